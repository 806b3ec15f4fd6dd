"""Drafters: who proposes tokens, and the laws they were drawn from.

A drafter sees committed tokens only and promises nothing about quality; proposals may be empty. The Drafter
protocol is all the loop knows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np

from semspec.runtime.chooser import Chooser
from semspec.runtime.model import LanguageModel, common_prefix
from semspec.runtime.records import Draft, Law
from semspec.runtime.sampling import sample
from semspec.runtime.segments import Segmenter

__all__ = ["Drafter", "ModelDrafter", "NgramDrafter"]

NGRAM_SIZES = (4, 3, 2, 1)
NGRAM_LIMIT = 16


class Drafter(Protocol):
    """Proposes what may come next."""

    @property
    def note(self) -> str:
        """What the user should know of this request, such as why drafting stopped; empty if nothing."""
        ...

    def start(self, prompt: Sequence[int]) -> None:
        """Begin a request whose committed tokens are `prompt`."""
        ...

    def propose(self, limit: int, rng: np.random.Generator) -> Draft:
        """At most `limit` tokens to follow the committed ones; none is an answer too."""
        ...

    def commit(self, ids: Sequence[int]) -> None:
        """These follow the committed tokens now, whatever was proposed."""
        ...


class ModelDrafter:
    """A small model. Its cache holds a prefix of the committed tokens and takes what is missing when it drafts.

    chooser: the request's own, so that drafts are drawn under the same penalties, processors and filters.
    stop_ids: end a draft, since nothing can follow them. segmenter: where given, a draft ends where a segment does,
    and begins one. vocab_size: ids the model has, None for all of the chooser's; it drafts no more once the text has
    another. The same where its context is full.
    """

    def __init__(
        self,
        model: LanguageModel,
        chooser: Chooser,
        *,
        stop_ids: Collection[int] = (),
        segmenter: Segmenter | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.model, self.chooser, self.note = model, chooser, ""
        self._stop_ids, self._segmenter = stop_ids, segmenter
        self._vocab_size = chooser.vocab_size if vocab_size is None else vocab_size
        self._committed: list[int] = []
        self._proposed: tuple[int, ...] = ()

    def start(self, prompt: Sequence[int]) -> None:
        self._committed, self._proposed, self.note = list(prompt), (), ""
        self.model.rewind(common_prefix(self.model.tokens, prompt[:-1]))

    def propose(self, limit: int, rng: np.random.Generator) -> Draft:
        ids: list[int] = []
        laws: list[Law] = []
        unread = self._committed[self.model.length :]
        segment = None if self._segmenter is None else self._segmenter.begin()
        for _ in range(min(limit, self._room(unread))):
            law = self.chooser.law(self.model.forward(unread).logits[0])
            token = sample(law, rng)
            ids.append(token)
            laws.append(law)
            unread = [token]
            self.chooser.accept(token)
            if token in self._stop_ids or (segment is not None and segment.push(token)):
                break
        self.chooser.rollback(len(ids))
        self._proposed = tuple(ids)
        return Draft(ids=self._proposed, laws=tuple(laws))

    def commit(self, ids: Sequence[int]) -> None:
        agreed = 0
        for ours, theirs in zip(self._proposed, ids, strict=False):
            if ours != theirs:
                break
            agreed += 1
        # the last proposal was never read, so what is remembered may be shorter than what was agreed; the last
        # committed token is left to be read, for its logits are wanted next
        agreed = min(agreed, len(ids) - 1)
        self.model.rewind(min(self.model.length, len(self._committed) + agreed))
        self._committed += ids
        self._proposed = ()

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


class NgramDrafter:
    """Looks the last 4, 3, 2 or 1 tokens up in prompt and output, and proposes what followed them last time."""

    def __init__(self) -> None:
        self.note = ""
        self._committed: list[int] = []
        self._followed_at: dict[tuple[int, ...], int] = {}

    def start(self, prompt: Sequence[int]) -> None:
        self._committed, self._followed_at = [], {}
        self.commit(prompt)

    def propose(self, limit: int, rng: np.random.Generator) -> Draft:
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
