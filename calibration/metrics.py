"""How good scores are, in numbers: ranking, calibration, and intervals that resample whole questions.

    scores (n,) in 0..1 for ece and brier, any finite numbers for the rest
    labels (n,) in 0..1; for ranking, true or false

Pure numpy. Chance is seeded: same arguments, same interval.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from semspec.calibration.equivalence import Bools
from semspec.runtime.errors import CalibrationError
from semspec.runtime.records import Array, Ints

__all__ = ["Interval", "auroc", "bootstrap", "brier", "concordance", "ece"]

N_BINS = 15
N_RESAMPLES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A statistic and its 95 % percentile bootstrap interval over questions.

    Predictions are held fixed, so an interval of something fitted is somewhat too narrow. n_questions: how many are
    resampled. n_left_out: resamples in which the statistic is undefined, such as AUROC where all labels agree; they
    are not in the interval.
    """

    value: float
    low: float
    high: float
    n_questions: int
    n_left_out: int


def auroc(scores: Array, positive: Bools) -> float:
    """The chance that a positive scores above a negative, ties counted half; NaN where one kind is missing."""
    _check(scores, positive)
    n_positive = int(positive.sum())
    n_negative = positive.size - n_positive
    if not n_positive or not n_negative:
        return float("nan")
    rank_sum = float(_ranks(scores)[positive].sum())
    return (rank_sum - n_positive * (n_positive + 1) / 2) / (n_positive * n_negative)


def concordance(scores: Array, labels: Array, groups: Sequence[Hashable]) -> float:
    """Within groups (contexts): of the pairs with different labels, the share that scores order alike, ties half.

    0.5 for scores that tell nothing but the group; NaN where no group has different labels.
    """
    _check(scores, labels)
    _check_groups(scores, groups)
    alike, n_pairs = 0.0, 0
    for places in _places(groups):
        ordered = np.sign(labels[places, None].astype(np.float64) - labels[None, places])
        found = np.sign(scores[places, None] - scores[None, places])
        differ = ordered > 0
        n_pairs += int(differ.sum())
        alike += float(((found[differ] + 1) / 2).sum())
    return alike / n_pairs if n_pairs else float("nan")


def ece(scores: Array, labels: Array, n_bins: int = N_BINS) -> float:
    """Expected calibration error: mean distance of score and label over bins of equal mass, in 0..1.

    Equal scores stand for the mean of their labels, so that a bin's edge among them means nothing. Bins are as many
    as there are scores where that is fewer. Biased upwards where bins are small. Raises CalibrationError for no bin
    and for values outside 0..1.
    """
    _check_shares(scores, labels)
    if n_bins < 1:
        raise CalibrationError(f"calibration is measured over at least 1 bin, got {n_bins}")
    _, tied = np.unique(scores, return_inverse=True)
    tied = tied.reshape(-1)
    means = np.bincount(tied, labels) / np.bincount(tied)
    order = np.argsort(scores, kind="stable")
    gaps = scores[order] - means[tied[order]]
    bins = np.array_split(gaps, min(n_bins, gaps.size))
    return float(sum(abs(part.mean()) * part.size for part in bins)) / gaps.size


def brier(scores: Array, labels: Array) -> float:
    """Mean squared distance of score and label; of soft labels not 0 even for the truth."""
    _check_shares(scores, labels)
    return float(np.mean((scores - labels) ** 2))


def bootstrap(
    statistic: Callable[[Ints], float],
    questions: Sequence[Hashable],
    *,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> Interval:
    """The interval of `statistic`, a function of row numbers (with repetitions), over resampled questions.

    questions: of each row; its rows are drawn together, since those of one question resemble each other. For two
    predictors take the difference of both in one statistic: then they are compared on the same draws.
    Raises CalibrationError: fewer than 2 questions, no resample, or a statistic that is undefined on all rows or in
    more than half of the resamples.
    """
    places = _places(questions)
    if len(places) < 2 or n_resamples < 1:
        raise CalibrationError(
            f"an interval needs at least 2 questions and 1 resample, got {len(places)} and {n_resamples}"
        )
    rng = np.random.default_rng(seed)
    value = statistic(np.arange(len(questions), dtype=np.int64))
    found = []
    for _ in range(n_resamples):
        drawn = rng.integers(0, len(places), len(places))
        found.append(statistic(np.concatenate([places[number] for number in drawn])))
    defined = [one for one in found if np.isfinite(one)]
    if not np.isfinite(value) or 2 * len(defined) < n_resamples:
        raise CalibrationError(
            f"a statistic is undefined in {n_resamples - len(defined)} of {n_resamples} resamples of {len(places)} "
            "questions: their labels hardly differ; collect more questions"
        )
    low, high = np.quantile(defined, (0.025, 0.975))
    return Interval(
        value=value,
        low=float(low),
        high=float(high),
        n_questions=len(places),
        n_left_out=n_resamples - len(defined),
    )


def _ranks(values: Array) -> Array:
    """1.., equal values sharing the mean of theirs."""
    _, tied, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Array = (np.cumsum(counts) - (counts - 1) / 2)[tied.reshape(-1)]
    return ranks


def _places(groups: Sequence[Hashable]) -> list[Ints]:
    """The row numbers of each group, groups by first appearance."""
    found: dict[Hashable, list[int]] = {}
    for place, group in enumerate(groups):
        found.setdefault(group, []).append(place)
    return [np.array(places, np.int64) for places in found.values()]


def _check(scores: Array, labels: Array) -> None:
    if scores.ndim != 1 or scores.shape != labels.shape or not scores.size:
        raise CalibrationError(
            f"scores and labels must be one row of at least 1 each, got shapes {scores.shape} and {labels.shape}"
        )
    if not (np.isfinite(scores).all() and np.isfinite(labels).all()):
        raise CalibrationError(
            "scores and labels must be finite; leave out what is undefined before measuring"
        )


def _check_groups(scores: Array, groups: Sequence[Hashable]) -> None:
    if len(groups) != scores.size:
        raise CalibrationError(f"{scores.size} scores have {len(groups)} groups; give one each")


def _check_shares(scores: Array, labels: Array) -> None:
    _check(scores, labels)
    low = min(float(scores.min()), float(labels.min()))
    high = max(float(scores.max()), float(labels.max()))
    if low < 0 or high > 1:
        raise CalibrationError(f"scores and labels must lie in 0..1 here, found {low:g}..{high:g}")
