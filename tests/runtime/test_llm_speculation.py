"""LLM with drafts: the real SmolLM2 writes what it writes without; a tiny pair for what can be asked of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_pairs

from semspec import LLM, BundleError, Completion, ConfigError, SamplingParams, SpecConfig
from semspec.runtime.records import Floats

PLAIN = SpecConfig(mode="autoregressive")
NGRAM = SpecConfig(draft="ngram")
MODEL = SpecConfig(draft="model")
PROMPTS = (
    "Count from 1 to 8, separated by commas.",
    "What is the capital of France, and on which river does it lie?",
    "Write a short poem about the sea.",
    "List three uses of a paper clip.",
    "Explain in two sentences why the sky is blue.",
    "Translate 'good morning' into French, Spanish and German.",
    "Write a Python function that returns the sum of a list of numbers.",
    "Repeat the sentence 'the quick brown fox jumps over the lazy dog' four times.",
    "Give me a recipe for pancakes.",
    "What is 12 plus 30? Think step by step.",
    "Name the planets of the solar system in order.",
    "Tell a story that begins with: once upon a time there was a clock.",
    "What are the differences between cats and dogs?",
    "Summarize: water boils at a lower temperature on a mountain because the pressure of the air is lower there.",
    "Write the numbers from one to twenty in words.",
    "Who wrote Romeo and Juliet, and when?",
    "Make a table of three fruits with their colours.",
    "How do I tie a tie?",
    "Write a polite letter to a landlord about a broken window.",
    "日本語で自己紹介をしてください。",
)


@pytest.fixture(scope="module", params=["int8 with int4", "int4 with int8"])
def smollm2(
    request: pytest.FixtureRequest, smollm2_pair: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LLM]:
    """The real model, and the same at the other precision as its draft."""
    bundle = smollm2_pair
    if request.param == "int4 with int8":
        folder = tmp_path_factory.mktemp("swapped") / "bundle"
        bundle = tiny_pairs.rearrange(smollm2_pair, folder, target="draft", draft="target")
    with LLM(bundle, threads=2) as llm:
        yield llm


@pytest.fixture(scope="module")
def smollm2_itself(smollm2_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The real model with itself as its draft: everything is kept, so stops fall inside of blocks."""
    folder = tmp_path_factory.mktemp("itself") / "bundle"
    with LLM(tiny_pairs.rearrange(smollm2_bundle, folder, target="target", draft="target")) as llm:
        yield llm


@pytest.fixture(scope="module")
def tiny(tiny_pair: Path) -> Iterator[LLM]:
    with LLM(tiny_pair, threads=1) as llm:
        yield llm


def assert_same(answer: Completion, plain: Completion) -> None:
    """All but the statistics."""
    assert answer.token_ids == plain.token_ids
    assert (answer.text, answer.finish_reason) == (plain.text, plain.finish_reason)
    assert answer.logprobs == plain.logprobs
    assert answer.stats.generated_tokens == len(answer.token_ids)


# The real model


