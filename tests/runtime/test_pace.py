"""Adaptive length: drafts that stop early leave the exact rule exact, and memories and readings in order."""

from __future__ import annotations

import doctest
from collections.abc import Callable, Sequence
from dataclasses import replace
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
from semspec.runtime.readings import read_signals
from semspec.runtime.records import Draft
from semspec.runtime.segments import Segmenter
from semspec.runtime.semantic import ByScore, CombinedJudge, SemanticJudge

EXACT = 1e-12


def answers(judge: Any, drafting: Callable[[], Any], rule: Any, n: int) -> dict[tuple[int, ...], float]:
    """The exact law of n tokens at temperature 1, by enumeration."""

    def once(rng: Any) -> tuple[int, ...]:
        target, draft = (ScriptedModel(scattered(2, seed, spread=1.5)) for seed in (51, 52))
        cut = Segmenter(lines(3, 3).boundary, lambda token: b"\n" if token == 0 else b"a")
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


def test_a_draft_that_throws_a_drawn_token_away_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same comparison, with the same judge: a drafter that lets go of its last token by what it is."""

    class Peeking(ModelDrafter):
        def propose(self, *given: Any, **options: Any) -> Draft:
            draft = super().propose(*given, **options)
            if len(draft.ids) < 2 or draft.whole or draft.ids[-1] != 0:
                return draft
            return replace(draft, ids=draft.ids[:-1], laws=draft.laws[:-1])

    judge = CombinedJudge(rule=ByScore(probes=Scripted(False), threshold=0.5))
    plain = answers(None, dict, accept_tokens, 4)
    monkeypatch.setattr("decoding.ModelDrafter", Peeking)
    found = answers(judge, lambda: {"pace": Pace("confidence", least=0.75)}, accept_tokens, 4)
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


def test_a_draft_stops_with_the_unsure_token() -> None:
    """Its law is there without a pass more. States and signals are of all that was drafted, and the token itself is
    left to be read."""

    def law(context: tuple[int, ...]) -> Any:
        sharp = len(context) < len(PROMPT) + 3
        return np.eye(V)[len(context) % V] * (9 if sharp else 0)

    model = ScriptedModel(law)
    pace_ = Pace("confidence", least=0.5)
    options: dict[str, Any] = {"states": True, "signals": True, "pace": pace_}
    drafter = ModelDrafter(model, Chooser(SamplingParams(), V, PROMPT), **options)
    drafter.start(PROMPT)
    draft = drafter.propose(9, np.random.default_rng(0), judged=True)
    assert len(draft.ids) == 4 and draft.readings and model.length == len(PROMPT) + 3
    other = ScriptedModel(law)
    other.forward(PROMPT[:-1])
    pooled = other.forward([PROMPT[-1], *draft.ids[:-1]], pool=np.ones(4, np.float32)).pooled
    assert pooled is not None
    np.testing.assert_allclose(draft.readings[0].pooled, pooled / 4)
    assert draft.readings[0].signals.agreement == 1
    drafter.commit(draft.ids)
    assert model.tokens == [*PROMPT, *draft.ids[:3]]


def drafted(sharp: Sequence[bool], segments: int, pace_: Pace) -> tuple[Draft, ModelDrafter]:
    """A draft of segments of 3 tokens by a model that is sure of its i-th token where `sharp` says so."""

    def law(context: tuple[int, ...]) -> Any:
        place = max(0, len(context) - len(PROMPT))  # 0 in the prompt too, where nobody looks
        return np.eye(V)[1 + place % 4] * (9 if place >= len(sharp) or sharp[place] else 0.1)

    options: dict[str, Any] = {"states": True, "signals": True, "pace": pace_}
    drafter = ModelDrafter(ScriptedModel(law), Chooser(SamplingParams(), V, PROMPT), **options)
    drafter.start(PROMPT)
    cut = lines(3, 3)
    draft = drafter.propose(
        3 * segments, np.random.default_rng(0), segment=cut.begin(), judged=True, segments=segments
    )
    return draft, drafter


@pytest.mark.parametrize(
    ("unsure", "n", "ends"),
    [
        ((), 9, (3, 6, 9)),
        ((0,), 3, (3,)),  # nothing would be drafted otherwise
        ((1,), 2, ()),
        ((2,), 3, (3,)),
        ((3,), 3, (3,)),  # begun by the next round, which may go on
        ((4,), 5, (3,)),
        ((6,), 6, (3, 6)),
    ],
)
def test_a_further_segment_takes_a_draft_that_was_sure_of_all(
    unsure: tuple[int, ...], n: int, ends: tuple[int, ...]
) -> None:
    """`confidence`: it stops with the token it is unsure of, or at the end of the segment before it; one segment a
    round has no more of them, and without adaptation there are as many as may be."""
    sharp = [place not in unsure for place in range(9)]
    for segments in (1, 2, 3):
        draft, _ = drafted(sharp, segments, Pace("confidence", least=0.5))
        most = 3 * segments
        assert (len(draft.ids), draft.ends) == (min(n, most), tuple(end for end in ends if end <= most))
        assert drafted(sharp, segments, Pace())[0].ends == (3, 6, 9)[:segments]


def test_later_segments_have_readings_of_their_own() -> None:
    """States and signals of each piece, whole or begun, are those of a pass over it alone."""
    draft, drafter = drafted([place != 7 for place in range(9)], 3, Pace("confidence", least=0.5))
    assert draft.cuts == (3, 6, 8) and len(draft.readings) == 3
    text = list(PROMPT)
    for piece in draft.pieces():
        other = ScriptedModel(drafter.model.law)  # type: ignore[attr-defined]
        other.forward(text[:-1])
        n = len(piece.ids)
        found = other.forward([text[-1], *piece.ids[:-1]], rows=range(n), pool=np.ones(n, np.float32))
        assert found.pooled is not None
        np.testing.assert_allclose(piece.readings[0].pooled, found.pooled / n)
        assert piece.readings[0].signals == read_signals(found.rows, piece.ids)
        text += piece.ids


def test_acceptance_sets_the_number_of_segments() -> None:
    """One that is refused makes the next rounds shorter, some that are kept longer again; what was not looked at behind
    a refused one counts for neither."""
    pace_ = Pace("acceptance", shortest=9)
    counts = []
    for kept in (9, 2, 3, 3, 3, 9, 9):
        draft, drafter = drafted([], 3, pace_)
        counts.append(len(draft.ends))
        drafter.commit([*draft.ids[:kept], 5])
    assert counts == [3, 3, 2, 1, 1, 2, 3]
