"""What bytes each token id adds to a text.

Knows the decoders of tokenizer.json that language models use, as one table, and turns them into one
question: which bytes does this id stand for, at the start of a text or inside it? With that, decoding a
stream is joining bytes: O(1) a token, and the same whatever the chunks. Does not know text, UTF-8 or end
tokens (tokenizer.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from semspec.runtime.errors import BundleError

__all__ = ["BYTE_LEVEL_CHARACTERS", "Pieces"]

Step: TypeAlias = Callable[[str, bool], str]
"""One decoder on one token: (token, is it the first of the text) -> text, raw bytes as surrogate escapes."""


def _byte_level_characters() -> tuple[str, ...]:
    """The printable character that byte-level BPE writes for each byte 0..255."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))


BYTE_LEVEL_CHARACTERS = _byte_level_characters()
_BYTE_OF = {character: byte for byte, character in enumerate(BYTE_LEVEL_CHARACTERS)}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Pieces:
    """Bytes by token id.

    strip: up to `strip[1]` times the character `strip[0]` vanishes from the start of a text.
    """

    def __init__(self, tokens: Callable[[int], str | None], decoder: Mapping[str, Any] | None) -> None:
        """tokens: id -> token as it stands in the vocabulary; decoder: that entry of tokenizer.json.

        Raises BundleError for a decoder that is not in the table.
        """
        self._tokens = tokens
        self._steps, self.strip = _read_decoder(decoder)
        self._inside: dict[int, bytes] = {}

    def of(self, token_id: int, *, first: bool = False) -> bytes:
        """Bytes that `token_id` adds; none where the vocabulary has a hole. Not yet stripped."""
        if first:
            return self._convert(token_id, first=True)
        if token_id not in self._inside:
            self._inside[token_id] = self._convert(token_id, first=False)
        return self._inside[token_id]

    def _convert(self, token_id: int, *, first: bool) -> bytes:
        text = self._tokens(token_id) or ""
        for step in self._steps if text else ():
            text = step(text, first)
        return text.encode("utf-8", "surrogateescape")


def _read_decoder(decoder: Mapping[str, Any] | None) -> tuple[list[Step], tuple[str, int]]:
    if decoder is None:
        return [_spaced], ("", 0)
    steps: list[Step] = []
    strip = ("", 0)
    fused = False
    for part in decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]:
        kind = part["type"]
        if kind == "Fuse":
            fused = True
        elif kind == "Strip" and fused and part["stop"] == 0:
            strip = (part["content"], part["start"])
        elif kind in _STEPS and not fused:
            steps.append(_STEPS[kind](part))
        else:
            raise BundleError(
                f"tokenizer.json: decoder {json.dumps(part)} is not supported here; supported: none, "
                f"{', '.join(sorted(_STEPS))}, and Fuse with a Strip of the start after them"
            )
    return steps, strip


def _spaced(token: str, first: bool) -> str:
    """No decoder: tokens are words, joined by one space."""
    return token if first else f" {token}"


def _read_byte_level(_: Mapping[str, Any]) -> Step:
    def step(token: str, first: bool) -> str:
        try:
            return bytes(_BYTE_OF[character] for character in token).decode("utf-8", "surrogateescape")
        except KeyError:  # an added token, written as it is
            return token

    return step


def _read_byte_fallback(_: Mapping[str, Any]) -> Step:
    def step(token: str, first: bool) -> str:
        match = _BYTE_TOKEN.fullmatch(token)
        return bytes.fromhex(match[1]).decode("utf-8", "surrogateescape") if match else token

    return step


def _read_replace(part: Mapping[str, Any]) -> Step:
    old, new = part["pattern"].get("String"), part["content"]
    if not old:
        raise BundleError(
            f"tokenizer.json: decoder {json.dumps(part)} replaces by regex; only by string is supported"
        )

    def step(token: str, first: bool) -> str:
        return token.replace(old, new)

    return step


def _read_metaspace(part: Mapping[str, Any]) -> Step:
    mark = part["replacement"]
    at_start = " " if part["prepend_scheme"] == "never" else ""

    def step(token: str, first: bool) -> str:
        return token.replace(mark, at_start if first else " ")

    return step


_STEPS: Mapping[str, Callable[[Mapping[str, Any]], Step]] = {
    "ByteFallback": _read_byte_fallback,
    "ByteLevel": _read_byte_level,
    "Metaspace": _read_metaspace,
    "Replace": _read_replace,
}
