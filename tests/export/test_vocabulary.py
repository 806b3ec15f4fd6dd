"""From a checkpoint's tokenizer to a bundle's: the same ids, every end token, nothing guessed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers as tiny
from gguf import GGUFWriter
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers
from transformers import PreTrainedTokenizerFast

from semspec.export.bpe import PRE_TOKENIZERS
from semspec.export.vocabulary import copy_licence, write_tokenizer
from semspec.runtime.errors import SourceError
from semspec.runtime.tokenizer import Tokenizer

# Case D26: measured on SmolLM2.
SMOLLM2_IDS = {
    "Hello world": [19556, 905],
    "  two  spaces": [216, 827, 216, 5600],
    "123456789": [33, 34, 35, 36, 37, 38, 39, 40, 41],
    "a\n\n\nb": [81, 1116, 198, 82],
    "I'm": [57, 5248],
    "naïve café — 123 😊": [3546, 46494, 37366, 1841, 216, 33, 34, 35, 40303, 228],
    "<|im_end|>": [2],
}


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2")
    write_tokenizer(smollm2_gguf, folder, config={"eos_token_id": 2, "vocab_size": 49152})
    return folder


def write_gguf(path: Path, metadata: dict[str, Any]) -> Path:
    """A GGUF file of these keys and no tensor, written by the gguf package."""
    writer = GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            add: dict[type, Callable[[str, Any], None]] = {
                bool: writer.add_bool,
                int: writer.add_uint32,
                float: writer.add_float32,
                str: writer.add_string,
            }
            add[type(value)](key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def from_metadata(folder: Path, **changes: Any) -> Tokenizer:
    """The tokenizer of tiny.GGUF_METADATA with some keys changed (dots as __), or left out (None)."""
    renamed = {f"tokenizer.{key.replace('__', '.')}": value for key, value in changes.items()}
    metadata = {key: value for key, value in {**tiny.GGUF_METADATA, **renamed}.items() if value is not None}
    write_tokenizer(write_gguf(folder / "model.gguf", metadata), folder / "out", config={})
    return Tokenizer.open(folder / "out")


@pytest.mark.parametrize("text", SMOLLM2_IDS)
def test_rebuilt_smollm2_has_the_measured_ids(smollm2: Path, text: str) -> None:
    """D26: merges, digits one by one, control tokens, spaces: all as in the original."""
    tokenizer = Tokenizer.open(smollm2)
    assert tokenizer.encode(text) == SMOLLM2_IDS[text]
    assert tokenizer.decode(SMOLLM2_IDS[text], skip_special=False) == text


def test_rebuilt_smollm2_keeps_what_the_file_says(smollm2: Path) -> None:
    """D20, D21: its BOS is named but not added; it has one end token; control tokens are special."""
    tokenizer = Tokenizer.open(smollm2)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (49152, 1, {2})
    assert tokenizer.special_ids == set(range(17)) and tokenizer.has_chat_template
    assert json.loads((smollm2 / "tokenizer_config.json").read_text())["add_bos_token"] is False


def test_writing_twice_gives_the_same_bytes(smollm2: Path, smollm2_gguf: Path, tmp_path: Path) -> None:
    """A bundle is compared by its hashes."""
    write_tokenizer(smollm2_gguf, tmp_path, config={"eos_token_id": [2], "vocab_size": 49152})
    names = sorted(path.name for path in smollm2.iterdir())
    assert names == [
        "chat_template.jinja",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    for name in names:
        assert (smollm2 / name).read_bytes() == (tmp_path / name).read_bytes()


@pytest.mark.slow
def test_rebuilt_qwen_cuts_text_as_the_original(tmp_path: Path) -> None:
    """D26: NFC, one word a digit, contractions in capitals too; the ids are as measured."""
    from semspec.export.recipes import load_recipe
    from semspec.export.sources import fetch

    write_tokenizer(fetch(load_recipe("qwen2.5-coder-0.5b").target), tmp_path, config={"vocab_size": 151936})
    tokenizer = Tokenizer.open(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.eos_ids) == (151665, {151645})
    known = {
        "Hello world": [9707, 1879],
        "123456789": list(range(16, 25)),
        "I'm": [40, 2776],
        "<|im_end|>": [151645],
        "日本語テスト": [101059, 102819, 140592],
        "<tool_call>": [151657],
    }
    for text, ids in known.items():
        assert tokenizer.encode(text) == ids
    for text in tiny.TEXTS:
        composed = text.replace("e\u0301", "é").replace("Å", "Å")
        assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == composed
    assert tokenizer.decode(tokenizer.encode("<tool_call>x")) == "<tool_call>x"


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_known_pre_tokenizer_gives_the_text_back(tmp_path: Path, name: str) -> None:
    """Byte-level BPE loses nothing, whatever the cutting (NFC composes first)."""
    tokenizer = from_metadata(tmp_path, ggml__pre=name, ggml__add_bos_token=False)
    for text in tiny.TEXTS:
        expected = Backend(models.BPE())
        expected.normalizer = normalizers.NFC() if PRE_TOKENIZERS[name].nfc else normalizers.Sequence([])
        assert tokenizer.decode(tokenizer.encode(text)) == expected.normalizer.normalize_str(text)


def test_llama3_takes_a_whole_word_without_merges(tmp_path: Path) -> None:
    """Its vocabulary has tokens that no merges reach; BOS is added where the file does not say."""
    (tmp_path / "a").mkdir()
    tokens = [*tiny.BYTES, "xy", "<s>", "</s>", "xyz", "<tool>", "[PAD261]"]
    kinds = [1] * 257 + [3, 3, 1, 4, 5]
    changes = {"ggml__tokens": tokens, "ggml__token_type": kinds, "ggml__merges": ["x y"]}
    assert from_metadata(tmp_path, ggml__pre="llama-bpe", **changes).encode("xyz") == [257, 259]
    assert from_metadata(tmp_path / "a", ggml__pre="gpt-2", **changes).encode("xyz") == [256, ord("z")]


def test_bos_is_added_only_when_the_file_says_so(tmp_path: Path) -> None:
    """D20: a BOS id alone is no order to add it."""
    (tmp_path / "plain").mkdir()
    assert from_metadata(tmp_path / "plain").encode("ab") == [256]
    assert from_metadata(tmp_path, ggml__add_bos_token=True).encode("ab") == [257, 256]


def test_padding_tokens_are_left_out_and_added_ones_are_text(tmp_path: Path) -> None:
    """Unused rows pad the embedding: their made-up names must not be found in texts."""
    tokenizer = from_metadata(tmp_path)
    assert tokenizer.vocab_size == 261 and tokenizer.special_ids == {257, 258, 259}
    assert len(tokenizer.encode("[PAD261]")) == 8
    assert tokenizer.encode("<tool><|eot|>") == [260, 259] and tokenizer.decode([260, 259]) == "<tool>"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ggml__merges": None}, r"tokenizer\.ggml\.merges is missing"),
        ({"ggml__token_type": None}, r"tokenizer\.ggml\.token_type is missing"),
        ({"ggml__tokens": None}, r"tokenizer\.ggml\.tokens is missing"),
        ({"ggml__pre": None}, r"tokenizer\.ggml\.pre is None, .*known: deepseek-r1-qwen, gpt-2"),
        ({"ggml__pre": "tekken"}, r"tokenizer\.ggml\.pre is 'tekken', an unknown .*smollm"),
        ({"ggml__model": "llama"}, r"tokenizer\.ggml\.model is 'llama'; only 'gpt2'"),
        ({"ggml__add_space_prefix": True}, r"tokenizer\.ggml\.add_space_prefix is true"),
        ({"ggml__token_type": [1] * 9}, r"tokenizer\.ggml\.token_type has 9 entries for 262"),
        ({"ggml__token_type": [9] * 262}, r"token_type of id 0 is 9; known: 1\.\.6"),
        ({"ggml__token_type": "x"}, r"tokenizer\.ggml\.token_type must be a list of int, found str"),
        ({"ggml__tokens": ["a", "a"], "ggml__token_type": [1, 1]}, "id 1, 'a', is empty or the same as id 0"),
        ({"ggml__merges": ["a  b"]}, r"tokenizer\.ggml\.merges: entry 0 is 'a  b'"),
        ({"ggml__merges": ["a", "b"]}, r"tokenizer\.ggml\.merges: entry 0 is 'a'"),
        ({"ggml__merges": ["b a"]}, "rebuilt tokenizer: cannot be used: Token `ba` out of vocabulary"),
        ({"ggml__eos_token_id": 999}, r"eos_token_id is 999; the vocabulary has ids 0\.\.261"),
        (
            {"ggml__bos_token_id": None, "ggml__add_bos_token": True},
            "add_bos_token is true but .*bos_token_id",
        ),
        ({"chat_template": 3}, "chat_template must be text, found int"),
    ],
)
def test_unusable_metadata_is_an_error_that_names_the_key(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """D26: a missing key is never guessed."""
    with pytest.raises(SourceError, match=message) as caught:
        from_metadata(tmp_path, **changes)
    assert "\n" not in str(caught.value) and "model.gguf" in str(caught.value)


def test_every_end_id_of_a_gguf_file_is_kept(tmp_path: Path) -> None:
    """D21: end of text, of turn and of message, and what the configuration says."""
    changes = {
        "tokenizer.ggml.eot_token_id": 259,
        "tokenizer.ggml.eom_token_id": 4,
        "general.sampling.top_k": 20,
    }
    path = write_gguf(
        tmp_path / "model.gguf", {**tiny.GGUF_METADATA, **changes, "general.sampling.temp": 0.5}
    )
    write_tokenizer(path, tmp_path / "out", config={"eos_token_id": [7, 258]})
    assert json.loads((tmp_path / "out/generation_config.json").read_text()) == {
        "do_sample": True,
        "eos_token_id": [4, 7, 258, 259],
        "temperature": 0.5,
        "top_k": 20,
    }


@pytest.mark.parametrize(
    ("config_ids", "generation_ids", "eos_token", "expected"),
    [
        (2, [2, 9], None, [2, 9]),
        ([9, 2], None, None, [2, 9]),
        (None, 9, None, [9]),
        (None, None, "</s>", [258]),
        (2, [9], "</s>", [2, 9, 258]),
        (2, [9], {"content": "</s>", "lstrip": False}, [2, 9, 258]),
        (None, None, None, []),
    ],
)
def test_every_end_id_of_a_folder_is_kept(
    tmp_path: Path, config_ids: Any, generation_ids: Any, eos_token: Any, expected: list[int]
) -> None:
    """D21: the union of configuration, generation configuration and tokenizer, whatever the form and order."""
    generation = {"eos_token_id": generation_ids, "temperature": 0.6, "do_sample": True, "top_p": 0.9}
    source = tiny.save(
        tmp_path / "in", tiny.byte_level(), config={"eos_token": eos_token}, generation=generation
    )
    write_tokenizer(source, tmp_path / "out", config={"eos_token_id": config_ids})
    assert Tokenizer.open(tmp_path / "out").eos_ids == set(expected)
    assert json.loads((tmp_path / "out/generation_config.json").read_text()) == {
        **generation,
        "eos_token_id": expected,
    }


def test_folder_written_by_transformers_gives_the_same_ids(tmp_path: Path) -> None:
    """tokenizer.json is taken as it is; the template may be text in the configuration."""
    backend = tiny.add_bos(tiny.byte_level())
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    theirs.chat_template = "{{ bos_token }}{{ messages[0].content }}\n"
    theirs.save_pretrained(tmp_path / "in")
    write_tokenizer(tmp_path / "in", tmp_path / "out", config={})
    ours = Tokenizer.open(tmp_path / "out")
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (tmp_path / "in/tokenizer.json").read_bytes()
    for text in tiny.TEXTS:
        assert ours.encode(text) == theirs.encode(text)
    chat = [{"role": "user", "content": "ab"}]
    assert ours.encode_chat(chat) == theirs.apply_chat_template(chat) == [257, 256]
    again = PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")
    assert again.encode("ab") == [257, 256] and again.eos_token_id == 258


@pytest.mark.parametrize(
    ("in_config", "file", "expected"),
    [
        ("one", None, "one"),
        ([{"name": "tool_use", "template": "x"}, {"name": "default", "template": "two"}], None, "two"),
        ("one", "three\r\n", "three\r\n"),
        (None, None, None),
    ],
)
def test_chat_template_is_found_in_every_place(
    tmp_path: Path, in_config: Any, file: str | None, expected: str | None
) -> None:
    """As transformers looks for it: the file first, then the configuration, as text or as a list."""
    source = tiny.save(tmp_path / "in", tiny.byte_level(), config={"chat_template": in_config})
    if file is not None:
        (source / "chat_template.jinja").write_bytes(file.encode())
    write_tokenizer(source, tmp_path / "out", config={})
    written = tmp_path / "out/chat_template.jinja"
    assert (written.read_bytes().decode() if written.exists() else None) == expected


def test_special_tokens_map_is_read_too(tmp_path: Path) -> None:
    """Older folders name their special tokens there alone."""
    source = tiny.save(tmp_path / "in", tiny.add_bos(tiny.byte_level()))
    (source / "tokenizer_config.json").unlink()
    (source / "special_tokens_map.json").write_text('{"bos_token": {"content": "<s>"}, "eos_token": "</s>"}')
    write_tokenizer(source, tmp_path / "out", config={})
    tokenizer = Tokenizer.open(tmp_path / "out")
    assert tokenizer.bos_id == 257 and tokenizer.eos_ids == {258} and tokenizer.encode("ab") == [257, 256]


BAD_FOLDERS: dict[str, tuple[str, str, str]] = {
    "broken tokenizer": ("tokenizer.json", "{", r"tokenizer\.json: cannot be used"),
    "not text": ("tokenizer.json", "\udcff", r"tokenizer\.json: is not UTF-8"),
    "broken configuration": ("tokenizer_config.json", "[1]", r"tokenizer_config\.json"),
    "bos flag": ("tokenizer_config.json", '{"add_bos_token": "yes"}', "add_bos_token must be true or false"),
    "eos unknown": (
        "tokenizer_config.json",
        '{"eos_token": "<end>"}',
        "eos_token '<end>' is not in the vocabulary",
    ),
    "eos a number": ("tokenizer_config.json", '{"eos_token": 3}', "eos_token must be a token, found 3"),
    "end id": ("generation_config.json", '{"eos_token_id": ["2"]}', r"an id or a list of ids, found \['2'\]"),
    "no default template": (
        "tokenizer_config.json",
        '{"chat_template": [{"name": "rag", "template": "x"}]}',
        r"chat_template has \['rag'\], but none named 'default'",
    ),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_unusable_folder_is_one_line_that_names_the_fault(tmp_path: Path, case: str) -> None:
    """A checkpoint folder is untrusted: whatever is wrong with it is said, in one line."""
    name, text, message = BAD_FOLDERS[case]
    source = tiny.save(tmp_path / "in", tiny.byte_level())
    (source / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(SourceError, match=message) as caught:
        write_tokenizer(source, tmp_path / "out", config={})
    assert "\n" not in str(caught.value)


def test_folder_without_tokenizer_json_says_how_to_make_one(tmp_path: Path) -> None:
    """SentencePiece models of old folders are not read; transformers converts them."""
    with pytest.raises(SourceError, match=r"has no tokenizer\.json; write one with transformers"):
        write_tokenizer(tmp_path, tmp_path / "out", config={})


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE"]
)
def test_link_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    """D51: a checkpoint must not make semspec copy other files into a bundle."""
    source = tiny.save(tmp_path / "in", tiny.byte_level(), template="x")
    (source / "LICENSE").write_text("mine")
    (source / name).rename(tmp_path / "outside")
    (source / name).symlink_to(tmp_path / "outside")
    with pytest.raises(SourceError, match="is a link that leads out of the folder"):
        write_tokenizer(source, tmp_path / "out", config={})
        copy_licence(source, tmp_path / "out")


def test_more_ids_than_rows_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Such ids have no embedding; text that spells them would ask for rows that are not there."""
    write_tokenizer(
        tiny.save(tmp_path / "in", tiny.byte_level()), tmp_path / "out", config={"vocab_size": 259}
    )
    assert "the tokenizer knows 260 ids, the model only 259" in caplog.text


def test_licence_files_go_along(tmp_path: Path) -> None:
    """Weights may only be passed on with their licence."""
    source = tmp_path / "in"
    source.mkdir()
    for name in ("LICENSE", "LICENSE-MODEL.txt", "NOTICE", "README.md"):
        (source / name).write_text(name)
    written = copy_licence(source, tmp_path / "out")
    assert [path.name for path in written] == ["LICENSE", "LICENSE-MODEL.txt", "NOTICE"]
    assert [path.read_text() for path in written] == ["LICENSE", "LICENSE-MODEL.txt", "NOTICE"]


def test_licence_of_a_gguf_file_is_named(tmp_path: Path, smollm2_gguf: Path) -> None:
    """The file has no text of it, only its name."""
    (written,) = copy_licence(smollm2_gguf, tmp_path)
    assert written.read_text() == "apache-2.0\n"
    assert copy_licence(write_gguf(tmp_path / "x.gguf", tiny.GGUF_METADATA), tmp_path / "none") == ()
