"""The cost model by hand."""

from __future__ import annotations

import doctest

import pytest
from bench_results import result

from semspec.calibration.bench import cost_model
from semspec.calibration.bench.cost_model import Costs, measure_costs, predict_speed
from semspec.calibration.bench.modes import parse_modes
from semspec.calibration.bench.summary import summarize

NAMES = ("autoregressive", "lossless:3", "draft-alone")
PLAIN = result("a", phase_ms={"target": 400.0}, num_rounds=10)
EXACT = result("a", "lossless:3", phase_ms={"target": 210.0, "draft": 60.0}, num_rounds=3, num_draft_tokens=9)
ALONE = result("a", "draft-alone", phase_ms={"draft": 40.0}, generated_tokens=4, num_rounds=0)
BY_MODE = {"autoregressive": [PLAIN], "lossless:3": [EXACT], "draft-alone": [ALONE]}


def test_docstring_example_holds() -> None:
    """The worked example is executed, so it cannot drift from the code."""
    found = doctest.testmod(cost_model)
    assert found.attempted and not found.failed


def test_unit_costs_come_from_the_modes_that_measure_them_alone() -> None:
    """40 ms a row, 10 a drafted token; a pass of four rows takes 70, so a further row takes 10 of 40."""
    costs = measure_costs(BY_MODE, parse_modes(NAMES))
    assert costs is not None
    assert (costs.draft, costs.row) == pytest.approx((0.25, 0.25))


@pytest.mark.parametrize("absent", NAMES)
def test_without_one_of_them_nothing_is_predicted(absent: str) -> None:
    """A price that nobody measured is not guessed."""
    rest = {name: found for name, found in BY_MODE.items() if name != absent}
    assert measure_costs(rest, parse_modes([name for name in NAMES if name != absent])) is None


def test_rows_are_never_cheaper_than_nothing() -> None:
    """A clock that says a pass of four rows is faster than one of one row is noise."""
    quick = result("a", "lossless:3", phase_ms={"target": 60.0}, num_rounds=3, num_draft_tokens=9)
    costs = measure_costs(BY_MODE | {"lossless:3": [quick]}, parse_modes(NAMES))
    assert costs is not None and costs.row == 0


def test_a_dearer_row_or_a_worse_draft_is_slower() -> None:
    """What the model is for: with rows at the price of tokens nothing is won however good the draft is."""
    free = predict_speed(Costs(draft=0.1, row=0.0), generated=90, drafted=90, passes=10)
    dear = predict_speed(Costs(draft=0.1, row=1.0), generated=90, drafted=90, passes=10)
    waste = predict_speed(Costs(draft=0.1, row=0.0), generated=90, drafted=180, passes=10)
    assert dear < 1 < waste < free


def test_the_table_holds_it_against_the_clock() -> None:
    """A mode that drafts has a prediction; plain decoding and the draft alone have none."""
    table = summarize([PLAIN, EXACT, ALONE], parse_modes(NAMES), greedy=True)
    plain, exact, alone = table.rows
    # n / (r + (c + k) d)
    assert exact.model_speed == pytest.approx(EXACT.generated_tokens / (3 + 0.5 * 9))
    assert (plain.model_speed, alone.model_speed) == (None, None)
