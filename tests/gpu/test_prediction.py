"""Predicted speeds against numbers that were worked out elsewhere."""

from __future__ import annotations

import doctest

import pytest
from gpu import prediction
from gpu.prediction import ACCEPTANCES, best_exact, measured_costs, segments, slope

FREE = dict.fromkeys(range(1, 33), 10.0)  # further rows cost nothing


def test_examples_hold() -> None:
    """They are what people read."""
    assert doctest.testmod(prediction).failed == 0


@pytest.mark.parametrize(
    ("draft", "speeds"),
    [(0.05, (1.92, 2.35, 3.09, 4.67)), (0.1, (1.67, 1.98, 2.47, 3.43)), (0.4, (1.14, 1.22, 1.36, 1.58))],
)
def test_exact_speeds_are_those_of_the_closed_form(draft: float, speeds: tuple[float, ...]) -> None:
    """(1 - a^(n+1)) / (1 - a) tokens for n c + 1, the best n; free rows."""
    found = [best_exact(FREE, 10 * draft, share)[0] for share in ACCEPTANCES]
    assert found == pytest.approx(speeds, abs=6e-3)


def test_rows_that_cost_shorten_drafts() -> None:
    """Each length is charged for the pass that it needs, as it was measured."""
    free, length = best_exact(FREE, 1.0, 0.8)
    dear, shorter = best_exact({size: 10.0 + 3 * (size - 1) for size in FREE}, 1.0, 0.8)
    assert dear < free and shorter < length
    assert measured_costs({1: 10.0, 8: 24.0}, 1.0, 7).row == pytest.approx(0.2)


def test_segments_pay_for_what_the_target_writes_anew() -> None:
    """31 tokens for 31 c + 1.5 + 0.3 * 31 passes."""
    passes = {1: 10.0, 32: 15.0}
    assert segments(passes, 1.0, 0.7) == pytest.approx(31 / (3.1 + 1.5 + 9.3), abs=1e-3)
    assert segments(passes, 1.0, 0.9) > segments(passes, 1.0, 0.6)


def test_slope_is_no_less_than_nothing() -> None:
    """A clock may say that eight rows are quicker than one; that is noise."""
    assert slope({1: 10.0, 8: 9.0}) == 0.0
    assert slope({1: 10.0, 2: 20.0, 128: 1.0}) == pytest.approx(1.0)
