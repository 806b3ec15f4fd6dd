"""LLM on bundles: the real SmolLM2 for what it says, a tiny random model for everything else."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from semspec import LLM, BackendError, BundleError, ConfigError, SamplingParams, SpecConfig
from semspec.runtime.bundle import MANIFEST, sha256_of

PLAIN = SpecConfig(mode="autoregressive")  # where one token a step is what a test looks at
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
PARIS = (504, 3575, 282, 4649, 314, 7042, 30, 2)  # "The capital of France is Paris." and the end token
ASTRONAUT = "👩‍🚀"  # woman, joiner, rocket: eight tokens, none of them a character
ASTRONAUT_IDS = [10813, 235, 119, 321, 231, 10813, 244, 218]


@pytest.fixture(scope="module")
def smollm2(smollm2_bundle: Path) -> Iterator[LLM]:
    with LLM(smollm2_bundle, threads=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def tiny(tiny_bundle: Path) -> Iterator[LLM]:
    with LLM(tiny_bundle, threads=1) as llm:
        yield llm


def changed_generation(bundle: Path, folder: Path, generation: dict[str, Any]) -> Path:
    """A copy of a bundle with another generation_config.json, its manifest mended."""
    copy = shutil.copytree(bundle, folder / "changed")
    file = copy / "tokenizer" / "generation_config.json"
    file.write_text(json.dumps(generation), encoding="utf-8")
    manifest = json.loads((copy / MANIFEST).read_text(encoding="utf-8"))
    manifest["files"]["tokenizer/generation_config.json"] = {
        "size": file.stat().st_size,
        "sha256": sha256_of(file),
    }
    (copy / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    return copy


# The real model


def test_smollm2_answers_with_exactly_these_ids(smollm2: LLM) -> None:
    """D21: template, weights and end token at once; a model that talks on into a next turn has more ids."""
    answer = smollm2.chat(FRANCE, SamplingParams())
    assert answer.token_ids == PARIS
    assert answer.text == "The capital of France is Paris."
    assert answer.finish_reason == "stop"
    assert (answer.stats.prompt_tokens, answer.stats.generated_tokens) == (37, 8)


def test_emoji_is_continued_in_whole_characters(smollm2: LLM) -> None:
    """D17, end to end: the model repeats an emoji whose eight tokens are all parts of characters."""
    for spec in (PLAIN, None):
        deltas = list(smollm2.stream(5 * ASTRONAUT, SamplingParams(max_tokens=16), spec=spec))
        assert [token for delta in deltas for token in delta.token_ids] == 2 * ASTRONAUT_IDS
        assert "".join(delta.text for delta in deltas) == 2 * ASTRONAUT
        if spec is PLAIN:
            assert {delta.text for delta in deltas} == {"", "👩", "\u200d", "🚀"}
        else:  # n-grams: it repeats the prompt, so drafts are kept, and cut characters anywhere
            assert deltas[-1].stats.num_accepted_draft_tokens >= 8
            assert {character for delta in deltas for character in delta.text} == {"👩", "\u200d", "🚀"}


def test_character_that_the_prompt_leaves_unfinished_belongs_to_the_answer(smollm2: LLM) -> None:
    """D17: a prompt given as ids may end inside a character."""
    prompt = (5 * ASTRONAUT_IDS)[:-2]
    answer = smollm2.generate(prompt, SamplingParams(max_tokens=2))
    assert answer.token_ids == (244, 218)
    assert answer.text == "🚀"


def test_answer_cut_inside_a_character_ends_with_one_replacement(smollm2: LLM) -> None:
    """D17: what is held at the end comes out once, and only at the end."""
    deltas = list(smollm2.stream(5 * ASTRONAUT, SamplingParams(max_tokens=2), spec=PLAIN))
    assert [delta.text for delta in deltas] == ["", "\ufffd"]
    assert deltas[-1].finish_reason == "length"


# Streams


def test_stream_is_generate_in_pieces(tiny: LLM) -> None:
    """Random bytes, most of them no text: the pieces joined are the answer, and each is valid by itself."""
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=100, ignore_eos=True)
    deltas = list(tiny.stream("hello", params, spec=PLAIN))
    answer = tiny.generate("hello", params, spec=PLAIN)
    assert "".join(delta.text for delta in deltas) == answer.text
    assert tuple(token for delta in deltas for token in delta.token_ids) == answer.token_ids
    assert answer.text == tiny.tokenizer.decode(answer.token_ids)
    for delta in deltas:
        delta.text.encode("utf-8")
    assert [delta.finish_reason for delta in deltas] == [None] * 99 + ["length"]


def test_stats_grow_with_the_stream(tiny: LLM) -> None:
    """A progress display reads them as they come; earlier ones do not change afterwards."""
    deltas = list(tiny.stream("hello", SamplingParams(max_tokens=5, ignore_eos=True), spec=PLAIN))
    assert [delta.stats.generated_tokens for delta in deltas] == [1, 2, 3, 4, 5]
    assert {delta.stats.prompt_tokens for delta in deltas} == {5}


def test_ids_are_generated_from_as_text_is(tiny: LLM) -> None:
    """Callers with their own tokenization get the same answer; numpy's integers are integers."""
    params = SamplingParams(max_tokens=10)
    expected = tiny.generate("hello", params)
    ids = tiny.tokenizer.encode("hello")
    for prompt in (ids, tuple(ids), np.array(ids)):
        assert tiny.generate(prompt, params).token_ids == expected.token_ids


