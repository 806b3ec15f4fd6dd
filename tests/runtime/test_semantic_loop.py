"""Semantic modes in the decoding loop: whatever is refused where, texts and memories after every step."""

from __future__ import annotations

import doctest
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from decoding import run, start
from judged import DRAFT, PROMPT, TARGET, V, greedy, lines, simulate, steps_of, text_of
from scripted import ScriptedModel
from segment_judges import INSIDE, Scripted, judges

from semspec.runtime import thinking
from semspec.runtime.records import Floats, Step, Verdict
from semspec.runtime.segments import Segmenter
from semspec.runtime.semantic import ByScore, SemanticJudge
from semspec.runtime.stats import Ledger


@pytest.mark.parametrize("kind", ["semantic", "thrown away", "paper", "combined"])
@pytest.mark.parametrize("decisions", list(product([True, False], repeat=3)))
@pytest.mark.parametrize("inside", [True, False])
def test_every_pattern_of_decisions_gives_the_text_of_the_method(
    decisions: tuple[bool, ...], kind: str, inside: bool
) -> None:
    """Refused at the first, a middle or the last segment: at temperature 0 what the target writes instead is its own
    text, whether a part was kept, drafted inside or written plainly. Memories are looked at after every step."""
    for (low, cap), n in product([(1, 1), (1, 3), (2, 5), (4, 9)], (1, 3, 7, 30)):
        cut, judge = lines(low, cap), judges(*decisions)[kind]
        steps, _, _ = steps_of(
            judge,
            cut,
            max_tokens=n + cap,  # a segment that is cut short is not judged
            inside={**INSIDE, "exact_inside": inside},
            drafting={"states": True},
            gamma=3,
        )
        if kind != "combined":  # which is not asked where the models agree
            assert text_of(steps)[:n] == simulate(decisions, n, cut)[0]
        elif not any(decisions):
            assert text_of(steps) == greedy(TARGET, PROMPT, n + cap)
        assert len(text_of(steps)) == n + cap and steps[-1].finish_reason == "length"


@pytest.mark.parametrize("kind", ["semantic", "thrown away", "paper", "combined"])
def test_a_judge_that_refuses_all_leaves_the_targets_text(kind: str) -> None:
    """Token for token, with none of them lossy; drafted inside it takes fewer passes than tokens."""
    plain = run(ScriptedModel(TARGET), PROMPT, vocab_size=V, max_tokens=40)
    ledger = Ledger()
    options: dict[str, Any] = {"inside": INSIDE, "drafting": {"states": True}, "ledger": ledger}
    steps, _, _ = steps_of(judges(False)[kind], lines(), max_tokens=40, **options)
    assert (text_of(steps), steps[-1].finish_reason) == plain
    summary = ledger.summary()
    assert summary.num_lossy_tokens == 0 and summary.num_rounds <= 40
    assert {step.rule for step in steps} <= {"target", "lossless", judges()[kind].name}


def test_a_kept_segment_is_lossy_but_for_what_the_exact_rule_keeps() -> None:
    """Semantic: all of it, for the exact rule was not asked. Combined: what is behind the first token that fell."""
    for kind in ("semantic", "combined"):
        steps, _, _ = steps_of(judges(True)[kind], lines(3, 6), max_tokens=60, inside=INSIDE)
        text = list(PROMPT)
        for step in steps:
            if step.judged is not None:
                own = greedy(TARGET, text, len(step.ids))
                agreed = next((i for i, (a, b) in enumerate(zip(own, step.ids, strict=True)) if a != b), None)
                exact = len(step.ids) if agreed is None else agreed
                assert step.n_lossy == (len(step.ids) if kind == "semantic" else len(step.ids) - exact)
                assert step.judged.n_kept == step.judged.n_drafted == len(step.ids)
            text += step.ids


def test_prefixes_of_refused_segments_stay() -> None:
    """The part that the target would have written too: kept, counted as the draft's, not lossy."""
    steps, _, _ = steps_of(judges(False)["semantic"], lines(3, 6), max_tokens=200, context=256, inside=INSIDE)
    parts = [step.judged.n_kept for step in steps if step.judged is not None]
    assert any(parts) and not all(parts)
    assert not any(step.n_lossy for step in steps)
    thrown, _, _ = steps_of(judges(False)["thrown away"], lines(3, 6), max_tokens=60, inside=INSIDE)
    assert not any(step.judged.n_kept for step in thrown if step.judged is not None)


