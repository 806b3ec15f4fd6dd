"""Several segments a round: the text, its law and the memories are those of one segment at a time, in fewer passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from branching import exact_law
from decoding import Letters, Says, Stub, run, start
from judged import DRAFT, PROMPT, TARGET, V, greedy, lines, steps_of, text_of
from laws import distance
from scripted import ScriptedModel, scattered
from segment_judges import INSIDE, Scripted, judges

from semspec.runtime import loop
from semspec.runtime.acceptance import accept_block, accept_tokens
from semspec.runtime.errors import ConfigError
from semspec.runtime.pace import Pace
from semspec.runtime.records import Draft, Step, Verdict
from semspec.runtime.rows import Rows
from semspec.runtime.segments import Segmenter
from semspec.runtime.semantic import ByScore, CombinedJudge, SemanticJudge
from semspec.runtime.stats import Ledger
from semspec.runtime.windows import read_draft

KINDS = ("semantic", "thrown away", "paper", "combined")
PATTERNS = list(product([True, False], repeat=3))
STATES: dict[str, Any] = {"states": True}


def several(n: int, **inside: Any) -> dict[str, Any]:
    """Fields of Judging: drafts of n segments, states read of each."""
    return {**INSIDE, "max_segments": n, "layers": (0,), **inside}


def rounds_of(judge: Any, cut: Segmenter, n: int, **options: Any) -> tuple[list[list[Step]], ScriptedModel]:
    """The steps of a request by round, memories looked at after each; and the target. n: segments."""
    context, inside = options.pop("context", 64), options.pop("inside", {})
    target, draft = (ScriptedModel(law, max_context=context) for law in (TARGET, DRAFT))
    given = {"vocab_size": V, "draft": draft, "drafting": STATES, **options}
    committed, rounds, n_calls, settled = list(PROMPT), list[list[Step]](), 1, True
    for step in start(target, PROMPT, judge=judge, segmenter=cut, inside=several(n, **inside), **given):
        if len(target.calls) > n_calls:
            at, read = target.calls[-1]
            assert settled and (at, read[0]) == (len(committed) - 1, committed[-1])
            rounds.append([])
        n_calls = len(target.calls)
        committed += step.ids
        rounds[-1].append(step)
        settled = target.tokens == committed[:-1]
        assert settled or target.tokens[: len(committed)] == committed
        if settled:
            assert draft.tokens == committed[: draft.length] and draft.length < len(committed)
    assert settled and step.finish_reason
    return rounds, target


def steps_in(rounds: Sequence[Sequence[Step]]) -> list[Step]:
    return [step for steps in rounds for step in steps]


def check_same(
    kind: str, decisions: Sequence[bool], cut: Segmenter, n: int, *, inside: Any = None, **options: Any
) -> list[list[Step]]:
    """At temperature 0 the steps are those of one segment a round, to their figures. Returns the rounds."""
    one, many = (judges(*decisions)[kind] for _ in range(2))
    steps, _, _ = steps_of(one, cut, inside={**INSIDE, **(inside or {})}, drafting=STATES, **options)
    rounds, _ = rounds_of(many, cut, n, inside=inside or {}, **options)
    assert steps_in(rounds) == steps
    return rounds


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decisions", PATTERNS)
def test_it_writes_what_one_segment_at_a_time_writes(decisions: tuple[bool, ...], kind: str) -> None:
    """Refused at the first, a middle or the last segment of a round, kept all or none: tokens, authors and verdicts."""
    for (low, cap), n in product([(1, 1), (2, 5)], (2, 3)):
        check_same(kind, decisions, lines(low, cap), n, max_tokens=25, gamma=3)


@pytest.mark.parametrize(
    ("decisions", "lengths"),
    [
        ((True,), {3}),
        ((False,), {1}),
        ((True, False), {2}),
        ((True, True, False), {3}),
        ((False, True), {1, 2}),
    ],
)
def test_a_round_goes_as_far_as_its_segments_are_kept(decisions: tuple[bool, ...], lengths: set[int]) -> None:
    """One pass for all of them. What is behind a refused one is not shown to a judge, and counts as drafted."""
    ledger, judge = Ledger(), judges(*decisions)["thrown away"]
    rounds, target = rounds_of(
        judge, lines(4, 4), 3, max_tokens=48, ledger=ledger, inside={"exact_inside": False}
    )
    judged = [steps for steps in rounds[:-2] if steps[0].judged is not None]
    assert judged and {len(steps) for steps in judged} == lengths
    for steps in judged:
        assert all(step.judged is not None and step.judged.n_kept == 4 for step in steps[:-1])
        assert len(steps) == 3 or (steps[-1].judged is not None and steps[-1].judged.n_kept == 0)
    summary, shown = ledger.summary(), judge.rule.probes.shown
    all_judged = [step.judged for step in steps_in(rounds) if step.judged is not None]
    assert summary.num_segments == len(shown) == len(all_judged)
    assert summary.num_accepted_draft_tokens == sum(one.n_kept for one in all_judged)
    assert summary.num_rounds == len(target.calls) - 1 == len(rounds)
    assert summary.num_draft_tokens == sum(len(ids) - 1 for _, ids in target.calls[1:])
    assert (summary.num_draft_tokens > summary.num_segment_tokens) == (min(lengths) < 3)


def test_only_kept_segments_leave_the_targets_text() -> None:
    """Against the method in plain words, not the same loop: a judge that refuses all, and one that keeps all."""
    for n in (2, 4):
        refused, _ = rounds_of(judges(False)["combined"], lines(), n, max_tokens=40)
        assert text_of(steps_in(refused)) == greedy(TARGET, PROMPT, 40)
        kept, _ = rounds_of(judges(True)["paper"], lines(3, 3), n, max_tokens=39)
        first = greedy(TARGET, PROMPT, 3)
        first = first[: lines(3, 3).length(first)]
        assert text_of(steps_in(kept)) == [*first, *greedy(DRAFT, [*PROMPT, *first], 39 - len(first))]


@pytest.mark.parametrize("kind", ["semantic", "combined", "paper"])
@pytest.mark.parametrize("end", range(V))
def test_an_end_inside_a_later_segment_ends_the_answer_there(end: int, kind: str) -> None:
    """D01, D22: a stop id, or the end of thoughts, behind which the target writes; nothing is drafted behind either."""
    for decisions in ((True,), (True, False)):
        cut = lines(2, 4, [end])
        check_same(kind, decisions, cut, 3, max_tokens=24, end_ids=[end])
        rounds = check_same(kind, decisions, cut, 3, max_tokens=24, inside={"closing": end})
        ids = text_of(steps_in(rounds))
        if end in ids:
            at = ids.index(end) + 1
            assert ids[at:] == greedy(TARGET, [*PROMPT, *ids[:at]], 24 - at)


def test_a_stop_string_may_end_in_any_segment_of_a_round() -> None:
    """D02: tokens behind it are in neither ids, text, counts nor cache."""
    letters = Letters("abcdef")
    free = text_of(steps_in(rounds_of(judges(True)["paper"], lines(3, 3), 3, max_tokens=12)[0]))
    for n in range(2, 12):
        stop = "".join(letters.pieces[token] for token in free[n - 2 : n])
        ledger = Ledger()
        options: dict[str, Any] = {"text": letters, "stop": (stop,), "max_tokens": 12, "ledger": ledger}
        steps = steps_in(rounds_of(judges(True)["paper"], lines(3, 3), 3, **options)[0])
        written = "".join(letters.pieces[token] for token in free)
        cut = written.index(stop) + 2
        assert (text_of(steps), steps[-1].finish_reason) == (free[:cut], "stop")
        assert "".join(step.text for step in steps) == written[: cut - 2]
        assert ledger.summary().generated_tokens == cut


@pytest.mark.parametrize("kind", ["semantic", "combined"])
def test_the_context_and_max_tokens_are_filled_to_the_last_place(kind: str) -> None:
    """A segment that either cuts short is left to the exact rule; the engine is never overfilled."""
    for room, cap, decisions in product(range(3, 13), (1, 4), [(True,), (True, False)]):
        for limit in ({"context": room, "max_tokens": 99}, {"max_tokens": room}):
            rounds = check_same(kind, decisions, lines(1, cap), 3, **limit)
            assert steps_in(rounds)[-1].finish_reason == "length"


def test_a_bonus_token_stands_behind_the_last_kept_one_only() -> None:
    """A token of the target's between two segments of one draft would change what the second follows."""
    for n in (1, 2, 3):
        options: dict[str, Any] = {"max_tokens": 4 + 3 * (4 * n + 1), "inside": {"bonus": True}}
        rounds, _ = rounds_of(judges(True)["semantic"], lines(4, 4), n, **options)
        text = list(PROMPT)
        for steps in rounds:
            for place, step in enumerate(steps):
                own = len(step.ids) - step.n_from_draft
                if step.judged is not None:
                    assert len(steps) == n and own == (place == n - 1)
                    assert [step.ids[-1]] == greedy(TARGET, [*text, *step.ids[:-1]], 1) or not own
                text += step.ids


