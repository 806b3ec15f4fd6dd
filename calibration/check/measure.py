"""Measure: of drafted segments, what a threshold keeps, and how much of that is bad; and what others keep at the same
share of tokens.

    predictor    segments that score at least the threshold
    random       every segment with the same chance
    a signal     those highest in it

A way to keep is a weight in 0..1 for each segment, held fixed over resamples of questions; so `random` and what is tied
at a signal's edge count by their chance, and nothing is drawn. It knows scores and what is bad; it knows no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from semspec.calibration.equivalence import Bools
from semspec.calibration.metrics import Interval
from semspec.calibration.resampling import Draws, Resamples
from semspec.runtime.errors import CalibrationError
from semspec.runtime.probe_set import RiskPoint
from semspec.runtime.records import Array, Ints

__all__ = ["PREDICTOR", "RANDOM", "Kept", "Measured", "RiskMeasured", "Segments", "keep_highest", "measure"]

PREDICTOR, RANDOM = "predictor", "random"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segments:
    """n drafted segments. scores: (n,), the predictor's. signals: name -> (n,), more of it is kept first. bad: (n,), no
    sample of the target is equivalent to it. tokens, questions: (n,)."""

    scores: Array
    signals: Mapping[str, Array]
    bad: Bools
    tokens: Ints
    questions: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What one way keeps. segments, tokens: shares of all. bad: share of the kept segments. gain: the predictor's bad
    share less this one's, paired; below 0 the predictor is better. Both are none where too little is kept to tell."""

    way: str
    segments: Interval
    tokens: Interval
    bad: tuple[Interval, ...]
    gain: tuple[Interval, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RiskMeasured:
    """A line of the risk table, on these segments. ways: the predictor, `random`, then signals; all keep as large a
    share of the tokens."""

    risk: float
    threshold: float
    ways: tuple[Kept, ...]

    @property
    def predictor(self) -> Kept:
        return self.ways[0]

    def way(self, name: str) -> Kept:
        """By name."""
        return next(one for one in self.ways if one.way == name)

    @property
    def best_signal(self) -> str:
        """The one with the fewest bad among what it keeps here: chosen by these very segments, in its favour."""
        told = {
            one.way: one.bad[0].value for one in self.ways if one.bad and one.way not in (PREDICTOR, RANDOM)
        }
        return min(told, key=told.__getitem__, default="")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Of all segments: how many, of how many questions and tokens, and the share that is bad. risks: ascending.
    n_resamples, seed: of the questions, behind every interval."""

    n_resamples: int
    seed: int
    segments: int
    questions: int
    tokens: int
    bad: Interval
    risks: tuple[RiskMeasured, ...]


def measure(
    segments: Segments, points: Sequence[RiskPoint], *, n_resamples: int = 1000, seed: int = 0
) -> Measured:
    """Intervals are 95 % percentile bootstraps over questions, predictions and thresholds held fixed.

    They say nothing about chance where none of the kept segments is bad: such an interval is [0, 0]. Raises
    CalibrationError for fewer than 2 questions, and no risk.
    """
    if not points:
        raise CalibrationError("there is no threshold to check: the probes support no risk")
    resamples = Resamples(segments.questions, n_resamples, seed)
    everything = np.ones(len(segments.scores))
    return Measured(
        n_resamples=n_resamples,
        seed=seed,
        segments=len(segments.scores),
        questions=resamples.n_questions,
        tokens=int(segments.tokens.sum()),
        bad=resamples.interval(_bad(resamples, segments, everything)),
        risks=tuple(_measure_risk(segments, point, resamples) for point in points),
    )


def keep_highest(values: Array, tokens: Ints, n_tokens: float) -> Array:
    """(n,) weights in 0..1 that keep `n_tokens` tokens, those of the highest values first; equal ones weigh alike.

    Two of three tokens, where the lower two of three segments are tied:

    >>> keep_highest(np.array([1.0, 3.0, 1.0]), np.array([1, 1, 1]), 2.0)
    array([0.5, 1. , 0.5])
    """
    weights, left = np.zeros(len(values)), n_tokens
    for value in np.unique(values)[::-1]:
        tied = values == value
        n_tied = float(tokens[tied].sum())
        weights[tied] = min(1.0, left / n_tied)
        left -= n_tied
        if left <= 0:
            break
    return weights


def _measure_risk(segments: Segments, point: RiskPoint, resamples: Resamples) -> RiskMeasured:
    kept = (segments.scores >= point.threshold).astype(np.float64)
    n_tokens = float(kept @ segments.tokens)
    weights = {PREDICTOR: kept, RANDOM: np.full(len(kept), n_tokens / segments.tokens.sum())}
    weights |= {
        name: keep_highest(values, segments.tokens, n_tokens) for name, values in segments.signals.items()
    }
    ours = _bad(resamples, segments, kept)
    return RiskMeasured(
        risk=point.risk,
        threshold=point.threshold,
        ways=tuple(_keep(name, segments, theirs, resamples, ours) for name, theirs in weights.items()),
    )


def _keep(way: str, segments: Segments, weights: Array, resamples: Resamples, ours: Draws) -> Kept:
    everything, tokens = np.ones(len(weights)), segments.tokens.astype(np.float64)
    bad = _bad(resamples, segments, weights)
    gain = ours.less(bad)
    return Kept(
        way=way,
        segments=resamples.interval(resamples.ratio(weights, everything)),
        tokens=resamples.interval(resamples.ratio(weights * tokens, tokens)),
        bad=_interval(resamples, bad),
        gain=() if way == PREDICTOR else _interval(resamples, gain),
    )


def _bad(resamples: Resamples, segments: Segments, weights: Array) -> Draws:
    return resamples.ratio(weights * segments.bad, weights)


def _interval(resamples: Resamples, draws: Draws) -> tuple[Interval, ...]:
    return (resamples.interval(draws),) if resamples.tells(draws) else ()
