"""The folders of a spread run: what goes on there, and what is not written over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_results import origin, result, settings

from semspec.calibration.bench.join import join, join_into
from semspec.calibration.bench.journal import CELLS, DIVERGENCES, RESULTS, RUN, Journal, read_cells
from semspec.calibration.bench.run import conclude
from semspec.calibration.bench.settings import plan_cells
from semspec.calibration.bench.shards import Shard, claim, new_shards, open_shards, read_files
from semspec.runtime.errors import CalibrationError, ConfigError


def measured(shard: Shard, lacking: int = 0) -> Shard:
    """As a node leaves it, without its last cells."""
    with Journal(shard.folder, origin(shard=(shard.index, shard.count))) as journal:
        cells = list(plan_cells(journal.origin.settings, (shard.index, shard.count)))
        for cell in cells[: len(cells) - lacking]:
            journal.append(result(cell.problem, cell.mode))
        if not lacking:
            conclude(shard.folder, journal.origin, journal.results, tuple)
    return shard


def test_a_split_that_was_begun_goes_on(tmp_path: Path) -> None:
    """The cluster may have grown meanwhile: another split would throw away what was measured."""
    assert open_shards(tmp_path, settings(), None) == [] and len(open_shards(tmp_path, settings(), 3)) == 3
    measured(new_shards(tmp_path, 2)[1], lacking=1)
    shards = open_shards(tmp_path, settings(), None)
    assert shards == open_shards(tmp_path, settings(), 2) == new_shards(tmp_path, 2)
    assert [shard.n_measured for shard in shards] == [0, 1] and not any(shard.finished for shard in shards)
    assert [shard.machine for shard in shards] == [None, {"processor": "slide rule", "cores": 1}]


def test_what_was_sent_twice_or_is_torn_is_written_once(tmp_path: Path) -> None:
    """News may come late, after the whole shard; and the driver may be killed while it writes."""
    source = measured(new_shards(tmp_path / "node", 1)[0])
    (shard,) = new_shards(tmp_path / "out", 1)
    files = read_files(source.folder)
    assert list(files) == [RUN, CELLS, DIVERGENCES, RESULTS]
    cells, cut = files[CELLS], files[CELLS].index(b"\n") + 1
    shard.keep({RUN: files[RUN], "../evil": b"x"})
    assert shard.append(cells[:cut], at=0) and not shard.append(cells[:cut], at=0)
    with (shard.folder / CELLS).open("ab") as file:
        file.write(cells[cut : cut + 9])
    assert shard.files() == {RUN: files[RUN], CELLS: cells[:cut]} and shard.n_measured == 1
    assert shard.append(cells[cut:], at=cut) and not shard.finished
    shard.keep(files)
    assert shard.finished and not shard.append(cells[cut:], at=cut) and read_files(shard.folder) == files
    assert sorted(path.name for path in (tmp_path / "out").rglob("*.*")) == sorted(files)


def test_a_run_is_joined_around_its_shards(tmp_path: Path) -> None:
    """The same bytes as those of join elsewhere, again after a kill; no stranger is built over."""
    out = tmp_path / "out"
    folders = [measured(shard).folder for shard in new_shards(out, 2)]
    join(folders, tmp_path / "elsewhere")
    for cut in (None, 10, None):
        if cut is not None:
            (out / RESULTS).unlink()
            (out / CELLS).write_bytes((out / CELLS).read_bytes()[:-cut])
        assert len(join_into(out, folders).results) == 6
        for name in (RUN, CELLS, DIVERGENCES, RESULTS):
            assert (out / name).read_bytes() == (tmp_path / "elsewhere" / name).read_bytes()
    assert json.loads((out / RUN).read_text())["shard"] == [1, 1]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    with pytest.raises(ConfigError, match=r"thesis\.txt"):
        join_into(tmp_path / "mine", folders)


def test_shards_of_another_run_are_refused(tmp_path: Path) -> None:
    """Before anything is measured, and with the way out."""
    first, second = (measured(shard) for shard in new_shards(tmp_path, 2))
    with pytest.raises(ConfigError, match=r"another run, give another --out: seeds is 1 there and 2 here"):
        open_shards(tmp_path, settings(seeds=2), None)
    with pytest.raises(ConfigError, match="2 shards and --ray-workers asks for 3"):
        open_shards(tmp_path, settings(), 3)
    second.folder.rename(tmp_path / "shards" / "copy")
    with pytest.raises(ConfigError, match="copy is not a shard"):
        open_shards(tmp_path, settings(), None)
    first.folder.rename(second.folder)
    (tmp_path / "shards" / "copy").rename(first.folder)
    with pytest.raises(ConfigError, match="1 holds shard 2/2"):
        open_shards(tmp_path, settings(), None)


def test_one_driver_at_a_time_and_nothing_is_left(tmp_path: Path) -> None:
    """Two would measure everything twice; a fault before the first answer leaves no trace."""
    refused = pytest.raises(CalibrationError, match="another run is writing")
    with claim(tmp_path / "out"), refused, claim(tmp_path / "out"):
        pass
    assert not list(tmp_path.iterdir())
    with claim(tmp_path / "out"):
        measured(new_shards(tmp_path / "out", 1)[0], lacking=1)
    assert len(read_cells(tmp_path / "out" / "shards" / "1" / CELLS)) == 5


@pytest.mark.parametrize("name", ["file", "folder"])
def test_a_folder_of_something_else_is_not_taken(tmp_path: Path, name: str) -> None:
    """Such as a run that was never spread."""
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file", tmp_path / "folder" / RUN):
        path.touch()
    with pytest.raises(ConfigError, match="no run that was spread"), claim(tmp_path / name):
        pass
    assert (tmp_path / "folder" / RUN).exists() and (tmp_path / "file").exists()
