"""Decoding by segments: against a simulation in plain words, with every memory looked at after every step."""

from __future__ import annotations

from itertools import cycle, pairwise, product
from typing import Any

import numpy as np
import pytest
from decoding import Letters, Says, Stub, keeping, run, start
from judged import DRAFT, PROMPT, TARGET, V, authors_of, greedy, lines, simulate, steps_of, text_of
from scripted import ScriptedModel

from semspec.runtime.chooser import Chooser
from semspec.runtime.config import SamplingParams
from semspec.runtime.drafting import ModelDrafter
from semspec.runtime.errors import ConfigError
from semspec.runtime.records import Floats, Step, Verdict
from semspec.runtime.review import Review
from semspec.runtime.segments import Segmenter
from semspec.runtime.stats import Ledger


@pytest.mark.parametrize("decisions", list(product([True, False], repeat=4)))
@pytest.mark.parametrize(("low", "cap"), [(1, 1), (1, 3), (2, 5), (4, 9)])
def test_every_pattern_of_decisions_gives_the_text_of_the_method(
    decisions: tuple[bool, ...], low: int, cap: int
) -> None:
    """Refused at the first, a middle or the last segment, all or none: tokens and authors, memories after each step."""
    cut = lines(low, cap)
    for n in (1, 2, 3, 7, 30):
        steps, _, _ = steps_of(keeping(*decisions), cut, max_tokens=n)
        assert (text_of(steps), authors_of(steps)) == simulate(decisions, n, cut)
        assert steps[-1].finish_reason == "length"


def test_a_judge_that_refuses_all_leaves_the_targets_text() -> None:
    """At temperature 0 plain decoding, token for token; and no draft token is counted as kept."""
    plain = run(ScriptedModel(TARGET), PROMPT, vocab_size=V, max_tokens=40)
    ledger = Ledger()
    steps, _, _ = steps_of(keeping(False), lines(), max_tokens=40, ledger=ledger)
    assert (text_of(steps), steps[-1].finish_reason) == plain
    summary = ledger.summary()
    assert (summary.draft_acceptance_rate, summary.semantic_acceptance_rate) == (0.0, 0.0)
    assert (summary.lossy_token_fraction, summary.num_rounds) == (0.0, 40)


def test_a_refused_draft_costs_no_pass_of_its_own() -> None:
    """The target's first token comes from the pass that reviewed the draft, so plain decoding's passes are enough."""
    _, target, _ = steps_of(keeping(False), lines(), max_tokens=40)
    assert len(target.calls) == 1 + 40  # the prompt's, and one a token


def test_the_first_segment_is_the_targets() -> None:
    """Then the draft has seen how the target begins; a draft is never asked before."""
    steps, _, draft = steps_of(keeping(True), lines(3, 3), max_tokens=9)
    assert authors_of(steps) == ["target"] * 3 + ["draft"] * 6
    assert draft.calls[0] == (0, (*PROMPT, *text_of(steps)[:3]))


def test_a_kept_segment_without_a_token_more_leaves_its_last_one_pending() -> None:
    """What the target read last is read again, with the next draft behind it."""
    steps, target, _ = steps_of(keeping(True), lines(2, 2), max_tokens=8)
    ids = text_of(steps)
    assert [len(step.ids) for step in steps] == [1, 1, 2, 2, 2]
    assert target.calls[-2:] == [(5, tuple(ids[3:6])), (7, tuple(ids[5:8]))]


def test_sampled_text_is_reproduced_by_its_seed() -> None:
    """Decisions by chance and tokens by chance: one seed for all. Agreement of two seeds: below 2^-40."""

    def coin(review: Review, rng: np.random.Generator) -> Verdict:
        kept = rng.random() < 0.5
        return Verdict(keep=len(review.ids)) if kept else Verdict(keep=0, target_writes=True)

    texts = [
        text_of(steps_of(Says(verdict=coin), lines(), max_tokens=50, temperature=1.0, seed=seed)[0])
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_decisions_do_not_move_the_chances_of_tokens() -> None:
    """Two rules that decide alike write alike, however many numbers one of them uses."""

    def greedy_for_numbers(review: Review, rng: np.random.Generator) -> Verdict:
        rng.random(100)
        return Verdict(keep=len(review.ids))

    options: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0, "seed": 3}
    one, _, _ = steps_of(keeping(True), lines(), **options)
    assert text_of(steps_of(Says(verdict=greedy_for_numbers), lines(), **options)[0]) == text_of(one)