def test_chat_is_the_template_and_then_generate(tiny: LLM) -> None:
    """Nothing else happens to a conversation."""
    messages = [{"role": "user", "content": "hi"}]
    params = SamplingParams(max_tokens=10)
    assert tiny.chat(messages, params).token_ids == tiny.generate("<user>hi</s><assistant>", params).token_ids


# Sampling


def test_same_seed_gives_the_same_answer_and_another_seed_another(tiny: LLM) -> None:
    """60 tokens of a hot law over bytes: agreement of two seeds by chance is below 2^-60."""

    def answer(seed: int | None) -> tuple[int, ...]:
        params = SamplingParams(temperature=5.0, seed=seed, max_tokens=60, ignore_eos=True)
        return tiny.generate("hello", params).token_ids

    first = answer(1)
    assert answer(1) == first
    assert answer(2) != first
    assert answer(None) != answer(None)


def test_defaults_are_what_the_model_ships_with(tiny: LLM) -> None:
    """generation_config says 0.7 and 0.9: what the model's makers tested, used where nothing else is said."""
    assert tiny.default_sampling == SamplingParams(temperature=0.7, top_p=0.9)
    assert not np.array_equal(tiny.generate("hello").token_ids, tiny.generate("hello").token_ids)


def test_end_tokens_are_all_those_of_the_bundle(tiny: LLM, tiny_bundle: Path, tmp_path: Path) -> None:
    """D21: several end ids, any of which ends the answer: here one is made of what the model writes third."""
    written = tiny.generate("hello", SamplingParams(max_tokens=8, ignore_eos=True)).token_ids
    ends = [258, written[2]]
    with LLM(changed_generation(tiny_bundle, tmp_path, {"eos_token_id": ends}), threads=1) as llm:
        answer = llm.generate("hello", SamplingParams(max_tokens=8))
    assert answer.token_ids == written[: written.index(written[2]) + 1]
    assert answer.finish_reason == "stop"


