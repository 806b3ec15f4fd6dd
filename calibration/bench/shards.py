"""The shards of a run that is spread over machines: one folder each, under --out, with what was measured so far.

It knows files and what may be in them; where shards are measured is not its business.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from semspec.calibration.bench.journal import (
    CELLS,
    DIVERGENCES,
    RESULTS,
    RUN,
    lock_folder,
    read_cells,
    read_origin,
)
from semspec.calibration.bench.peer_notes import NOTES
from semspec.calibration.bench.settings import Settings, check_same
from semspec.runtime.errors import ConfigError

__all__ = ["Shard", "claim", "new_shards", "open_shards", "read_files"]

SHARDS = "shards"
FILES = (
    RUN,
    CELLS,
    NOTES,
    DIVERGENCES,
    RESULTS,
)  # in the order written: the last one says that a shard is finished


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Part `index` of `count`, from 1, and its folder, which need not exist."""

    index: int
    count: int
    folder: Path

    def __str__(self) -> str:
        return f"shard {self.index}/{self.count}"

    @property
    def finished(self) -> bool:
        return (self.folder / RESULTS).exists()

    @property
    def n_measured(self) -> int:
        return len(read_cells(self.folder / CELLS))

    @property
    def machine(self) -> Mapping[str, Any] | None:
        """What it was begun on and must go on on; None where nothing was measured yet."""
        return read_origin(self.folder).machines[0] if self.n_measured else None

    def files(self) -> dict[str, bytes]:
        """What another machine needs to go on with it. A line that a kill tore is cut off."""
        read_cells(self.folder / CELLS, mend=True)
        return read_files(self.folder)

    def keep(self, files: Mapping[str, bytes]) -> None:
        """Write the files of its folder, each at once, in place of those that are there; others are not looked at."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            if name in files:
                unfinished = self.folder / f"{name}.partial"
                with unfinished.open("wb") as file:
                    file.write(files[name])
                    file.flush()
                    os.fsync(file.fileno())
                unfinished.replace(self.folder / name)

    def append(self, cells: bytes, *, at: int) -> bool:
        """Add lines to its journal, after run.json was kept; not where it does not end at byte `at`."""
        with (self.folder / CELLS).open("ab") as file:
            if file.tell() != at:
                return False
            file.write(cells)
            file.flush()
            os.fsync(file.fileno())
        return True


def read_files(folder: Path) -> dict[str, bytes]:
    """The files of a shard, as far as they are there."""
    paths = [folder / name for name in FILES]
    return {path.name: path.read_bytes() for path in paths if path.exists()}


@contextmanager
def claim(out: Path) -> Iterator[None]:
    """Nobody else spreads a run into `out` meanwhile. Where nothing was kept in the end, nothing is left there.

    Raises ConfigError where `out` holds something else, CalibrationError where somebody does.
    """
    folder = out / SHARDS
    if out.exists() and not folder.is_dir() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"{out} holds no run that was spread with --ray; give an --out of its own")
    folder.mkdir(parents=True, exist_ok=True)
    lock = lock_folder(folder)
    try:
        yield
    finally:
        os.close(lock)
        with suppress(OSError):  # they are not empty
            folder.rmdir()
            out.rmdir()


def new_shards(out: Path, count: int) -> list[Shard]:
    """All the shards of a run that is split into `count`."""
    return [
        Shard(index=index, count=count, folder=out / SHARDS / str(index)) for index in range(1, count + 1)
    ]


def open_shards(out: Path, settings: Settings, count: int | None) -> list[Shard]:
    """All the shards of the run in `out`: of the split that was begun there, else of `count`; none where that is None.

    Raises ConfigError for a run with other settings or another count, CalibrationError for a damaged folder.
    """
    begun = sorted(path.parent for path in (out / SHARDS).glob(f"*/{RUN}"))
    if not begun:
        return new_shards(out, count) if count else []
    found = read_origin(begun[0]).shard[1]
    if count not in (None, found):
        raise ConfigError(
            f"{out} holds a run in {found} shards and --ray-workers asks for {count}; leave it out, or give another "
            f"--out"
        )
    shards = new_shards(out, found)
    if strange := [path for path in begun if path not in {shard.folder for shard in shards}]:
        raise ConfigError(f"{strange[0]} is not a shard of the run in {out}; take it out of there")
    for shard in shards:
        if shard.folder in begun:
            origin = read_origin(shard.folder)
            check_same(f"{shard.folder} holds another run, give another --out", origin.settings, settings)
            if origin.shard != (shard.index, shard.count):
                raise ConfigError(
                    f"{shard.folder} holds shard {'/'.join(map(str, origin.shard))}; move it back"
                )
    return shards
