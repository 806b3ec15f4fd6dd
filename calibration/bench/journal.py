"""The folder of a run: run.json (what is measured, where), cells.jsonl (the journal), and its end: divergences.jsonl,
then results.json.

A measurement is in the journal, on the disk, before the next one begins; what a kill tore is dropped and measured
again. One process writes a folder at a time. Linux and macOS: the lock is flock's.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Collection
from pathlib import Path
from types import TracebackType

from semspec.calibration.bench.divergences import Divergence
from semspec.calibration.bench.records import Cell, Result
from semspec.calibration.bench.settings import Origin, check_same
from semspec.runtime.errors import CalibrationError, ConfigError
from semspec.runtime.typed import shown

__all__ = [
    "CELLS",
    "DIVERGENCES",
    "RESULTS",
    "RUN",
    "Journal",
    "lock_folder",
    "read_cells",
    "read_divergences",
    "read_origin",
    "write_once",
]

RUN, CELLS, DIVERGENCES, RESULTS = "run.json", "cells.jsonl", "divergences.jsonl", "results.json"


class Journal:
    """The open journal of one run: `results` so far, and `append`. A context manager.

    folder: made if it is missing. origin: what run.json shall say; a folder with measurements goes on only where it
    says the same, but for when it started, which stays. guests: names of others that may lie in a new one.

    Raises ConfigError for a folder of another run or of something else, CalibrationError for a damaged one and for
    one that another process is writing.
    """

    def __init__(self, folder: Path, origin: Origin, *, guests: Collection[str] = ()) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = lock_folder(folder)
        try:
            cells = read_cells(folder / CELLS, mend=True)
            if cells:
                self.origin = read_origin(folder)
                check_same(f"{folder} holds another run, give another --out", self.origin, origin)
            else:
                self.origin = _begin(folder, origin, guests)
            self.results = {result.cell: result for result in cells}
            self._file = (folder / CELLS).open("ab")
        except BaseException:
            os.close(self._lock)
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        os.close(self._lock)

    def append(self, result: Result) -> None:
        """Write one result; it is on the disk when this returns. Raises ValueError for a cell that is there."""
        if result.cell in self.results:
            raise ValueError(f"{result.cell} is in the journal already")
        self._file.write(result.to_json().encode("ascii") + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.results[result.cell] = result


def read_cells(path: Path, *, mend: bool = False) -> list[Result]:
    """Results of a journal in the order measured; none where it does not exist. A last line without its end was
    torn by a kill and does not count; mend: it is cut off the file.

    Raises CalibrationError, with file and line, for any other line that is not a result, or is one again.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    whole = content[: content.rfind(b"\n") + 1]
    if mend and len(whole) < len(content):
        os.truncate(path, len(whole))
    results: dict[Cell, Result] = {}
    for number, line in enumerate(whole.split(b"\n")[:-1], start=1):
        try:
            result = Result.from_json(line.decode("ascii"))
        except ValueError as error:
            raise CalibrationError(
                f"{path}, line {number} is damaged ({_short(error)}); remove the line"
            ) from None
        if result.cell in results:
            raise CalibrationError(
                f"{path}, line {number}: {result.cell} came before; remove one of the lines"
            )
        results[result.cell] = result
    return list(results.values())


def read_divergences(path: Path) -> tuple[Divergence, ...]:
    """Divergences of a run, with their margins. Raises CalibrationError where the file is missing or damaged."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        raise CalibrationError(f"{path} is missing; run it to its end") from None
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(Divergence.from_json(line.decode("ascii")))
        except ValueError as error:
            raise CalibrationError(
                f"{path}, line {number} is damaged ({_short(error)}); remove the file and run the same command again"
            ) from None
    return tuple(found)


def read_origin(folder: Path) -> Origin:
    """run.json of a folder. Raises CalibrationError where there is none, or one that is damaged."""
    path = folder / RUN
    try:
        return Origin.from_json(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise CalibrationError(f"{folder} holds no run: it has no {RUN}") from None
    except (OSError, ValueError) as error:
        raise CalibrationError(
            f"{path} is damaged ({_short(error)}); start again in another folder"
        ) from None


def write_once(path: Path, text: str) -> None:
    """Write a file that never changes again, whole or not at all. Writing the same again does nothing.

    Raises CalibrationError where it says something else.
    """
    content = text.encode("utf-8")
    if path.exists():
        if path.read_bytes() != content:
            raise CalibrationError(f"{path} is of another run and is not overwritten; give another --out")
        return
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def _begin(folder: Path, origin: Origin, guests: Collection[str]) -> Origin:
    """Write run.json; one that nothing was measured for is replaced."""
    ours = {RUN, CELLS, f"{RUN}.partial", *guests}
    if strangers := sorted(path.name for path in folder.iterdir() if path.name not in ours):
        raise ConfigError(
            f"{folder} holds {shown(strangers[0])} and no measurement; give an --out of its own"
        )
    (folder / RUN).unlink(missing_ok=True)
    write_once(folder / RUN, origin.to_json())
    return origin


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:160]


def lock_folder(folder: Path, *, other: str = "--out") -> int:
    """A descriptor; until it is closed, nobody else gets one. Raises CalibrationError where somebody has, which names
    `other` as the option to change."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise CalibrationError(
            f"another run is writing {folder}; wait for it, or give another {other}"
        ) from None
    return lock
