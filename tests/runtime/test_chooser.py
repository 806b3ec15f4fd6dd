"""Chooser: penalties by definition and by transformers, rollback, padding, and processors."""

from __future__ import annotations

import doctest
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import ScriptedModel, chain
from transformers import RepetitionPenaltyLogitsProcessor

from semspec.runtime import chooser as module
from semspec.runtime.acceptance import RULES
from semspec.runtime.chooser import Chooser, check_processors
from semspec.runtime.config import SamplingParams
from semspec.runtime.drafting import ModelDrafter, NgramDrafter
from semspec.runtime.errors import ConfigError
from semspec.runtime.loop import Request, decode
from semspec.runtime.records import Floats
from semspec.runtime.stats import Ledger
from semspec.runtime.stopping import StopWatch

V = 12
INF = float("inf")

IDS = st.lists(st.integers(0, V - 1), max_size=12)
PENALTIES = st.fixed_dictionaries(
    {
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.3, 2.0]),
        "presence_penalty": st.sampled_from([-0.5, 0.0, 0.7]),
        "frequency_penalty": st.sampled_from([-0.5, 0.0, 0.7]),
    }
)
ROWS = st.lists(st.one_of(st.just(-INF), st.floats(-20, 20, width=32)), min_size=V, max_size=V)


def row(*values: float) -> Floats:
    return np.array(values, np.float32)


def choose(prompt: Sequence[int], answer: Sequence[int], vocab_size: int = V, **params: Any) -> Chooser:
    chooser = Chooser(SamplingParams(**params), vocab_size, prompt)
    for token in answer:
        chooser.accept(token)
    return chooser


def brute_force(
    logits: Sequence[float], prompt: Sequence[int], answer: Sequence[int], penalties: dict[str, float]
) -> list[float]:
    """The definitions, id by id: repetition over the whole text, presence and frequency over the answer."""
    found = []
    for token, value in enumerate(logits):
        if token in prompt or token in answer:
            scale = penalties["repetition_penalty"]
            value = value / scale if value > 0 else value * scale
        if token in answer:
            value -= penalties["presence_penalty"]
        found.append(value - answer.count(token) * penalties["frequency_penalty"])
    return found


def test_docstring_examples_hold() -> None:
    """An example that drifts from the code misleads; none may fail."""
    assert doctest.testmod(module).failed == 0


# Penalties


@settings(deadline=None, derandomize=True, max_examples=300)
@given(ROWS, IDS, IDS, PENALTIES)
def test_penalties_equal_their_definitions(
    logits: list[float], prompt: list[int], answer: list[int], penalties: dict[str, float]
) -> None:
    """D14: each once per place, the prompt's ids for repetition only, all three together too."""
    found = choose(prompt, answer, **penalties).logits(row(*logits))
    np.testing.assert_allclose(found, brute_force(logits, prompt, answer, penalties), rtol=1e-5, atol=1e-5)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(ROWS, IDS, IDS, st.floats(0.1, 4))
def test_repetition_penalty_equals_transformers(
    logits: list[float], prompt: list[int], answer: list[int], penalty: float
) -> None:
    """Shipped settings (Qwen2.5: 1.1) were tuned with transformers' meaning; the same numbers, to a rounding."""
    text = torch.tensor([[*prompt, *answer]], dtype=torch.long)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(text, torch.tensor([logits]))[0].numpy()
    found = choose(prompt, answer, repetition_penalty=penalty).logits(row(*logits))
    np.testing.assert_allclose(found, theirs, rtol=1e-6)


def test_frequency_counts_and_presence_does_not() -> None:
    """OpenAI's definition: logit - count * frequency - (count > 0) * presence, over the answer."""
    found = choose([0, 0, 0], [1, 1, 1, 2], presence_penalty=0.5, frequency_penalty=0.25).logits(
        np.zeros(V, np.float32)
    )
    assert found[:4].tolist() == [0, -1.25, -0.75, 0]


def test_prompt_counts_once_for_repetition() -> None:
    """D14: an id that stands many times in the prompt, and in the answer too, is penalised once."""
    found = choose([3, 3, 3, 3], [3, 3], repetition_penalty=2.0).logits(row(*[8.0] * V))
    assert found[3] == 4 and found[4] == 8


def test_penalties_change_the_law() -> None:
    """The greedy id moves on when it was written; without penalties it stays."""
    logits = row(3, 2.5, *[0] * (V - 2))
    assert choose([], [0]).law(logits).ids.tolist() == [0]
    assert choose([], [0], repetition_penalty=1.5).law(logits).ids.tolist() == [1]
    assert choose([0], [], presence_penalty=1.0).law(logits).ids.tolist() == [0]