def test_few_rows_of_the_head_are_enough_for_judges_of_states() -> None:
    """Sampled: one row a segment, the one its replacement is drawn from, and one for a bonus token."""
    for bonus, decisions in product([False, True], [(True,), (False,), (True, False), (True, True, False)]):
        texts = []
        for few in (True, False):
            inside = {"few_rows": few, "bonus": bonus}
            options: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0, "seed": 3, "inside": inside}
            rounds, _ = rounds_of(judges(*decisions)["paper"], lines(), 3, **options)
            texts.append(text_of(steps_in(rounds)))
        assert texts[0] == texts[1]


def test_sampled_text_is_reproduced_by_its_seed() -> None:
    """40 tokens of more than a bit; log-probabilities are those of each token at its place."""
    options: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0, "logprobs": True}
    one, again, other = (
        steps_in(rounds_of(judges(True, True, False)["semantic"], lines(), 3, seed=seed, **options)[0])
        for seed in (1, 1, 2)
    )
    assert one == again and text_of(one) != text_of(other)
    text = list(PROMPT)
    for step in one:
        for token, logprob in zip(step.ids, step.logprobs, strict=True):
            row = np.asarray(TARGET(tuple(text)), np.float64)
            assert logprob == pytest.approx(row[token] - np.log(np.exp(row).sum()), abs=1e-5)
            text.append(token)


