"""The plan of a run, and what run.json says of it."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from bench_results import origin, settings

from semspec.calibration.bench.settings import Origin, check_same, plan_cells
from semspec.runtime.errors import ConfigError


def test_modes_take_turns_and_each_is_first_equally_often() -> None:
    """Whoever always ran first would always pay for what the machine did before."""
    modes = ("autoregressive", "ngram", "lossless")
    plan = settings(problems=tuple("abcdef"), modes=modes, seeds=2, repeats=2)
    cells = list(plan_cells(plan))
    groups = [cells[start : start + 3] for start in range(0, len(cells), 3)]
    assert len(set(cells)) == len(cells) == 6 * 3 * 2 * 2
    assert all(len({(cell.problem, cell.seed, cell.repeat) for cell in group}) == 1 for group in groups)
    for place in range(3):
        assert set(Counter(group[place].mode for group in groups).values()) == {8}


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_shards_are_the_plan_each_cell_once(count: int) -> None:
    """In the order of the whole plan, so a split run measures the same in the same turns."""
    plan = settings(problems=tuple("abcde"), seeds=2)
    whole = list(plan_cells(plan))
    shards = [list(plan_cells(plan, (index, count))) for index in range(1, count + 1)]
    assert sorted(cell for shard in shards for cell in shard) == sorted(whole)
    for shard in shards:
        assert shard == [cell for cell in whole if cell in set(shard)]


def test_origin_is_read_back_as_it_was() -> None:
    """And is the same for comparison, whatever JSON makes of tuples."""
    one = origin(shard=(2, 3))
    back = Origin.from_json(one.to_json())
    assert back.to_json() == one.to_json()
    check_same("same", back, one)


@pytest.mark.parametrize(
    "change",
    [
        {"format": 9},
        {"shard": [3, 2]},
        {"shard": [1]},
        {"shard": [0, 1]},
        {"settings": {}},
        {"machines": 1},
        {"x": 1},
    ],
)
def test_another_run_json_is_refused(change: dict[str, Any]) -> None:
    """It may be of another version, or edited."""
    with pytest.raises(ValueError):
        Origin.from_json(json.dumps({**json.loads(origin().to_json()), **change}))


@pytest.mark.parametrize("text", ["", "[]", "null", "[" * 100_000])
def test_what_is_no_run_json_is_refused(text: str) -> None:
    """A torn or foreign file."""
    with pytest.raises(ValueError):
        Origin.from_json(text)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"seeds": 2}, "settings.seeds is 1 there and 2 here"),
        ({"sampling": {"temperature": 0.6, "stop": (), "seed": None}}, "settings.sampling.temperature"),
        ({"models": {}}, "settings.models"),
        ({"problems": ("a", "b")}, "settings.problems"),
        ({"shard": (1, 2)}, "shard is"),
    ],
)
def test_the_first_difference_is_named(changes: dict[str, Any], name: str) -> None:
    """So that the user can give the old value, or another folder."""
    with pytest.raises(ConfigError, match=name):
        check_same("what", origin(), origin(**changes))


def test_a_later_start_is_no_difference() -> None:
    """A run that is resumed began at one time and goes on at another."""
    check_same("what", origin(), origin(started="2031-01-01T00:00:00+00:00"))
