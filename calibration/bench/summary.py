"""The table of a benchmark: what each mode gave, with intervals, from its results alone. Pure numpy.

Everything is averaged by problem first and bootstrapped by problem: answers to one question resemble each other, and
more seeds or repeats of it are not more questions. Same results, same table: the chance is seeded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from semspec.calibration.bench.cost_model import Costs, measure_costs, predict_speed
from semspec.calibration.bench.records import PLAIN, Mode, Result

__all__ = ["Estimate", "ModeRow", "Table", "first_difference", "summarize"]


N_RESAMPLES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A number and its 95 % percentile bootstrap interval over problems.

    Too narrow where problems are few (below about 20), and no interval at all where they all agree (one problem,
    every answer right): low = high = value then.
    """

    value: float
    low: float
    high: float


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
    """A row for each mode, in the order asked for. greedy: temperature was 0.

    peak_mib: most memory our process held, in MiB, all models of the bundle that any mode needs; peers have their own.
    """

    rows: tuple[ModeRow, ...]
    greedy: bool
    peak_mib: float


def summarize(results: Sequence[Result], modes: Sequence[Mode], *, greedy: bool) -> Table:
    """The table of complete results: every mode must have at least one."""
    by_mode = {mode.name: [result for result in results if result.cell.mode == mode.name] for mode in modes}
    plain, costs = by_mode.get(PLAIN, []), measure_costs(by_mode, modes)
    rows = tuple(_row(mode, by_mode[mode.name], plain, costs, greedy=greedy) for mode in modes)
    peers = {mode.name for mode in modes if mode.peer}
    ours = [result.peak_mib for result in results if result.cell.mode not in peers]
    return Table(rows=rows, greedy=greedy, peak_mib=max(ours, default=0.0))


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
    speeds = _by_problem(results, _speed, np.median)
    right = _by_problem(results, _right, np.mean)
    drafted = _total(result.num_draft_tokens for result in results)
    accepted = _total(result.num_accepted_draft_tokens for result in results)
    generated = sum(result.generated_tokens for result in results)
    passes = _total(result.num_rounds for result in results)
    return ModeRow(
        mode=mode.name,
        exact=mode.exact,
        n=len(results),
        n_problems=len(speeds),
        accuracy=_estimate(list(right.values()), np.mean),
        accuracy_gain=_estimate(_paired(np.subtract, right, _by_problem(held, _right, np.mean)), np.mean),
        tokens_per_second=_known(_estimate(list(speeds.values()), np.median)),
        seconds=_known(_estimate(list(_by_problem(results, _seconds, np.median).values()), np.median)),
        mean_tokens=float(np.mean(list(_by_problem(results, _length, np.mean).values()))),
        truncated=float(np.mean([result.finish_reason == "length" for result in results])),
        acceptance=_share(accepted, drafted),
        tokens_per_pass=_share(generated, passes),
        draft_share=_share(_total(result.n_from_draft for result in results), generated),
        lossy_share=_share(sum(result.n_lossy for result in results), generated) if mode.lossy else None,
        phase_ms=_phases(results),
        speed_ratio=_estimate(_paired(np.divide, speeds, _by_problem(held, _speed, np.median)), np.median),
        divergences=_divergences(results, held) if mode.exact and greedy and held else None,
        model_speed=predict_speed(costs, generated=generated, drafted=drafted, passes=passes)
        if costs and drafted and passes and not mode.peer
        else None,
        peer=mode.peer,
        peak_mib=max(result.peak_mib for result in results) if mode.peer else None,
    )


def _speed(result: Result) -> float:
    return result.tokens_per_second


def _seconds(result: Result) -> float:
    return result.seconds


def _length(result: Result) -> float:
    return result.generated_tokens


def _right(result: Result) -> float | None:
    return None if result.correct is None else float(result.correct)


def _by_problem(
    results: Sequence[Result], value_of: Callable[[Result], float | None], middle: Callable[..., Any]
) -> dict[str, float]:
    """Problem -> the middle of its values; problems without any are left out."""
    values: dict[str, list[float]] = {}
    for result in results:
        value = value_of(result)
        if value is not None:
            values.setdefault(result.cell.problem, []).append(value)
    return {problem: float(middle(found)) for problem, found in values.items()}


def _paired(
    compare: Callable[[float, float], Any], ours: Mapping[str, float], theirs: Mapping[str, float]
) -> list[float]:
    """What both have of a problem, compared, for each problem that both have."""
    return [float(compare(value, theirs[problem])) for problem, value in ours.items() if problem in theirs]


def _estimate(values: Sequence[float], middle: Callable[..., Any]) -> Estimate | None:
    """None for no values."""
    if not values:
        return None
    sample = np.asarray(values, np.float64)
    chosen = np.random.default_rng(0).integers(len(sample), size=(N_RESAMPLES, len(sample)))
    low, high = np.quantile(middle(sample[chosen], axis=1), [0.025, 0.975])
    return Estimate(value=float(middle(sample)), low=float(low), high=float(high))


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