# Exactness


def answers(
    n_segments: int, rule: Any, pace: Callable[[], Pace] = Pace, *, bonus: bool = False
) -> dict[tuple[int, ...], float]:
    """The law of 4 tokens at temperature 1, by enumeration, of `combined` without its predictor; 0: of the target."""
    target_law, draft_law = (scattered(2, seed, spread=1.5) for seed in (51, 52))
    judge = CombinedJudge(rule=ByScore(probes=Scripted(False), threshold=0.5), bonus=bonus)

    def once(rng: Any) -> tuple[int, ...]:
        options: dict[str, Any] = {}
        if n_segments:
            options = {"judge": judge, "segmenter": lines(1, 2), "draft": ScriptedModel(draft_law)}
            inside = several(n_segments, exact_inside=False, bonus=bonus)
            options |= {"inside": inside, "drafting": {"pace": pace()}}
        model = ScriptedModel(target_law)
        steps = start(
            model, (0, 1), vocab_size=2, rule=rule, rng=rng, temperature=1.0, max_tokens=4, **options
        )
        return tuple(token for step in steps for token in step.ids)

    return exact_law(once)


@pytest.mark.parametrize("rule", [accept_tokens, accept_block])
@pytest.mark.parametrize("adaptive", ["off", "confidence", "acceptance"])
def test_the_exact_rule_stays_exact(adaptive: str, rule: Any) -> None:
    """What the predictor refuses has the target's law, to 1e-12, whatever sets the number of segments; what the exact
    rule draws behind each of them is left out, but for the bonus token behind the last."""
    found = answers(3, rule, lambda: Pace(adaptive, least=0.6), bonus=adaptive == "off")
    assert distance(found, answers(0, accept_tokens)) < 1e-12