def check_prompts(llm: LLM, prompts: Sequence[str], max_tokens: int) -> None:
    """Greedy answers with either drafter against plain ones, log-probabilities to the bit."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=True)
    for number, prompt in enumerate(prompts):
        messages = [{"role": "user", "content": prompt}]
        plain = llm.chat(messages, params, spec=PLAIN)
        assert len(plain.token_ids) == max_tokens
        for draft, n in (("ngram", 1 + number % 8), ("model", 1 + (number + 3) % 8)):
            spec = SpecConfig(draft=draft, num_draft_tokens=n, block=number % 2 == 1)
            answer = llm.chat(messages, params, spec=spec)
            assert_same(answer, plain)
            assert answer.stats.num_draft_tokens


def test_smollm2_writes_the_same_with_drafts(smollm2: LLM) -> None:
    """Exact means exact, on a real model in int4 and int8: ids and log-probabilities, no exception for ties."""
    check_prompts(smollm2, PROMPTS[:4], 64)


@pytest.mark.slow
def test_smollm2_writes_the_same_with_drafts_at_length(smollm2: LLM) -> None:
    """20 prompts of 128 tokens, without an end: where it repeats itself, ties are near."""
    check_prompts(smollm2, PROMPTS, 128)


@pytest.mark.parametrize("stop", [" 4", "4. 4", "3\n4"])
def test_smollm2_stops_at_a_string_in_the_middle_of_a_block(smollm2_itself: LLM, stop: str) -> None:
    """D02: text, ids and reason are those of plain decoding, wherever in a block the string is completed."""
    messages = [{"role": "user", "content": PROMPTS[0]}]
    params = SamplingParams(max_tokens=32, stop=(stop,))
    plain = smollm2_itself.chat(messages, params, spec=PLAIN)
    assert plain.finish_reason == "stop" and plain.text.startswith("1. 1\n2. 2\n3.")
    assert stop not in plain.text
    for n in range(1, 9):
        answer = smollm2_itself.chat(messages, params, spec=SpecConfig(num_draft_tokens=n))
        assert_same(answer, plain)
        assert answer.stats.draft_acceptance_rate == 1
        assert smollm2_itself.target.tokens[-len(answer.token_ids) + 1 :] == list(answer.token_ids[:-1])


# What can be asked of a pair


def test_default_is_lossless_with_what_the_bundle_has(tiny: LLM, tiny_bundle: Path) -> None:
    """A draft model where there is one, n-grams where there is none; nothing has to be said."""
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    plain = tiny.generate("hello", params, spec=PLAIN)
    answer = tiny.generate("hello", params)
    assert_same(answer, plain)
    assert plain.stats.num_drafts == 0
    assert answer.stats.draft_acceptance_rate is not None and answer.stats.draft_acceptance_rate > 0.4
    with LLM(tiny_bundle, threads=1) as alone:
        assert alone.draft is None
        repeated = alone.generate("abcabcabc", params)
        assert_same(repeated, alone.generate("abcabcabc", params, spec=PLAIN))
        assert repeated.stats.num_drafts


def test_every_way_to_draft_gives_the_same_answer(tiny: LLM) -> None:
    """Greedy: drafter, length and rule change the speed alone."""
    params = SamplingParams(max_tokens=100, ignore_eos=True, logprobs=True)
    plain = tiny.generate("hello", params, spec=PLAIN)
    for draft, n, block in product(("model", "ngram"), (1, 2, 5, 8), (False, True)):
        spec = SpecConfig(draft=draft, num_draft_tokens=n, block=block)
        assert_same(tiny.generate("hello", params, spec=spec), plain)


@pytest.mark.parametrize("spec", [MODEL, NGRAM, SpecConfig(block=True, num_draft_tokens=8)], ids=str)
def test_stream_is_generate_in_pieces(tiny: LLM, spec: SpecConfig) -> None:
    """D18: pieces of several tokens joined are the answer; each is valid text, and says how much was drafted."""
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=100, ignore_eos=True)
    deltas = list(tiny.stream("hello", params, spec=spec))
    answer = tiny.generate("hello", params, spec=spec)
    assert "".join(delta.text for delta in deltas) == answer.text == tiny.tokenizer.decode(answer.token_ids)
    assert tuple(token for delta in deltas for token in delta.token_ids) == answer.token_ids
    assert sum(delta.n_from_draft for delta in deltas) == answer.stats.num_accepted_draft_tokens
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    for delta in deltas:
        delta.text.encode("utf-8")


@pytest.mark.parametrize("spec", [MODEL, NGRAM, SpecConfig(block=True)], ids=str)
def test_same_seed_gives_the_same_answer_and_another_seed_another(tiny: LLM, spec: SpecConfig) -> None:
    """D13: drafts draw from the same generator. 60 tokens of a hot law: seeds agree with less than 2^-60."""

    def answer(seed: int) -> tuple[int, ...]:
        params = SamplingParams(temperature=5.0, seed=seed, max_tokens=60, ignore_eos=True)
        return tiny.generate("hello", params, spec=spec).token_ids

    first = answer(1)
    assert answer(1) == first
    assert answer(2) != first


def test_second_turn_goes_on_from_what_is_known(tiny: LLM, tiny_pair: Path) -> None:
    """D11: a conversation on one LLM, its first turn cut inside of a block, against a fresh LLM on all of it."""
    params = SamplingParams(max_tokens=7, ignore_eos=True, logprobs=True)
    first = tiny.generate("hello", params)
    prompt = [*tiny.tokenizer.encode("hello"), *first.token_ids, 10, 11, 12, 13, 14]
    second = tiny.generate(prompt, params)
    with LLM(tiny_pair, threads=1) as fresh:
        assert_same(second, fresh.generate(prompt, params, spec=PLAIN))


def test_context_is_filled_as_without_drafts(tiny: LLM) -> None:
    """Blocks are shortened near the end of the context, and the reason is the same."""
    params = SamplingParams(max_tokens=500, ignore_eos=True)
    for n_prompt in (1, 2, 120, 126, 127, 128):
        plain = tiny.generate("x" * n_prompt, params, spec=PLAIN)
        assert plain.finish_reason == "length" and len(plain.token_ids) == 129 - n_prompt
        for spec in (MODEL, NGRAM):
            assert_same(tiny.generate("x" * n_prompt, params, spec=spec), plain)


class NoRepeat:
    """Forbids the token that was just written."""

    def __init__(self) -> None:
        self.text: list[int] = []

    def mask(self, logits: Floats) -> Floats:
        changed = logits.copy()
        changed[self.text[-1:]] = -np.inf
        return changed

    def accept(self, token: int) -> None:
        self.text.append(token)


class NoRepeatWithRollback(NoRepeat):
    """The same, and it can be told that tokens were taken back."""

    def rollback(self, n: int) -> None:
        del self.text[-n:]


def test_processor_follows_the_answer(tiny: LLM) -> None:
    """D14: told of every token once, drafted ones taken back, in all modes."""
    params = SamplingParams(max_tokens=40, ignore_eos=True, repetition_penalty=1.3)
    plain = tiny.generate("hello", params, spec=PLAIN, processors=[NoRepeat()])
    for spec in (MODEL, NGRAM):
        processor = NoRepeatWithRollback()
        assert_same(tiny.generate("hello", params, spec=spec, processors=[processor]), plain)
        assert processor.text == list(plain.token_ids)


def test_processor_that_cannot_go_back_is_refused_where_it_would_have_to(tiny: LLM) -> None:
    """D14: by name, before anything is computed; plain decoding takes it."""
    tiny.generate("hello", SamplingParams(max_tokens=1), spec=PLAIN, processors=[NoRepeat()])
    before = list(tiny.target.tokens)
    with pytest.raises(ConfigError, match=r"NoRepeat has no method rollback: .*autoregressive"):
        tiny.generate("other", processors=[NoRepeat()])
    assert tiny.target.tokens == before


@pytest.mark.parametrize("prompts", [["hello", "other"], ["hello"], ("a", "b")])
def test_several_prompts_are_refused(tiny: LLM, prompts: Any) -> None:
    """D12: one text at a time; never an answer to the first of them."""
    with pytest.raises(ConfigError, match="one prompt at a time"):
        tiny.generate(prompts)


def test_draft_model_that_is_not_there_is_an_error(tiny_bundle: Path, tiny_pair: Path) -> None:
    """Asked for by name it is never replaced by n-grams, whether the bundle lacks it or it was not opened."""
    with pytest.raises(BundleError, match="has no draft"):
        LLM(tiny_bundle, spec=MODEL)
    with LLM(tiny_pair, spec=NGRAM, threads=1) as llm:
        assert llm.draft is None
        with pytest.raises(ConfigError, match="draft model is not open"):
            llm.generate("hello", spec=MODEL)


def test_closing_closes_both(tiny_pair: Path) -> None:
    """Both engines hold memory."""
    with LLM(tiny_pair, threads=1) as llm:
        assert llm.draft is not None
    for model in (llm.target, llm.draft):
        with pytest.raises(Exception, match="closed"):
            model.forward([1])
