"""Windows: the target's one pass over a draft, and what of it belongs to each piece of the draft.

The pass reads the pending token and the whole draft, so its row i says what follows the first i drafted tokens: the
rows that predicted a piece begun behind `start` tokens are start..start + n - 1, and row start + n is behind it. It
knows places and rows; it decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from semspec.runtime.judging import Judging
from semspec.runtime.model import LanguageModel
from semspec.runtime.pooled import Pooled
from semspec.runtime.records import Draft, Floats, Forward
from semspec.runtime.rows import Rows

__all__ = ["Window", "read_draft"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Window:
    """A piece of n tokens, and what the pass said of it. Of use until the target's next pass.

    judging: who judges it, None: the exact rule. rows: of `places`, which are some of 0..n; place 0 is before its first
    token. states: (K, E), the mean of states over the rows that predicted it, None where nobody asked. start: drafted
    tokens before it. n_behind: those behind it, which the target has read too.
    """

    piece: Draft
    judging: Judging | None
    places: Sequence[int]
    rows: Rows
    states: Pooled | None
    start: int
    n_behind: int


def read_draft(
    target: LanguageModel,
    pending: int,
    pieces: Sequence[Draft],
    judges: Sequence[Judging | None],
    *,
    all_rows: bool = False,
) -> list[Window]:
    """Read the pending token and all pieces of a draft. judges: of each piece. all_rows: whoever judges.

    The mean of one piece's states is taken in the graph, and stays on the device if there is one. Of several each needs
    a mean of its own, which is made here of the rows of `Judging.layers`. Raises ConfigError where the target does not
    return these.
    """
    ids = [token for piece in pieces for token in piece.ids]
    starts = [sum(len(piece.ids) for piece in pieces[:place]) for place in range(len(pieces))]
    wanted = [
        range(len(piece.ids) + 1) if all_rows else _wanted(piece, judging)
        for piece, judging in zip(pieces, judges, strict=True)
    ]
    rows = sorted({start + row for start, own in zip(starts, wanted, strict=True) for row in own})
    several, judging = len(pieces) > 1, judges[0]
    found = target.forward(
        [pending, *ids],
        rows=rows,
        pool=None if several or judging is None else _pool(len(ids)),
        hidden=judging.layers if several and judging is not None else (),
    )
    windows = []
    for piece, own, start, judge in zip(pieces, wanted, starts, judges, strict=True):
        first = rows.index(start + own[0])  # those of a piece lie one behind the other
        n = len(piece.ids)
        windows.append(
            Window(
                piece=piece,
                judging=judge,
                places=own,
                rows=found.rows.part(first, first + len(own)),
                states=_states(found, start, start + n) if several else found.states,
                start=start,
                n_behind=len(ids) - start - n,
            )
        )
    return windows


def _wanted(piece: Draft, judging: Judging | None) -> Sequence[int]:
    """The rows of a piece that are looked at: all of them, or those that tokens may be drawn from."""
    n = len(piece.ids)
    if judging is None or not judging.few_rows or not piece.whole:
        return range(n + 1)
    return (0, n) if judging.bonus else (0,)


def _pool(n: int) -> Floats:
    """For a mean: 1 / n of each row that predicted a draft of n tokens, nothing of the one behind it."""
    pool = np.full(n + 1, 1 / n, np.float32)
    pool[-1] = 0
    return pool


def _states(found: Forward, start: int, end: int) -> Pooled | None:
    """(K, E) over rows start..end - 1; None where no states were asked for."""
    if not found.hidden:
        return None
    return Pooled(np.stack([state[start:end].mean(axis=0) for state in found.hidden.values()]))