@pytest.mark.parametrize("kind", ["semantic", "combined", "paper"])
@pytest.mark.parametrize("decision", [True, False])
@pytest.mark.parametrize("end", range(V))
def test_an_end_inside_a_segment_ends_the_answer_there(end: int, decision: bool, kind: str) -> None:
    """D01: kept, nothing behind it is written, counted or remembered; refused, it ends nothing."""
    cut = lines(3, 9)
    free = simulate([decision], 40, cut)[0] if kind != "combined" or not decision else None
    ledger = Ledger()
    options: dict[str, Any] = {"inside": INSIDE, "drafting": {"states": True}, "ledger": ledger}
    steps, _, _ = steps_of(
        judges(decision)[kind], lines(3, 9, [end]), max_tokens=40, end_ids=[end], **options
    )
    ids = text_of(steps)
    assert end not in ids[:-1]
    assert steps[-1].finish_reason == ("stop" if ids[-1] == end else "length")
    if free is not None:
        assert ids == (free[: free.index(end) + 1] if end in free else free)
    assert ledger.summary().generated_tokens == len(ids)


@pytest.mark.parametrize("kind", ["semantic", "combined", "paper"])
@pytest.mark.parametrize("decisions", [(True,), (False,), (True, False, False)])
def test_the_context_is_filled_to_its_last_place_and_no_further(
    decisions: tuple[bool, ...], kind: str
) -> None:
    """A draft that the context or max_tokens cuts short is left to the exact rule."""
    for context, cap in product(range(3, 20), (1, 4, 9)):
        steps, target, _ = steps_of(
            judges(*decisions)[kind],
            lines(1, cap),
            context=context,
            max_tokens=500,
            inside=INSIDE,
            drafting={"states": True},
        )
        assert len(text_of(steps)) == context - len(PROMPT) + 1 and target.length == context
        assert steps[-1].finish_reason == "length"
        assert all(at + len(ids) <= context for at, ids in target.calls)


def test_a_cut_segment_is_left_to_the_exact_rule() -> None:
    """max_tokens ends the draft before the segment's end: nobody's score is of half a segment."""
    for n in range(10, 30):
        probes = Scripted(True)
        judge = SemanticJudge(rule=ByScore(probes=probes, threshold=0.5))
        steps, _, _ = steps_of(judge, lines(9, 9), max_tokens=n, inside=INSIDE)
        assert all(step.judged is None or len(step.ids) == 9 for step in steps)
        assert len(probes.shown) == sum(step.judged is not None for step in steps) == n // 9 - 1


def test_a_bonus_token_is_the_targets() -> None:
    """Behind every kept segment, and the next one begins with it."""
    steps, _, _ = steps_of(
        judges(True)["semantic"], lines(4, 4), max_tokens=60, inside={**INSIDE, "bonus": True}
    )
    text, n = list(PROMPT), 0
    for step in steps:
        if step.judged is not None:
            assert step.n_from_draft == len(step.ids) - 1 == 4
            assert [step.ids[-1]] == greedy(TARGET, [*text, *step.ids[:-1]], 1)
            n += 1
        text += step.ids
    assert n > 5


def test_one_row_of_the_head_is_enough_for_a_judge_of_states() -> None:
    """What a refused segment is replaced by comes from its first row, a bonus token from its last."""
    for bonus, decisions in product([False, True], [(True,), (False,), (True, False)]):
        texts = []
        for few in (True, False):
            inside = {**INSIDE, "few_rows": few, "bonus": bonus}
            steps, _, _ = steps_of(
                judges(*decisions)["paper"],
                lines(),
                max_tokens=40,
                temperature=1.0,
                seed=3,
                inside=inside,
                drafting={"states": True},
            )
            texts.append(text_of(steps))
        assert texts[0] == texts[1]
    steps, _, _ = steps_of(
        judges(True)["paper"],
        lines(),
        max_tokens=40,
        logprobs=True,
        inside={**INSIDE, "few_rows": True},
        drafting={"states": True},
    )
    assert all(len(step.logprobs) == len(step.ids) for step in steps)  # which need all rows


# The end of thoughts


def thoughtful(place: int, tag: int = 5) -> Callable[[tuple[int, ...]], Floats]:
    """A draft that writes 1s, and the tag as its `place`-th token behind the prompt and the target's first segment."""
    return lambda context: np.eye(V, dtype=np.float32)[
        tag if len(context) == len(PROMPT) + 4 + place - 1 else 1
    ]


def ones(context: tuple[int, ...]) -> Floats:
    return np.eye(V, dtype=np.float32)[1]


