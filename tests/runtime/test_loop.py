"""The decoding loop without drafts, against models whose answers are written down."""

from __future__ import annotations

import doctest
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import decoding
import numpy as np
import pytest
import scripted
from scripted import ScriptedModel, chain, scattered

from semspec.runtime.errors import BackendError, ConfigError
from semspec.runtime.records import Step
from semspec.runtime.stats import Ledger

V = 8


def successors(size: int = V) -> ScriptedModel:
    """After i comes i + 1, round and round."""
    return ScriptedModel(chain(np.roll(5 * np.eye(size), 1, axis=1)))


def steps_of(model: ScriptedModel, prompt: Sequence[int], **options: Any) -> Iterator[Step]:
    return decoding.start(model, prompt, **{"vocab_size": V, **options})


def run(model: ScriptedModel, prompt: Sequence[int], **options: Any) -> tuple[list[int], str | None]:
    return decoding.run(model, prompt, **{"vocab_size": V, **options})


def test_worked_examples_of_the_double() -> None:
    """The double is public within the tests: its examples are checked like any other."""
    assert doctest.testmod(scripted).failed == 0


def test_double_spoils_what_it_returned_before() -> None:
    """A loop that keeps logits over a pass would go unnoticed with a kinder double."""
    model = successors()
    kept = model.forward([1], pool=np.ones(1, np.float32), hidden=(0,))
    assert kept.logits.tolist() == [[0, 0, 5, 0, 0, 0, 0, 0]]
    model.forward([2])
    assert kept.pooled is not None
    assert np.isnan(kept.logits).all() and np.isnan(kept.pooled).all() and np.isnan(kept.hidden[0]).all()


def test_greedy_follows_the_largest_logits() -> None:
    """The plainest case: what the table says, token by token, until max_tokens."""
    assert run(successors(), [3], max_tokens=6) == ([4, 5, 6, 7, 0, 1], "length")


def test_greedy_tie_goes_to_the_lowest_id() -> None:
    """One rule for ties everywhere, or exact modes would differ from the plain one by chance."""
    ids, _ = run(ScriptedModel(lambda _: [0, 1, 7, 1, 7, 7, 0, 0]), [0], max_tokens=2)
    assert ids == [2, 2]


@pytest.mark.parametrize("params", [{}, {"temperature": 1.5, "seed": 0}])
def test_ids_that_the_tokenizer_lacks_are_never_drawn(params: dict[str, Any]) -> None:
    """Rows of a padded vocabulary hold anything: here they hold nearly all of the mass (1 - 2e-7)."""
    ids, _ = run(ScriptedModel(lambda _: [0, 1, 2, 20, 20, 20, 20, 20]), [0], vocab_size=3, **params)
    assert set(ids) <= {0, 1, 2}


@pytest.mark.parametrize("params", [{}, {"temperature": 0.7, "seed": 0}])
def test_nan_is_an_error_of_the_engine(params: dict[str, Any]) -> None:
    """numpy's argmax would take NaN for the largest and go on in silence."""
    model = ScriptedModel(lambda context: [0, np.nan if len(context) > 2 else 1, 0, 0, 0, 0, 0, 0])
    steps = steps_of(model, [0, 0], **params)
    next(steps)
    with pytest.raises(BackendError, match="nan"):
        list(steps)


def test_nan_beyond_the_vocabulary_does_not_matter() -> None:
    """Padding is not looked at."""
    assert run(ScriptedModel(lambda _: [0, 1, np.nan]), [0], vocab_size=2, max_tokens=1) == ([1], "length")


def test_any_end_id_ends_the_answer_and_is_its_last_id() -> None:
    """Models have several end ids; the one that came is part of the ids, the text leaves it out."""
    for end_ids, expected in (([6], [4, 5, 6]), ([7, 5], [4, 5]), ([], [4, 5, 6, 7])):
        ids, reason = run(successors(), [3], end_ids=end_ids, max_tokens=4)
        assert ids == expected
        assert reason == ("stop" if end_ids else "length")


def test_stop_token_ids_end_it_also_where_eos_is_ignored() -> None:
    """ignore_eos is about the model's own end tokens; what the user asks to stop at still stops."""
    model = successors()
    assert run(model, [3], end_ids=[5], ignore_eos=True, max_tokens=4) == ([4, 5, 6, 7], "length")
    assert run(model, [3], end_ids=[5], ignore_eos=True, stop_token_ids=(6,)) == ([4, 5, 6], "stop")
    assert run(model, [3], end_ids=[7], stop_token_ids=(6,)) == ([4, 5, 6], "stop")


def test_end_at_the_last_allowed_token_is_a_stop() -> None:
    """Both reasons hold; that the model was done is the one worth knowing."""
    assert run(successors(), [3], end_ids=[5], max_tokens=2) == ([4, 5], "stop")


def test_full_context_ends_with_length() -> None:
    """Four places, two of them the prompt's: the third token that is written could not be read any more."""
    model = successors()
    model.max_context = 4
    assert run(model, [2, 3]) == ([4, 5, 6], "length")
    assert model.length == 4


def test_prompt_that_fills_the_context_still_gets_one_token() -> None:
    """It is all there is room for: the last place goes to the last token of the prompt."""
    model = successors()
    model.max_context = 3
    assert run(model, [1, 2, 3]) == ([4], "length")


