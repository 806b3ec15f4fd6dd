"""Segments: where one ends. Boundary is the rule that a bundle names, Segmenter the rule over one vocabulary.

It knows ids and the bytes they stand for; it knows no model and not who writes. What ends a sentence is sentences.py's.
Where a segment ends depends on its own tokens alone, not on what stood before it, and a cut never falls inside a token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from semspec.runtime.errors import ConfigError
from semspec.runtime.sentences import START, read_on

__all__ = ["BOUNDARY_KINDS", "Boundary", "Segment", "Segmenter", "parse_boundary"]

BOUNDARY_KINDS = ("blank-line", "newline", "sentence", "ids")

_SPANS = {"blank-line": (1, 500), "newline": (12, 64), "sentence": (12, 64), "ids": (1, 500)}
_WRITTEN = re.compile(r"(?P<kind>[a-z-]+)(?:=(?P<ids>\d+(?:,\d+)*))?(?::(?P<low>\d+)-(?P<high>\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """Where a segment ends: with the first token, at or after the `min_tokens`-th, that completes a line (`newline`),
    a blank line (`blank-line`), a sentence or a line (`sentence`, see sentences.py), or is one of `ids` (`ids`); at
    the cap anyway.

    A larger `min_tokens` or `max_tokens` (the cap) makes segments longer: fewer target passes, more at stake
    in each decision. Source: newline 12/64 was measured on small chat models, blank-line 500 is the paper's, whose own
    rule is a list of ids. Raises ConfigError for an unknown kind, numbers out of order, and ids where they do not
    belong, or are not ascending.
    """

    kind: str = "newline"
    min_tokens: int = 12
    max_tokens: int = 64
    ids: tuple[int, ...] = field(default=(), metadata={"left_out_by_default": True})

    def __post_init__(self) -> None:
        if self.kind not in BOUNDARY_KINDS:
            raise ConfigError(f"boundary kind must be one of {', '.join(BOUNDARY_KINDS)}, got {self.kind!r}")
        if not 1 <= self.min_tokens <= self.max_tokens:
            raise ConfigError(
                f"min_tokens must be between 1 and max_tokens ({self.max_tokens}), got {self.min_tokens}"
            )
        if bool(self.ids) != (self.kind == "ids"):
            raise ConfigError(
                f"a boundary of kind 'ids' has token ids and no other has, got {len(self.ids)} for {self.kind!r}"
            )
        if self.ids and (self.ids[0] < 0 or list(self.ids) != sorted(set(self.ids))):
            raise ConfigError(f"boundary ids must ascend from 0, got {', '.join(map(str, self.ids))[:80]}")

    def __str__(self) -> str:
        """As parse_boundary reads it."""
        ids = f"={','.join(map(str, self.ids))}" if self.ids else ""
        return f"{self.kind}{ids}:{self.min_tokens}-{self.max_tokens}"


def parse_boundary(text: str) -> Boundary:
    """A boundary as it is written in a command: `KIND`, `KIND:MIN-MAX`, `ids=ID,ID,..` or `ids=ID,ID,..:MIN-MAX`.

    Without MIN-MAX: 12 to 64 tokens of `newline` and `sentence`, 1 to 500 of `blank-line` and `ids`. Ids may stand in
    any order. Raises ConfigError.

    >>> str(parse_boundary("ids=382,271")), parse_boundary("newline") == Boundary()
    ('ids=271,382:1-500', True)
    """
    found = _WRITTEN.fullmatch(text)
    if found is None or found["kind"] not in BOUNDARY_KINDS:
        raise ConfigError(
            f"a boundary is written KIND or KIND:MIN-MAX, with KIND one of blank-line, newline, sentence or "
            f"ids=ID,ID,..; got {text[:80]!r}"
        )
    low, high = _SPANS[found["kind"]] if found["low"] is None else (int(found["low"]), int(found["high"]))
    ids = tuple(sorted({int(part) for part in found["ids"].split(",")})) if found["ids"] else ()
    return Boundary(kind=found["kind"], min_tokens=low, max_tokens=high, ids=ids)


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
        self.boundary, self.stop_ids, self.end_ids = boundary, frozenset(stop_ids), frozenset(boundary.ids)
        self._token_bytes = token_bytes
        self._bytes: dict[int, bytes] = {}
        self._looks: dict[int, _Look] = {}

    def begin(self) -> Segment:
        """A new segment, without a token yet."""
        return Segment(self)

    def length(self, ids: Sequence[int]) -> int | None:
        """How many of `ids`, from their first on, are a whole segment; None while it is not over."""
        segment = self.begin()
        return next((n for n, token in enumerate(ids, 1) if segment.push(token)), None)

    def bytes_of(self, token: int) -> bytes:
        """What `token` adds to a text."""
        if token not in self._bytes:
            self._bytes[token] = self._token_bytes(token)
        return self._bytes[token]

    def look(self, token: int) -> _Look:
        """What `token` does to lines."""
        if token not in self._looks:
            self._looks[token] = _look(self.bytes_of(token))
        return self._looks[token]


class Segment:
    """A segment as it is written, token by token; copy.copy makes another that goes on from here. n: tokens so far."""

    def __init__(self, segmenter: Segmenter) -> None:
        self.n = 0
        self._segmenter = segmenter
        self._stopped = False
        self._at_line_start = False  # nothing but blanks since a newline
        self._sentence = START

    def push(self, token: int) -> bool:
        """Take the next token; whether the segment ends with it."""
        boundary = self._segmenter.boundary
        self.n += 1
        self._stopped = token in self._segmenter.stop_ids
        over = self._completes(token)
        return (over and self.n >= boundary.min_tokens) or self.n >= boundary.max_tokens or self._stopped

    def following(self) -> Segment | None:
        """The one behind this, which is over; None where it ended with a stop."""
        return None if self._stopped else self._segmenter.begin()

    @property
    def cap(self) -> int:
        """Most tokens it may have."""
        return self._segmenter.boundary.max_tokens

    def _completes(self, token: int) -> bool:
        """Whether `token` completes what the boundary is about."""
        kind = self._segmenter.boundary.kind
        if kind == "ids":
            return token in self._segmenter.end_ids
        if kind == "sentence":
            self._sentence, ends = read_on(self._sentence, self._segmenter.bytes_of(token))
            return ends
        look = self._segmenter.look(token)
        if kind == "newline":
            return look.newline
        over = look.blank_line or (self._at_line_start and look.blanks_then_newline)
        self._at_line_start = look.newline_then_blanks or (self._at_line_start and look.blanks)
        return over


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
