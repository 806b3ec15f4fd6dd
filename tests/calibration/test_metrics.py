"""Measures of scores against plain definitions, and intervals that keep a question's rows together."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from semspec.calibration.metrics import auroc, bootstrap, brier, concordance, ece
from semspec.runtime.errors import CalibrationError


def rows(*values: float) -> Any:
    return np.array(values, np.float64)


def test_auroc_is_the_share_of_pairs_in_order() -> None:
    """Against its definition, on scores with many ties."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        scores, positive = rng.integers(0, 5, 30).astype(np.float64), rng.random(30) < 0.4
        pairs = list(itertools.product(scores[positive], scores[~positive]))
        wanted = sum((high > low) + 0.5 * (high == low) for high, low in pairs) / len(pairs)
        assert auroc(scores, positive) == pytest.approx(wanted)
    assert auroc(rows(1, 2, 3), np.array([False, True, True])) == 1
    assert auroc(rows(2, 2, 2), np.array([False, True, True])) == 0.5


def test_one_kind_of_label_ranks_nothing() -> None:
    """NaN, so that nobody takes it for a result; an interval over it is refused below."""
    assert np.isnan(auroc(rows(1, 2), np.array([True, True])))
    assert np.isnan(concordance(rows(1, 2), rows(1, 1), ["c", "c"]))


def test_concordance_sees_only_what_is_ordered_within_a_group() -> None:
    """A score that knows the question but not the segment is worth 0.5 there, however good its AUROC."""
    labels, groups = rows(0, 0.5, 0.5, 1), ["a", "a", "b", "b"]
    assert concordance(rows(1, 2, 3, 4), labels, groups) == 1
    assert concordance(rows(2, 1, 4, 3), labels, groups) == 0
    assert concordance(rows(1, 1, 4, 4), labels, groups) == 0.5
    assert concordance(rows(1, 2, 4, 3), labels, groups) == 0.5


def test_ece_is_nought_for_the_truth_and_the_gap_for_a_constant() -> None:
    """Calibrated is not good: a constant that is right on average has no calibration error either."""
    scores = np.repeat(rows(0.2, 0.8), 50)
    labels = np.concatenate([np.arange(50) < 10, np.arange(50) < 40]).astype(np.float64)
    assert ece(scores, labels) == pytest.approx(0)
    assert ece(np.full(100, 0.5), labels) == pytest.approx(0)
    assert ece(np.full(100, 0.9), labels) == pytest.approx(0.4)
    assert ece(rows(0, 1), rows(1, 0)) == 1
    assert ece(1 - scores, labels, n_bins=10) == pytest.approx(0.6)


def test_ece_does_not_depend_on_the_order_of_equal_scores() -> None:
    """Else sorting rows by label would change the result."""
    rng = np.random.default_rng(1)
    scores, labels = rng.integers(0, 4, 100) / 4, rng.random(100)
    order = rng.permutation(100)
    assert ece(scores[order], labels[order]) == pytest.approx(ece(scores, labels))
    assert ece(rows(0.5), rows(0.25)) == 0.25


def test_brier_is_the_mean_squared_distance() -> None:
    """Of soft labels too."""
    assert brier(rows(0, 1, 0.5), rows(0, 0, 0.5)) == pytest.approx(1 / 3)


def test_an_interval_covers_the_truth_as_often_as_it_says() -> None:
    """40 questions of 5 rows that agree among themselves: 95 %, give or take what 200 worlds can tell. Rows drawn one
    by one would cover about 60 %."""
    rng, covered = np.random.default_rng(0), 0
    questions = np.repeat(np.arange(40), 5)
    for world in range(200):
        values = np.repeat(rng.normal(0.0, 1.0, 40), 5)
        found = bootstrap(
            lambda drawn, values=values: float(values[drawn].mean()),  # type: ignore[misc]
            questions.tolist(),
            n_resamples=200,
            seed=world,
        )
        covered += found.low <= 0 <= found.high
    assert 0.88 <= covered / 200 <= 0.99


def test_an_interval_is_the_same_for_the_same_seed_and_counts_what_it_leaves_out() -> None:
    """Resamples without both kinds of label have no AUROC; they are counted, not hidden."""
    questions = ["a", "a", "b", "b", "c", "c"]
    scores, positive = rows(1, 2, 3, 4, 5, 6), np.array([False, False, False, False, False, True])

    def statistic(drawn: Any) -> float:
        return auroc(scores[drawn], positive[drawn])

    found = bootstrap(statistic, questions, seed=3)
    assert found == bootstrap(statistic, questions, seed=3)
    assert found.value == 1 and found.n_questions == 3
    assert 200 < found.n_left_out < 400, "the chance not to draw question c is (2/3)^3"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: auroc(rows(1), np.array([True, False])), r"got shapes \(1,\) and \(2,\)"),
        (lambda: auroc(rows(), np.array([], np.bool_)), "at least 1 each"),
        (lambda: auroc(rows(np.nan, 1), np.array([True, False])), "must be finite"),
        (lambda: brier(rows(0.5), rows(np.nan)), "must be finite"),
        (lambda: ece(rows(-0.1), rows(0)), r"must lie in 0\.\.1 here, found -0\.1\.\.0"),
        (lambda: brier(rows(0.5), rows(2)), r"found 0\.5\.\.2"),
        (lambda: ece(rows(0.5), rows(1), n_bins=0), "at least 1 bin"),
        (lambda: concordance(rows(1, 2), rows(0, 1), ["a"]), "2 scores have 1 groups"),
        (lambda: bootstrap(lambda _: 1.0, ["a", "a"]), "at least 2 questions"),
        (lambda: bootstrap(lambda _: 1.0, ["a", "b"], n_resamples=0), "1 resample"),
        (lambda: bootstrap(lambda _: float("nan"), ["a", "b"]), "undefined in 1000 of 1000 resamples"),
    ],
)
def test_what_cannot_be_measured_is_refused(call: Any, message: str) -> None:
    """One line that says what was given, not a warning from the depths of numpy."""
    with pytest.raises(CalibrationError, match=message):
        call()
