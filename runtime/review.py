"""Review: what the target makes of a draft, read from its one pass. TargetLaws: its laws along the draft, made lazily.

It knows one target and the memory of its pass; it decides nothing (acceptance.py, judging.py). Both are of use only
until the verdict: what a pass returned belongs to the model, and the history that laws depend on is taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from semspec.runtime.chooser import Chooser
from semspec.runtime.errors import ConfigError
from semspec.runtime.features import SegmentText
from semspec.runtime.model import LanguageModel
from semspec.runtime.pooled import HeldPooled, Pooled
from semspec.runtime.readings import NO_SIGNALS, NO_STATES, Reading, Signals, read_signals
from semspec.runtime.records import Draft, Floats, Law, Verdict
from semspec.runtime.rows import Rows
from semspec.runtime.stats import Ledger

__all__ = ["Review", "TargetLaws"]

CUT_OFF = Law(ids=np.zeros(1, np.int64), probs=np.ones(1))


class TargetLaws(Sequence[Law]):
    """The target's laws along a draft of n tokens, n + 1 of them, each with the history of its own place.

    rows: of `places`, ascending in 0..n; what cannot be drawn is cut off from them. places: None for all; the law of
    another place cannot be asked for. Behind a stop id any law will do, for what is drawn from it is cut off; a grammar
    that has ended is not asked.
    """

    def __init__(
        self,
        chooser: Chooser,
        rows: Rows,
        ids: Sequence[int],
        stop_ids: Collection[int],
        *,
        places: Sequence[int] | None = None,
    ) -> None:
        self.rows = rows.cut(chooser.vocab_size)
        computed = range(len(ids) + 1) if places is None else places
        self._row_at = {place: row for row, place in enumerate(computed)}
        self._chooser, self._ids, self._stop_ids = chooser, ids, stop_ids
        self._made: dict[int, Law] = {}
        self._n_told = 0

    def __len__(self) -> int:
        return len(self._ids) + 1

    def __getitem__(self, i: int) -> Law:  # type: ignore[override]
        if not 0 <= i < len(self):
            raise IndexError(f"a draft of {len(self._ids)} tokens has laws 0..{len(self._ids)}, got {i}")
        if i not in self._row_at:
            raise IndexError(
                f"of a draft of {len(self._ids)} tokens rows {[*self._row_at]} were computed, not {i}"
            )
        if i not in self._made:
            self._made[i] = self._make(i)
        return self._made[i]

    def hold(self) -> None:
        """Copy what later passes of the model would overwrite."""
        self.rows = self.rows.copy()

    def close(self) -> None:
        """Take back the drafted tokens that the chooser was told about."""
        self._chooser.rollback(self._n_told)

    def _make(self, place: int) -> Law:
        if self._told_to(place):
            return self._chooser.law_of(self.rows[self._row_at[place]])
        return CUT_OFF

    def _told_to(self, place: int) -> bool:
        """Bring the chooser to the history of `place`; False behind a stop."""
        self._chooser.rollback(max(0, self._n_told - place))
        self._n_told = min(self._n_told, place)
        for token in self._ids[self._n_told : place]:
            if token in self._stop_ids:
                return False
            self._chooser.accept(token)
            self._n_told += 1
        return True


class Review:
    """A draft y_1..y_n, in one piece, and what the target says of it, for a judge.

    ids: the drafted tokens. draft: what their author made of them, None where nobody asked. q: the laws they were drawn
    from. p: the target's laws at the same places, and one behind the draft; made when read. target: has just read the
    draft and remembers it, and n_behind drafted tokens more. states: (K, E), the mean of the target's over the rows
    that predicted the draft. n_written, n_lossy: tokens of the answer so far, and how many of them are lossy.
    """

    def __init__(
        self,
        draft: Draft,
        p: TargetLaws,
        target: LanguageModel,
        ledger: Ledger,
        *,
        states: Pooled | None = None,
        n_behind: int = 0,
        describe: Callable[[Sequence[int], Sequence[int]], SegmentText] | None = None,
        exact: Callable[[Sequence[int], Sequence[Law], Sequence[Law]], Verdict] | None = None,
    ) -> None:
        self.ids, self.q, self.p = draft.ids, draft.laws, p
        self.draft = draft.readings[0] if draft.readings else None
        self.n_written, self.n_lossy = ledger.generated_tokens, ledger.lossy_tokens
        self._target, self._ledger, self._n_behind = target, ledger, n_behind
        self._states, self._describe, self._exact = states, describe, exact
        self._signals: Signals | None = None
        self._verdict: Verdict | None = None

    @property
    def rows(self) -> Rows:
        """n + 1 of them: row i is the target's own word on y_{i+1}, before penalties, processors and temperature, over
        the ids of the tokenizer. Fewer where the request's judge reads none."""
        return self.p.rows

    @property
    def logits(self) -> Floats:
        """(n + 1, V): all of every row, read-only by agreement. A device copies them: ask `rows` where that will do."""
        return self.rows.logits

    @property
    def pooled(self) -> Floats:
        """(K, E): the target's states, the mean over the rows that predicted y_1..y_n; a copy, from a device too: ask
        `reading` where that will do. Raises ConfigError where the pass did not pool."""
        return self._mean().values.copy()

    @property
    def signals(self) -> Signals:
        """The target's free numbers of the draft, read when first asked for. Raises ConfigError where rows are
        missing."""
        if len(self.rows) < len(self.ids):
            raise ConfigError("the target's logits were not computed along this draft")
        if self._signals is None:
            self._signals = read_signals(self.rows, self.ids)
        return self._signals

    def reading(self, *, states: bool, signals: bool) -> Reading:
        """What the target made of the draft, as far as it is asked for; states that are on a device stay there."""
        mean = self._mean() if states else None
        held = mean if isinstance(mean, HeldPooled) else None
        return Reading(
            pooled=NO_STATES if mean is None or held is not None else mean.values,
            signals=self.signals if signals else NO_SIGNALS,
            held=held,
        )

    @property
    def text(self) -> SegmentText:
        """What the draft says, and what it follows. Raises ConfigError where nobody can tell."""
        if self._describe is None:
            raise ConfigError("this request does not tell what a draft says")
        n_known = self._target.length - self._n_behind - len(self.ids)
        return self._describe(self._target.tokens[:n_known], self.ids)

    def exact(self) -> Verdict:
        """What the exact rule says of the draft: the request's own, from the chances of its tokens, asked once."""
        if self._exact is None:
            raise ConfigError("this request has no exact rule")
        if self._verdict is None:
            self._verdict = self._exact(self.ids, self.q, self.p)
        return self._verdict

    def ask(self, ids: Sequence[int]) -> Floats | None:
        """Logits (V,) of what the target would say after the whole draft and then `ids`; it forgets them again.

        None where its context has no room for them. A pass of the target like any other, and counted as one. Raises
        ConfigError where the target has read more than this draft: it would have to forget that.
        """
        if self._n_behind:
            raise ConfigError(
                f"a judge that asks the target can be shown one segment a round, and {self._n_behind} more drafted "
                f"tokens were read behind this one; leave max_segments at 1"
            )
        if len(ids) > self._target.max_context - self._target.length:
            return None
        self.p.hold()
        self._states = None if self._states is None else self._states.copy()
        read = self._target.length
        answer = self._target.forward(ids).rows.cut(self.rows.n_ids)[0].logits.copy()
        self._target.rewind(read)
        self._ledger.add_question()
        return answer

    def _mean(self) -> Pooled:
        if self._states is None:
            raise ConfigError("the target's states were not pooled in this pass")
        return self._states
