"""Drafters: n-grams against a search by definition, and what a draft model remembers round by round."""

from __future__ import annotations

import doctest
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from branching import exact_law
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import ScriptedModel, chain, scattered

from semspec.runtime import drafting
from semspec.runtime.chooser import Chooser
from semspec.runtime.config import SamplingParams
from semspec.runtime.drafting import Drafter, ModelDrafter, NgramDrafter
from semspec.runtime.records import Draft, Floats, Law

V = 8


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def ngrams(text: Sequence[int], limit: int = 16) -> tuple[int, ...]:
    drafter = NgramDrafter()
    drafter.start(text)
    return drafter.propose(limit, rng()).ids


def brute_force(text: Sequence[int], limit: int) -> tuple[int, ...]:
    """The longest of the last 4..1 tokens that stood there before, its latest place, what followed there."""
    for size in (4, 3, 2, 1):
        for start in range(len(text) - size - 1, -1, -1):
            if len(text) > size and text[start : start + size] == text[-size:]:
                return tuple(text[start + size :][: min(limit, 16)])
    return ()


def model_drafter(
    model: ScriptedModel, prompt: Sequence[int], *, params: SamplingParams | None = None, **options: Any
) -> ModelDrafter:
    drafter = ModelDrafter(model, Chooser(params or SamplingParams(), V, prompt), **options)
    drafter.start(prompt)
    return drafter


def commit(drafter: ModelDrafter, ids: Sequence[int]) -> None:
    """As the loop does it: the chooser is told too."""
    for token in ids:
        drafter.chooser.accept(token)
    drafter.commit(ids)


def test_drafters_keep_the_protocol() -> None:
    """Told by the loop in the same words, whichever it is; there are no examples that could have drifted."""
    drafters: list[Drafter] = [NgramDrafter(), model_drafter(ScriptedModel(scattered(V)), [1])]
    for drafter in drafters:
        drafter.start([1, 2, 3])
        assert drafter.note == "" and isinstance(drafter.propose(1, rng()), Draft)
        drafter.commit([4])
    assert doctest.testmod(drafting).failed == 0


# N-grams


@settings(deadline=None, derandomize=True, max_examples=500)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=40),
    st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=4),
    st.integers(1, 20),
)
def test_ngrams_equal_a_search_by_definition(prompt: list[int], rounds: list[list[int]], limit: int) -> None:
    """Prompt and output both, over the border too; the index built token by token must find what a search finds."""
    drafter = NgramDrafter()
    drafter.start(prompt)
    text = list(prompt)
    for ids in [[], *rounds]:
        drafter.commit(ids)
        text += ids
        draft = drafter.propose(limit, rng())
        assert draft.ids == brute_force(text, limit)
        assert [(law.ids.tolist(), law.probs.tolist()) for law in draft.laws] == [
            ([y], [1.0]) for y in draft.ids
        ]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        pytest.param(
            [1, 2, 3, 4, 5, 9, 2, 3, 4, 6, 1, 2, 3, 4], (5, 9, 2, 3, 4, 6, 1, 2, 3, 4), id="longest first"
        ),
        pytest.param([1, 2, 5, 1, 2, 6, 0, 1, 2], (6, 0, 1, 2), id="latest of equal length"),
        pytest.param([5, 6, 7, 5], (6, 7, 5), id="one token is enough"),
        pytest.param([3, 3, 3], (3,), id="a run: one more of it"),
        pytest.param([1, 2, 3], (), id="nothing stood there before"),
        pytest.param([1], (), id="one token"),
        pytest.param([1, 1], (1,), id="two tokens"),
        pytest.param([*range(40), 0], tuple(range(1, 17)), id="at most 16"),
    ],
)
def test_ngrams_by_example(text: list[int], ids: tuple[int, ...]) -> None:
    """The definition in small."""
    assert ngrams(text) == ids


def test_ngrams_respect_the_limit() -> None:
    """Near the cap a draft is short."""
    assert [ngrams([1, 2, 3, 4, 1], limit) for limit in (1, 2, 9)] == [(2,), (2, 3), (2, 3, 4, 1)]


