"""The semantic rules: judges that keep a whole segment of the draft by what it means, as the bundle's probes tell.

    SemanticJudge    asks the probes: by the predictor's threshold, or by chance min(1, s_T / s_D) as published
    CombinedJudge    asks the exact rule first, and the probes only where that stops early

They are asked about whole segments only (judging.py). Both are lossy: what the probes let through has the draft's
wording, and how likely the target means the same is an estimate. Reasons of their verdicts:

    score, ratio    the probes' word, either way    thoughts end    drafts do not end them (`discard`)
    exact           the exact rule kept all         lossy limit     max_lossy_fraction would be exceeded
    top-2           all among the two likeliest

Figures: `score` and `threshold`, or `s_target`, `s_draft` and `ratio`; the signals that were read, by their features'
names. It knows a review and scores; it knows no model and no files (probes.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import ClassVar, Protocol

import numpy as np

from semspec.runtime.config import RATIO_PRESETS, SpecConfig
from semspec.runtime.errors import ConfigError
from semspec.runtime.features import SegmentText
from semspec.runtime.pooled import HeldPooled
from semspec.runtime.readings import Reading
from semspec.runtime.records import Floats, Verdict
from semspec.runtime.review import Review

__all__ = [
    "DEFAULT_RISK",
    "ByRatio",
    "ByScore",
    "CombinedJudge",
    "Rule",
    "Scorer",
    "SemanticJudge",
    "make_judge",
]

DEFAULT_RISK = 0.1
LEAST = 1e-6  # of s_D: nothing is divided by less


class Scorer(Protocol):
    """What is asked of probes (probes.Probes)."""

    @property
    def needs_signals(self) -> bool: ...

    @property
    def needs_draft_signals(self) -> bool: ...

    @property
    def needs_text(self) -> bool: ...

    @property
    def needs_target_states(self) -> bool: ...

    @property
    def needs_draft_states(self) -> bool: ...

    def score(self, target: Reading, draft: Reading | None, segment: SegmentText) -> float: ...

    def ratio_scores(
        self, target_pooled: Floats | HeldPooled, draft_pooled: Floats
    ) -> tuple[float, float]: ...


class Rule(Protocol):
    """Whether a whole segment is kept."""

    @property
    def reason(self) -> str:
        """What verdicts by it are called."""
        ...

    def decide(self, review: Review, chance: float) -> tuple[bool, Mapping[str, float]]:
        """Its word, and the figures behind it. chance: uniform in [0, 1)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ByScore:
    """Keeps a segment whose score is at least `threshold`."""

    probes: Scorer
    threshold: float
    reason: ClassVar[str] = "score"

    @property
    def reads_logits(self) -> bool:
        """Whether it needs the target's logits along the segment."""
        return self.probes.needs_signals

    def decide(self, review: Review, chance: float) -> tuple[bool, Mapping[str, float]]:
        """Whether the segment is kept, and the figures. chance: uniform, not used."""
        probes, n = self.probes, len(review.ids)
        target = review.reading(states=probes.needs_target_states, signals=probes.needs_signals)
        unread = SegmentText(text="", before="", n_tokens=n, ended="boundary")
        score = probes.score(target, review.draft, review.text if probes.needs_text else unread)
        figures = {"score": score, "threshold": self.threshold}
        if probes.needs_signals:
            figures |= {f"target.{name}": value for name, value in asdict(target.signals).items()}
        if probes.needs_draft_signals and review.draft is not None:
            figures |= {f"draft.{name}": value for name, value in asdict(review.draft.signals).items()}
        return score >= self.threshold, figures


@dataclass(frozen=True, slots=True, kw_only=True)
class ByRatio:
    """Keeps a segment with chance min(1, s_T / s_D), none below the ratio `floor`; greedy: from the ratio 1 on."""

    probes: Scorer
    floor: float = 0.0
    greedy: bool = False
    reason: ClassVar[str] = "ratio"
    reads_logits: ClassVar[bool] = False

    def decide(self, review: Review, chance: float) -> tuple[bool, Mapping[str, float]]:
        """Whether the segment is kept, and the figures. chance: uniform in [0, 1)."""
        if review.draft is None:
            raise ConfigError("the ratio needs the draft's own states, and this drafter has none")
        target = review.reading(states=True, signals=False)
        s_target, s_draft = self.probes.ratio_scores(target.states, review.draft.pooled)
        ratio = s_target / max(s_draft, LEAST)
        kept = ratio >= self.floor and (ratio >= 1 if self.greedy else chance < ratio)
        return kept, {"s_target": s_target, "s_draft": s_draft, "ratio": ratio}


