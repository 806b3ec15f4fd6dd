"""What steps and ledger say of judged text, and what a judge may ask the target: reviews leave no trace."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, product
from typing import Any

import numpy as np
import pytest
from decoding import Says, keeping, start
from judged import DRAFT, PROMPT, TARGET, V, authors_of, greedy, lines, steps_of, text_of
from scripted import ScriptedModel

from semspec.runtime.records import Floats, Verdict
from semspec.runtime.review import Review
from semspec.runtime.sampling import log_probabilities
from semspec.runtime.stats import Ledger

# Questions


def asking(question: Sequence[int], answers: list[Floats | None], *decisions: bool) -> Says:
    turns = cycle(decisions)

    def verdict(review: Review, rng: np.random.Generator) -> Verdict:
        before = review.logits.copy()
        answers.append(review.ask(question))
        np.testing.assert_array_equal(review.logits, before)
        assert [review.p[i].ids.tolist() for i in range(len(before))] == [
            [int(row.argmax())] for row in before
        ]
        return Verdict(keep=len(review.ids)) if next(turns) else Verdict(keep=0, target_writes=True)

    return Says(verdict=verdict)


@pytest.mark.parametrize("decisions", [(True,), (False,), (True, False)])
def test_a_question_leaves_no_trace(decisions: tuple[bool, ...]) -> None:
    """Text, log-probabilities, memories and drafts are those of a judge that does not ask; its passes are counted."""
    answers: list[Floats | None] = []
    ledger, silent = Ledger(), Ledger()
    options: dict[str, Any] = {"max_tokens": 30, "logprobs": True}
    asked, target, _ = steps_of(asking([5, 2], answers, *decisions), lines(), ledger=ledger, **options)
    plain, _, _ = steps_of(keeping(*decisions), lines(), ledger=silent, **options)
    assert asked == plain
    assert answers and len(answers) == ledger.summary().num_segments
    assert ledger.summary().num_rounds == silent.summary().num_rounds + len(answers)
    assert sum(ids == (5, 2) for _, ids in target.calls) == len(answers)


def test_the_answer_follows_the_whole_draft_and_the_question() -> None:
    """Not the committed text alone, and not without the draft's last token."""
    answers: list[Floats | None] = []
    steps, _, _ = steps_of(asking([5, 2], answers, True), lines(3, 3), max_tokens=9)
    ids = text_of(steps)
    for n, answer in zip((6, 9), answers, strict=True):
        expected = np.asarray(TARGET((*PROMPT, *ids[:n], 5, 2)), np.float32)
        assert answer is not None
        np.testing.assert_array_equal(answer, expected)


def test_a_question_that_does_not_fit_has_no_answer() -> None:
    """The engine is not overfilled, the judge is told; the last place of the context can be used.

    With segments of 2 the target has read 6, 8, 10, 12, 14 and 16 tokens when it is asked.
    """
    for n, answered in ((2, 5), (3, 4), (4, 4), (5, 3), (10, 1), (11, 0)):
        answers: list[Floats | None] = []
        steps_of(asking([5] * n, answers, True), lines(2, 2), max_tokens=99, context=16)
        assert [answer is not None for answer in answers] == [True] * answered + [False] * (6 - answered)


# Counts


def test_every_token_has_an_author_and_a_promise() -> None:
    """Steps, ledger and simulation agree; only drafted tokens under a lossy judge are lossy."""
    for lossy, n_exact in product((True, False), (0, 1)):
        ledger, turns = Ledger(), cycle([True, False, True])

        def verdict(review: Review, rng: Any, n_exact: int = n_exact, turns: Any = turns) -> Verdict:
            kept = next(turns)
            return (
                Verdict(keep=len(review.ids), n_exact=n_exact)
                if kept
                else Verdict(keep=0, target_writes=True)
            )

        judge = Says(verdict=verdict, lossy=lossy, name="coin")
        steps, _, _ = steps_of(judge, lines(), max_tokens=60, ledger=ledger)
        n_draft = authors_of(steps).count("draft")
        kept = [step for step in steps if step.n_from_draft]
        n_lossy = n_draft - n_exact * len(kept) if lossy else 0
        summary = ledger.summary()
        assert summary.num_accepted_draft_tokens == n_draft
        assert summary.num_lossy_tokens == sum(step.n_lossy for step in steps) == n_lossy
        assert summary.lossy_token_fraction == n_lossy / 60
        assert summary.num_accepted_segments == len(kept)
        assert {step.rule for step in kept} == {"coin"}
        assert {step.rule for step in steps[: lines().length(text_of(steps))]} == {"target"}
        judged = [step for step in steps if step.rule == "coin"]
        assert summary.num_segments == len(judged)
        assert summary.semantic_acceptance_rate == len(kept) / len(judged)


def test_exact_drafts_are_called_lossless_and_nothing_is_lossy() -> None:
    """The same fields say it for the modes that were there before."""
    ledger = Ledger()
    steps = list(
        start(
            ScriptedModel(TARGET),
            PROMPT,
            vocab_size=V,
            draft=ScriptedModel(TARGET),
            max_tokens=20,
            ledger=ledger,
        )
    )
    assert {step.rule for step in steps} == {"lossless"} and not any(step.n_lossy for step in steps)
    assert (ledger.summary().lossy_token_fraction, ledger.summary().semantic_acceptance_rate) == (0.0, None)


def test_a_draft_model_alone_writes_its_own_text() -> None:
    """All of it is the draft's and lossy, and no pass of the target is counted."""
    ledger = Ledger()
    steps = list(start(ScriptedModel(DRAFT), PROMPT, vocab_size=V, alone=True, max_tokens=20, ledger=ledger))
    assert text_of(steps) == greedy(DRAFT, PROMPT, 20)
    summary = ledger.summary()
    assert {(step.rule, step.n_from_draft, step.n_lossy) for step in steps} == {("draft", 1, 1)}
    assert (summary.num_rounds, summary.lossy_token_fraction, summary.mean_acceptance_length) == (
        0,
        1.0,
        None,
    )
    assert list(summary.phase_ms) == ["prefill", "draft", "sampling"]


def test_log_probabilities_of_a_kept_segment_are_the_targets() -> None:
    """Of each token at its own place, though the draft wrote it."""
    steps, _, _ = steps_of(keeping(True), lines(), max_tokens=20, logprobs=True)
    ids, values = text_of(steps), [value for step in steps for value in step.logprobs]
    rows = np.array([TARGET((*PROMPT, *ids[:n])) for n in range(len(ids))], np.float32)
    assert values == pytest.approx(log_probabilities(rows, ids), abs=1e-12)


def test_phases_have_names() -> None:
    """A judge's own time is not hidden in another's."""
    ledger = Ledger()
    steps_of(keeping(True), lines(), max_tokens=20, ledger=ledger)
    assert list(ledger.summary().phase_ms) == ["prefill", "target", "sampling", "draft", "judge"]
