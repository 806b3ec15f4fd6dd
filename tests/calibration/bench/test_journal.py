"""What a folder keeps: nothing is lost, nothing is repeated, nothing is mixed."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_results import origin, result

from semspec.calibration.bench.journal import CELLS, RUN, Journal, read_cells, read_origin, write_once
from semspec.runtime.errors import CalibrationError, ConfigError


def test_results_are_there_when_the_folder_is_opened_again(tmp_path: Path) -> None:
    """And when it began stays what it was."""
    with Journal(tmp_path / "deep" / "out", origin()) as journal:
        for problem in "ab":
            journal.append(result(problem))
    with Journal(tmp_path / "deep" / "out", origin(started="later")) as journal:
        assert list(journal.results.values()) == [result("a"), result("b")]
        assert journal.origin.started == origin().started
        with pytest.raises(ValueError, match="already"):
            journal.append(result("a"))


@pytest.mark.parametrize("kept", [0, 1, 100, -2, -1])
def test_a_torn_last_line_is_dropped_and_measured_again(tmp_path: Path, kept: int) -> None:
    """A kill may come in the middle of a write, also just before the end of the line."""
    with Journal(tmp_path, origin()) as journal:
        journal.append(result("a"))
    whole = (tmp_path / CELLS).read_bytes()
    (tmp_path / CELLS).write_bytes(whole + result("b").to_json().encode()[:kept])
    assert read_cells(tmp_path / CELLS) == [result("a")]
    with Journal(tmp_path, origin()) as journal:
        assert list(journal.results) == [result("a").cell]
        journal.append(result("b"))
    assert read_cells(tmp_path / CELLS) == [result("a"), result("b")]


@pytest.mark.parametrize(("line", "message"), [(b"{}", "line 2 is damaged"), (None, "came before")])
def test_a_damaged_journal_is_refused(tmp_path: Path, line: bytes | None, message: str) -> None:
    """Only the end of the file can be torn; anything else was edited, and is not guessed at."""
    good = result("a").to_json().encode()
    (tmp_path / CELLS).write_bytes(b"\n".join([good, line or good, result("b").to_json().encode(), b""]))
    with pytest.raises(CalibrationError, match=message):
        read_cells(tmp_path / CELLS)


def test_another_run_is_not_continued(tmp_path: Path) -> None:
    """Cells of two settings in one table would be nobody's result."""
    with Journal(tmp_path, origin()) as journal:
        journal.append(result("a"))
    before = (tmp_path / RUN).read_bytes()
    with pytest.raises(ConfigError, match=r"settings\.repeats is 1 there and 2 here"):
        Journal(tmp_path, origin(repeats=2))
    assert (tmp_path / RUN).read_bytes() == before
    (tmp_path / RUN).unlink()
    with pytest.raises(CalibrationError, match="holds no run"):
        Journal(tmp_path, origin())


def test_a_run_that_measured_nothing_may_change(tmp_path: Path) -> None:
    """After a first try that failed on a setting, the corrected command needs no new folder."""
    with Journal(tmp_path, origin(backend="tpu")):
        pass
    (tmp_path / CELLS).write_bytes(b'{"cell":')
    with Journal(tmp_path, origin()) as journal:
        assert journal.origin.settings.backend == read_origin(tmp_path).settings.backend == "cpu"


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    """Nothing of ours is mixed into a user's files."""
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"'notes\.txt'"):
        Journal(tmp_path, origin())
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_two_processes_do_not_write_one_folder(tmp_path: Path) -> None:
    """The second would measure the same cells again. The lock goes with its owner, also by an error."""
    with Journal(tmp_path, origin()) as journal:
        journal.append(result("a"))
        with pytest.raises(CalibrationError, match="another run is writing"):
            Journal(tmp_path, origin())
    with pytest.raises(ConfigError):
        Journal(tmp_path, origin(seeds=9))
    with Journal(tmp_path, origin()):
        pass


def test_a_missing_or_damaged_run_json_is_named(tmp_path: Path) -> None:
    """A wrong folder is the likeliest mistake of a join."""
    with pytest.raises(CalibrationError, match="holds no run"):
        read_origin(tmp_path / "none")
    (tmp_path / RUN).write_bytes(b"\xff")
    with pytest.raises(CalibrationError, match="is damaged"):
        read_origin(tmp_path)


def test_a_written_file_never_changes(tmp_path: Path) -> None:
    """results.json is quoted; the same again is no change."""
    path = tmp_path / "x.json"
    write_once(path, "ä")
    write_once(path, "ä")
    with pytest.raises(CalibrationError, match="not overwritten"):
        write_once(path, "b")
    assert path.read_bytes() == "ä".encode() and list(tmp_path.iterdir()) == [path]
