"""Shards of one run, measured apart, as the one run they are parts of."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from semspec.calibration.bench.divergences import Divergence
from semspec.calibration.bench.journal import (
    CELLS,
    DIVERGENCES,
    Journal,
    read_cells,
    read_divergences,
    read_origin,
)
from semspec.calibration.bench.peer_notes import join_notes
from semspec.calibration.bench.records import Cell, Result
from semspec.calibration.bench.run import Run, conclude
from semspec.calibration.bench.settings import Origin, check_same, plan_cells
from semspec.runtime.errors import CalibrationError, ConfigError

__all__ = ["join", "join_into"]


def join(folders: Sequence[Path], out: Path) -> Run:
    """Write the run whose shards are in `folders`, in any order, to `out`, which must not exist.

    Its cells are those of a run that was never split, in the same order; its origin names every machine. Raises
    ConfigError when the folders are not all the shards of one run, each once; CalibrationError for a damaged or
    unfinished one. Nothing is left in `out` then.
    """
    if out.exists():
        raise ConfigError(f"{out} exists; give --out a new folder")
    unfinished = out.with_name(f".{out.name}.partial")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a join that was killed
    try:
        finished = join_into(unfinished, folders)
        unfinished.rename(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return replace(finished, folder=out)


def join_into(out: Path, folders: Sequence[Path]) -> Run:
    """As join, but into a folder that may be there: one of the same shards, joined or half-joined, is completed, and
    one that holds the shards themselves is filled."""
    shards = _in_order(folders)
    results: dict[Cell, Result] = {}
    margins: dict[Cell, float | None] = {}
    for folder, origin in shards:
        results.update(_read_shard(folder, origin))
        margins.update((one.cell, one.margin) for one in read_divergences(folder / DIVERGENCES))
    origins = [origin for _, origin in shards]
    whole = replace(
        origins[0],
        started=min(origin.started for origin in origins),
        shard=(1, 1),
        machines=tuple(machine for origin in origins for machine in origin.machines),
    )
    guests = {folder.relative_to(out).parts[0] for folder in folders if out in folder.parents}
    with Journal(out, whole, guests=guests) as journal:
        for cell in plan_cells(whole.settings):
            if cell not in journal.results:
                journal.append(results[cell])
        join_notes(out, [folder for folder, _ in shards])
        return conclude(out, whole, journal.results, partial(_known, margins))


def _in_order(folders: Sequence[Path]) -> list[tuple[Path, Origin]]:
    """The shards 1..n with their folders, or ConfigError."""
    origins = [read_origin(folder) for folder in folders]
    by_index: dict[int, tuple[Path, Origin]] = {}
    for folder, origin in zip(folders, origins, strict=True):
        index, count = origin.shard
        if count != origins[0].shard[1]:
            raise ConfigError(
                f"{folder} is a part of {count} and {folders[0]} a part of {origins[0].shard[1]}: shards of one run go "
                f"together"
            )
        check_same(f"{folder} is of another run than {folders[0]}", origins[0].settings, origin.settings)
        if index in by_index:
            raise ConfigError(
                f"{by_index[index][0]} and {folder} are both shard {index}/{count}; leave one out"
            )
        by_index[index] = folder, origin
    lacking = [index for index in range(1, origins[0].shard[1] + 1) if index not in by_index]
    if lacking:
        raise ConfigError(
            f"shard {lacking[0]}/{origins[0].shard[1]} is missing; give the folders of all of them"
        )
    return [by_index[index] for index in sorted(by_index)]


def _read_shard(folder: Path, origin: Origin) -> dict[Cell, Result]:
    """Its results, which are all that it plans."""
    found = {result.cell: result for result in read_cells(folder / CELLS)}
    if found.keys() != set(plan_cells(origin.settings, origin.shard)):
        raise CalibrationError(f"{folder} is unfinished or of another plan; run it to its end")
    return found


def _known(margins: Mapping[Cell, float | None], divergences: Sequence[Divergence]) -> Iterator[Divergence]:
    """Divergences with the margins that were measured with the shards."""
    for one in divergences:
        if one.cell not in margins:
            raise CalibrationError(
                f"no shard has the margin of {one.cell} in its {DIVERGENCES}; remove the file and run the shard again"
            )
        yield replace(one, margin=margins[one.cell])