@settings(deadline=None, derandomize=True, max_examples=200)
@given(ROWS, IDS, IDS, IDS, PENALTIES)
def test_rollback_restores_exactly(
    logits: list[float], prompt: list[int], answer: list[int], draft: list[int], penalties: dict[str, float]
) -> None:
    """A rejected draft leaves no trace, to the bit; part of it may be taken back first."""
    chooser = choose(prompt, answer, **penalties)
    before = chooser.logits(row(*logits))
    for token in draft:
        chooser.accept(token)
    half = len(draft) // 2
    chooser.rollback(half)
    kept = choose(prompt, [*answer, *draft[: len(draft) - half]], **penalties)
    np.testing.assert_array_equal(chooser.logits(row(*logits)), kept.logits(row(*logits)))
    chooser.rollback(len(draft) - half)
    np.testing.assert_array_equal(chooser.logits(row(*logits)), before)


# Vocabularies


def test_ids_beyond_the_tokenizer_are_never_drawn() -> None:
    """D07: padded rows of an embedding carry logits that mean nothing, however large."""
    law = choose([], [], vocab_size=3, temperature=1.0).law(row(0, 0, 0, 50, 60))
    assert law.ids.tolist() == [0, 1, 2]
    assert choose([], [], vocab_size=3).law(row(0, 1, 0, 50)).ids.tolist() == [1]


def test_draft_with_fewer_rows_gives_the_missing_ids_no_chance() -> None:
    """D07: p and q are over the same ids; penalties of ids that the draft lacks change nothing there."""
    chooser = choose(
        [4], [3, 4], vocab_size=5, temperature=1.0, presence_penalty=-50.0, repetition_penalty=1.2
    )
    assert chooser.law(row(0, 0, 0)).ids.tolist() == [0, 1, 2]
    assert chooser.logits(row(0, 0, 0)).tolist()[3:] == [-INF, -INF]
    assert chooser.law(row(0, 0, 0, 0, 0)).probs[3:].sum() > 0.999  # where they are, the penalty lifts them


@pytest.mark.parametrize("n_rows", [V - 2, V, V + 5])
@pytest.mark.parametrize(
    "params", [{}, {"repetition_penalty": 1.5, "presence_penalty": 1.0, "temperature": 0.7}]
)
def test_logits_are_left_as_they_were(n_rows: int, params: dict[str, Any]) -> None:
    """They are the engine's memory: log-probabilities and the acceptance rule read them again."""
    logits = np.random.default_rng(1).normal(size=n_rows).astype(np.float32)
    before = logits.copy()
    chooser = choose([0, 1], [1, 2], **params)
    chooser.law(logits)
    chooser.logits(logits)
    assert logits.tolist() == before.tolist() and logits.flags.writeable


def test_prompt_ids_beyond_the_vocabulary_are_no_index() -> None:
    """A chooser over a shared part may be given a prompt with ids outside of it."""
    assert choose([1, 99], [], repetition_penalty=2.0).logits(row(*[4.0] * V)).tolist()[:3] == [4, 2, 4]


# Processors


class Recorder:
    """Bans one id, and writes down how it was called."""

    def __init__(self, name: str, calls: list[Any], banned: int = 0) -> None:
        self.name, self.calls, self.banned = name, calls, banned

    def mask(self, logits: Floats) -> Floats:
        self.calls.append((self.name, "mask", logits.tolist()))
        masked = logits.copy()
        masked[self.banned] = -np.inf
        return masked

    def accept(self, token: int) -> None:
        self.calls.append((self.name, "accept", token))

    def rollback(self, n: int) -> None:
        self.calls.append((self.name, "rollback", n))


def with_processors(*processors: Any, vocab_size: int = 3, **params: Any) -> Chooser:
    return Chooser(SamplingParams(**params), vocab_size, (), processors)


def test_processors_are_called_in_order_after_penalties_and_before_filters() -> None:
    """The second sees what the first made of the penalised logits; top-k sees what is left."""
    calls: list[Any] = []
    chooser = with_processors(
        Recorder("a", calls), Recorder("b", calls, banned=1), temperature=1.0, top_k=1, presence_penalty=1.0
    )
    chooser.accept(2)
    assert chooser.law(row(9, 8, 7, 99)).ids.tolist() == [2]
    chooser.accept(1)
    chooser.rollback(2)
    assert calls == [
        ("a", "accept", 2),
        ("b", "accept", 2),
        ("a", "mask", [9, 8, 6]),
        ("b", "mask", [-INF, 8, 6]),
        ("a", "accept", 1),
        ("b", "accept", 1),
        ("a", "rollback", 2),
        ("b", "rollback", 2),
    ]


def test_nothing_to_take_back_is_not_asked_for() -> None:
    """Plain decoding works with processors that cannot roll back."""
    calls: list[Any] = []
    with_processors(Recorder("a", calls)).rollback(0)
    assert calls == []


