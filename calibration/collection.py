"""The folder of a collection: run.json (what is collected, of which graphs), and a safetensors file for each context.

    run.json
    00007-mixed.safetensors    question 7, slot `mixed`: the context, its samples, and what the models made of them

A file is there whole or not at all, and the same run writes the same bytes, whenever it was interrupted. A slot that
gave no context has a file as well, without samples, so that it is not tried again. One process writes a folder at a
time. It knows records and files; it knows no model.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from semspec.calibration.bench.journal import RUN, lock_folder, write_once
from semspec.calibration.bench.settings import check_same
from semspec.calibration.contexts import SLOTS
from semspec.calibration.records import Context, Sample
from semspec.calibration.run_folder import begin_run, unwritable
from semspec.calibration.sample_files import read_samples, write_samples
from semspec.runtime.errors import CalibrationError, ConfigError
from semspec.runtime.segments import Boundary
from semspec.runtime.typed import plain, read_typed

__all__ = [
    "Cell",
    "CollectSettings",
    "Collecting",
    "Collection",
    "CollectionRun",
    "join_collections",
    "open_collection",
]

FORMAT = 3  # 1: every context drawn anew, every segment read in a pass of its own; 2: `mixed` behind the prompt alone
_FILE = re.compile(rf"(\d{{5,}})-({'|'.join(SLOTS)})\.safetensors")
_WRITING = re.compile(rf"\.(?:{_FILE.pattern})\.writing")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectSettings:
    """What is written where. Raises ConfigError for a value out of range.

    n_draft, n_target: samples of each model in a context, beside its greedy one; more of the target's: finer labels,
    more of the draft's: more of them. max_segments: of the longest prefix; more: contexts further into an answer, and
    slower. n_contexts: of each question; fewer than all: contexts.SLOTS take turns from question to question. More
    questions with fewer contexts cost as much and give tighter bounds. temperature, top_p: as at run time. seed: of all
    chances.
    """

    n_draft: int = 8
    n_target: int = 4
    max_segments: int = 6
    n_contexts: int = field(default=len(SLOTS), metadata={"left_out_by_default": True})
    temperature: float = 0.6
    top_p: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("n_draft", "n_target"):
            if getattr(self, name) < 2:
                raise ConfigError(
                    f"{name} must be at least 2, got {getattr(self, name)}: how likely a meaning is can only be told "
                    f"from other samples"
                )
        if self.max_segments < 1:
            raise ConfigError(f"max_segments must be at least 1, got {self.max_segments}")
        if not 1 <= self.n_contexts <= len(SLOTS):
            raise ConfigError(f"n_contexts must be 1 to {len(SLOTS)}, got {self.n_contexts}")
        if not 0 < self.temperature < 100:
            raise ConfigError(
                f"temperature must be above 0 and below 100, got {self.temperature}: samples at 0 are all alike"
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.seed < 0:
            raise ConfigError(f"seed must be at least 0, got {self.seed}")


class Cell(NamedTuple):
    """One context to be: the question's number in the run, from 0, and one of contexts.SLOTS."""

    question: int
    slot: str

    @property
    def file(self) -> str:
        return f"{self.question:05d}-{self.slot}.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionRun:
    """What run.json says. Of a collection that goes on, every word must be the same.

    models: role -> file -> sha256, graphs and weights. pooled_layers, widths: role -> of its states. questions: ids,
    in order; questions_sha256: of all that is asked. backend: whose bits these are. shard: (i, n), i from 1; (1, 1)
    is all.
    """

    format: int
    settings: CollectSettings
    boundary: Boundary
    models: Mapping[str, Mapping[str, str]]
    pooled_layers: Mapping[str, tuple[int, ...]]
    widths: Mapping[str, int]
    questions: tuple[str, ...]
    questions_sha256: str
    backend: str
    shard: tuple[int, ...]

    def cells(self) -> Iterator[Cell]:
        """Cells of this shard in the order collected: all of a question's together, questions dealt like cards."""
        index, count = self.shard
        for question in range(index - 1, len(self.questions), count):
            for slot in self.slots(question):
                yield Cell(question, slot)

    def slots(self, question: int) -> tuple[str, ...]:
        """Those of a question's number, in the order collected."""
        dealt = {SLOTS[(question + place) % len(SLOTS)] for place in range(self.settings.n_contexts)}
        return tuple(slot for slot in SLOTS if slot in dealt)

    @property
    def fingerprint(self) -> str:
        """sha256 of all but the shard: in every file, so that files of two runs are never mixed."""
        return hashlib.sha256(replace(self, shard=(1, 1)).to_json().encode("ascii")).hexdigest()

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Role -> (K, E)."""
        return {role: (len(layers), self.widths[role]) for role, layers in self.pooled_layers.items()}

    def to_json(self) -> str:
        """The text of run.json."""
        return json.dumps(plain(self), indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> CollectionRun:
        """Raises ValueError for a text that to_json did not write."""
        try:
            run: CollectionRun = read_typed(cls, json.loads(text), "run")
        except RecursionError:
            raise ValueError("nested too deeply") from None
        if run.format != FORMAT:
            raise ValueError(f"format {run.format}, this version reads {FORMAT}")
        if len(run.shard) != 2 or not 1 <= run.shard[0] <= run.shard[1]:
            raise ValueError(f"shard {run.shard}")
        if not run.pooled_layers.keys() == run.widths.keys() == {"target", "draft"}:
            raise ValueError("pooled_layers and widths must be of target and draft")
        return run


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """What lies in a folder; it may be read while it grows."""

    folder: Path
    run: CollectionRun

    @property
    def missing(self) -> list[Cell]:
        """Cells without a file."""
        return [cell for cell in self.run.cells() if not (self.folder / cell.file).exists()]

    def contexts(self) -> Iterator[tuple[Context, tuple[Sample, ...]]]:
        """Each context with its samples: of the draft, then of the target, the greedy one of each first.

        One file in memory at a time. Raises CalibrationError for a file that is damaged or of another run.
        """
        missing = set(self.missing)
        for cell in self.run.cells():
            if cell not in missing:
                context, samples = self.read(cell)
                if context is not None:
                    yield context, samples

    def read(self, cell: Cell) -> tuple[Context | None, tuple[Sample, ...]]:
        """One cell that has a file; None and no samples where the slot gave no context. Raises as contexts."""
        return read_samples(self.folder / cell.file, fingerprint=self.run.fingerprint, shapes=self.run.shapes)


class Collecting:
    """A collection that this process writes. A context manager: holds the folder's lock.

    folder: made if it is missing; one with contexts goes on only where run.json says the same. Raises ConfigError for a
    folder of another run or of something else, CalibrationError for a damaged one, one that another process is writing,
    and one that cannot be written.
    """

    def __init__(self, folder: Path, run: CollectionRun) -> None:
        self.collection = Collection(folder=folder, run=run)
        what = f"{folder} holds another collection, give another folder"
        self._lock = begin_run(
            folder,
            run.to_json(),
            whose="the collection",
            stores=_FILE.fullmatch,
            left_over=_WRITING.fullmatch,
            check=lambda: check_same(what, _read_run(folder), run),
        )

    def __enter__(self) -> Collecting:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._lock)

    def add(self, cell: Cell, context: Context | None, samples: Sequence[Sample]) -> None:
        """On the disk when this returns. context: None where the slot gives none. Raises CalibrationError."""
        path, run = self.collection.folder / cell.file, self.collection.run
        try:
            write_samples(path, context, samples, fingerprint=run.fingerprint)
        except OSError as error:
            raise unwritable(path, error) from None


def open_collection(folder: Path) -> Collection:
    """A folder to read from. Raises CalibrationError where there is no collection, or its run.json is damaged."""
    return Collection(folder=folder, run=_read_run(folder))


def join_collections(folders: Sequence[Path], out: Path) -> Collection:
    """Copy the shards of one run, all of them, together into `out`, as if it had never been split.

    A shard may be unfinished; the collection is then as well, and can be gone on with. Raises ConfigError for shards
    that are not of one run, come twice or are missing, and for an `out` that exists; CalibrationError for damaged ones
    and where `out` cannot be written.
    """
    shards = [open_collection(folder) for folder in folders]
    whole = _one_run(shards)
    if os.path.lexists(out):
        raise ConfigError(f"{out} exists; give a folder that does not")
    partial = out.with_name(f".{out.name}.partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(partial)
        try:
            _copy(shards, whole, partial)
            partial.rename(out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            os.close(lock)
    except OSError as error:
        raise unwritable(out, error) from None
    return Collection(folder=out, run=whole)


def _one_run(shards: Sequence[Collection]) -> CollectionRun:
    if not shards:
        raise ConfigError("there is no shard to join; give the folders of all shards of one run")
    whole = replace(shards[0].run, shard=(1, 1))
    for shard in shards[1:]:
        what = f"{shard.folder} holds another run than {shards[0].folder}"
        check_same(what, replace(shard.run, shard=(1, 1)), whole)
    found = sorted(shard.run.shard for shard in shards)
    count = found[0][1]
    if found != [(index, count) for index in range(1, count + 1)]:
        names = ", ".join("/".join(map(str, shard)) for shard in found)
        raise ConfigError(f"all {count} shards of a run are joined, each once; found {names}")
    return whole


def _copy(shards: Sequence[Collection], whole: CollectionRun, out: Path) -> None:
    for left_over in out.iterdir():
        left_over.unlink()
    write_once(out / RUN, whole.to_json())
    for shard in shards:
        for cell in set(shard.run.cells()) - set(shard.missing):
            shutil.copyfile(shard.folder / cell.file, out / cell.file)


def _read_run(folder: Path) -> CollectionRun:
    path = folder / RUN
    try:
        return CollectionRun.from_json(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise CalibrationError(f"{folder} holds no collection: it has no {RUN}") from None
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:160]
        raise CalibrationError(f"{path} is damaged ({reason}); collect again in another folder") from None