def test_a_window_off_by_one_row_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the law of the text, and by the text at temperature 0."""

    def shifted(*given: Any, **options: Any) -> Any:
        first, *later = read_draft(*given, **options)
        return [first, *(replace(one, rows=Rows(np.roll(one.rows.logits, 1, axis=0))) for one in later)]

    monkeypatch.setattr(loop, "read_draft", shifted)
    assert distance(answers(3, accept_tokens), answers(0, accept_tokens)) > 1e-3
    with pytest.raises(AssertionError):
        for decisions in PATTERNS:
            check_same("combined", decisions, lines(), 3, max_tokens=25)


# What is read, and who else may be there


def test_states_of_every_segment_are_of_its_own_rows() -> None:
    """D42, D43: of the target, whose pass is over all, and of the draft, whose sum begins anew. A row off shows in both
    numbers of a state: how many tokens were read, and the last of them."""
    judge = SemanticJudge(rule=ByScore(probes=Scripted(True, True, False), threshold=0.5))
    judge.rule.probes.needs_target_states = True  # type: ignore[attr-defined]
    rounds, _ = rounds_of(judge, lines(2, 5), 3, max_tokens=60)
    text, places = list(PROMPT), set[int]()
    shown = iter(judge.rule.probes.shown)  # type: ignore[attr-defined]
    for steps in rounds:
        for place, step in enumerate(steps):
            if step.judged is not None:
                target, draft = next(shown)
                n = step.judged.n_drafted
                rows = [text[-1], *greedy(DRAFT, text, n - 1)]
                expected = [np.mean(range(len(text), len(text) + n)), np.mean(rows)]  # scripted.place_and_id
                for reading in (target, draft):
                    np.testing.assert_allclose(reading.pooled, [expected], rtol=1e-6)
                places.add(place)
            text += step.ids
    assert places == {0, 1, 2} and next(shown, None) is None


def test_a_text_is_told_with_what_stands_before_it() -> None:
    """Of a later segment the earlier ones are context, and what was drafted behind it is not."""
    told: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def describe(context: Sequence[int], ids: Sequence[int]) -> Any:
        told.append((tuple(context), tuple(ids)))

    judge = judges(True, True, False)["semantic"]
    judge.rule.probes.needs_text = True
    rounds, _ = rounds_of(judge, lines(2, 5), 3, max_tokens=40, inside={"describe": describe})
    text, asked = list(PROMPT), iter(told)
    for step in steps_in(rounds):
        if step.judged is not None:
            context, ids = next(asked)
            assert (context, ids) == (tuple(text), tuple(greedy(DRAFT, text, step.judged.n_drafted)))
        text += step.ids


def test_a_drafter_that_writes_on_is_heard_up_to_the_last_segments_end() -> None:
    """And its readings, of which there are none here, are not made up."""
    seen: list[tuple[int, ...]] = []

    def verdict(review: Any, rng: Any) -> Verdict:
        seen.append(review.ids)
        assert review.draft is None
        return Verdict(keep=len(review.ids))

    stub = Stub(habit=lambda committed, limit: [2, 0, 2, 2, 0, 2, 0, 2])
    options: dict[str, Any] = {"judge": Says(verdict=verdict), "segmenter": lines(), "max_tokens": 25}
    run(ScriptedModel(TARGET), PROMPT, vocab_size=V, draft=stub, inside={"max_segments": 2}, **options)
    assert seen[:6] == [(2, 0), (2, 2, 0)] * 3


def test_a_segment_of_which_a_part_is_kept_is_the_last_of_its_round() -> None:
    """Also where its judge leaves the rest to the draft: what was drafted behind it follows what is gone."""
    for keep in (1, 3):
        judge = Says(verdict=lambda review, _, n=keep: Verdict(keep=min(n, len(review.ids))))  # type: ignore[misc]
        one, _, _ = steps_of(judge, lines(4, 4), max_tokens=20, drafting=STATES)
        rounds, _ = rounds_of(judge, lines(4, 4), 2, max_tokens=20, inside={"whole_only": False})
        assert text_of(steps_in(rounds)) == text_of(one) and {len(steps) for steps in rounds} == {1}


def test_a_question_to_the_target_goes_with_one_segment() -> None:
    """It would have to forget the others, which are still to be judged."""
    judge = Says(verdict=lambda review, rng: review.ask([1]) and Verdict(keep=1))
    with pytest.raises(ConfigError, match="leave max_segments at 1"):
        rounds_of(judge, lines(2, 2), 2)


@pytest.mark.parametrize("n", range(1, 9))
def test_an_answer_may_be_left_between_two_segments(n: int) -> None:
    """What models remember is what they have read, so the next request gets the text of a fresh one."""
    target, draft = ScriptedModel(TARGET), ScriptedModel(DRAFT)

    def begin(target: ScriptedModel, draft: ScriptedModel) -> Any:
        options: dict[str, Any] = {
            "judge": judges(True)["paper"],
            "segmenter": lines(3, 3),
            "drafting": STATES,
        }
        return start(target, PROMPT, vocab_size=V, draft=draft, inside=several(3), max_tokens=30, **options)

    whole, left = list(begin(ScriptedModel(TARGET), ScriptedModel(DRAFT))), begin(target, draft)
    assert [next(left) for _ in range(n)] == whole[:n]
    left.close()
    for model, law in ((target, TARGET), (draft, DRAFT)):
        known = list(model.tokens)
        again = np.asarray(law((*known, 5)), np.float32)
        np.testing.assert_array_equal(model.forward([5]).logits[0], again)
        model.rewind(len(known))
    assert list(begin(target, draft)) == whole


def test_a_draft_falls_into_its_pieces() -> None:
    """Whole ones, and one begun; one empty piece where there is nothing."""
    laws = Stub(habit=lambda *_: range(7)).propose(7, np.random.default_rng(0)).laws
    draft = Draft(ids=tuple(range(7)), laws=laws, ends=(2, 5))
    pieces = draft.pieces()
    assert [piece.ids for piece in pieces] == [(0, 1), (2, 3, 4), (5, 6)]
    assert [piece.whole for piece in pieces] == [True, True, False]
    assert [law for piece in pieces for law in piece.laws] == [*laws]
    assert [piece.ids for piece in replace(draft, ends=(2, 7)).pieces()] == [(0, 1), (2, 3, 4, 5, 6)]
    assert [piece.ids for piece in Draft(ids=(), laws=()).pieces()] == [()]