def test_ngrams_of_an_earlier_request_are_forgotten() -> None:
    """D11: what one user wrote must not be proposed to the next."""
    drafter = NgramDrafter()
    drafter.start([1, 2, 3, 1])
    drafter.start([1, 5, 1])
    assert drafter.propose(9, rng()).ids == (5, 1)
    drafter.commit([2])
    assert drafter.propose(9, rng()).ids == ()


def test_ngrams_use_no_chance() -> None:
    """The draw of the target is the first of a round; a certain proposal needs none."""
    generator, fresh = rng(), rng()
    drafter = NgramDrafter()
    drafter.start([1, 2, 1])
    drafter.propose(4, generator)
    assert generator.random() == fresh.random()


# A draft model: what it proposes


def test_model_proposes_what_it_would_write() -> None:
    """Greedy: after i comes i + 1."""
    drafter = model_drafter(ScriptedModel(chain(np.roll(5 * np.eye(V), 1, axis=1))), [3])
    assert drafter.propose(6, rng()).ids == (4, 5, 6, 7, 0, 1)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0},
        {"temperature": 0.5, "top_p": 0.8},
        {"temperature": 1.5, "frequency_penalty": 1.0},
        {},
    ],
    ids=str,
)
def test_laws_are_those_drawn_from(settings: dict[str, Any]) -> None:
    """D13, D14: by enumeration, a draft's chance is the product of the laws it came with, penalties included."""
    params = SamplingParams(repetition_penalty=1.2, **settings)
    chances: dict[tuple[int, ...], float] = {}

    def run(generator: Any) -> tuple[int, ...]:
        logits = scattered(4, 3, spread=1.5)
        chooser = Chooser(params, 4, [0, 1])
        drafter = ModelDrafter(ScriptedModel(logits), chooser)
        drafter.start([0, 1])
        draft = drafter.propose(3, generator)
        for i, law in enumerate(draft.laws):
            again = Chooser(params, 4, [0, 1])
            for token in draft.ids[:i]:
                again.accept(token)
            expected = again.law(np.asarray(logits((0, 1, *draft.ids[:i])), np.float32))
            assert law.ids.tolist() == expected.ids.tolist() and law.probs.tolist() == expected.probs.tolist()
        chances[draft.ids] = float(
            np.prod([law.prob(y) for law, y in zip(draft.laws, draft.ids, strict=True)])
        )
        return draft.ids

    assert exact_law(run) == pytest.approx(chances, abs=1e-12)


def test_drafting_leaves_the_chooser_as_it_was() -> None:
    """The target is judged by the same chooser, from the committed text on."""
    params = SamplingParams(presence_penalty=1.0, frequency_penalty=0.5)
    drafter = model_drafter(ScriptedModel(scattered(V)), [1, 2], params=params)
    flat = np.zeros(V, np.float32)
    commit(drafter, [3])
    before = drafter.chooser.logits(flat).tolist()
    assert len(drafter.propose(4, rng()).ids) == 4
    assert drafter.chooser.logits(flat).tolist() == before


def test_laws_outlive_the_next_pass() -> None:
    """What forward returns is overwritten by the next call (the double spoils it): laws must not point into it."""
    drafter = model_drafter(ScriptedModel(scattered(V)), [1], params=SamplingParams(temperature=1.0))
    laws = drafter.propose(5, rng()).laws
    assert all(np.isfinite(law.probs).all() and abs(law.probs.sum() - 1) < 1e-12 for law in laws)


def test_draft_ends_with_a_stop_id() -> None:
    """D01: nothing can follow an end token, so nothing is proposed behind it; if it is rejected drafting goes on."""
    drafter = model_drafter(ScriptedModel(chain(np.roll(5 * np.eye(V), 1, axis=1))), [3], stop_ids={5})
    assert drafter.propose(6, rng()).ids == (4, 5)
    commit(drafter, [4, 6])
    assert drafter.propose(6, rng()).ids == (7, 0, 1, 2, 3, 4)


