"""Shards put together: the cells of the unsplit run, and no other way to get a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench_results import origin, result

from semspec.calibration.bench.join import join
from semspec.calibration.bench.journal import CELLS, RESULTS, Journal
from semspec.calibration.bench.peer_notes import NOTES, read_notes
from semspec.calibration.bench.run import conclude
from semspec.calibration.bench.settings import plan_cells
from semspec.runtime.errors import CalibrationError, ConfigError, SemspecError


def measured(folder: Path, shard: tuple[int, int], lacking: int = 0, **changes: Any) -> Path:
    """A shard as a run leaves it, `lacking` its last cells. Speeds differ by cell."""
    with Journal(folder, origin(shard=shard, **changes)) as journal:
        cells = list(plan_cells(journal.origin.settings, shard))
        for cell in cells[: len(cells) - lacking]:
            seconds = 1.0 + ord(cell.problem) % 7 + len(cell.mode) / 9
            journal.append(result(cell.problem, cell.mode, cell.seed, cell.repeat, seconds=seconds))
        if not lacking:
            conclude(folder, journal.origin, journal.results, tuple)
    return folder


def test_joined_shards_are_the_unsplit_run(tmp_path: Path) -> None:
    """Same results, same table, same journal; the origin names each machine. Their order does not matter."""
    whole = measured(tmp_path / "whole", (1, 1))
    shards = [measured(tmp_path / str(index), (index, 2)) for index in (1, 2)]
    (shards[1] / NOTES).write_text('{"peer": {"version": "1.2"}}', encoding="utf-8")
    joined = join(shards[::-1], tmp_path / "out")
    assert read_notes(tmp_path / "out") == {"peer": {"version": "1.2"}}
    mine, theirs = (json.loads((folder / RESULTS).read_text()) for folder in (tmp_path / "out", whole))
    assert mine["results"] == theirs["results"] and mine["table"] == theirs["table"]
    assert (tmp_path / "out" / CELLS).read_bytes() == (whole / CELLS).read_bytes()
    assert mine["origin"]["settings"] == theirs["origin"]["settings"] and mine["origin"]["shard"] == [1, 1]
    assert len(mine["origin"]["machines"]) == 2 and joined.folder == tmp_path / "out"
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([{"shard": (1, 2)}], "shard 2/2 is missing"),
        ([{"shard": (1, 2)}, {"shard": (1, 2)}], "both shard 1/2"),
        ([{"shard": (1, 2)}, {"shard": (2, 3)}], "a part of 3"),
        ([{"shard": (1, 2)}, {"shard": (2, 2), "seeds": 2}], r"seeds is 1 there and 2 here"),
        ([{"shard": (1, 2)}, {"shard": (2, 2), "lacking": 1}], "unfinished"),
    ],
)
def test_what_is_not_one_whole_run_is_refused(
    tmp_path: Path, shards: list[dict[str, Any]], message: str
) -> None:
    """A table over part of the problems, or of two settings, would be quoted as that of all. Nothing is left."""
    folders = [measured(tmp_path / f"part{number}", **shard) for number, shard in enumerate(shards)]
    with pytest.raises(SemspecError, match=message):
        join(folders, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == [folder.name for folder in folders]


def test_an_existing_folder_is_not_written(tmp_path: Path) -> None:
    """Not even one of the shards."""
    shard = measured(tmp_path / "one", (1, 1))
    with pytest.raises(ConfigError, match="exists"):
        join([shard], shard)
    with pytest.raises(CalibrationError, match="holds no run"):
        join([tmp_path / "none"], tmp_path / "out")
