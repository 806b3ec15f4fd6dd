"""Texts to calibrate on: what is built in, and what a user may give."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
import tiny_pairs
import tiny_tokenizers

from semspec.calibration.texts import (
    DEFAULT_TOKENS,
    WINDOW,
    built_in_conversations,
    built_in_documents,
    cut_text,
    read_text_file,
)
from semspec.export.checkpoint import Checkpoint, open_checkpoint
from semspec.runtime.errors import CalibrationError, ConfigError, SourceError

LINE = "The quick numbers 0123456789 are added up again.\n"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A model over bytes with 256 positions; 258 is the end token, 257 BOS, which it does not add."""
    return open_checkpoint(tiny_pairs.save_checkpoint(tmp_path_factory.mktemp("texts") / "tiny"))


@pytest.mark.parametrize(
    "sign", ["\\boxed{", "def ", "#include", "SELECT", "const ", "fn ", "| Linux", '"lat"', "\\begin{", "»"]
)
def test_the_built_in_text_has_many_kinds(sign: str) -> None:
    """Channels that only code, tables or formulas reach would otherwise look unused."""
    assert any(sign in document for document in built_in_documents())


def test_the_built_in_text_has_many_scripts() -> None:
    """Latin, Cyrillic, Han, kana, Hangul, Arabic, Devanagari, Greek, Hebrew, Thai."""
    text = "".join(built_in_documents())
    for block in ("а-я", "一-龥", "ぁ-ん", "가-힣", "ا-ي", "अ-ह", "α-ω", "א-ת", "ก-ฮ"):
        assert re.search(f"[{block}]", text), block


def test_conversations_alternate() -> None:
    """A template would refuse others, or render what no model has seen."""
    for conversation in built_in_conversations():
        roles = [message["role"] for message in conversation if message["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2) and roles
        assert all(message["content"] for message in conversation)


def test_conversations_are_written_with_the_models_template(tiny: Checkpoint) -> None:
    """What the model reads in use starts so, from position 0 on."""
    windows = cut_text(tiny, tokens=100_000).windows
    start = list(b"<user>A farmer has 84 metres")
    assert any(list(window[: len(start)]) == start for window in windows)


def test_without_a_template_conversations_are_plain(tmp_path: Path) -> None:
    """A base model has no roles."""
    folder = tiny_pairs.save_checkpoint(tmp_path / "base")
    (folder / "chat_template.jinja").unlink()
    windows = cut_text(open_checkpoint(folder), tokens=100_000).windows
    assert any(list(window[:20]) == list(b"User: A farmer has 8") for window in windows)


def test_documents_start_windows_and_none_is_longer_than_the_model_can_read(tiny: Checkpoint) -> None:
    """Positions as in use: a document starts at 0, and nothing lies beyond what the model was trained for."""
    windows = cut_text(tiny, tokens=100_000).windows
    assert max(map(len, windows)) == min(WINDOW, tiny.spec.max_positions)
    starts = [bytes(window[:8]) for window in windows if max(window[:8]) < 256]
    assert all(document.encode()[:8] in starts for document in built_in_documents() if document[:3] != "ab")


def test_of_a_long_text_windows_are_taken_evenly(tiny: Checkpoint) -> None:
    """The first part of a long text alone would be one kind of text."""
    text = " ".join(map(str, range(5000)))
    whole = cut_text(tiny, text, tokens=100_000).windows
    some = cut_text(tiny, text, tokens=2048)
    assert 2048 - 256 < sum(map(len, some.windows)) <= 2048
    at = [whole.index(window) for window in some.windows]
    assert at == sorted(at) and at[0] < len(whole) / 4 and at[-1] > 0.9 * len(whole)
    gaps = [b - a for a, b in pairwise(at)]
    assert max(gaps) - min(gaps) <= 1


def test_every_window_starts_with_bos_where_the_model_wants_it(tmp_path: Path) -> None:
    """Its first position takes the attention that has nowhere to go; another token there gives other outliers."""
    tokenizer = tiny_tokenizers.add_bos(tiny_tokenizers.byte_level())
    folder = tiny_pairs.save_checkpoint(tmp_path / "bos", tokenizer=tokenizer)
    windows = cut_text(open_checkpoint(folder), LINE * 20).windows
    assert len(windows) > 3 and all(window[0] == 257 for window in windows)
    assert bytes(i for window in windows for i in window[1:]) == (LINE * 20).encode()
    assert max(map(len, windows)) == 256


def test_the_hash_is_of_the_text(tiny: Checkpoint) -> None:
    """Same text, same hash; not of which part of it was read."""
    one, part, other = (
        cut_text(tiny, text, tokens=n) for text, n in ((LINE * 9, 999), (LINE * 9, 200), (LINE * 8, 999))
    )
    assert one.sha256 == part.sha256 != other.sha256
    assert cut_text(tiny).sha256 == cut_text(tiny).sha256


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; give a text of at least 128 tokens"),
        (b" \n\t", "is empty"),
        (b"caf\xe9 " * 99, "is not UTF-8"),
    ],
)
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    """One line that names the file."""
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(CalibrationError, match=message) as caught:
        read_text_file(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_missing_or_enormous_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder is no file; a text that takes minutes to tokenize is a mistake."""
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(CalibrationError, match="no such file"):
            read_text_file(path)
    monkeypatch.setattr("semspec.calibration.texts.MAX_BYTES", 10)
    (tmp_path / "long").write_text("12345678901")
    with pytest.raises(CalibrationError, match="has 11 bytes; at most 10 are read, give a part of it"):
        read_text_file(tmp_path / "long")


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    """Editors write it; a model would read it as three odd tokens."""
    (tmp_path / "text.txt").write_bytes(b"\xef\xbb\xbfabc")
    assert read_text_file(tmp_path / "text.txt") == "abc"


def test_too_little_is_refused(tiny: Checkpoint) -> None:
    """Statistics of a few tokens would be noise."""
    with pytest.raises(CalibrationError, match="the text has 98 tokens; at least 128 are needed"):
        cut_text(tiny, LINE * 2)
    with pytest.raises(ConfigError, match="at least 128 tokens, got 127"):
        cut_text(tiny, tokens=127)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    """Its ids would be read past the embedding's end."""
    folder = tiny_pairs.save_checkpoint(tmp_path / "small", vocab_size=100, eos_token_id=None)
    with pytest.raises(CalibrationError, match=r"gives id \d+, and the model has 100 rows"):
        cut_text(open_checkpoint(folder), LINE * 9)


def test_a_checkpoint_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    """With the repair."""
    folder = tiny_pairs.save_checkpoint(tmp_path / "bare")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(SourceError, match=r"has no tokenizer\.json"):
        cut_text(open_checkpoint(folder))


def test_the_commands_default_is_the_librarys() -> None:
    """The command imports nothing before it runs, so it spells the number."""
    from semspec.calibration.cli import calibrate

    defaults = {option.name: option.default for option in calibrate.commands["ranges"].params}
    assert defaults["tokens"] == DEFAULT_TOKENS
