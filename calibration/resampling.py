"""Resampling by question, as linear algebra: every statistic that is a ratio of sums, on the same draws of questions.

How often each question is drawn in each resample is one matrix, so AUROC, shares and means of all candidates cost a
product each, and differences are paired. Equal to metrics.bootstrap's resamples, statistic by statistic. It knows rows
and questions only.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from semspec.calibration.equivalence import Bools
from semspec.calibration.metrics import Interval
from semspec.runtime.errors import CalibrationError
from semspec.runtime.records import Array, Ints

__all__ = ["Draws", "Resamples"]

CHUNK = 1 << 22  # comparisons held at once


class Draws(NamedTuple):
    """A statistic, and what it is in each resample (R,), NaN where it is undefined."""

    value: float
    found: Array

    @property
    def defined(self) -> Array:
        return self.found[np.isfinite(self.found)]

    def less(self, other: Draws) -> Draws:
        """The difference, resample by resample."""
        return Draws(self.value - other.value, self.found - other.found)


class Resamples:
    """questions: (n,) of each row. Raises CalibrationError for fewer than 2 questions or no resample."""

    def __init__(self, questions: Ints, n_resamples: int, seed: int) -> None:
        known, places = np.unique(questions, return_inverse=True)
        if len(known) < 2 or n_resamples < 1:
            raise CalibrationError(
                f"an interval needs at least 2 questions and 1 resample, got {len(known)} and {n_resamples}"
            )
        self.places = places.reshape(-1)
        self.n_questions = len(known)
        drawn = np.random.default_rng(seed).integers(0, len(known), (n_resamples, len(known)))
        self._counts = np.zeros((n_resamples, len(known)))
        np.add.at(self._counts, (np.arange(n_resamples)[:, None], drawn), 1.0)

    def sums(self, values: Array) -> Array:
        """(Q,) of values (n,), by question."""
        return np.bincount(self.places, values, self.n_questions)

    def ratio(self, numerator: Array, denominator: Array) -> Draws:
        """Sum over sum, of (n,) each."""
        upper, lower = self.sums(numerator), self.sums(denominator)
        with np.errstate(invalid="ignore", divide="ignore"):
            found = (self._counts @ upper) / (self._counts @ lower)
        total = float(lower.sum())
        return Draws(float(upper.sum()) / total if total else float("nan"), found)

    def auroc(self, scores: Array, positive: Bools, among: Bools | None = None) -> Draws:
        """metrics.auroc of scores (n,), of all rows or those `among`."""
        chosen = np.ones(len(scores), np.bool_) if among is None else among
        wins = self._wins(scores, positive & chosen, ~positive & chosen)
        n_positive = self.sums((positive & chosen).astype(np.float64))
        n_negative = self.sums((~positive & chosen).astype(np.float64))
        with np.errstate(invalid="ignore", divide="ignore"):
            found = ((self._counts @ wins) * self._counts).sum(axis=1) / (
                (self._counts @ n_positive) * (self._counts @ n_negative)
            )
        pairs = float(n_positive.sum() * n_negative.sum())
        return Draws(float(wins.sum()) / pairs if pairs else float("nan"), found)

    def concordance(self, scores: Array, labels: Array, groups: Ints) -> Draws:
        """metrics.concordance; a group's rows are of one question and stand together."""
        alike, pairs = np.zeros(len(scores)), np.zeros(len(scores))
        edges = np.flatnonzero(np.concatenate([[True], np.diff(groups) != 0, [True]]))
        for start, end in pairwise(edges.tolist()):
            differ = labels[start:end, None] > labels[None, start:end]
            order = np.sign(scores[start:end, None] - scores[None, start:end])
            pairs[start] = differ.sum()
            alike[start] = ((order[differ] + 1) / 2).sum()
        return self.ratio(alike, pairs)

    def interval(self, draws: Draws) -> Interval:
        """Its 95 % percentile interval. Raises CalibrationError where it is undefined on all rows or in more than half
        of the resamples."""
        defined = draws.defined
        if not self.tells(draws):
            raise CalibrationError(
                f"a statistic is undefined in {len(draws.found) - len(defined)} of {len(draws.found)} resamples of "
                f"{self.n_questions} questions: their labels hardly differ; collect more questions"
            )
        low, high = np.quantile(defined, (0.025, 0.975))
        return Interval(
            value=draws.value,
            low=float(low),
            high=float(high),
            n_questions=self.n_questions,
            n_left_out=len(draws.found) - len(defined),
        )

    def tells(self, draws: Draws) -> bool:
        """Whether it has an interval."""
        return bool(np.isfinite(draws.value)) and 2 * len(draws.defined) >= len(draws.found)

    def _wins(self, scores: Array, positive: Bools, negative: Bools) -> Array:
        """(Q, Q): of pairs of a positive row of one question and a negative of another, how many are in order."""
        wins = np.zeros((self.n_questions, self.n_questions))
        losers = np.flatnonzero(negative)
        if not positive.any() or not len(losers):
            return wins
        losers = losers[np.argsort(self.places[losers], kind="stable")]
        whose, starts = np.unique(self.places[losers], return_index=True)
        low = scores[losers]
        winners = np.flatnonzero(positive)
        step = max(1, CHUNK // len(losers))
        for begin in range(0, len(winners), step):
            rows = winners[begin : begin + step]
            high = scores[rows][:, None]
            beaten = np.add.reduceat((high > low).astype(np.float64) + 0.5 * (high == low), starts, axis=1)
            part = np.zeros((self.n_questions, len(whose)))
            np.add.at(part, self.places[rows], beaten)
            wins[:, whose] += part
        return wins