@pytest.mark.parametrize("limit", [0, 1])
def test_limit_is_kept_and_nothing_is_computed_for_none(limit: int) -> None:
    """The last token of a request needs no draft."""
    model = ScriptedModel(scattered(V))
    assert len(model_drafter(model, [1, 2]).propose(limit, rng()).ids) == len(model.calls) == limit


# A draft model: what it remembers


@pytest.mark.parametrize("n_kept", range(5))
@pytest.mark.parametrize("prompt", [[1], [1, 2], [1, 2, 3, 4, 5, 6, 7]], ids=len)
def test_memory_is_a_prefix_of_the_text_and_what_is_missing_is_read_once(
    prompt: list[int], n_kept: int
) -> None:
    """D03, D04: after 0..4 of 4 accepted, then a token of the target's; a cache cut wrongly only lowers acceptance."""
    model = ScriptedModel(scattered(V))
    drafter = model_drafter(model, prompt)
    assert model.calls == []
    text = list(prompt)
    for _ in range(4):
        missing, before = text[model.length :], model.length
        model.calls.clear()
        draft = drafter.propose(4, rng())
        assert [call[1] for call in model.calls] == [tuple(missing), *((y,) for y in draft.ids[:-1])]
        assert model.calls[0][0] == before
        other = (draft.ids[n_kept] + 1) % V if n_kept < 4 else 0
        text += [*draft.ids[:n_kept], other]
        commit(drafter, text[-n_kept - 1 :])
        assert model.tokens == text[: len(model.tokens)]
        # the last proposal is never read; the target's own token never either
        assert len(text) - model.length == (2 if n_kept == 4 else 1)


def test_proposals_follow_from_the_text_alone() -> None:
    """D03: 60 rounds of mixed acceptance; each draft equals that of a model that reads the text afresh."""
    chance = np.random.default_rng(1)
    model = ScriptedModel(scattered(V), max_context=500)
    drafter = model_drafter(model, [1, 2, 3])
    text = [1, 2, 3]
    for _ in range(60):
        limit = int(chance.integers(1, 7))
        draft = drafter.propose(limit, rng())
        fresh = model_drafter(ScriptedModel(scattered(V), max_context=500), text)
        assert draft.ids == fresh.propose(limit, rng()).ids
        n_kept = int(chance.integers(0, limit + 1))
        ids = [*draft.ids[:n_kept], int(chance.integers(0, V))]  # now and then what was proposed, too
        text += ids
        commit(drafter, ids)
        assert model.tokens == text[: model.length] and model.length < len(text)


@pytest.mark.parametrize("n", range(1, 6))
def test_text_may_end_with_any_part_of_the_draft_itself(n: int) -> None:
    """Whatever was proposed: the last committed token is left to be read, or there were no logits to draft from."""
    model = ScriptedModel(scattered(V))
    drafter = model_drafter(model, [1, 2])
    draft = drafter.propose(5, rng())
    commit(drafter, draft.ids[:n])
    assert model.length == 2 + n - 1
    fresh = model_drafter(ScriptedModel(scattered(V)), [1, 2, *draft.ids[:n]])
    assert drafter.propose(3, rng()).ids == fresh.propose(3, rng()).ids


def test_rounds_without_a_draft_are_caught_up() -> None:
    """A token limit of one, or another drafter in between: the model is behind, never wrong."""
    model = ScriptedModel(scattered(V))
    drafter = model_drafter(model, [1, 2])
    for token in (3, 4, 5):
        commit(drafter, [token])
    assert model.length == 0
    drafter.propose(2, rng())
    assert model.calls[0] == (0, (1, 2, 3, 4, 5))


def test_commit_of_nothing_forgets_the_draft() -> None:
    """A round may end without a token."""
    model = ScriptedModel(scattered(V))
    drafter = model_drafter(model, [1, 2, 3])
    first = drafter.propose(4, rng()).ids
    drafter.commit([])
    assert model.tokens == [1, 2]
    assert drafter.propose(4, rng()).ids == first


