"""Text to ids, ids to text as they come, and what a broken tokenizer folder says."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers as tiny
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from semspec.export.vocabulary import write_tokenizer
from semspec.runtime.errors import BundleError, ConfigError
from semspec.runtime.tokenizer import Tokenizer

# Case D17: measured on SmolLM2.
SPLIT_TEXTS = {
    "👩‍🚀": [10813, 235, 119, 321, 231, 10813, 244, 218],
    "日本語テスト": [23274, 115, 40993, 179, 120, 248, 11100, 224, 10391, 134, 11100, 226],
    "ď": [143, 233],
}
CHAT_OF_HI = (
    "1 9690 198 2683 359 253 5356 5646 11173 3365 3511 308 34519 28 7018 411 407 19712 8182 2 198 1 4093 198 "
    "26843 2 198 1 520 9531 198"
)

JUDGE = tiny.byte_level()


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The real tokenizer, rebuilt from the GGUF file."""
    folder = tmp_path_factory.mktemp("smollm2")
    write_tokenizer(smollm2_gguf, folder, config={"eos_token_id": 2, "vocab_size": 49152})
    return Tokenizer.open(folder)


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One id a byte: every UTF-8 accident can be written."""
    return Tokenizer.open(tiny.save(tmp_path_factory.mktemp("bytewise"), tiny.byte_level()))


def chunked(ids: Sequence[int], size: int) -> list[Sequence[int]]:
    return [ids[at : at + size] for at in range(0, len(ids), size)]


def streamed(tokenizer: Tokenizer, ids: Sequence[int], size: int, prompt: Sequence[int] = ()) -> str:
    stream = tokenizer.stream(prompt)
    return "".join([*(stream.push(part) for part in chunked(ids, size)), stream.finish()])


@pytest.mark.parametrize("size", [1, 2, 3, 99])
@pytest.mark.parametrize("text", SPLIT_TEXTS)
def test_stream_never_splits_a_character(smollm2: Tokenizer, text: str, size: int) -> None:
    """D17: characters spread over tokens come whole, whatever a speculative loop commits at once."""
    ids = SPLIT_TEXTS[text]
    assert smollm2.encode(text) == ids
    stream = smollm2.stream()
    pieces = [*(stream.push(part) for part in chunked(ids, size)), stream.finish()]
    assert "".join(pieces) == smollm2.decode(ids) == text
    assert not any("�" in piece for piece in pieces)


@pytest.mark.parametrize("cut", [1, 2])
@pytest.mark.parametrize("text", SPLIT_TEXTS)
def test_stream_cut_inside_a_character_ends_as_the_decoding_does(
    smollm2: Tokenizer, text: str, cut: int
) -> None:
    """D17: an unfinished character comes out once, at the end."""
    ids = SPLIT_TEXTS[text][:cut]
    stream = smollm2.stream()
    shown = stream.push(ids)
    assert shown + stream.finish() == smollm2.decode(ids)
    assert stream.finish() == ""


@settings(deadline=None)
@given(
    ids=st.lists(st.integers(0, 259), max_size=40),
    sizes=st.lists(st.integers(1, 5), min_size=40, max_size=40),
)
def test_stream_of_any_bytes_equals_the_decoding(
    bytewise: Tokenizer, ids: list[int], sizes: list[int]
) -> None:
    """Joined pieces equal tokenizers' own decoding for any bytes and chunks; only one character is ever held."""
    stream, shown, at = bytewise.stream(), "", 0
    for size in sizes:
        shown += stream.push(ids[at : at + size])
        at += size
        now = bytewise.decode(ids[:at])
        assert now.startswith(shown) and len(now) - len(shown) <= 1
    shown += stream.finish()
    assert shown == bytewise.decode(ids) == JUDGE.decode(ids)


def test_stream_of_invalid_bytes_does_not_stall(bytewise: Tokenizer) -> None:
    """D17: a run of continuation bytes comes out as it goes on, not at its end."""
    stream = bytewise.stream()
    assert [len(stream.push([0x80])) for _ in range(1000)] == [1] * 1000


@pytest.mark.parametrize("decoder", ["llama", "metaspace"])
@pytest.mark.parametrize("size", [1, 2, 3, 99])
@pytest.mark.parametrize("text", ["a b  c", "a", " a", "  b a", "日 é", "c  "])
def test_stream_keeps_spaces_of_sentencepiece(tmp_path: Path, decoder: str, size: int, text: str) -> None:
    """D19: a piece decoded alone would lose its leading space; words must not run together."""
    judge = tiny.sentencepiece(decoder=decoder)
    tokenizer = Tokenizer.open(tiny.save(tmp_path, judge))
    ids = tokenizer.encode(text)
    assert streamed(tokenizer, ids, size) == tokenizer.decode(ids) == judge.decode(ids)
    for cut in range(1, len(ids)):
        new = tokenizer.decode(ids).removeprefix(tokenizer.decode(ids[:cut]))
        assert streamed(tokenizer, ids[cut:], size, ids[:cut]) == new


