"""Results survive the journal."""

from __future__ import annotations

import json
from typing import Any

import pytest
from bench_results import result

from semspec.calibration.bench.records import Cell, Result


def test_a_result_is_read_back_as_it_was() -> None:
    """Times to the last bit, any text, one line."""
    one = result(
        text='a\n"\u2028\ud800',
        seconds=0.1 + 0.2,
        correct=None,
        tpot_ms=None,
        phase_ms={"target": 1 / 3},
        token_ids=(0, 5),
    )
    line = one.to_json()
    assert "\n" not in line and line.isascii()
    assert Result.from_json(line) == one and Result.from_json(line).to_json() == line


@pytest.mark.parametrize(
    "change",
    [
        {"text": 3},
        {"token_ids": [1, "2"]},
        {"token_ids": [-1]},
        {"correct": 1},
        {"seconds": 0},
        {"seconds": float("nan")},
        {"prompt_tokens": True},
        {"phase_ms": [1]},
        {"cell": {"problem": "a", "mode": "m", "seed": 0}},
        {"cell": None},
        {"extra": 1},
    ],
)
def test_other_lines_are_refused(change: dict[str, Any]) -> None:
    """A journal may have been edited; what is not a result must not become one."""
    value = {**json.loads(result().to_json()), **change}
    with pytest.raises(ValueError):
        Result.from_json(json.dumps(value))


@pytest.mark.parametrize("line", ["", "{", "[]", "[" * 100_000, "{}"])
def test_lines_that_are_no_object_of_ours_are_refused(line: str) -> None:
    """The end of a torn file, or another file."""
    with pytest.raises(ValueError):
        Result.from_json(line)


def test_cells_are_ordered_and_named() -> None:
    """The name of a cell is its key for people."""
    one, two = (Cell(problem="p", mode="m", seed=0, repeat=repeat) for repeat in (0, 1))
    assert one < two and str(two) == "p/m/0/1"