@pytest.mark.parametrize(
    ("prompt", "known"),
    [([1, 2, 3, 4, 5], 3), ([1, 2, 3], 2), ([1, 2], 1), ([1], 0), ([5, 1, 2, 3], 0), ([1, 2, 7, 4, 5], 2)],
    ids=str,
)
def test_second_request_uses_what_is_remembered(prompt: list[int], known: int) -> None:
    """D11: the common start is not read again, and nothing beyond it stays; the last token is always read."""
    model = ScriptedModel(scattered(V))
    drafter = model_drafter(model, [1, 2, 3])
    commit(drafter, drafter.propose(4, rng()).ids)
    model.rewind(min(model.length, 3))
    model.calls.clear()
    again = model_drafter(model, prompt)
    assert model.length == known
    ids = again.propose(3, rng()).ids
    assert model.calls[0] == (known, tuple(prompt[known:]))
    assert ids == model_drafter(ScriptedModel(scattered(V)), prompt).propose(3, rng()).ids


# Where a draft model ends


def test_smaller_context_shortens_drafts_and_then_stops_them_with_a_note() -> None:
    """D08: no crash, and it is said; a draft of none is no rejection."""
    model = ScriptedModel(scattered(V), max_context=6)
    drafter = model_drafter(model, [1, 2, 3])
    assert len(drafter.propose(9, rng()).ids) == 4  # the last is not read: 3 + 3 fill the 6
    assert model.length == 6
    commit(drafter, [4, 5, 6])
    assert drafter.note == "" and len(drafter.propose(9, rng()).ids) == 1
    commit(drafter, [7])
    n_calls = len(model.calls)
    for _ in range(3):
        assert drafter.propose(9, rng()).ids == ()
        commit(drafter, [1, 2])
    assert drafter.note == "drafting stopped at 6 tokens, the draft model's context"
    assert len(model.calls) == n_calls
    drafter.start([1, 2])
    assert drafter.note == "" and len(drafter.propose(2, rng()).ids) == 2


def test_prompt_longer_than_the_drafts_context_is_not_read() -> None:
    """D08: from the first round on."""
    model = ScriptedModel(scattered(V), max_context=4)
    drafter = model_drafter(model, [1, 2, 3, 4, 5])
    assert drafter.propose(3, rng()) == Draft(ids=(), laws=())
    assert drafter.note and model.calls == []


@pytest.mark.parametrize("where", ["prompt", "answer"])
def test_id_that_the_draft_lacks_stops_drafting_with_a_note(where: str) -> None:
    """D07: the shared part of the vocabularies is what drafts are made of; the target may write the rest."""
    model = ScriptedModel(scattered(6))
    drafter = model_drafter(model, [1, 7, 2] if where == "prompt" else [1, 2], vocab_size=6)
    if where == "answer":
        draft = drafter.propose(5, rng())
        assert len(draft.ids) == 5 and max(draft.ids) < 6
        assert all(law.ids.max() < 6 for law in draft.laws)
        commit(drafter, [*draft.ids[:1], 7])
    n_calls = len(model.calls)
    for _ in range(2):
        assert drafter.propose(5, rng()).ids == ()
        commit(drafter, [1])
    assert drafter.note == "drafting stopped at id 7, which the draft model does not have"
    assert len(model.calls) == n_calls


def test_processors_are_asked_along_the_draft() -> None:
    """D14: the draft is drawn under the same bans, with the history of each place, and all of it is taken back."""

    class NoRepeat:
        """Never the same id twice in a row."""

        text: list[int]

        def __init__(self) -> None:
            self.text = []

        def mask(self, logits: Floats) -> Floats:
            masked = logits.copy()
            masked[self.text[-1:]] = -np.inf
            return masked

        def accept(self, token: int) -> None:
            self.text.append(token)

        def rollback(self, n: int) -> None:
            del self.text[-n:]

    ban = NoRepeat()
    chooser = Chooser(SamplingParams(), 3, [0], [ban])
    drafter = ModelDrafter(ScriptedModel(lambda _: [3.0, 2.0, 1.0]), chooser)
    drafter.start([0])
    draft = drafter.propose(4, rng())
    assert draft.ids == (0, 1, 0, 1) and ban.text == []
    assert all(isinstance(law, Law) for law in draft.laws)
