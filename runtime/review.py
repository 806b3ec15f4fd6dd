"""Review: what the target makes of a draft, read from its one pass. TargetLaws: its laws along the draft, made lazily.

It knows one target and the memory of its pass; it decides nothing (acceptance.py, judging.py). Both are of use only
until the verdict: what a pass returned belongs to the model, and the history that laws depend on is taken back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from semspec.runtime.chooser import Chooser
from semspec.runtime.model import LanguageModel
from semspec.runtime.records import Draft, Floats, Law
from semspec.runtime.stats import Ledger

__all__ = ["Review", "TargetLaws"]

CUT_OFF = Law(ids=np.zeros(1, np.int64), probs=np.ones(1))


class TargetLaws(Sequence[Law]):
    """The target's laws along a draft of n tokens, n + 1 of them, each with the history of its own place.

    logits: (n + 1, V), cropped to the ids that can be drawn. Behind a stop id any law will do, for what is drawn from
    it is cut off; a grammar that has ended is not asked.
    """

    def __init__(
        self, chooser: Chooser, logits: Floats, ids: Sequence[int], stop_ids: Collection[int]
    ) -> None:
        self.logits = logits[:, : chooser.vocab_size]
        self._chooser, self._ids, self._stop_ids = chooser, ids, stop_ids
        self._made: list[Law] = []
        self._n_told = 0

    def __len__(self) -> int:
        return len(self._ids) + 1

    def __getitem__(self, i: int) -> Law:  # type: ignore[override]
        if not 0 <= i < len(self):
            raise IndexError(f"a draft of {len(self._ids)} tokens has laws 0..{len(self._ids)}, got {i}")
        while len(self._made) <= i:
            self._made.append(self._make(len(self._made)))
        return self._made[i]

    def hold(self) -> None:
        """Copy what later passes of the model would overwrite."""
        self.logits = self.logits.copy()

    def close(self) -> None:
        """Take back the drafted tokens that the chooser was told about."""
        self._chooser.rollback(self._n_told)

    def _make(self, place: int) -> Law:
        if place:
            token = self._ids[place - 1]
            if token in self._stop_ids:
                return CUT_OFF
            self._chooser.accept(token)
            self._n_told += 1
        return self._chooser.law(self.logits[place])


class Review:
    """A draft y_1..y_n and what the target says of it, for a judge.

    ids: the drafted tokens. q: the laws they were drawn from. p: the target's laws at the same places, and one behind
    the draft; made when read. target: has just read the draft and remembers it.
    """

    def __init__(self, draft: Draft, p: TargetLaws, target: LanguageModel, ledger: Ledger) -> None:
        self.ids, self.q, self.p = draft.ids, draft.laws, p
        self._target, self._ledger = target, ledger

    @property
    def logits(self) -> Floats:
        """(n + 1, V): row i is the target's own word on y_{i+1}, before penalties, processors and temperature.

        Read-only by agreement. V: the ids of the tokenizer.
        """
        return self.p.logits

    def ask(self, ids: Sequence[int]) -> Floats | None:
        """Logits (V,) of what the target would say after the whole draft and then `ids`; it forgets them again.

        None where its context has no room for them. A pass of the target like any other, and counted as one.
        """
        if len(ids) > self._target.max_context - self._target.length:
            return None
        self.p.hold()
        read = self._target.length
        answer = self._target.forward(ids).logits[0, : self.logits.shape[1]].copy()
        self._target.rewind(read)
        self._ledger.add_question()
        return answer
