"""Segments as one model writes or reads them, and what it makes of them: ids in, Written out.

The samples of one context, and what others wrote there, share the passes over what they have in common: a tree of
tokens, walked depth first, the cache rewound at every fork. Each sample draws from chances of its own, so it is the one
that would have been written alone, in whatever passes its rows are read: what another wrote is read many rows at a
time, and a row that would be read alone takes a guess along. Half of eight samples of a small model are alike, most
begin alike, and the target often says what the draft said (measured). It knows no text and no files.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from semspec.calibration.guesses import Guesses
from semspec.runtime.config import SamplingParams
from semspec.runtime.errors import ConfigError
from semspec.runtime.model import LanguageModel, common_prefix
from semspec.runtime.readings import Reading, Row, TokenSignals, sum_up
from semspec.runtime.records import Floats, Forward
from semspec.runtime.sampling import sample, warp
from semspec.runtime.segments import Segment, Segmenter

__all__ = ["Author", "Written", "draw_segment", "write_segments"]

MOST_AHEAD = 64  # tokens read ahead in one pass: bounds the logits that a pass gives, and that an engine keeps room for

Author: TypeAlias = np.random.Generator | tuple[int, ...] | None
"""Where a segment's tokens come from: chances, a segment that another wrote, or None for the likeliest ones."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Written:
    """A segment and what a model made of it."""

    ids: tuple[int, ...]
    reading: Reading


def write_segments(
    model: LanguageModel,
    context: Sequence[int],
    authors: Sequence[Author],
    *,
    segmenter: Segmenter,
    sampling: SamplingParams,
    n_ids: int,
) -> list[Written]:
    """One segment after `context` for each of `authors`, and what `model` makes of it.

    A generator: drawn with `sampling` from its chances; None: the greedy one; ids: this very segment. Pooled and
    signals are over the rows that predicted its tokens: the one of the context's last token and those of all tokens but
    the segment's last. n_ids: ids that can be drawn. The model is left with the context, all but its last token. Equal
    segments have one and the same Reading. Not guaranteed: the last bits of a pooled sum, which is added up in the
    passes that all of `authors` together need. Raises ConfigError for ids that are no whole segment, and where the
    context and a segment are longer than what the model can remember; BackendError for logits that cannot be used.
    """
    for author in authors:
        if isinstance(author, tuple) and segmenter.length(author) != len(author):
            raise ConfigError(
                f"{len(author)} ids are not one whole segment; give one that ends where segments end"
            )
    start = _recall(model, context)
    tree = _Tree(model, context, authors, segmenter=segmenter, sampling=sampling, n_ids=n_ids)
    tree.grow()
    model.rewind(start)
    return [written for written in tree.found if written is not None]


def draw_segment(
    model: LanguageModel,
    context: Sequence[int],
    rng: np.random.Generator,
    *,
    segmenter: Segmenter,
    sampling: SamplingParams,
    n_ids: int,
) -> tuple[int, ...]:
    """The segment that write_segments draws from `rng`, for who wants no reading of it. Raises as write_segments.

    The model is left with the context and the segment, all but its last token.
    """
    _recall(model, context)
    text, guesses, segment, over = list(context), Guesses(context), segmenter.begin(), False
    while not over:
        guess = _guess(guesses, text, segment, room=model.max_context - model.length - 1)
        passed = model.forward([text[-1], *guess], rows=range(1 + len(guess)))
        for place, logits in enumerate(passed.logits):
            token = sample(warp(logits[:n_ids], sampling), rng)
            guesses.learn(text, [token])
            text.append(token)
            over = segment.push(token)
            if over or guess[place : place + 1] != (token,):
                break
        model.rewind(len(text) - 1)
    return tuple(text[len(context) :])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Node:
    """A begun segment that some authors have in common.

    tokens: what the model thinks of its ids. pooled: the sum over its first `n_pooled` rows, None for none; all later
    ones are read again, since a pass gives one sum. over: it is whole.
    """

    ids: tuple[int, ...]
    tokens: tuple[TokenSignals, ...]
    pooled: Floats | None
    n_pooled: int
    segment: Segment
    over: bool
    authors: tuple[int, ...]