@dataclass(frozen=True, slots=True, kw_only=True)
class SemanticJudge:
    """Keeps a segment whole where `rule` says so. One that is refused is thrown away; keep_prefix: but for the part
    that the exact rule keeps. top2: keeps also what is among the target's two likeliest ids throughout. discards: an id
    that no draft may end with; the target writes on from there. most_lossy: share of the answer."""

    rule: ByScore | ByRatio
    keep_prefix: bool = True
    top2: bool = False
    bonus: bool = False
    discards: int | None = None
    most_lossy: float = 1.0
    name: ClassVar[str] = "semantic"
    lossy: ClassVar[bool] = True
    segments: ClassVar[bool] = True

    @property
    def few_rows(self) -> bool:
        """Of a whole segment it looks at the target's states alone."""
        return not (self.keep_prefix or self.top2 or self.rule.reads_logits)

    def judge(self, review: Review, rng: np.random.Generator) -> Verdict:
        n, chance = len(review.ids), rng.random()  # one number a draft, whatever becomes of it
        if review.ids[-1] == self.discards:
            return Verdict(keep=0, target_writes=True, to_end=True, reason="thoughts end")
        kept, reason, figures = False, "lossy limit", dict[str, float]()
        if _affordable(review, n, self.most_lossy):
            kept, reason, figures = self._decide(review, chance)
        if kept:
            return Verdict(keep=n, reason=reason, figures=figures)
        if not self.keep_prefix:
            return Verdict(keep=0, target_writes=True, reason=reason, figures=figures)
        if review.exact().keep == n:
            return _all_exact(review, self.bonus)
        return _exactly(review, reason, figures)

    def _decide(self, review: Review, chance: float) -> tuple[bool, str, dict[str, float]]:
        rows = zip(review.rows, review.ids, strict=False)
        if self.top2 and all(row.is_among(token, 2) for row, token in rows):
            return True, "top-2", {}
        kept, figures = self.rule.decide(review, chance)
        return kept, self.rule.reason, dict(figures)


@dataclass(frozen=True, slots=True, kw_only=True)
class CombinedJudge:
    """Keeps what the exact rule keeps, and the rest of a segment where `rule` says so. Fields as SemanticJudge's."""

    rule: Rule
    bonus: bool = False
    discards: int | None = None
    most_lossy: float = 1.0
    name: str = "combined"
    lossy: ClassVar[bool] = True
    segments: ClassVar[bool] = True
    few_rows: ClassVar[bool] = False

    def judge(self, review: Review, rng: np.random.Generator) -> Verdict:
        n, chance, exact = len(review.ids), rng.random(), review.exact()
        if exact.keep == n:
            return _all_exact(review, self.bonus)
        if review.ids[-1] == self.discards:
            return _exactly(review, "thoughts end")
        if not _affordable(review, n - exact.keep, self.most_lossy):
            return _exactly(review, "lossy limit")
        kept, figures = self.rule.decide(review, chance)
        if kept:
            return Verdict(keep=n, n_exact=exact.keep, reason=self.rule.reason, figures=figures)
        return _exactly(review, self.rule.reason, figures)


def make_judge(
    spec: SpecConfig, probes: Scorer, threshold: float, *, closing: int | None
) -> SemanticJudge | CombinedJudge:
    """The judge of a semantic mode. threshold: of the spec's risk. closing: the id that ends thoughts, if any may.

    The one-row review of published settings follows from them (SemanticJudge.few_rows).
    """
    by_ratio = spec.preset in RATIO_PRESETS
    policy = spec.thinking or ("discard" if by_ratio else "exact")
    discards = closing if policy == "discard" else None
    if spec.mode == "combined":
        return CombinedJudge(
            rule=ByScore(probes=probes, threshold=threshold),
            bonus=spec.bonus,
            discards=discards,
            most_lossy=spec.max_lossy_fraction,
        )
    greedy = spec.preset == "strict" if spec.greedy_accept is None else spec.greedy_accept
    rule: ByScore | ByRatio = ByScore(probes=probes, threshold=threshold)
    if by_ratio:
        rule = ByRatio(probes=probes, floor=spec.ratio_floor or 0.0, greedy=greedy)
    return SemanticJudge(
        rule=rule,
        keep_prefix=not by_ratio if spec.keep_prefix is None else spec.keep_prefix,
        top2=spec.top2,
        bonus=spec.bonus,
        discards=discards,
        most_lossy=spec.max_lossy_fraction,
    )


def _exactly(review: Review, reason: str, figures: Mapping[str, float] | None = None) -> Verdict:
    """What the exact rule keeps and the token it draws; the target goes on to the segment's end."""
    exact = review.exact()
    return replace(exact, n_exact=exact.keep, target_writes=True, reason=reason, figures=figures or {})


def _all_exact(review: Review, bonus: bool) -> Verdict:
    """The exact rule keeps the whole segment; the token behind it is of the next one."""
    exact = review.exact()
    extra = exact.extra if bonus else None
    return replace(exact, extra=extra, n_exact=exact.keep, reason="exact")


def _affordable(review: Review, n_lossy: int, most: float) -> bool:
    """Whether the answer's share of lossy tokens stays within `most` with so many more of them."""
    return review.n_lossy + n_lossy <= most * (review.n_written + len(review.ids))
