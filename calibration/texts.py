"""Texts that models are calibrated on: the built-in one, or the user's, as windows of token ids.

The built-in text is our own: reasoning, code, tables and prose in several languages, and conversations, which are
written with the model's own chat template where it has one. A document starts where a model would start reading,
at position 0; long ones go on in the next window.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from semspec.export.checkpoint import Checkpoint
from semspec.export.vocabulary import write_tokenizer
from semspec.runtime.errors import CalibrationError, ConfigError
from semspec.runtime.tokenizer import Tokenizer

__all__ = [
    "DEFAULT_TOKENS",
    "CalibrationText",
    "built_in_conversations",
    "built_in_documents",
    "cut_text",
    "read_text_file",
]

DEFAULT_TOKENS = 8192
WINDOW = 512  # tokens; attention sees as much at once
MIN_TOKENS = 128
MAX_BYTES = 16 << 20
_TEXTS = "ranges_text"
_CONVERSATIONS = "conversations.txt"
_SEPARATOR = "\n%%%%\n"  # between documents


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationText:
    """windows: ids, each of at most WINDOW tokens. sha256: of the text they are from, as it was tokenized."""

    windows: tuple[tuple[int, ...], ...]
    sha256: str


def read_text_file(path: Path) -> str:
    """A user's text.

    Raises CalibrationError: no such file, too large, not UTF-8, or nothing but white space in it.
    """
    try:
        if not path.is_file():
            raise CalibrationError(f"{path}: no such file")
        if (size := path.stat().st_size) > MAX_BYTES:
            raise CalibrationError(
                f"{path}: has {size} bytes; at most {MAX_BYTES} are read, give a part of it"
            )
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{path}: is not UTF-8 ({error}); save it as UTF-8") from None
    except OSError as error:
        raise CalibrationError(f"{path}: cannot be read: {error.strerror or error}") from None
    if not text.strip():
        raise CalibrationError(f"{path}: is empty; give a text of at least {MIN_TOKENS} tokens")
    return text


def cut_text(
    checkpoint: Checkpoint, text: str | None = None, *, tokens: int = DEFAULT_TOKENS
) -> CalibrationText:
    """`text`, or the built-in one, in the words of the checkpoint's tokenizer, in windows of at most WINDOW tokens.

    tokens: at most so many; of a longer text windows are left out evenly from its beginning to its end.

    Raises ConfigError for `tokens` below MIN_TOKENS; CalibrationError for a text below MIN_TOKENS, and for a tokenizer
    with ids that the model has no rows for; SourceError for a checkpoint without a usable tokenizer.
    """
    if tokens < MIN_TOKENS:
        raise ConfigError(f"calibration needs at least {MIN_TOKENS} tokens, got {tokens}")
    tokenizer = _open_tokenizer(checkpoint)
    documents = _built_in(tokenizer) if text is None else [text]
    size = min(WINDOW, checkpoint.spec.max_positions)
    windows = [window for document in documents for window in _cut(tokenizer, document, size)]
    n_tokens = sum(map(len, windows))
    if n_tokens < MIN_TOKENS:
        raise CalibrationError(f"the text has {n_tokens} tokens; at least {MIN_TOKENS} are needed")
    highest, n_rows = max(map(max, windows)), checkpoint.spec.vocab_size
    if highest >= n_rows:
        raise CalibrationError(
            f"{checkpoint.path}: its tokenizer gives id {highest}, and the model has {n_rows} rows of embedding; they "
            "do not belong together"
        )
    content = _SEPARATOR.join(documents).encode("utf-8")
    return CalibrationText(windows=tuple(_thin(windows, tokens)), sha256=hashlib.sha256(content).hexdigest())


def built_in_documents() -> list[str]:
    """The plain texts, in a fixed order."""
    folder = resources.files("semspec.calibration").joinpath(_TEXTS)
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".txt"))
    texts = [folder.joinpath(name).read_text("utf-8") for name in names if name != _CONVERSATIONS]
    return [document.strip() for text in texts for document in text.split(_SEPARATOR)]


def built_in_conversations() -> list[list[dict[str, str]]]:
    """The conversations: messages with role and content."""
    folder = resources.files("semspec.calibration").joinpath(_TEXTS)
    text = folder.joinpath(_CONVERSATIONS).read_text("utf-8")
    return [list(_messages(conversation)) for conversation in text.split(_SEPARATOR)]


def _messages(conversation: str) -> Iterator[dict[str, str]]:
    """`>> role` on a line of its own starts a message."""
    for message in f"\n{conversation}".split("\n>> ")[1:]:
        role, _, content = message.partition("\n")
        yield {"role": role, "content": content.strip()}


def _built_in(tokenizer: Tokenizer) -> list[str]:
    conversations = built_in_conversations()
    if tokenizer.has_chat_template:
        chats = [tokenizer.render_chat(chat, add_generation_prompt=False) for chat in conversations]
    else:
        chats = [
            "\n\n".join(f"{message['role'].capitalize()}: {message['content']}" for message in chat)
            for chat in conversations
        ]
    return [*built_in_documents(), *chats]


def _open_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(checkpoint.path, Path(folder), config=checkpoint.config)
        return Tokenizer.open(Path(folder))


def _cut(tokenizer: Tokenizer, text: str, size: int) -> Iterator[tuple[int, ...]]:
    """Windows of at most `size` ids. Where a text starts with BOS every window does: no model reads without it."""
    ids = tokenizer.encode(text)
    prefix = ids[:1] if ids[:1] == [tokenizer.bos_id] else []
    rest, step = ids[len(prefix) :], size - len(prefix)
    for start in range(0, len(rest), step):
        yield (*prefix, *rest[start : start + step])


def _thin(windows: Sequence[tuple[int, ...]], tokens: int) -> Iterator[tuple[int, ...]]:
    """Windows spread evenly over all of them, together at most `tokens`: each that its share of them allows."""
    total = sum(map(len, windows))
    tokens = min(tokens, total)
    seen = taken = 0
    for window in windows:
        seen += len(window)
        if seen == total:  # what is left; all, where a single window is too long
            window = window[: tokens - taken]
        if window and taken + len(window) <= seen * tokens // total:
            taken += len(window)
            yield window