def test_byte_fallback_spoils_only_the_wrong_byte(tmp_path: Path) -> None:
    """tokenizers judges a whole run of bytes at once; a stream that waited for its end would hold a page."""
    backend = tiny.sentencepiece()
    tokenizer = Tokenizer.open(tiny.save(tmp_path, backend))
    ids = [backend.token_to_id(f"<0x{byte:02X}>") for byte in (0xE6, 0x97, 0xA5, 0xFF)]
    assert streamed(tokenizer, ids, 1) == tokenizer.decode(ids) == "日�"


def test_stream_continues_a_character_that_the_prompt_began(bytewise: Tokenizer) -> None:
    """A prompt may be given as ids and end anywhere."""
    assert streamed(bytewise, [0x82, 0xAC, 0x21], 1, prompt=[0x61, 0xE2]) == "€!"


def test_words_without_decoder_are_joined_by_spaces(tmp_path: Path) -> None:
    """As tokenizers does; word-level vocabularies are how tests write any text."""
    tokenizer = Tokenizer.open(tiny.save(tmp_path, tiny.words("?", "blue", "whale")))
    assert streamed(tokenizer, [1, 2, 0], 1) == tokenizer.decode([1, 2, 0]) == "blue whale ?"


def test_special_tokens_are_skipped_or_written(bytewise: Tokenizer) -> None:
    """Control tokens are no text; tokens that were only added are."""
    ids = [257, 0x61, 259, 258]
    assert bytewise.decode(ids) == "a<tool>" == streamed(bytewise, ids, 1)
    assert bytewise.decode(ids, skip_special=False) == "<s>a<tool></s>"
    assert bytewise.token_text(258) == "</s>"
    assert bytewise.special_ids == {257, 258}


def test_chat_of_the_real_model_has_the_measured_ids(smollm2: Tokenizer) -> None:
    """D20: SmolLM2 has a BOS id that must not be added; its template writes it itself."""
    assert smollm2.encode("Hi") == [26843]
    assert smollm2.encode_chat([{"role": "user", "content": "Hi"}]) == [int(n) for n in CHAT_OF_HI.split()]
    assert (smollm2.bos_id, smollm2.eos_ids, smollm2.vocab_size) == (1, {2}, 49152)


@pytest.mark.parametrize(
    "template", ["{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"]
)
def test_chat_has_exactly_one_bos(tmp_path: Path, template: str) -> None:
    """D20: template and tokenizer may both add it, or only the tokenizer."""
    folder = tiny.save(tmp_path, tiny.add_bos(tiny.byte_level()), template=template)
    tokenizer = Tokenizer.open(folder)
    assert tokenizer.encode_chat([{"role": "user", "content": "ab"}]) == [257, 256]
    assert tokenizer.encode("ab") == [257, 256] and tokenizer.encode("<s>ab") == [257, 256]


@pytest.mark.parametrize(
    ("flag", "processor", "expected"),
    [(None, True, [257, 256]), (False, True, [256]), (True, False, [257, 256]), (None, False, [256])],
)
def test_configuration_decides_about_bos(
    tmp_path: Path, flag: bool | None, processor: bool, expected: list[int]
) -> None:
    """add_bos_token says it; where it is silent the post-processor does."""
    backend = tiny.add_bos(tiny.byte_level()) if processor else tiny.byte_level()
    config = {} if flag is None else {"add_bos_token": flag}
    assert Tokenizer.open(tiny.save(tmp_path, backend, config=config)).encode("ab") == expected


def test_prompt_gets_no_end_token(tmp_path: Path) -> None:
    """A tokenizer trained to close texts would end every prompt: the model would see a finished text."""
    backend = tiny.byte_level()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 257), ("</s>", 258)]
    )
    assert Tokenizer.open(tiny.save(tmp_path, backend)).encode("ab") == [257, 256]


def test_long_prompt_is_never_cut_or_padded(tmp_path: Path) -> None:
    """tokenizer.json may carry the lengths of its training; a prompt cut in silence is a wrong answer."""
    backend = tiny.byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=9)
    tokenizer = Tokenizer.open(tiny.save(tmp_path, backend))
    assert tokenizer.encode("xyzxyz") == [ord(letter) for letter in "xyzxyz"] and tokenizer.encode("ab") == [
        256
    ]


@pytest.mark.parametrize(("value", "expected"), [([9, 2], {2, 9}), (7, {7}), (None, set()), ([], set())])
def test_every_end_id_is_read(tmp_path: Path, value: object, expected: set[int]) -> None:
    """D21: one of several is not enough, and none is allowed."""
    folder = tiny.save(tmp_path, tiny.byte_level(), generation={"eos_token_id": value, "top_k": 5})
    tokenizer = Tokenizer.open(folder)
    assert tokenizer.eos_ids == expected and tokenizer.generation["top_k"] == 5


