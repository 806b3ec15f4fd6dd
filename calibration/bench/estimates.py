"""Numbers with intervals, of problems: a problem's results become one value, and the bootstrap draws problems.

Answers to one question resemble each other: more seeds or repeats of it are not more questions. Pure numpy; the chance
is seeded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from semspec.calibration.bench.records import Result

__all__ = ["Estimate", "by_problem", "estimate", "paired", "right", "speed"]

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


def estimate(values: Sequence[float], middle: Callable[..., Any]) -> Estimate | None:
    """The middle (a mean, a median, with `axis`) of a value for each problem; None for no values."""
    if not values:
        return None
    sample = np.asarray(values, np.float64)
    chosen = np.random.default_rng(0).integers(len(sample), size=(N_RESAMPLES, len(sample)))
    low, high = np.quantile(middle(sample[chosen], axis=1), [0.025, 0.975])
    return Estimate(value=float(middle(sample)), low=float(low), high=float(high))


def by_problem(
    results: Sequence[Result], value_of: Callable[[Result], float | None], middle: Callable[..., Any]
) -> dict[str, float]:
    """Problem -> the middle of its values; problems without any are left out."""
    values: dict[str, list[float]] = {}
    for result in results:
        value = value_of(result)
        if value is not None:
            values.setdefault(result.cell.problem, []).append(value)
    return {problem: float(middle(found)) for problem, found in values.items()}


def paired(
    compare: Callable[[float, float], Any], ours: Mapping[str, float], theirs: Mapping[str, float]
) -> list[float]:
    """What both have of a problem, compared, for each problem that both have."""
    return [float(compare(value, theirs[problem])) for problem, value in ours.items() if problem in theirs]


def speed(result: Result) -> float:
    """Tokens/s of one answer."""
    return result.tokens_per_second


def right(result: Result) -> float | None:
    """1 for a right answer, 0 for a wrong one, None where nobody knows."""
    return None if result.correct is None else float(result.correct)