@pytest.mark.parametrize("prompt", [[], [0] * 4])
def test_prompt_that_is_empty_or_too_long_is_refused(prompt: list[int]) -> None:
    """In one line that says what is allowed, before anything is computed or forgotten."""
    model = successors()
    model.forward([1])
    model.max_context = 3
    with pytest.raises(ConfigError, match=rf"has {len(prompt)} tokens; .* 1 to 3 .*--max-context"):
        next(steps_of(model, prompt))
    assert model.length == 1


def test_prompt_is_read_in_one_pass_all_but_its_last_token() -> None:
    """The pending token is read by the first step: the logits of the prompt's last row come for free."""
    model = successors()
    run(model, [1, 2, 3], max_tokens=2)
    assert model.calls == [(0, (1, 2)), (2, (3,)), (3, (4,))]


def test_one_token_prompt_needs_no_call_of_its_own() -> None:
    """It is pending at once; an empty pass is an error in every engine."""
    model = successors()
    run(model, [3], max_tokens=2)
    assert model.calls == [(0, (3,)), (1, (4,))]


def test_prompt_is_read_from_where_it_leaves_the_remembered_text() -> None:
    """D11: the next turn of a conversation costs what is new in it; a changed token is read again, and all after."""
    model = successors()
    run(model, [1, 2, 3], max_tokens=3)  # remembers 1 2 3 4 5
    for prompt, read in (
        ([1, 2, 3, 4, 5, 6, 0, 0], [(5, (6, 0)), (7, (0,))]),
        ([1, 2, 3, 7, 7], [(3, (7,)), (4, (7,))]),
        ([1, 2, 3, 7], [(3, (7,))]),
        ([0, 2], [(0, (0,)), (1, (2,))]),
        ([5], [(0, (5,))]),
    ):
        model.calls.clear()
        run(model, prompt, max_tokens=1)
        assert model.calls == read


def test_after_every_step_the_model_remembers_all_but_the_pending_token() -> None:
    """The invariant that drafts, reviews and rewinds of the other modes build on."""
    model, committed = ScriptedModel(scattered(V)), [5, 1, 2]
    for step in steps_of(model, [5, 1, 2], max_tokens=20):
        committed += step.ids
        assert model.tokens == committed[:-1]
    assert len(committed) == 23


def test_earlier_text_is_forgotten() -> None:
    """A request must not depend on the one before it."""
    model = ScriptedModel(scattered(V))
    first = run(model, [1, 2], max_tokens=8)
    run(model, [3, 4, 5], max_tokens=3)
    assert run(model, [1, 2], max_tokens=8) == first


def test_same_seed_gives_the_same_tokens_and_another_seed_others() -> None:
    """40 tokens of a law with more than 1 bit each: two seeds agree by chance with less than 2^-40."""
    model = ScriptedModel(scattered(V, spread=0.5))
    first = run(model, [1], temperature=1.0, seed=1, max_tokens=40)
    assert run(model, [1], temperature=1.0, seed=1, max_tokens=40) == first
    assert run(model, [1], temperature=1.0, seed=2, max_tokens=40) != first


def test_no_seed_gives_other_tokens_each_time() -> None:
    """The default is chance, not a hidden constant. Agreement by chance: below 2^-40, as above."""
    model = ScriptedModel(scattered(V, spread=0.5))
    assert run(model, [1], temperature=1.0, max_tokens=40) != run(model, [1], temperature=1.0, max_tokens=40)


def test_sampled_tokens_follow_the_law() -> None:
    """2,000 draws from 0.7/0.2/0.1: chi-square with 2 degrees passes 27.6 once in a million runs; fixed seed."""
    law = np.log([0.7, 0.2, 0.1])
    model = ScriptedModel(lambda _: law, max_context=4000)
    ids, _ = run(model, [0], vocab_size=3, temperature=1.0, seed=7, max_tokens=2000)
    expected = 2000 * np.exp(law)
    assert np.sum((np.bincount(ids, minlength=3) - expected) ** 2 / expected) < 27.6


def test_log_probabilities_are_given_on_request() -> None:
    """Of the token that was written, under the model itself: the rows of the table, scaled to sum to 1."""
    for wanted in (True, False):
        steps = list(
            steps_of(successors(), [3], max_tokens=2, logprobs=wanted, temperature=0.5, seed=0, top_k=1)
        )
        expected = 5 - np.log(np.exp(5) + V - 1) if wanted else None
        assert [step.logprobs for step in steps] == 2 * [(pytest.approx(expected),) if wanted else ()]


def test_abandoned_request_leaves_a_usable_model() -> None:
    """A reader may leave at any step; the next request starts from nothing."""
    model = ScriptedModel(scattered(V))
    whole = run(model, [1, 2], max_tokens=6)
    for n_steps in range(4):
        steps = steps_of(model, [3, 4, 5], max_tokens=6)
        list(islice(steps, n_steps))
        steps.close()  # type: ignore[attr-defined]
        assert run(model, [1, 2], max_tokens=6) == whole


def test_ledger_counts_the_prompt_and_every_token_in_named_phases() -> None:
    """Speed is reported from it: a phase that is not timed would hide its cost."""
    ledger = Ledger()
    run(successors(), [1, 2, 3], max_tokens=5, ledger=ledger)
    summary = ledger.summary()
    assert (summary.prompt_tokens, summary.generated_tokens) == (3, 5)
    assert list(summary.phase_ms) == ["prefill", "target", "sampling"]


def test_counts_are_right_when_a_step_is_seen() -> None:
    """Streams report while they run."""
    ledger = Ledger()
    for n_steps, _ in enumerate(steps_of(successors(), [1], max_tokens=3, ledger=ledger), 1):
        assert ledger.generated_tokens == n_steps