# Ends


@pytest.mark.parametrize("decision", [True, False])
@pytest.mark.parametrize("end", range(V))
def test_an_end_inside_a_segment_ends_the_answer_there(end: int, decision: bool) -> None:
    """D01: nothing behind it is written, counted or remembered; refused, it ends nothing."""
    cut = lines(3, 9)
    free, _ = simulate([decision], 40, cut)
    expected = free[: free.index(end) + 1] if end in free else free
    ledger = Ledger()
    steps, _, _ = steps_of(keeping(decision), lines(3, 9, [end]), max_tokens=40, end_ids=[end], ledger=ledger)
    assert text_of(steps) == expected
    assert steps[-1].finish_reason == ("stop" if end in free else "length")
    assert ledger.summary().generated_tokens == len(expected)


@pytest.mark.parametrize("place", range(1, 5))
def test_a_stop_string_inside_a_kept_segment_cuts_it(place: int) -> None:
    """D02: it may be completed anywhere; tokens behind it are in neither ids, text, counts nor cache."""
    pieces = ["a", "b", "c", "d", "e", "f"]
    cut = lines(5, 5)
    ids, _ = simulate([True], 20, cut)
    stop = "".join(pieces[token] for token in ids[4 + place : 6 + place])
    written = "".join(pieces[token] for token in ids)
    n = written.index(stop) + 2
    ledger = Ledger()
    options: dict[str, Any] = {"text": Letters(pieces), "stop": (stop,), "max_tokens": 20, "ledger": ledger}
    steps, target, _ = steps_of(keeping(True), cut, **options)
    assert (text_of(steps), steps[-1].finish_reason) == (ids[:n], "stop")
    assert "".join(step.text for step in steps) == written[: n - 2]
    assert target.length == len(PROMPT) + n - 1
    summary = ledger.summary()
    assert summary.num_draft_tokens == summary.num_accepted_draft_tokens == n - 5
    assert (summary.num_segments, summary.num_accepted_segments) == (len(steps) - 5, len(steps) - 5)


def test_a_segment_thrown_away_counts_whole_where_the_answer_ends() -> None:
    """The target ends at once where the draft went on: six tokens were judged and none kept, not one of one."""
    steps: list[Step] = []
    ledger = Ledger()
    target = ScriptedModel(lambda context: np.eye(V)[1 if len(context) > 2 else 0])
    draft = ScriptedModel(lambda _: np.eye(V)[5])
    options: dict[str, Any] = {"draft": draft, "judge": keeping(False), "segmenter": lines(1, 6, [1])}
    steps += start(target, PROMPT, vocab_size=V, end_ids=[1], ledger=ledger, **options)
    assert (text_of(steps), steps[-1].finish_reason) == ([0, 1], "stop")
    assert ledger.summary().num_draft_tokens == 6


@pytest.mark.parametrize("decisions", [(True,), (False,), (True, False), (False, True, True)])
def test_drafts_fit_in_what_is_left_of_the_context(decisions: tuple[bool, ...]) -> None:
    """The engine is never overfilled, and the text goes on to the very last place, as in plain decoding."""
    for context, cap in product(range(3, 24), (1, 4, 9)):
        cut = lines(1, cap)
        steps, target, _ = steps_of(keeping(*decisions), cut, context=context, max_tokens=500)
        n = context - len(PROMPT) + 1
        assert len(text_of(steps)) == n and target.length == context
        assert steps[-1].finish_reason == "length"
        assert all(at + len(ids) <= context for at, ids in target.calls)


def test_no_draft_is_longer_than_what_may_still_be_written() -> None:
    """What would be cut off anyway costs time, and counts as drafted."""
    for n in range(1, 12):
        ledger, cut = Ledger(), lines(9, 9)
        steps_of(keeping(False), cut, max_tokens=n, ledger=ledger)
        assert ledger.summary().num_draft_tokens == max(0, n - 9)


