"""The table of a benchmark: what each mode gave, with intervals, from its results alone. Pure numpy.

Everything is averaged by problem first and bootstrapped by problem: answers to one question resemble each other, and
more seeds or repeats of it are not more questions. Same results, same table: the chance is seeded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from semspec.calibration.bench.cost_model import Costs, measure_costs, predict_speed
from semspec.calibration.bench.duels import Duel, set_duels
from semspec.calibration.bench.estimates import Estimate, by_problem, estimate, paired, right, speed
from semspec.calibration.bench.records import PLAIN, Mode, Result

__all__ = ["ModeRow", "Table", "first_difference", "summarize"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeRow:
    """One mode. Shares and rates are 0..1 and None where there is nothing to divide by, or a peer does not tell.

    n: results; n_problems: questions among them. accuracy: mean over problems, None without known answers;
    accuracy_gain: less plain decoding's on the same problems. tokens_per_second: median over problems of a
    problem's median, prompt reading included; seconds: the same of the whole answer. mean_tokens: mean length.
    truncated: answers that max_tokens or the context cut off. acceptance: accepted over drafted tokens.
    tokens_per_pass: generated tokens over target passes after the prompt. draft_share: generated tokens the draft
    wrote; lossy_share: those that need not follow the target's law, of a lossy mode. phase_ms: mean
    milliseconds of one answer by phase. speed_ratio: median over problems of this mode's tokens/s over plain
    decoding's on the same problem; model_speed: what cost_model.py makes of the mode's counts. What is held against
    plain decoding is None without it in the run, and for itself. divergences: results whose ids differ from plain
    decoding's for the same problem, seed and repeat; None where they may: a lossy mode, a peer, or sampling.
    peak_mib: most memory of a peer's process.
    """

    mode: str
    exact: bool
    n: int
    n_problems: int
    accuracy: Estimate | None
    accuracy_gain: Estimate | None
    tokens_per_second: Estimate
    seconds: Estimate
    mean_tokens: float
    truncated: float
    acceptance: float | None
    tokens_per_pass: float | None
    draft_share: float | None
    lossy_share: float | None
    phase_ms: Mapping[str, float]
    speed_ratio: Estimate | None
    divergences: int | None
    model_speed: float | None = None
    peer: bool = False
    peak_mib: float | None = None

    @property
    def promise(self) -> str:
        """`exact`, `lossy`, or `peer`: another engine, which rounds the same weights in its own way."""
        return "peer" if self.peer else "exact" if self.exact else "lossy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A row for each mode, in the order asked for. greedy: temperature was 0. duels: of the semantic modes.

    peak_mib: most memory our process held, in MiB, all models of the bundle that any mode needs; peers have their own.
    """

    rows: tuple[ModeRow, ...]
    greedy: bool
    peak_mib: float
    duels: tuple[Duel, ...] = ()


def summarize(results: Sequence[Result], modes: Sequence[Mode], *, greedy: bool) -> Table:
    """The table of complete results: every mode must have at least one."""
    by_mode = {mode.name: [result for result in results if result.cell.mode == mode.name] for mode in modes}
    plain, costs = by_mode.get(PLAIN, []), measure_costs(by_mode, modes)
    rows = tuple(_row(mode, by_mode[mode.name], plain, costs, greedy=greedy) for mode in modes)
    peers = {mode.name for mode in modes if mode.peer}
    ours = [result.peak_mib for result in results if result.cell.mode not in peers]
    return Table(rows=rows, greedy=greedy, peak_mib=max(ours, default=0.0), duels=set_duels(by_mode, modes))


def first_difference(ids: Sequence[int], others: Sequence[int]) -> int | None:
    """The first position where two answers differ, the length of the shorter where it begins the longer; None
    where they are equal."""
    for position, (one, other) in enumerate(zip(ids, others, strict=False)):
        if one != other:
            return position
    return None if len(ids) == len(others) else min(len(ids), len(others))


def _row(
    mode: Mode, results: Sequence[Result], plain: Sequence[Result], costs: Costs | None, *, greedy: bool
) -> ModeRow:
    held = plain if mode.name != PLAIN else []
    speeds = by_problem(results, speed, np.median)
    rights = by_problem(results, right, np.mean)
    drafted = _total(result.num_draft_tokens for result in results)
    accepted = _total(result.num_accepted_draft_tokens for result in results)
    generated = sum(result.generated_tokens for result in results)
    passes = _total(result.num_rounds for result in results)
    return ModeRow(
        mode=mode.name,
        exact=mode.exact,
        n=len(results),
        n_problems=len(speeds),
        accuracy=estimate(list(rights.values()), np.mean),
        accuracy_gain=estimate(paired(np.subtract, rights, by_problem(held, right, np.mean)), np.mean),
        tokens_per_second=_known(estimate(list(speeds.values()), np.median)),
        seconds=_known(estimate(list(by_problem(results, _seconds, np.median).values()), np.median)),
        mean_tokens=float(np.mean(list(by_problem(results, _length, np.mean).values()))),
        truncated=float(np.mean([result.finish_reason == "length" for result in results])),
        acceptance=_share(accepted, drafted),
        tokens_per_pass=_share(generated, passes),
        draft_share=_share(_total(result.n_from_draft for result in results), generated),
        lossy_share=_share(sum(result.n_lossy for result in results), generated) if mode.lossy else None,
        phase_ms=_phases(results),
        speed_ratio=estimate(paired(np.divide, speeds, by_problem(held, speed, np.median)), np.median),
        divergences=_divergences(results, held) if mode.exact and greedy and held else None,
        model_speed=predict_speed(costs, generated=generated, drafted=drafted, passes=passes)
        if costs and drafted and passes and not mode.peer
        else None,
        peer=mode.peer,
        peak_mib=max(result.peak_mib for result in results) if mode.peer else None,
    )


def _seconds(result: Result) -> float:
    return result.seconds


def _length(result: Result) -> float:
    return result.generated_tokens


def _known(estimate: Estimate | None) -> Estimate:
    assert estimate is not None  # a mode has results
    return estimate


def _total(counts: Iterable[int | None]) -> int | None:
    """None where one of them is not known."""
    found = list(counts)
    known = [count for count in found if count is not None]
    return sum(known) if len(known) == len(found) else None


def _share(part: int | None, whole: int | None) -> float | None:
    return part / whole if part is not None and whole else None


def _phases(results: Sequence[Result]) -> dict[str, float]:
    names = dict.fromkeys(name for result in results for name in result.phase_ms)
    return {name: float(np.mean([result.phase_ms.get(name, 0.0) for result in results])) for name in names}


def _divergences(results: Sequence[Result], plain: Sequence[Result]) -> int:
    ids = {(result.cell.problem, result.cell.seed, result.cell.repeat): result.token_ids for result in plain}
    keys = [(result.cell.problem, result.cell.seed, result.cell.repeat) for result in results]
    pairs = [(result.token_ids, ids[key]) for result, key in zip(results, keys, strict=True)]
    return sum(first_difference(ours, theirs) is not None for ours, theirs in pairs)
