"""Where an exact mode left plain decoding's tokens although nothing was left to chance. Pure.

    find_divergences -> measure_margins (one pass of the target for each) -> a line of divergences.jsonl

It knows results and logits; files are journal.py's, and opening the model is run.py's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from semspec.calibration.bench.records import PLAIN, Cell, Result
from semspec.calibration.bench.summary import Table, first_difference
from semspec.runtime.errors import BackendError, CalibrationError
from semspec.runtime.model import LanguageModel
from semspec.runtime.records import Floats
from semspec.runtime.typed import read_typed

__all__ = ["Divergence", "find_divergences", "measure_margins"]

AROUND = 4  # ids kept before and after the place where two answers part


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """An answer of an exact mode that is not plain decoding's.

    position: of the first token that differs, counted from 0; where one answer only ends earlier, its length.
    plain_ids, ids: plain decoding's and the mode's tokens from place `start` on, `AROUND` before the difference
    to `AROUND` behind it. margin: see measure_margins; None where one answer only ends earlier, which no logit
    decides but a limit or a stop, and until it is measured.
    """

    problem: str
    mode: str
    seed: int
    repeat: int
    position: int
    start: int
    plain_ids: tuple[int, ...]
    ids: tuple[int, ...]
    margin: float | None = None

    @property
    def cell(self) -> Cell:
        """The measurement that diverged."""
        return Cell(problem=self.problem, seed=self.seed, repeat=self.repeat, mode=self.mode)

    def to_json(self) -> str:
        """One line without its end; the same divergence gives the same text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Divergence:
        """Raises ValueError for a line that to_json did not write."""
        try:
            value = json.loads(line)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        if not isinstance(value, dict) or "margin" not in value:
            raise ValueError("must be an object with a margin")
        margin = value.pop("margin")
        if margin is not None and not (isinstance(margin, float) and math.isfinite(margin)):
            raise ValueError("margin must be a finite number with a point, or null")
        one: Divergence = read_typed(cls, value, "divergence")
        return replace(one, margin=margin)


def find_divergences(results: Sequence[Result], table: Table) -> tuple[Divergence, ...]:
    """Divergences of all exact modes, sorted by cell, without margins; none unless the run was greedy, for chance
    may differ.

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


def measure_margins(
    target: LanguageModel,
    divergences: Sequence[Divergence],
    results: Mapping[Cell, Result],
    prompts: Mapping[str, Sequence[int]],
) -> Iterator[Divergence]:
    """Divergences with their margins: plain decoding's token's logit less that of the other mode's token.

    results: must hold plain decoding's answers. prompts: problem -> ids. The target reads prompt and common tokens
    in one pass for each, and forgets all else. Near 0, rounding decided; large, a rule is wrong; below 0, plain
    decoding itself did not take the likelier token. Raw logits: what penalties make of them does not count. Not
    guaranteed where an engine's bits depend on how a text is cut (GPUs): margins carry that noise themselves.

    Raises ConfigError and CalibrationError for ids that the target lacks, BackendError for logits that are no numbers.
    """
    for one in divergences:
        place = one.position - one.start
        if place >= min(len(one.plain_ids), len(one.ids)):
            yield one
            continue
        common = results[replace(one.cell, mode=PLAIN)].token_ids[: one.position]
        target.rewind(0)
        logits = target.forward([*prompts[one.problem], *common]).logits[-1]
        yield replace(one, margin=_margin(logits, one.plain_ids[place], one.ids[place], str(one.cell)))


def _margin(logits: Floats, ours: int, theirs: int, cell: str) -> float:
    if max(ours, theirs) >= len(logits):
        raise CalibrationError(
            f"{cell} has the token {max(ours, theirs)} and the target has 0 to {len(logits) - 1}; measure it again"
        )
    margin = float(logits[ours]) - float(logits[theirs])
    if not math.isfinite(margin):
        raise BackendError(f"{cell}: the target's logits are not numbers where it diverges from {PLAIN}")
    return margin


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
