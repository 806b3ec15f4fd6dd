"""The nouns that pass between phases, and the letters their shapes are written in.

    B batch                S tokens in a call        R rows wanted         n draft tokens
    V vocabulary           E width                   L layers              H key/value heads
    D head size            C cache capacity          T cache rows read     K pooled layers
    F signals of a probe

Records are frozen; what changes lives in caches and ledgers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from semspec.runtime.pooled import Pooled
    from semspec.runtime.readings import Reading
    from semspec.runtime.rows import Rows

__all__ = [
    "Array",
    "Draft",
    "Floats",
    "Forward",
    "Ints",
    "Judged",
    "Law",
    "Progress",
    "Step",
    "TensorSpec",
    "Verdict",
]

Array: TypeAlias = npt.NDArray[Any]
Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]

Progress: TypeAlias = Callable[[str, int, int], None]
"""on_progress(stage, done, total): called often, must be quick; total 0 means unknown."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, numpy dtype name and shape of a graph input or output; a letter stands for a size set by the call."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """What one pass of a model returned. Arrays may be reused by the model's next call: copy what must last.

    rows: of the rows asked for, what may follow each. states: (K, E), the running sum of the pooled layers' states, or
    None where nothing was pooled. hidden: state index -> (S, E).
    """

    rows: Rows
    states: Pooled | None = None
    hidden: Mapping[int, Floats] = field(default_factory=dict)

    @property
    def logits(self) -> Floats:
        """(R, V): all of every row, which a device has to copy."""
        return self.rows.logits

    @property
    def pooled(self) -> Floats | None:
        """(K, E): the states in memory, which a device has to copy."""
        return None if self.states is None else self.states.values


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Law:
    """The distribution a token is drawn from, after every filter.

    ids: (m,) int64 ascending, the ids that can be drawn. probs: (m,) float64, each above 0, summing to 1.
    """

    ids: Ints
    probs: npt.NDArray[np.float64]

    def prob(self, token: int) -> float:
        """The chance of one token, 0 for one that cannot be drawn."""
        place = int(np.searchsorted(self.ids, token))
        return float(self.probs[place]) if place < self.ids.size and self.ids[place] == token else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """Proposed tokens y_1..y_n, and the law each was drawn from.

    ends: how many of them end a segment, ascending. What stands behind the last end is a segment begun. readings: what
    their author made of each piece, whole or begun; empty where nobody asked.
    """

    ids: tuple[int, ...]
    laws: tuple[Law, ...]
    ends: tuple[int, ...] = ()
    readings: tuple[Reading, ...] = ()

    @property
    def whole(self) -> bool:
        """They end where a segment does."""
        return self.ends[-1:] == (len(self.ids),)

    @property
    def cuts(self) -> tuple[int, ...]:
        """Where its pieces end: `ends`, and n where they do not reach it. One at least."""
        return self.ends if self.whole else (*self.ends, len(self.ids))

    def pieces(self) -> tuple[Draft, ...]:
        """Each as a draft of its own; one, and perhaps empty, where there are no segments."""
        bounds = pairwise((0, *self.cuts))
        return tuple(
            Draft(
                ids=self.ids[start:end],
                laws=self.laws[start:end],
                ends=(end - start,) if end in self.ends else (),
                readings=self.readings[place : place + 1],
            )
            for place, (start, end) in enumerate(bounds)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a rule says: keep the first `keep` drafted tokens, then `extra`, a token of the target's.

    extra None: the draft's last kept token is the last of the round, or, where the target writes, the loop draws one
    from the target's law behind the kept ones. n_exact: the first so many of the kept tokens follow the target's own
    law; read only where a lossy judge speaks. target_writes: the target alone goes on, to the end of the segment that
    the draft began; to_end: to the end of the answer. reason: why, in a word or two; figures: what that rests on.
    """

    keep: int
    extra: int | None = None
    n_exact: int = 0
    target_writes: bool = False
    to_end: bool = False
    reason: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What a judge said of a draft, or of one segment of it: its length, how much stayed, how much of that is lossy.

    reason and figures: the judge's own (semantic.py lists those of the semantic modes). ms: phase -> milliseconds;
    drafting and the target's pass are with the first segment that they were for. Two are equal whatever time they took.
    """

    n_drafted: int
    n_kept: int
    n_lossy: int
    reason: str
    figures: Mapping[str, float]
    ms: Mapping[str, float] = field(compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One round of the decoding loop, or one segment of a round that drafted several: the ids it committed, and what of
    the text can be shown.

    The first n_from_draft ids were written by the draft and kept, the others drawn by the target. n_lossy: how many
    of the ids need not follow the target's law; they are the last of those from the draft. rule: what judged the
    draft, `lossless` or the name of a judge; `target` or `draft` where that model wrote alone.
    finish_reason: `stop` (an end id or a stop string), `length` (max_tokens or the context), None while there
    is more. logprobs: of each id under the target itself, where asked for. judged: where a judge spoke, what it rests
    on.
    """

    ids: tuple[int, ...]
    text: str
    n_from_draft: int = 0
    n_lossy: int = 0
    rule: str = "target"
    finish_reason: str | None = None
    logprobs: tuple[float, ...] = ()
    judged: Judged | None = None