def test_a_draft_model_that_cannot_go_on_leaves_the_rest_to_the_target() -> None:
    """D08: a smaller context of the draft is no error; what follows is the target's own text."""
    target, draft = ScriptedModel(TARGET), ScriptedModel(DRAFT, max_context=12)
    ledger, cut = Ledger(), lines()
    options: dict[str, Any] = {"draft": draft, "judge": keeping(True), "segmenter": cut, "ledger": ledger}
    ids, _ = run(target, PROMPT, vocab_size=V, max_tokens=50, **options)
    assert ledger.note == "drafting stopped at 12 tokens, the draft model's context"
    n = ledger.summary().num_accepted_draft_tokens
    assert 0 < n < 12
    assert ids[14:] == greedy(TARGET, [*PROMPT, *ids[:14]], 36)


# What drafters and judges may do


def test_a_drafter_that_writes_on_is_heard_up_to_the_segments_end() -> None:
    """Half a segment behind a whole one would be judged with it."""
    cut, seen = lines(2, 5), list[tuple[int, ...]]()

    def verdict(review: Review, rng: np.random.Generator) -> Verdict:
        seen.append(review.ids)
        return Verdict(keep=len(review.ids))

    drafter = Stub(habit=lambda committed, limit: [2, 0, 2, 0, 2, 2])
    run(
        ScriptedModel(TARGET), PROMPT, vocab_size=V, draft=drafter, judge=Says(verdict=verdict), segmenter=cut
    )
    assert seen and set(seen[:-1]) == {(2, 0)}


def test_a_drafter_with_nothing_to_say_leaves_a_segment_to_the_target() -> None:
    """A whole one, also where it would speak again after a token; for good, it is plain decoding."""
    silent = Stub(habit=lambda committed, limit: [2] * limit if len(committed) > len(PROMPT) + 3 else [])
    options: dict[str, Any] = {"draft": silent, "judge": keeping(True), "max_tokens": 9}
    steps = list(start(ScriptedModel(TARGET), PROMPT, vocab_size=V, segmenter=lines(3, 3), **options))
    assert authors_of(steps) == ["target"] * 6 + ["draft"] * 3
    ledger = Ledger()
    options = {"draft": Stub(habit=lambda *_: []), "judge": keeping(True), "ledger": ledger}
    found = run(ScriptedModel(TARGET), PROMPT, vocab_size=V, segmenter=lines(), max_tokens=20, **options)
    assert found == run(ScriptedModel(TARGET), PROMPT, vocab_size=V, max_tokens=20)
    assert (ledger.summary().num_drafts, ledger.summary().num_segments) == (0, 0)


@pytest.mark.parametrize("extra", [None, 2])
@pytest.mark.parametrize("keep", [1, 2, 3])
def test_a_part_of_a_segment_may_be_kept(keep: int, extra: int | None) -> None:
    """The next draft begins where the kept part, or the token behind it, ends."""
    cut, law = lines(4, 4), list(PROMPT)
    steps, _, _ = steps_of(
        Says(verdict=lambda review, _: Verdict(keep=min(keep, len(review.ids)), extra=extra)),
        cut,
        max_tokens=15,
    )
    law += greedy(TARGET, law, 4)
    while len(law) < len(PROMPT) + 15:
        law += greedy(DRAFT, law, keep)
        law += [] if extra is None else [extra]
    assert text_of(steps) == law[len(PROMPT) :][:15]


def test_the_target_goes_on_to_where_the_drafts_segment_ends() -> None:
    """A kept part counts: of a segment of 4 tokens, 1 is kept and the target writes 3."""
    cut = lines(4, 4)
    judge = Says(verdict=lambda review, _: Verdict(keep=1, target_writes=True))
    steps, _, _ = steps_of(judge, cut, max_tokens=16)
    assert authors_of(steps) == ["target"] * 4 + (["draft"] + ["target"] * 3) * 3
    text = list(PROMPT) + greedy(TARGET, PROMPT, 4)
    for _ in range(3):
        text += greedy(DRAFT, text, 1)
        text += greedy(TARGET, text, 3)
    assert text_of(steps) == text[len(PROMPT) :]