class Masks:
    """Any function as a processor."""

    def __init__(self, function: Callable[[Floats], Floats]) -> None:
        self.mask = function

    def accept(self, token: int) -> None: ...

    def rollback(self, n: int) -> None: ...


def test_processor_that_writes_into_its_argument_is_stopped() -> None:
    """It would change the engine's memory, which is read again: an error at once, not odd numbers later."""

    def ban(logits: Floats) -> Floats:
        logits[0] = -np.inf
        return logits

    logits = row(3, 2, 1)
    with pytest.raises(ValueError, match="read-only"):
        with_processors(Masks(ban)).law(logits)
    assert logits.tolist() == [3, 2, 1]


def test_processor_may_return_what_it_was_given() -> None:
    """The usual answer of a grammar that forbids nothing, also between penalties and filters."""
    chooser = with_processors(
        Masks(lambda logits: logits), Masks(lambda logits: logits), temperature=1, top_p=0.5
    )
    assert chooser.law(row(3, 2, 1)).ids.tolist() == [0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda logits: logits - INF, "Masks.mask forbids every token"),
        (lambda logits: logits[:2], r"Masks.mask must return 3 logits, as given; got shape \(2,\)"),
        (lambda logits: None, r"Masks.mask must return 3 logits, as given; got shape \(\)"),
    ],
)
def test_mask_that_nothing_can_be_drawn_from_is_an_error_of_the_processor(
    function: Callable[[Floats], Floats], message: str
) -> None:
    """Blaming the engine's precision would send the user the wrong way."""
    with pytest.raises(ConfigError, match=message) as caught:
        with_processors(Masks(function)).law(row(1, 2, 3))
    assert "\n" not in str(caught.value)


def lacking(*methods: str) -> object:
    """A processor without some methods."""
    calls = {
        name: lambda self, value: value for name in ("mask", "accept", "rollback") if name not in methods
    }
    return type("Grammar", (), calls)()


@pytest.mark.parametrize("speculative", [True, False])
@pytest.mark.parametrize("method", ["mask", "accept", "rollback"])
def test_processor_without_a_method_is_refused_where_it_is_needed(method: str, speculative: bool) -> None:
    """D14: refused by name, never dropped; plain decoding takes nothing back and needs no rollback."""
    processors = [lacking(), lacking(method)]
    if method == "rollback" and not speculative:
        check_processors(processors, speculative=False)
        return
    with pytest.raises(ConfigError, match=f"^processor Grammar has no method {method}: ") as caught:
        check_processors(processors, speculative=speculative)
    message = str(caught.value)
    assert "\n" not in message
    assert bool(re.search("mode 'autoregressive'", message)) == (method == "rollback")


def test_processor_whose_rollback_is_no_method_is_refused() -> None:
    """None stands for "cannot" in many interfaces."""
    processor = lacking()
    processor.rollback = None  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="no method rollback"):
        check_processors([processor], speculative=True)


class Silent:
    """Text of ids that nobody reads."""

    def push(self, ids: Sequence[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""


class Ended:
    """A grammar of one sentence: after its end there is nothing to ask it for."""

    def __init__(self, end: int) -> None:
        self.end, self.text = end, list[int]()

    def mask(self, logits: Floats) -> Floats:
        assert self.end not in self.text
        return logits

    def accept(self, token: int) -> None:
        assert self.end not in self.text
        self.text.append(token)

    def rollback(self, n: int) -> None:
        del self.text[-n:]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("draft", ["model", "ngram"])
def test_grammar_that_has_ended_is_not_asked_again(draft: str, rule: str) -> None:
    """D01: drafts go up to an end token and beyond; grammars raise there, and plain decoding never asks them."""
    params, grammar, prompt = SamplingParams(), Ended(5), [3, 4, 5, 6, 7, 3]
    target, small = (ScriptedModel(chain(np.roll(5 * np.eye(8), 1, axis=1))) for _ in range(2))
    chooser = Chooser(params, 8, prompt, [grammar])
    request = Request(
        prompt=prompt,
        chooser=chooser,
        watch=StopWatch(params, [5], Silent()),
        ledger=Ledger(),
        rng=np.random.default_rng(0),
        drafter=ModelDrafter(small, chooser, stop_ids={5}) if draft == "model" else NgramDrafter(),
        num_draft_tokens=4,
        rule=RULES[rule],
    )
    assert [(step.ids, step.finish_reason) for step in decode(target, request)] == [((4, 5), "stop")]
    assert grammar.text == [4, 5]
    assert target.calls[-1] == (5, (3, 4, 5))  # what an n-gram proposes behind the end is not even read
    assert request.ledger.summary().num_draft_tokens == 2
