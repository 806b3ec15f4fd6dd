"""Where an exact mode left plain decoding's tokens although nothing was left to chance. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from semspec.calibration.bench.records import PLAIN, Result
from semspec.calibration.bench.summary import Table, first_difference

__all__ = ["Divergence", "find_divergences"]

AROUND = 4  # ids kept before and after the place where two answers part


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """An answer of an exact mode that is not plain decoding's.

    position: of the first token that differs, counted from 0; where one answer only ends earlier, its length.
    plain_ids, ids: plain decoding's and the mode's tokens from place `start` on, `AROUND` before the difference
    to `AROUND` behind it.
    """

    problem: str
    mode: str
    seed: int
    repeat: int
    position: int
    start: int
    plain_ids: tuple[int, ...]
    ids: tuple[int, ...]


def find_divergences(results: Sequence[Result], table: Table) -> tuple[Divergence, ...]:
    """Divergences of all exact modes, sorted by cell; none unless the run was greedy, for chance may differ.

    An answer is held against plain decoding's to the same problem with the same seed in the same repeat.
    """
    if not table.greedy:
        return ()
    exact = {row.mode for row in table.rows if row.exact and row.mode != PLAIN}
    plain = {replace(one.cell, mode=""): one for one in results if one.cell.mode == PLAIN}
    ordered = sorted((one for one in results if one.cell.mode in exact), key=lambda one: one.cell)
    pairs = [(plain.get(replace(one.cell, mode="")), one) for one in ordered]
    found = [_compare(held, one) for held, one in pairs if held is not None]
    return tuple(one for one in found if one is not None)


def _compare(plain: Result, one: Result) -> Divergence | None:
    position = first_difference(plain.token_ids, one.token_ids)
    if position is None:
        return None
    window = slice(max(position - AROUND, 0), position + AROUND + 1)
    return Divergence(
        problem=one.cell.problem,
        mode=one.cell.mode,
        seed=one.cell.seed,
        repeat=one.cell.repeat,
        position=position,
        start=window.start,
        plain_ids=plain.token_ids[window],
        ids=one.token_ids[window],
    )
