"""Segments: where one ends. Boundary is the rule that a bundle names, Segmenter the rule over one vocabulary.

It knows ids and the bytes they stand for; it knows no model and not who writes. Where a segment ends depends on its
own tokens alone, not on what stood before it, and a cut never falls inside a token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from semspec.runtime.errors import ConfigError

__all__ = ["BOUNDARY_KINDS", "Boundary", "Segment", "Segmenter"]

BOUNDARY_KINDS = ("blank-line", "newline")


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """Where a segment ends: with the first token, at or after the `min_tokens`-th, that completes a line (`newline`)
    or a blank line (`blank-line`); at the cap anyway.

    A larger `min_tokens` or `max_tokens` (the cap) makes segments longer: fewer target passes, more at stake
    in each decision. Source: newline 12/64 was measured on small chat models, blank-line 500 is the paper's.
    Raises ConfigError for an unknown kind or numbers out of order.
    """

    kind: str = "newline"
    min_tokens: int = 12
    max_tokens: int = 64

    def __post_init__(self) -> None:
        if self.kind not in BOUNDARY_KINDS:
            raise ConfigError(f"boundary kind must be one of {', '.join(BOUNDARY_KINDS)}, got {self.kind!r}")
        if not 1 <= self.min_tokens <= self.max_tokens:
            raise ConfigError(
                f"min_tokens must be between 1 and max_tokens ({self.max_tokens}), got {self.min_tokens}"
            )


class Segmenter:
    """A boundary over one vocabulary.

    token_bytes: id -> the bytes it adds to a text (Tokenizer.token_bytes); asked once an id. stop_ids: end a segment
    wherever they come, for nothing can follow them.

    >>> segmenter = Segmenter(Boundary(kind="newline", min_tokens=2, max_tokens=4), [b"a", b".\\n"].__getitem__)
    >>> [segmenter.length(ids) for ids in ([0, 1, 0], [1, 0, 1, 1], [0, 0, 0, 0, 0], [0])]
    [2, 3, 4, None]
    """

    def __init__(
        self, boundary: Boundary, token_bytes: Callable[[int], bytes], stop_ids: Collection[int] = ()
    ) -> None:
        self.boundary, self.stop_ids = boundary, frozenset(stop_ids)
        self._token_bytes = token_bytes
        self._looks: dict[int, _Look] = {}

    def begin(self) -> Segment:
        """A new segment, without a token yet."""
        return Segment(self)

    def length(self, ids: Sequence[int]) -> int | None:
        """How many of `ids`, from their first on, are a whole segment; None while it is not over."""
        segment = self.begin()
        return next((n for n, token in enumerate(ids, 1) if segment.push(token)), None)

    def look(self, token: int) -> _Look:
        """What `token` does to lines."""
        if token not in self._looks:
            self._looks[token] = _look(self._token_bytes(token))
        return self._looks[token]


class Segment:
    """A segment as it is written, token by token. n: tokens so far."""

    def __init__(self, segmenter: Segmenter) -> None:
        self.n = 0
        self._segmenter = segmenter
        self._at_line_start = False  # nothing but blanks since a newline

    def push(self, token: int) -> bool:
        """Take the next token; whether the segment ends with it."""
        boundary, look = self._segmenter.boundary, self._segmenter.look(token)
        self.n += 1
        if boundary.kind == "newline":
            over = look.newline
        else:
            over = look.blank_line or (self._at_line_start and look.blanks_then_newline)
        self._at_line_start = look.newline_then_blanks or (self._at_line_start and look.blanks)
        return (
            (over and self.n >= boundary.min_tokens)
            or self.n >= boundary.max_tokens
            or token in self._segmenter.stop_ids
        )


class _Look(NamedTuple):
    """Of the bytes of a token: has a newline; has a blank line; begins so, ends so, is so. Blanks may be none."""

    newline: bool
    blank_line: bool
    blanks_then_newline: bool
    newline_then_blanks: bool
    blanks: bool


def _look(text: bytes) -> _Look:
    return _Look(
        newline=b"\n" in text,
        blank_line=re.search(rb"\n[ \t\r]*\n", text) is not None,
        blanks_then_newline=re.match(rb"[ \t\r]*\n", text) is not None,
        newline_then_blanks=re.search(rb"\n[ \t\r]*\Z", text) is not None,
        blanks=re.fullmatch(rb"[ \t\r]*", text) is not None,
    )
