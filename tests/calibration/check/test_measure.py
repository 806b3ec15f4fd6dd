"""What a threshold keeps on segments that it was not made for, and what chance and signals would keep instead."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from semspec.calibration.check.measure import PREDICTOR, RANDOM, Segments, keep_highest, measure
from semspec.calibration.metrics import bootstrap
from semspec.runtime.errors import CalibrationError
from semspec.runtime.probe_set import RiskPoint

SEGMENTS = Segments(
    scores=np.array([0.9, 0.4, 0.8, 0.3, 0.7, 0.2]),
    signals={"tied": np.array([1.0, 1, 0, 0, 0, 0]), "good": np.array([3.0, 0, 3, 0, 0, 3])},
    bad=np.array([False, True, False, True, True, False]),
    tokens=np.array([2, 2, 2, 2, 2, 2]),
    questions=np.array([0, 0, 1, 1, 2, 2]),
)


def point(risk: float, threshold: float) -> RiskPoint:
    return RiskPoint(risk=risk, threshold=threshold, coverage=0.5, observed=risk / 2, upper=risk)


def test_a_worked_example() -> None:
    """Six segments by hand: 0.9, 0.8 and 0.7 are kept, one of them bad. Chance keeps half of all, three of six bad. The
    signal `tied` keeps the first question and a quarter of each of the four behind it."""
    found = measure(SEGMENTS, [point(0.2, 0.6)], n_resamples=50)
    assert (found.segments, found.questions, found.tokens, found.bad.value) == (6, 3, 12, 0.5)
    (line,) = found.risks
    assert [one.way for one in line.ways] == [PREDICTOR, RANDOM, "tied", "good"]
    assert all(one.segments.value == one.tokens.value == 0.5 for one in line.ways)
    assert [one.bad[0].value for one in line.ways] == pytest.approx([1 / 3, 0.5, 1.5 / 3, 0.0])
    assert line.predictor.gain == ()
    assert [one.gain[0].value for one in line.ways[1:]] == pytest.approx([-1 / 6, -1 / 6, 1 / 3])
    assert line.best_signal == "good"


def test_the_interval_is_that_of_resampled_questions() -> None:
    """The same draws as metrics.bootstrap, whose statistic is written in plain words; one of a question's segments says
    little more than the other."""
    rng = np.random.default_rng(1)
    n = 120
    many = Segments(
        scores=rng.random(n),
        signals={"signal": rng.random(n)},
        bad=rng.random(n) < 0.4,
        tokens=rng.integers(1, 9, n),
        questions=np.repeat(np.arange(20), 6),
    )
    kept = many.scores >= 0.5
    line = measure(many, [point(0.3, 0.5)], n_resamples=200, seed=3).risks[0]

    def bad(rows: np.ndarray) -> float:
        return float(many.bad[rows][kept[rows]].mean())

    def less(rows: np.ndarray) -> float:
        return bad(rows) - float(many.bad[rows].mean())

    for mine, statistic in ((line.predictor.bad, bad), (line.way(RANDOM).gain, less)):
        expected = bootstrap(statistic, many.questions.tolist(), n_resamples=200, seed=3)
        found = mine[0]
        assert (found.value, found.low, found.high) == pytest.approx(
            (expected.value, expected.low, expected.high)
        )


def test_a_signal_that_ranks_alike_is_no_better_and_no_worse() -> None:
    """Paired: the difference is nought in every resample, not only on average."""
    alike = replace(SEGMENTS, signals={"logit": np.log(SEGMENTS.scores)})
    gain = measure(alike, [point(0.2, 0.6)], n_resamples=50).risks[0].way("logit").gain[0]
    assert (gain.value, gain.low, gain.high) == (0.0, 0.0, 0.0)


def test_where_nothing_is_kept_nothing_is_told() -> None:
    """A share of nothing is not 0."""
    line = measure(SEGMENTS, [point(0.1, 1.0)], n_resamples=50).risks[0]
    assert all(one.tokens.value == 0.0 and not one.bad and not one.gain for one in line.ways)
    assert line.best_signal == ""


def test_as_many_tokens_are_kept_as_asked_for() -> None:
    """Long segments at the edge count in part, and the better ones always first."""
    tokens = np.array([5, 1, 10, 3])
    values = np.array([0.2, 0.9, 0.5, 0.5])
    for n_tokens in (0.0, 1.0, 7.5, 14.0, 19.0):
        weights = keep_highest(values, tokens, n_tokens)
        assert float(weights @ tokens) == pytest.approx(n_tokens) and weights[2] == weights[3]
        assert weights[1] >= weights[2] >= weights[0]


def test_what_cannot_be_measured_is_refused() -> None:
    """No risk, and no second question to draw."""
    with pytest.raises(CalibrationError, match="no threshold to check"):
        measure(SEGMENTS, [])
    with pytest.raises(CalibrationError, match="at least 2 questions"):
        measure(replace(SEGMENTS, questions=np.zeros(6, np.int64)), [point(0.2, 0.6)])
