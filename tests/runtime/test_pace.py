"""Adaptive length: drafts that stop early leave the exact rule exact, and memories and readings in order."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from branching import exact_law
from decoding import start
from judged import PROMPT, TARGET, V, greedy, lines, steps_of, text_of
from laws import distance
from scripted import ScriptedModel, scattered
from segment_judges import INSIDE, Scripted, judges

from semspec.runtime import pace
from semspec.runtime.acceptance import accept_block, accept_tokens
from semspec.runtime.chooser import Chooser
from semspec.runtime.config import SamplingParams
from semspec.runtime.drafting import ModelDrafter
from semspec.runtime.pace import Pace
from semspec.runtime.readings import Row
from semspec.runtime.segments import Segmenter
from semspec.runtime.semantic import ByScore, CombinedJudge, SemanticJudge

EXACT = 1e-12


def answers(judge: Any, drafting: Callable[[], Any], rule: Any, n: int) -> dict[tuple[int, ...], float]:
    """The exact law of n tokens at temperature 1, by enumeration."""

    def once(rng: Any) -> tuple[int, ...]:
        target, draft = (ScriptedModel(scattered(2, seed, spread=1.5)) for seed in (51, 52))
        cut = Segmenter(lines(2, 2).boundary, lambda token: b"\n" if token == 0 else b"a")
        options: dict[str, Any] = {"judge": judge, "segmenter": cut, "inside": INSIDE} if judge else {}
        steps = start(
            target,
            (0, 1),
            vocab_size=2,
            draft=draft if judge else None,
            drafting=drafting(),
            gamma=2,
            rule=rule,
            rng=rng,
            temperature=1.0,
            max_tokens=n,
            **options,
        )
        return tuple(token for step in steps for token in step.ids)

    return exact_law(once)


@pytest.mark.parametrize("rule", [accept_tokens, accept_block])
@pytest.mark.parametrize("adaptive", ["off", "confidence", "acceptance"])
def test_stopping_early_leaves_the_exact_rule_exact(adaptive: str, rule: Any) -> None:
    """What the predictor refuses has the target's law, to 1e-12: every text of 4 tokens, with drafts that stop where
    the draft is unsure, which depends on what was drafted."""
    judge = CombinedJudge(rule=ByScore(probes=Scripted(False), threshold=0.5))
    plain = answers(None, dict, accept_tokens, 4)
    found = answers(judge, lambda: {"pace": Pace(adaptive, least=0.75)}, rule, 4)
    assert distance(found, plain) < EXACT


def test_stopping_where_a_token_was_drawn_is_caught() -> None:
    """The comparison sees a draft that looks at a token and throws it away."""

    class Peeking(Pace):
        def ends(self, row: Row) -> bool:
            return bool(np.argmax(row.logits) == 0)

    judge = CombinedJudge(rule=ByScore(probes=Scripted(True), threshold=0.5))
    plain = answers(None, dict, accept_tokens, 4)
    found = answers(judge, lambda: {"pace": Peeking("confidence")}, accept_tokens, 4)
    assert distance(found, plain) > 1e-3


def test_an_unsure_draft_stops_and_the_exact_rule_judges_it() -> None:
    """No score of half a segment; the target writes the rest of it, with memories in order after every step."""
    for least in (0.5, 0.9, 1.0):
        probes = Scripted(True)
        judge = SemanticJudge(rule=ByScore(probes=probes, threshold=0.5))
        steps, _, _ = steps_of(
            judge,
            lines(5, 5),
            max_tokens=60,
            inside=INSIDE,
            drafting={"states": True, "signals": True, "pace": Pace("confidence", least=least)},
        )
        assert len(probes.shown) == sum(step.judged is not None for step in steps)
        assert all(step.judged.n_drafted == 5 for step in steps if step.judged is not None)
        if least == 1.0:
            assert text_of(steps) == greedy(TARGET, PROMPT, 60) and not probes.shown


def test_drafts_get_shorter_where_little_is_kept() -> None:
    """And longer again; never below the shortest."""
    assert doctest.testmod(pace).failed == 0
    steps, _, _ = steps_of(
        judges(False)["combined"],
        lines(12, 12),
        max_tokens=200,
        context=256,
        inside=INSIDE,
        drafting={"pace": Pace("acceptance", shortest=2)},
    )
    judged = [step for step in steps if step.judged is not None]
    assert judged and judged[-1] is not steps[-1]
    assert not any(step.judged for step in steps[len(steps) // 2 :])
    assert text_of(steps) == greedy(TARGET, PROMPT, 200)


def test_readings_of_a_draft_that_stopped_are_not_of_the_row_behind_it() -> None:
    """The model has read one row more than it has drawn tokens from; states and signals are of the drafted ones."""

    def law(context: tuple[int, ...]) -> Any:
        sharp = len(context) < len(PROMPT) + 3
        return np.eye(V)[len(context) % V] * (9 if sharp else 0)

    model = ScriptedModel(law)
    pace_ = Pace("confidence", least=0.5)
    options: dict[str, Any] = {"states": True, "signals": True, "pace": pace_}
    drafter = ModelDrafter(model, Chooser(SamplingParams(), V, PROMPT), **options)
    drafter.start(PROMPT)
    draft = drafter.propose(9, np.random.default_rng(0), judged=True)
    assert len(draft.ids) == 3 and draft.reading is not None
    other = ScriptedModel(law)
    other.forward(PROMPT[:-1])
    pooled = other.forward([PROMPT[-1], *draft.ids[:-1]], pool=np.ones(3, np.float32)).pooled
    assert pooled is not None
    np.testing.assert_allclose(draft.reading.pooled, pooled / 3)
    assert draft.reading.signals.agreement == 1
    drafter.commit(draft.ids)
    assert model.tokens == [*PROMPT, *draft.ids][: model.length] and model.length < len(PROMPT) + 3
