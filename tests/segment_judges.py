"""Semantic judges that decide what a test says, one of every kind."""

from __future__ import annotations

from itertools import cycle
from typing import Any

from semspec.runtime.features import SegmentText
from semspec.runtime.readings import Reading
from semspec.runtime.records import Floats
from semspec.runtime.semantic import ByRatio, ByScore, CombinedJudge, SemanticJudge

INSIDE: dict[str, Any] = {"whole_only": True, "exact_inside": True}
"""Of Judging, as semantic modes have it."""


class Scripted:
    """Probes that keep what `decisions` say, one segment after the other, round and round."""

    def __init__(self, *decisions: bool) -> None:
        self._turns = cycle(decisions)
        self.needs_text = self.needs_draft_signals = False
        self.needs_target_states = self.needs_draft_states = self.needs_signals = False
        self.shown: list[tuple[Reading, Reading | None]] = []

    def score(self, target: Reading, draft: Reading | None, segment: SegmentText) -> float:
        self.shown.append((target, draft))
        return float(next(self._turns))

    def ratio_scores(self, target_pooled: Floats, draft_pooled: Floats) -> tuple[float, float]:
        return float(next(self._turns)), 1.0


def judges(*decisions: bool) -> dict[str, Any]:
    """One of every kind, deciding alike."""
    return {
        "semantic": SemanticJudge(rule=ByScore(probes=Scripted(*decisions), threshold=0.5)),
        "thrown away": SemanticJudge(
            rule=ByScore(probes=Scripted(*decisions), threshold=0.5), keep_prefix=False
        ),
        "paper": SemanticJudge(rule=ByRatio(probes=Scripted(*decisions)), keep_prefix=False),
        "combined": CombinedJudge(rule=ByScore(probes=Scripted(*decisions), threshold=0.5)),
    }
