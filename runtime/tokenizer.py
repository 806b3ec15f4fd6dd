"""The tokenizer of a bundle: text -> ids, chat -> ids, and ids -> text as they come.

Knows the four files of a bundle's tokenizer folder. They are untrusted: only `tokenizers` reads
tokenizer.json, and the chat template runs in a sandbox (chat.py). Does not know models, segments or stop
strings.

Not guaranteed: a message or prompt that spells a control token ("<|im_end|>") becomes that token, as
everywhere.
"""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers

from semspec.runtime.chat import ChatTemplate
from semspec.runtime.errors import BundleError, ConfigError
from semspec.runtime.pieces import Pieces

__all__ = [
    "CHAT_TEMPLATE",
    "CONFIG",
    "GENERATION_CONFIG",
    "TOKENIZER",
    "TextStream",
    "Tokenizer",
    "parse_tokenizer",
]

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
GENERATION_CONFIG = "generation_config.json"

THINK_START, THINK_END = "<think>", "</think>"

_MAX_BYTES = 1 << 28  # of one file; the largest tokenizer.json known has 35 MB
_MAX_IDS = 1 << 22
_NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class Tokenizer:
    """Read-only once open; may be shared by threads.

    vocab_size: number of ids, the largest known id + 1, added tokens included. eos_ids: every id that ends
    an answer. bos_id: the first token of a text, None where the model has none; whether `encode` adds it is
    the tokenizer's own rule. has_chat_template: encode_chat can be used. generation: the model's own
    sampling defaults, as they stand in generation_config.json.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        config: Mapping[str, Any],
        generation: Mapping[str, Any],
        chat_template: ChatTemplate | None,
    ) -> None:
        """Raises BundleError: a decoder, a post-processor or an id that cannot be used here."""
        self._backend = backend
        self._chat_template = chat_template
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if not 0 < self.vocab_size <= _MAX_IDS:
            raise BundleError(f"{TOKENIZER}: has {self.vocab_size} ids; 1 to {_MAX_IDS} are allowed")
        self.special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        decoder = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        self._pieces = Pieces(backend.id_to_token, decoder)
        self._named = _read_names(config)
        self.bos_id, self._adds_bos = self._read_bos(config.get("add_bos_token"))
        self.generation: Mapping[str, Any] = MappingProxyType(dict(generation))
        self.eos_ids = _read_eos_ids(generation)

    @classmethod
    def open(cls, folder: Path) -> Tokenizer:
        """Read the tokenizer folder of a bundle; the chat template may be missing.

        Raises BundleError: a file is missing, a link out of the folder, too large, or broken.
        """
        config, generation = _read_object(folder, CONFIG), _read_object(folder, GENERATION_CONFIG)
        template = None
        if os.path.lexists(folder / CHAT_TEMPLATE):
            template = ChatTemplate(_read_text(folder, CHAT_TEMPLATE), name=CHAT_TEMPLATE)
        backend = parse_tokenizer(_read_text(folder, TOKENIZER), f"{folder / TOKENIZER}")
        return cls(backend, config=config, generation=generation, chat_template=template)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    @property
    def think_start_id(self) -> int | None:
        """The token that begins it, `<think>`; None where the vocabulary has none."""
        token_id: int | None = self._backend.token_to_id(THINK_START)
        return token_id

    @property
    def think_end_id(self) -> int | None:
        """The token that ends the thinking of a reasoning model, `</think>`; None where the vocabulary has none."""
        token_id: int | None = self._backend.token_to_id(THINK_END)
        return token_id

    @property
    def reasons(self) -> bool:
        """Whether the model thinks before it answers: it has that token, and its chat template knows of it."""
        return (
            self.think_end_id is not None
            and self._chat_template is not None
            and THINK_END in self._chat_template.source
        )

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; BOS in front exactly when the tokenizer adds it, and never twice.

        An end token that the tokenizer would append is left out: a prompt is there to be continued. Raises
        ConfigError: not text, or half of a surrogate pair in it.
        """
        try:
            text.encode("utf-8")
        except (AttributeError, UnicodeEncodeError):
            raise ConfigError(f"text must be a str that UTF-8 can hold, got {ascii(text)[:80]}") from None
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        if self._adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Ids of a chat, exactly one BOS where the tokenizer or the template wants one.

        messages: {"role": ..., "content": ...}, and what else the template reads. variables: further names
        for the template, such as tools or enable_thinking. Raises BundleError: there is no template, or it
        fails (the message has its line).
        """
        return self.encode(
            self.render_chat(messages, add_generation_prompt=add_generation_prompt, **variables)
        )

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text that encode_chat encodes. Raises as encode_chat does."""
        if self._chat_template is None:
            raise BundleError(
                f"this model has no chat template ({CHAT_TEMPLATE}); give plain text instead of messages"
            )
        return self._chat_template.render(
            messages, add_generation_prompt=add_generation_prompt, **{**self._named, **variables}
        )

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `ids`, special tokens left out or written as they are.

        Equals tokenizers' own decoding, except that in a byte-fallback vocabulary a wrong byte spoils only
        itself and not the characters beside it. Raises ConfigError for an id outside 0..vocab_size - 1.
        """
        stream = TextStream(self, skip_special=skip_special)
        return stream.push(ids) + stream.finish()

    def token_text(self, token_id: int) -> str:
        """What one id looks like inside a text; a part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes:
        """Bytes that one id adds to a text; none for an id that the vocabulary leaves out.

        first: nothing stands before it. Raises ConfigError for an id outside 0..vocab_size - 1.
        """
        if not 0 <= token_id < self.vocab_size:
            raise ConfigError(f"token id must be in 0..{self.vocab_size - 1}, got {token_id}")
        return self._pieces.of(token_id, first=first)

    def stream(self, prompt_ids: Sequence[int] = ()) -> TextStream:
        """Decode what follows `prompt_ids` as it comes. Reads the prompt once."""
        stream = TextStream(self)
        stream.push(prompt_ids)
        return stream

    @property
    def strip(self) -> tuple[str, int]:
        """(character, how many of it at most vanish from the start of a text)."""
        return self._pieces.strip

    def _read_bos(self, adds_bos: bool | None) -> tuple[int | None, bool]:
        """BOS id, and whether encode adds it: as the configuration says, else as the post-processor does."""
        if adds_bos is not None and not isinstance(adds_bos, bool):
            raise BundleError(f"{CONFIG}: add_bos_token must be true or false, found {adds_bos!r}")
        prefix = self._read_prefix()
        name = self._named.get("bos_token")
        bos_id = self._backend.token_to_id(name) if name is not None else (prefix[0] if prefix else None)
        if name is not None and bos_id is None:
            raise BundleError(f"{CONFIG}: bos_token {name!r} is not in the vocabulary")
        if prefix not in ([], [bos_id]):
            raise BundleError(
                f"{TOKENIZER}: the post-processor puts ids {prefix} before a text; only one BOS is supported"
            )
        if adds_bos and bos_id is None:
            raise BundleError(f"{CONFIG}: add_bos_token is true but there is no bos_token; name it")
        return bos_id, bool(prefix) if adds_bos is None else adds_bos

    def _read_prefix(self) -> list[int]:
        """What the post-processor puts in front of a text."""
        if not self._backend.num_special_tokens_to_add(False):
            return []
        with _reading(TOKENIZER):
            plain = self._backend.encode("a", add_special_tokens=False).ids
            whole: list[int] = self._backend.encode("a", add_special_tokens=True).ids
        starts = (at for at in range(len(whole)) if whole[at : at + len(plain)] == plain)
        return whole[: next(starts, len(whole))]