@pytest.mark.parametrize("place", range(1, 5))
@pytest.mark.parametrize("discards", [None, 5])
def test_the_rule_changes_at_the_token_behind_the_tag(place: int, discards: int | None) -> None:
    """D22: wherever it stands in a draft block, the draft ends with it, and the target writes what follows; or the
    whole segment, where drafts must not end thoughts."""
    target, draft = ScriptedModel(ones), ScriptedModel(thoughtful(place))
    judge = SemanticJudge(
        rule=ByScore(probes=Scripted(True), threshold=0.5), keep_prefix=False, discards=discards
    )
    cut = Segmenter(lines(4, 4).boundary, lambda token: b"a", [5])
    options: dict[str, Any] = {"judge": judge, "segmenter": cut, "max_tokens": 30}
    steps: list[Step] = list(
        start(target, PROMPT, vocab_size=V, draft=draft, inside={**INSIDE, "closing": 5}, **options)
    )
    ids = text_of(steps)
    judged = [step for step in steps if step.judged is not None]
    assert len(judged) == 1
    if discards is None:
        assert judged[0].ids == (1,) * (place - 1) + (5,)
        assert ids[4:] == [*(1,) * (place - 1), 5, *(1,) * (26 - place)]
    else:
        assert judged[0].judged is not None and judged[0].judged.reason == "thoughts end"
        assert ids == [1] * 30
    behind = steps[steps.index(judged[0]) + 1 :]
    assert behind and all(step.n_lossy == 0 and step.rule in ("lossless", "target") for step in behind)


def test_the_targets_own_tag_ends_judging_too() -> None:
    """Also in the middle of a block drafted inside its first segment; without a closing id nothing changes."""

    def tag(context: tuple[int, ...]) -> Floats:
        return np.eye(V, dtype=np.float32)[5 if len(context) == len(PROMPT) + 1 else 1]

    for closing, n_judged in ((5, 0), (None, 6)):
        probes = Scripted(True)
        judge = SemanticJudge(rule=ByScore(probes=probes, threshold=0.5))
        cut = Segmenter(lines(4, 4).boundary, lambda token: b"a", [] if closing is None else [closing])
        options: dict[str, Any] = {"judge": judge, "segmenter": cut, "max_tokens": 28}
        steps = start(
            ScriptedModel(tag),
            PROMPT,
            vocab_size=V,
            draft=ScriptedModel(tag),
            inside={**INSIDE, "closing": closing},
            **options,
        )
        assert text_of(list(steps)) == [1, 5, *[1] * 26]
        assert len(probes.shown) == n_judged


def test_what_the_prompt_has_closed_is_not_closed_again() -> None:
    """D22: the state at the end of the prompt counts; worked examples."""
    assert doctest.testmod(thinking).failed == 0


# What is read, and whose turn it is


def test_nothing_is_read_of_a_draft_unless_it_is_asked_for() -> None:
    """States are copied and signals take a pass over V: neither where no probe reads them."""
    for drafting, states, signals in (
        ({}, False, False),
        ({"states": True}, True, False),
        ({"signals": True}, False, True),
    ):
        probes = Scripted(True)
        judge = SemanticJudge(rule=ByScore(probes=probes, threshold=0.5))
        steps_of(judge, lines(), max_tokens=30, inside=INSIDE, drafting=drafting)
        for target, draft in probes.shown:
            assert target.pooled.size == 0 and np.isnan(target.signals.mean_logprob)
            if not drafting:
                assert draft is None
                continue
            assert draft is not None
            assert (draft.pooled.size > 0, np.isfinite(draft.signals.mean_logprob)) == (states, signals)


def test_a_verdict_may_give_the_target_the_rest() -> None:
    """to_end: no draft is judged any more."""
    from decoding import Says

    def verdict(review: Any, rng: Any) -> Verdict:
        return Verdict(keep=0, target_writes=True, to_end=True)

    steps, _, _ = steps_of(Says(verdict=verdict), lines(), max_tokens=40, inside=INSIDE)
    assert sum(step.judged is not None for step in steps) == 1
    assert text_of(steps) == greedy(TARGET, PROMPT, 40)


def lengths(steps: Sequence[Step]) -> list[int]:
    return [len(step.ids) for step in steps]


def test_the_targets_own_segments_are_drafted_inside_up_to_their_end() -> None:
    """No draft inside runs over the boundary, so what is judged next begins where segments begin."""
    steps, _, _ = steps_of(
        judges(False)["thrown away"], lines(5, 5), max_tokens=100, context=128, inside=INSIDE, gamma=4
    )
    at = 0
    for step in steps:
        if step.judged is not None:
            assert at % 5 == 0
        at += len(step.ids)
    assert max(lengths(steps)) > 1 and DRAFT is not TARGET