def test_a_judge_of_tokens_has_drafts_from_the_start() -> None:
    """No first segment, no boundary: up to num_draft_tokens, and room for the token behind them."""
    lengths: list[int] = []

    def verdict(review: Review, rng: np.random.Generator) -> Verdict:
        lengths.append(len(review.ids))
        return Verdict(keep=len(review.ids), extra=int(np.argmax(review.logits[-1])))

    ledger = Ledger()
    judge = Says(verdict=verdict, segments=False)
    steps, _, _ = steps_of(judge, lines(1, 2), max_tokens=12, gamma=4, ledger=ledger)
    assert lengths == [4, 4, 1] and [len(step.ids) for step in steps] == [5, 5, 2]
    assert (ledger.summary().num_segments, ledger.summary().semantic_acceptance_rate) == (0, None)


def test_processors_follow_what_is_kept_and_what_is_thrown_away() -> None:
    """D14: drafting, laws that a judge reads and verdicts all tell the processor; at the end it knows the text only."""

    class Log:
        def __init__(self) -> None:
            self.text: list[int] = []

        def mask(self, logits: Floats) -> Floats:
            changed = logits.copy()
            changed[self.text[-1:]] = -np.inf
            return changed

        def accept(self, token: int) -> None:
            self.text.append(token)

        def rollback(self, n: int) -> None:
            del self.text[len(self.text) - n :]

    for decisions in ((True,), (False,), (True, False, False)):
        turns = cycle(decisions)

        def verdict(review: Review, rng: np.random.Generator, turns: Any = turns) -> Verdict:
            assert len(review.p) == len(review.ids) + 1 and review.p[len(review.ids)].ids.size
            return Verdict(keep=len(review.ids)) if next(turns) else Verdict(keep=0, target_writes=True)

        log = Log()
        steps, _, _ = steps_of(Says(verdict=verdict), lines(), max_tokens=30, processors=[log])
        ids = text_of(steps)
        assert log.text == ids and all(one != other for one, other in pairwise(ids))


def test_a_bad_verdict_stops_the_request() -> None:
    """One line that names the judge; the next request finds models that work."""
    target, draft = ScriptedModel(TARGET), ScriptedModel(DRAFT)
    bad = Says(verdict=lambda review, _: Verdict(keep=99), name="bad")
    with pytest.raises(ConfigError, match="'bad' keeps 99"):
        run(target, PROMPT, vocab_size=V, draft=draft, judge=bad, segmenter=lines())
    options: dict[str, Any] = {"draft": draft, "judge": keeping(True), "segmenter": lines(), "max_tokens": 20}
    assert run(target, PROMPT, vocab_size=V, **options)[0] == simulate([True], 20, lines())[0]


# Drafts


@pytest.mark.parametrize("seed", range(6))
def test_a_draft_is_the_beginning_of_what_the_model_drafts_anyway(seed: int) -> None:
    """It ends with the segment, at a stop or at the limit; tokens and laws are the same, and so is the history."""
    params = SamplingParams(temperature=1.0, frequency_penalty=0.5)

    def drafted(limit: int, segmenter: Segmenter | None = None) -> tuple[Any, Any]:
        chooser = Chooser(params, V, PROMPT)
        drafter = ModelDrafter(
            ScriptedModel(DRAFT), chooser, stop_ids=segmenter.stop_ids if segmenter else ()
        )
        drafter.start(PROMPT)
        segment = None if segmenter is None else segmenter.begin()
        found = drafter.propose(limit, np.random.default_rng(seed), segment=segment, judged=True)
        chooser.rollback(0)
        return found, chooser.law(np.zeros(V, np.float32)).probs.tolist()

    whole, untouched = drafted(30)
    for cut in (lines(2, 5), lines(1, 3), lines(4, 20), lines(4, 20, [2])):
        draft, after = drafted(30, segmenter=cut)
        n = cut.length(whole.ids)
        assert draft.ids == whole.ids[:n] and len(draft.laws) == n and after == untouched
        for ours, theirs in zip(draft.laws, whole.laws, strict=False):
            np.testing.assert_array_equal(ours.probs, theirs.probs)
        assert drafted(2, segmenter=cut)[0].ids == whole.ids[: min(2, n or 2)]