def test_setting_that_is_not_applied_is_warned_of_once(
    tiny_bundle: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Some ship a ban on repeated n-grams; a line for every request would drown it."""
    generation = {"eos_token_id": [258], "no_repeat_ngram_size": 3}
    with (
        caplog.at_level(logging.WARNING),
        LLM(changed_generation(tiny_bundle, tmp_path, generation), threads=1) as llm,
    ):
        llm.generate("hello", SamplingParams(max_tokens=2))
        llm.generate("hello")
    assert caplog.text.count("no_repeat_ngram_size=3") == 1


def test_sampling_settings_are_one_object_and_a_stray_keyword_is_an_error(tiny: LLM) -> None:
    """`generate("x", temperature=1)` must not be taken for a template variable or dropped."""
    with pytest.raises(TypeError, match="temperature"):
        tiny.generate("hello", temperature=1)  # type: ignore[call-arg]


def test_penalty_that_the_model_ships_with_is_applied(tiny_bundle: Path, tmp_path: Path) -> None:
    """Qwen2.5 ships repetition_penalty 1.1: what nobody asked for at a call is still part of the answer's law."""
    generation = {"eos_token_id": [], "repetition_penalty": 1.8}
    with LLM(changed_generation(tiny_bundle, tmp_path, generation), threads=1) as llm:
        assert llm.default_sampling == SamplingParams(repetition_penalty=1.8)
        asked = llm.generate("hello", SamplingParams(repetition_penalty=1.8))
        assert llm.generate("hello").token_ids == asked.token_ids
        assert llm.generate("hello", SamplingParams()).token_ids != asked.token_ids


# States


def test_states_are_those_that_were_exported(tiny: LLM) -> None:
    """Index -> (S, E); all of them unless some are asked for, and theirs to keep."""
    states = tiny.states("hello")
    assert states.keys() == {0, 3}
    assert all(state.shape == (5, 48) for state in states.values())
    first = states[3].copy()
    assert_array_equal(tiny.states(tiny.tokenizer.encode("hello"), layers=[3])[3], first)
    tiny.states("other")
    assert_array_equal(states[3], first)


def test_states_that_are_not_there_are_refused(tiny: LLM, smollm2: LLM) -> None:
    """With the option that would bring them."""
    with pytest.raises(ConfigError, match=r"\[1\].*--hidden-layers"):
        tiny.states("hello", layers=[0, 1])
    with pytest.raises(ConfigError, match="--hidden-layers"):
        smollm2.states("hello")


# Prompts


@pytest.mark.parametrize("prompt", ["", []])
def test_empty_prompt_is_refused(tiny: LLM, prompt: Any) -> None:
    """There is nothing to continue; a model would need at least a BOS."""
    for ask in (tiny.generate, tiny.states):
        with pytest.raises(ConfigError, match="0 tokens"):
            ask(prompt)


def test_prompt_longer_than_the_context_is_refused_with_both_numbers(tiny: LLM) -> None:
    """Cutting it in silence would answer another question."""
    for ask in (tiny.generate, tiny.states):
        with pytest.raises(ConfigError, match=r"129 tokens.* 128.*--max-context"):
            ask("x" * 129)
    answer = tiny.generate("x" * 128)
    assert len(answer.token_ids) == 1


@pytest.mark.parametrize("prompt", [[5, 260], [-1], [10**9]])
def test_id_that_the_tokenizer_lacks_is_refused(tiny: LLM, prompt: list[int]) -> None:
    """-1 would be read from the end of the table, 260 is a row of padding."""
    for ask in (tiny.generate, tiny.states):
        with pytest.raises(ConfigError, match=r"token id must be in 0\.\.259"):
            ask(prompt)


def test_prompt_of_another_type_is_refused(tiny: LLM) -> None:
    """Bytes are integers to Python: they would be taken for ids."""
    with pytest.raises(ConfigError, match="got bytes"):
        tiny.generate(b"hello")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        tiny.generate([1.5])  # type: ignore[list-item]


# One request at a time


def test_abandoned_stream_leaves_a_usable_llm(tiny: LLM) -> None:
    """A reader who has seen enough just stops."""
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    whole = tiny.generate("hello", params)
    list(islice(tiny.stream("other", params), 3))
    assert tiny.generate("hello", params).token_ids == whole.token_ids


@pytest.mark.parametrize("other", ["generate", "states"])
def test_stream_that_another_request_cut_short_says_so(tiny: LLM, other: str) -> None:
    """Both share one memory: going on would continue the other text without a word."""
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    stream = tiny.stream("hello", params)
    next(stream)
    tiny.generate("other", params) if other == "generate" else tiny.states("other")
    with pytest.raises(ConfigError, match="another request"):
        next(stream)


def test_two_llms_on_one_bundle_do_not_disturb_each_other(tiny_bundle: Path, tiny: LLM) -> None:
    """The way to serve two requests at once; the files are only read."""
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    expected = [tiny.generate(prompt, params).token_ids for prompt in ("hello", "other")]
    with LLM(tiny_bundle, threads=1) as one, LLM(tiny_bundle, threads=1) as two:
        pairs = zip(one.stream("hello", params), two.stream("other", params), strict=True)
        found = [(a.token_ids[0], b.token_ids[0]) for a, b in pairs]
    assert [tuple(ids) for ids in zip(*found, strict=True)] == expected


# Opening and closing


def test_closed_llm_says_so(tiny_bundle: Path) -> None:
    """Leaving the context closes, closing again is harmless, using it is one clear line."""
    with LLM(str(tiny_bundle), threads=1) as llm:
        llm.generate("hello", SamplingParams(max_tokens=1))
    llm.close()
    with pytest.raises(BackendError, match="closed"):
        llm.generate("hello")


def test_backend_whose_graph_was_not_exported_names_the_option(tiny_bundle: Path) -> None:
    """D46: never another graph or device instead."""
    with pytest.raises(BundleError, match=r"no 'cuda' graph of its target; .*--graphs cpu,cuda"):
        LLM(tiny_bundle, backend="cuda")


def test_unknown_backend_lists_the_known(tiny_bundle: Path) -> None:
    """Before the bundle is looked for: no export would help."""
    for bundle in (tiny_bundle, tiny_bundle / "missing"):
        with pytest.raises(ConfigError, match="one of auto, cpu, cuda, tensorrt, tensorrt-rtx, got 'gpu'"):
            LLM(bundle, backend="gpu")


def test_graph_of_another_model_is_refused_when_opened(tiny_bundle: Path, tmp_path: Path) -> None:
    """A manifest that promises other sizes than the graph has."""
    copy = shutil.copytree(tiny_bundle, tmp_path / "copy")
    manifest = json.loads((copy / MANIFEST).read_text(encoding="utf-8"))
    manifest["models"]["target"]["graphs"]["cpu"]["max_context"] = 64
    (copy / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(BundleError, match=r"does not follow the graph contract: .*kv\.0\.key"):
        LLM(copy, threads=1)


def test_changed_file_is_found_on_request(tiny_bundle: Path, tmp_path: Path) -> None:
    """Hashes cost seconds a gigabyte, so they are checked when asked for; the size tells nothing here."""
    copy = shutil.copytree(tiny_bundle, tmp_path / "copy")
    weights = copy / "target" / "onnx" / "weights.data"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    LLM(copy, threads=1).close()
    with pytest.raises(BundleError, match=r"weights\.data was changed"):
        LLM(copy, threads=1, verify=True)