class TextStream:
    """Text of ids as they come. The pieces, joined, equal the decoding of all ids at once.

    Each piece is whole characters: at most the three bytes of an unfinished one are held. A character that
    the prompt leaves unfinished belongs to the stream. Chunks may be of any size; the cost of a token does
    not grow.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset[int]()
        self._first = True
        self._unstripped, self._n_strip = tokenizer.strip
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete. Raises ConfigError for an id outside the vocabulary."""
        return self._strip(self._decoder.decode(b"".join(map(self._bytes, ids))))

    def finish(self) -> str:
        """What is still held: an unfinished character, as U+FFFD. Empty when asked again."""
        return self._strip(self._decoder.decode(b"", final=True))

    def _bytes(self, token_id: int) -> bytes:
        if token_id in self._skipped:
            return b""
        first, self._first = self._first, False
        return self._tokenizer.token_bytes(token_id, first=first)

    def _strip(self, text: str) -> str:
        """Take off what vanishes from the start; over as soon as another character comes."""
        while self._n_strip and text:
            if text[0] != self._unstripped:
                self._n_strip = 0
                break
            text = text[1:]
            self._n_strip -= 1
        return text


def parse_tokenizer(text: str, where: str) -> tokenizers.Tokenizer:
    """A tokenizer.json as tokenizers reads it, never cutting or padding a text.

    Raises BundleError: it cannot be read.
    """
    with _reading(where):
        backend = tokenizers.Tokenizer.from_str(text)
    backend.no_truncation()
    backend.no_padding()
    if getattr(backend.model, "dropout", None):
        raise BundleError(f"{where}: has dropout, so a text would have other ids each time; set it to null")
    return backend


@contextmanager
def _reading(where: str) -> Iterator[None]:
    """Faults of the file become ours; tokenizers also panics on some, outside of Exception."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        problem = " ".join(str(error).split())[:300]
        raise BundleError(
            f"{where}: cannot be used: {problem}; get the file again, or a newer tokenizers"
        ) from error


def _read_names(config: Mapping[str, Any]) -> dict[str, str]:
    names = {name: config[name] for name in _NAMED_TOKENS if config.get(name) is not None}
    for name, token in names.items():
        if not isinstance(token, str):
            raise BundleError(f"{CONFIG}: {name} must be a token, found {token!r}; export the bundle again")
    return names


def _read_eos_ids(generation: Mapping[str, Any]) -> frozenset[int]:
    value = generation.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise BundleError(
            f"{GENERATION_CONFIG}: eos_token_id must be ids, found {value!r}; export the bundle again"
        )
    return frozenset(ids)


def _read_object(folder: Path, name: str) -> dict[str, Any]:
    try:
        value = json.loads(_read_text(folder, name))
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{folder / name}: is not valid JSON ({error}); export the bundle again") from None
    if not isinstance(value, dict):
        raise BundleError(f"{folder / name}: must hold a JSON object, found {type(value).__name__}")
    return value


def _read_text(folder: Path, name: str) -> str:
    path = folder / name
    try:
        real = path.resolve(strict=True)
        if not real.is_relative_to(folder.resolve()):
            raise BundleError(f"{path}: is a link that leads out of the bundle; put the file itself there")
        if not real.is_file():
            raise BundleError(f"{path}: is not a regular file")
        if real.stat().st_size > _MAX_BYTES:
            raise BundleError(f"{path}: has {real.stat().st_size} bytes; at most {_MAX_BYTES} are read")
        return real.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise BundleError(f"{path}: no such file; export the bundle again") from None
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        raise BundleError(f"{path}: cannot be read: {error}") from error