class _Tree:
    """The segments of all authors after one context, which the model remembers, all but its last token.

    found: by author, as far as they are written.
    """

    def __init__(
        self,
        model: LanguageModel,
        context: Sequence[int],
        authors: Sequence[Author],
        *,
        segmenter: Segmenter,
        sampling: SamplingParams,
        n_ids: int,
    ) -> None:
        self.found: list[Written | None] = [None] * len(authors)
        self._model, self._context, self._authors = model, tuple(context), authors
        self._start, self._sampling, self._n_ids = model.length, sampling, n_ids
        self._guesses = Guesses(context)
        for author in authors:
            if isinstance(author, tuple):
                self._guesses.learn(context, author)
        self._root = _Node(
            ids=(),
            tokens=(),
            pooled=None,
            n_pooled=0,
            segment=segmenter.begin(),
            over=False,
            authors=tuple(range(len(authors))),
        )

    def grow(self) -> None:
        """Write all."""
        stack = [self._root] if self._authors else []
        while stack:
            node = stack.pop()
            if node.over:
                self._finish(node)
            else:
                # next is who goes on behind all that was read, since others read over it; of these the greedy one,
                # then by number: what is likely is there to be guessed from
                stack += sorted(self._branch(node), key=lambda branch: (branch.n_pooled, -branch.authors[0]))

    def _branch(self, node: _Node) -> list[_Node]:
        """One pass: over the node's last token, over rows that are not pooled yet, and ahead as far as can be told."""
        ahead = self._ahead(node)
        passed = self._read(node, (*node.ids, *ahead), n_rows=1 + len(ahead))
        found = list[_Node]()
        for place, logits in enumerate(passed.logits):
            row, is_last = Row(logits[: self._n_ids]), place == len(ahead)
            pooled, n_pooled = node.pooled, node.n_pooled
            if is_last:
                assert passed.pooled is not None  # asked for
                pooled, n_pooled = passed.pooled.copy(), len(node.ids) + 1
            following = None
            for token, authors in self._draw(row, node.authors, len(node.ids)).items():
                segment = copy.copy(node.segment)
                branch = _Node(
                    ids=(*node.ids, token),
                    tokens=(*node.tokens, row.of(token)),
                    pooled=pooled,
                    n_pooled=n_pooled,
                    over=segment.push(token),
                    segment=segment,
                    authors=authors,
                )
                self._guesses.learn((*self._context[-4:], *node.ids), [token])
                if not is_last and token == ahead[place]:
                    following = branch
                else:
                    found.append(branch)
            if following is None:
                return found
            node = following
        return found

    def _ahead(self, node: _Node) -> tuple[int, ...]:
        """Tokens behind the node's that are read in the same pass: what all given segments here say next, up to where
        they part or one ends; else a guess, where a row would be read alone."""
        given = [author[len(node.ids) :] for author in self._given(node)]
        if given:
            shortest = min(map(len, given)) - 1
            n = next((n for n in range(shortest) if any(ids[n] != given[0][n] for ids in given)), shortest)
            return given[0][: min(n, MOST_AHEAD)]
        if node.n_pooled < len(node.ids):
            return ()
        room = self._model.max_context - self._start - len(node.ids) - 1
        return _guess(self._guesses, (*self._context, *node.ids), node.segment, room=room)

    def _given(self, node: _Node) -> list[tuple[int, ...]]:
        authors = [self._authors[number] for number in node.authors]
        return [author for author in authors if isinstance(author, tuple)]

    def _read(self, node: _Node, ids: tuple[int, ...], *, n_rows: int) -> Forward:
        """A pass that ends with the last of `ids`, with its last rows of logits."""
        unread = (self._context[-1], *ids)[node.n_pooled :]
        self._model.rewind(self._start + node.n_pooled)
        rows = range(len(unread) - n_rows, len(unread))
        return self._model.forward(
            unread, rows=rows, pool=np.ones(len(unread), np.float32), pooled=node.pooled
        )

    def _draw(self, row: Row, authors: Sequence[int], place: int) -> dict[int, tuple[int, ...]]:
        """Next token -> the authors who go on with it."""
        drawn: dict[int, tuple[int, ...]] = {}
        law = None
        for number in authors:
            author = self._authors[number]
            if author is None:
                token = row.best
            elif isinstance(author, tuple):
                token = author[place]
            else:
                law = warp(row.logits, self._sampling) if law is None else law
                token = sample(law, author)
            drawn[token] = (*drawn.get(token, ()), number)
        return drawn

    def _finish(self, node: _Node) -> None:
        pooled = node.pooled
        if node.n_pooled < len(node.ids):
            pooled = self._read(node, node.ids[:-1], n_rows=0).pooled
        assert pooled is not None  # of at least one row
        written = Written(ids=node.ids, reading=_reading(pooled, node.tokens))
        for number in node.authors:
            self.found[number] = written


def _recall(model: LanguageModel, context: Sequence[int]) -> int:
    """Bring the model to the context, all but its last token; how many tokens that is."""
    *known, _ = context
    model.rewind(common_prefix(model.tokens, known))
    if len(known) > model.length:
        model.forward(known[model.length :], rows=())
    return len(known)


def _guess(guesses: Guesses, text: Sequence[int], segment: Segment, *, room: int) -> tuple[int, ...]:
    """A token to read with the last of `text`; none where nothing like it was seen, where it would end the segment, or
    without `room`, which is of rows behind the last."""
    token = guesses.after(text)
    if token is None or room < 1 or copy.copy(segment).push(token):
        return ()
    return (token,)


def _reading(pooled: Floats, tokens: Sequence[TokenSignals]) -> Reading:
    return Reading(pooled=pooled / np.float32(len(tokens)), signals=sum_up(tokens))