def test_id_outside_the_vocabulary_is_an_error(bytewise: Tokenizer) -> None:
    """Rows of a padded embedding have no text; sampling must never give them."""
    assert bytewise.vocab_size == 260
    for token_id in (260, -1):
        with pytest.raises(ConfigError, match=r"token id must be in 0\.\.259"):
            bytewise.decode([token_id])


@pytest.mark.parametrize("text", ["a\ud800", None])
def test_what_is_no_text_is_an_error(bytewise: Tokenizer, text: Any) -> None:
    """JSON can carry half a surrogate pair; the message must be printable all the same."""
    with pytest.raises(ConfigError, match="text must be a str that UTF-8 can hold, got") as caught:
        bytewise.encode(text)
    str(caught.value).encode("utf-8")


def test_plain_text_works_with_a_broken_template(tmp_path: Path) -> None:
    """D54: who does not chat is not harmed; who does gets the line."""
    tokenizer = Tokenizer.open(tiny.save(tmp_path, tiny.byte_level(), template="\n{% if %}"))
    assert tokenizer.has_chat_template and tokenizer.encode("ab") == [256]
    with pytest.raises(BundleError, match=r"chat_template\.jinja, line 2: "):
        tokenizer.encode_chat([])


def test_missing_template_says_what_to_do(bytewise: Tokenizer) -> None:
    """D54: base models have none."""
    assert not bytewise.has_chat_template
    with pytest.raises(BundleError, match=r"no chat template .* plain text instead"):
        bytewise.encode_chat([{"role": "user", "content": "Hi"}])


def _without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _with(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text, encoding="utf-8") and None


def _edited(name: str, **changes: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
        (folder / name).write_text(json.dumps({**content, **changes}), encoding="utf-8")

    return edit


BREAKAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (_without("tokenizer.json"), r"tokenizer\.json: no such file"),
    "missing config": (_without("tokenizer_config.json"), r"tokenizer_config\.json: no such file"),
    "empty": (_with("tokenizer.json", ""), r"tokenizer\.json: cannot be used"),
    "not ours": (_with("tokenizer.json", "{}"), r"tokenizer\.json: cannot be used"),
    "config is a list": (_with("tokenizer_config.json", "[]"), "must hold a JSON object, found list"),
    "config is cut": (_with("tokenizer_config.json", "{"), "is not valid JSON"),
    "end ids": (
        _with("generation_config.json", '{"eos_token_id": "2"}'),
        "eos_token_id must be ids, found '2'",
    ),
    "panic": (
        _edited("tokenizer.json", normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        r"tokenizer\.json: cannot be used",
    ),
    "decoder": (
        _edited("tokenizer.json", decoder={"type": "WordPiece", "prefix": "##", "cleanup": True}),
        "decoder .*WordPiece.* is not supported here; supported: none, ByteFallback",
    ),
    "no bos": (_edited("tokenizer_config.json", bos_token=None, add_bos_token=True), "there is no bos_token"),
    "bos flag": (
        _edited("tokenizer_config.json", add_bos_token="yes"),
        "add_bos_token must be true or false",
    ),
    "bos a number": (_edited("tokenizer_config.json", bos_token=1), "bos_token must be a token, found 1"),
    "unknown bos": (
        _edited("tokenizer_config.json", bos_token="<x>"),
        "bos_token '<x>' is not in the vocabulary",
    ),
    "huge id": (
        _edited("tokenizer.json", model={"type": "BPE", "vocab": {"a": 0, "b": 4294967295}, "merges": []}),
        "4294967296 ids",
    ),
    "dropout": (
        _edited("tokenizer.json", model={"type": "BPE", "dropout": 0.5, "vocab": {"a": 0}, "merges": []}),
        "dropout",
    ),
}


@pytest.mark.parametrize("case", BREAKAGES)
def test_broken_folder_is_one_line_that_names_the_file(tmp_path: Path, case: str) -> None:
    """A bundle comes from elsewhere: whatever is wrong with it is said, in one line."""
    breakage, message = BREAKAGES[case]
    tiny.save(tmp_path, tiny.byte_level())
    breakage(tmp_path)
    with pytest.raises(BundleError, match=message) as caught:
        Tokenizer.open(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_link_out_of_the_bundle_is_refused(tmp_path: Path, name: str) -> None:
    """D51: a bundle must not make semspec read other files."""
    folder = tiny.save(tmp_path / "bundle", tiny.byte_level(), template="x")
    (folder / name).rename(tmp_path / "outside")
    (folder / name).symlink_to(tmp_path / "outside")
    with pytest.raises(BundleError, match="link that leads out of the bundle"):
        Tokenizer.open(folder)


def test_other_special_prefix_is_refused(tmp_path: Path) -> None:
    """Families that start every text with several control tokens are not known here."""
    backend = tiny.byte_level()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="</s> <s> $A", special_tokens=[("<s>", 257), ("</s>", 258)]
    )
    with pytest.raises(BundleError, match=r"puts ids \[258, 257\] before a text; only one BOS"):
        Tokenizer.open(tiny.save(tmp_path, backend))
