"""Drafters: who proposes tokens, and the laws they were drawn from.

A drafter sees committed tokens only and promises nothing about quality; proposals may be empty. The Drafter
protocol is all the loop knows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from semspec.runtime.chooser import Chooser
from semspec.runtime.model import LanguageModel, common_prefix
from semspec.runtime.pace import Pace
from semspec.runtime.pooled import Pooled
from semspec.runtime.readings import NO_SIGNALS, NO_STATES, Reading, Row, TokenSignals, sum_up
from semspec.runtime.records import Draft, Law
from semspec.runtime.sampling import sample
from semspec.runtime.segments import Segment

__all__ = ["Drafter", "ModelDrafter", "NgramDrafter"]

NGRAM_SIZES = (4, 3, 2, 1)
NGRAM_LIMIT = 16
EMPTY = Draft(ids=(), laws=())


class Drafter(Protocol):
    """Proposes what may come next."""

    @property
    def note(self) -> str:
        """What the user should know of this request, such as why drafting stopped; empty if nothing."""
        ...

    def start(self, prompt: Sequence[int]) -> None:
        """Begin a request whose committed tokens are `prompt`."""
        ...

    def propose(
        self,
        limit: int,
        rng: np.random.Generator,
        *,
        segment: Segment | None = None,
        judged: bool = False,
        segments: int = 1,
    ) -> Draft:
        """At most `limit` tokens to follow the committed ones; none is an answer too.

        segment: begun by the committed tokens; nothing behind its end is of use, or behind that of the last of
        `segments`. It may be written on. judged: as whole segments, so what their author makes of each may be asked
        for.
        """
        ...

    def commit(self, ids: Sequence[int]) -> None:
        """These follow the committed tokens now, whatever was proposed: all of a round at once."""
        ...


class ModelDrafter:
    """A small model. Its cache holds a prefix of the committed tokens and takes what is missing when it drafts.

    chooser: the request's own, so that drafts are drawn under the same penalties, processors and filters.
    stop_ids: end a draft, since nothing can follow them. vocab_size: ids the model has, None for all of the chooser's;
    it drafts no more once the text has another. The same where its context is full. states, signals: read these of
    drafts that are judged as segments. pace: how long those get, and how many.
    """

    def __init__(
        self,
        model: LanguageModel,
        chooser: Chooser,
        *,
        stop_ids: Collection[int] = (),
        vocab_size: int | None = None,
        states: bool = False,
        signals: bool = False,
        pace: Pace | None = None,
    ) -> None:
        self.model, self.chooser, self.note = model, chooser, ""
        self._stop_ids = stop_ids
        self._vocab_size = chooser.vocab_size if vocab_size is None else vocab_size
        self._states, self._signals, self._pace = states, signals, pace or Pace()
        self._committed: list[int] = []
        self._proposed = EMPTY
        self._paced = False  # what was proposed is segments, or the beginning of one

    def start(self, prompt: Sequence[int]) -> None:
        self._committed, self._proposed, self.note = list(prompt), EMPTY, ""
        self.model.rewind(common_prefix(self.model.tokens, prompt[:-1]))

    def propose(
        self,
        limit: int,
        rng: np.random.Generator,
        *,
        segment: Segment | None = None,
        judged: bool = False,
        segments: int = 1,
    ) -> Draft:
        unread = self._committed[self.model.length :]
        room = min(limit, self._room(unread))
        written = _Written(
            self.chooser.vocab_size, states=judged and self._states, signals=judged and self._signals
        )
        end = self._end(0, limit, segment) if judged else room
        while len(written.ids) < min(end, room):
            row, last = written.notes.read(self.model, unread), False
            if judged and self._unsure(written, segments):
                if written.ids and not written.n_begun:
                    break  # a segment is begun by the next round, which may go on with it
                last, written.sure = bool(written.n_begun), False
            law = self.chooser.law_of(row)
            token = sample(law, rng)
            written.add(token, law)
            unread = [token]
            self.chooser.accept(token)
            if token in self._stop_ids:
                break
            if segment is not None and segment.push(token):
                written.end_segment()
                n, segment = len(written.ends), segment.following()
                if n >= segments or segment is None or not self._pace.goes_on(n, sure=written.sure):
                    break
                end = self._end(len(written.ids), limit, segment)
            if last:
                break
        self.chooser.rollback(len(written.ids))
        self._proposed, self._paced = written.draft(), judged and bool(written.ids)
        return self._proposed

    def commit(self, ids: Sequence[int]) -> None:
        agreed = common_prefix(self._proposed.ids, ids)
        start = 0
        for end in self._proposed.cuts if self._paced else ():
            whole = end in self._proposed.ends
            self._pace.saw(drafted=end - start, kept=min(agreed, end) - start, whole=whole)
            if agreed < end:
                break  # of what stands behind, nothing was looked at
            start = end
        # the last proposal was never read, so what is remembered may be shorter than what was agreed; the last
        # committed token is left to be read, for its logits are wanted next
        agreed = min(agreed, len(ids) - 1)
        self.model.rewind(min(self.model.length, len(self._committed) + agreed))
        self._committed += ids
        self._proposed, self._paced = EMPTY, False

    def _end(self, start: int, limit: int, segment: Segment | None) -> int:
        """Where a piece that begins behind `start` tokens is broken off at the latest, by the pace."""
        left = limit - start
        return start + self._pace.limit(left if segment is None else min(segment.cap, left))

    def _unsure(self, written: _Written, segments: int) -> bool:
        """Whether the draft ends with the row just read, or would if it were not the first, which matters to later
        segments."""
        looks = self._pace.reads_rows and (bool(written.ids) or segments > 1)
        return looks and self._pace.ends(written.notes.row)

    def _room(self, unread: Sequence[int]) -> int:
        """Tokens that can be drafted; none, and a note, where the model cannot read the text any more."""
        context = self.model.max_context
        unknown = next((token for token in unread if token >= self._vocab_size), None)
        if unknown is not None:
            self.note = f"drafting stopped at id {unknown}, which the draft model does not have"
            return 0
        if len(self._committed) > context:
            self.note = f"drafting stopped at {context} tokens, the draft model's context"
            return 0
        return context - len(self._committed) + 1


class _Notes:
    """What a model makes of one piece of its own draft, as far as it is asked for: every row that is read is one that a
    token is drawn from, but for the first of a piece that is not begun."""

    def __init__(self, vocab_size: int, *, states: bool, signals: bool) -> None:
        self._vocab_size, self._states, self._signals = vocab_size, states, signals
        self.row = Row(np.zeros(0, np.float32))  # the one just read
        self._sum: Pooled | None = None  # where the passes make it, on a device too
        self._tokens: list[TokenSignals] = []

    def read(self, model: LanguageModel, unread: Sequence[int]) -> Row:
        """The row behind `unread`, which the model reads."""
        pool = None
        if self._states:
            pool = np.zeros(len(unread), np.float32)
            pool[-1] = 1
        found = model.forward(unread, pool=pool, pooled=self._sum)
        self._sum = found.states
        self.row = found.rows.cut(self._vocab_size)[0]
        return self.row

    def add(self, token: int) -> None:
        """Drawn from the row just read."""
        if self._signals:
            self._tokens.append(self.row.of(token))

    def reading(self, n_tokens: int) -> Reading | None:
        """Of all it was told of; None where nothing was asked for, or nothing drafted."""
        if not n_tokens or not (self._states or self._signals):
            return None
        return Reading(
            pooled=NO_STATES if self._sum is None else self._sum.values / np.float32(n_tokens),
            signals=sum_up(self._tokens) if self._signals else NO_SIGNALS,
        )


class _Written:
    """A draft as it is written: where segments ended, and notes of the piece in hand. sure: its model was, of all."""

    def __init__(self, vocab_size: int, *, states: bool, signals: bool) -> None:
        self.ids: list[int] = []
        self.ends: list[int] = []
        self.sure = True
        self._laws: list[Law] = []
        self._readings: list[Reading] = []
        self._new_notes = partial(_Notes, vocab_size, states=states, signals=signals)
        self.notes = self._new_notes()

    def add(self, token: int, law: Law) -> None:
        """Drawn from `law`, which is of the row just read."""
        self.ids.append(token)
        self._laws.append(law)
        self.notes.add(token)

    @property
    def n_begun(self) -> int:
        """Tokens of the piece in hand."""
        return len(self.ids) - (self.ends[-1] if self.ends else 0)

    def end_segment(self) -> None:
        """The last token ended one; what follows is another piece."""
        self._note()
        self.ends.append(len(self.ids))
        self.notes = self._new_notes()

    def draft(self) -> Draft:
        """All of it."""
        self._note()
        return Draft(
            ids=tuple(self.ids),
            laws=tuple(self._laws),
            ends=tuple(self.ends),
            readings=tuple(self._readings),
        )

    def _note(self) -> None:
        """Keep what was noted of the piece in hand."""
        reading = self.notes.reading(self.n_begun)
        if reading is not None:
            self._readings.append(reading)


class NgramDrafter:
    """Looks the last 4, 3, 2 or 1 tokens up in prompt and output, and proposes what followed them last time."""

    def __init__(self) -> None:
        self.note = ""
        self._committed: list[int] = []
        self._followed_at: dict[tuple[int, ...], int] = {}

    def start(self, prompt: Sequence[int]) -> None:
        self._committed, self._followed_at = [], {}
        self.commit(prompt)

    def propose(
        self,
        limit: int,
        rng: np.random.Generator,
        *,
        segment: Segment | None = None,
        judged: bool = False,
        segments: int = 1,
    ) -> Draft:
        for size in NGRAM_SIZES:
            at = self._followed_at.get(tuple(self._committed[-size:]))
            if at is not None:
                ids = tuple(self._committed[at : at + min(limit, NGRAM_LIMIT)])
                return Draft(ids=ids, laws=tuple(_certain(token) for token in ids))
        return Draft(ids=(), laws=())

    def commit(self, ids: Sequence[int]) -> None:
        for token in ids:
            # what ends just before this token has a follower from now on; the newest one wins
            end = len(self._committed)
            for size in NGRAM_SIZES:
                if size <= end:
                    self._followed_at[tuple(self._committed[end - size :])] = end
            self._committed.append(token)


def _certain(token: int) -> Law:
    return Law(ids=np.array([token], np.int64), probs=np.ones(1))
