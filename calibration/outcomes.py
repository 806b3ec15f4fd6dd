"""The folder of outcomes, beside a collection: run.json, and a JSON file for each cell of the collection.

    run.json
    00007-mixed.json    question 7, slot `mixed`: how the target ends after the draft's segment, and after its own

A file is there whole or not at all, and the same run writes the same bytes, whenever it was interrupted. A cell without
a context, or whose question has no known answer, has a file as well, without an outcome, so that it is not tried again.
One process writes a folder at a time. It knows records and files; who goes on is rollouts.py.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np

from semspec.calibration.bench.journal import RUN, write_once
from semspec.calibration.bench.settings import check_same
from semspec.calibration.collection import Cell, Collection
from semspec.calibration.contexts import SLOTS
from semspec.calibration.labels import label_outcomes
from semspec.calibration.records import Sample
from semspec.calibration.run_folder import begin_run, unwritable
from semspec.runtime.errors import CalibrationError
from semspec.runtime.typed import plain, read_typed

__all__ = [
    "MISSING_OUTCOMES",
    "Outcome",
    "OutcomeCounts",
    "OutcomeRun",
    "Outcomes",
    "RollOut",
    "WritingOutcomes",
    "open_outcomes",
    "sample_labels",
]

FORMAT = 1
MISSING_OUTCOMES = "contexts not gone on from in time"
_FILE = re.compile(rf"\d{{5,}}-(?:{'|'.join(SLOTS)})\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class RollOut:
    """How the target ends an answer greedily.

    segment: what it goes on from. ids: what it writes, none where the segment ended the answer. whole: it came to an
    end by itself. right: the answer is.
    """

    segment: tuple[int, ...]
    ids: tuple[int, ...]
    whole: bool
    right: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of one context: after the draft's greedy segment, and after the target's own; equal where the segments are."""

    context: str
    question: str
    answer: str
    after_draft: RollOut
    after_own: RollOut


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeRun:
    """What run.json says. Of outcomes that go on, every word must be the same.

    collection: fingerprint of the run that the contexts are of, its graphs included. max_tokens: that a roll-out may
    write; more: fewer answers that are cut off and count as wrong, and slower. backend: whose bits these are.
    """

    format: int
    collection: str
    max_tokens: int
    backend: str

    def to_json(self) -> str:
        """The text of run.json."""
        return json.dumps(plain(self), indent=2, sort_keys=True) + "\n"


class OutcomeCounts(NamedTuple):
    """Of contexts with an outcome: how many; how often the target's own way is right; how often both are; how often the
    draft's is and its own is not; how many roll-outs were cut off."""

    contexts: int
    own_right: int
    both_right: int
    only_draft_right: int
    cut_off: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """What lies in a folder, of the cells of `collection`; both may be read while they grow."""

    folder: Path
    run: OutcomeRun
    collection: Collection

    @property
    def missing(self) -> list[Cell]:
        """Cells that were collected, and have no file here."""
        absent = set(self.collection.missing)
        return [
            cell
            for cell in self.collection.run.cells()
            if cell not in absent and not self._path(cell).exists()
        ]

    def all(self) -> Iterator[tuple[Cell, Outcome]]:
        """Outcomes that there are, in the order of the collection. Raises CalibrationError for a damaged file, and one
        of another run."""
        for cell in self.collection.run.cells():
            if self._path(cell).exists():
                outcome = self._read(cell)
                if outcome is not None:
                    yield cell, outcome

    def labels(self) -> dict[str, tuple[float, ...]]:
        """Context id -> sample_labels of its samples, of contexts with an outcome. Raises CalibrationError."""
        return {
            outcome.context: sample_labels(outcome, self.collection.read(cell)[1])
            for cell, outcome in self.all()
        }

    def counts(self) -> OutcomeCounts:
        """Raises CalibrationError, as all."""
        found = [outcome for _, outcome in self.all()]
        pairs = [(one.after_draft, one.after_own) for one in found]
        return OutcomeCounts(
            contexts=len(found),
            own_right=sum(own.right for _, own in pairs),
            both_right=sum(draft.right and own.right for draft, own in pairs),
            only_draft_right=sum(draft.right and not own.right for draft, own in pairs),
            cut_off=sum(not one.whole for pair in pairs for one in dict.fromkeys(pair)),
        )

    def facts(self) -> dict[str, int]:
        """For people: how answers ended, and how many are missing. Raises CalibrationError, as all."""
        counts = self.counts()
        return {
            "contexts gone on from": counts.contexts,
            "right after the target's own segment": counts.own_right,
            "of these right after the draft's as well": counts.both_right,
            "right after the draft's alone": counts.only_draft_right,
            "answers cut off": counts.cut_off,
            MISSING_OUTCOMES: len(self.missing),
        }

    def _path(self, cell: Cell) -> Path:
        return self.folder / _name(cell)

    def _read(self, cell: Cell) -> Outcome | None:
        path = self._path(cell)
        try:
            found: _Stored = read_typed(_Stored, json.loads(path.read_text("ascii")), "outcome")
        except (OSError, ValueError, RecursionError) as error:
            raise _damaged(path, error) from None
        if found.run != self.run:
            raise CalibrationError(f"{path} is of another run than {self.folder / RUN}; remove it")
        return found.outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    run: OutcomeRun
    outcome: Outcome | None


def sample_labels(outcome: Outcome, samples: Sequence[Sample]) -> tuple[float, ...]:
    """Of each sample of a context: 1 where the answer stays right after its segment, 0 where it is spoiled, NaN where
    nobody knows: where the target's own way is wrong, and after segments that nobody went on from."""
    right = {one.segment: one.right for one in (outcome.after_own, outcome.after_draft)}
    known = [sample.ids in right for sample in samples]
    after = np.array([right.get(sample.ids, False) for sample in samples], np.bool_)
    labels = label_outcomes(after, np.full(len(samples), outcome.after_own.right))
    return tuple(
        float(label) if is_known else float("nan") for label, is_known in zip(labels, known, strict=True)
    )


class WritingOutcomes:
    """Outcomes that this process writes. A context manager: holds the folder's lock.

    folder: made if it is missing; one with outcomes goes on only where run.json says the same. Raises ConfigError for a
    folder of another run or of something else, CalibrationError for a damaged one, one that another process is writing,
    and one that cannot be written.
    """

    def __init__(self, folder: Path, run: OutcomeRun, collection: Collection) -> None:
        self.outcomes = Outcomes(folder=folder, run=run, collection=collection)
        what = f"{folder} holds other outcomes, give another folder"
        self._lock = begin_run(
            folder,
            run.to_json(),
            whose="the outcomes",
            stores=_FILE.fullmatch,
            left_over=lambda name: _FILE.fullmatch(name.removesuffix(".partial")),
            check=lambda: check_same(what, _read_run(folder), run),
        )

    def __enter__(self) -> WritingOutcomes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._lock)

    def add(self, cell: Cell, outcome: Outcome | None) -> None:
        """On the disk when this returns. Raises CalibrationError."""
        path = self.outcomes.folder / _name(cell)
        text = json.dumps(plain(_Stored(run=self.outcomes.run, outcome=outcome)), sort_keys=True) + "\n"
        try:
            write_once(path, text)
        except OSError as error:
            raise unwritable(path, error) from None


def open_outcomes(folder: Path, collection: Collection) -> Outcomes:
    """Outcomes to read. Raises CalibrationError where there are none, run.json is damaged, or they are of another
    collection."""
    run = _read_run(folder)
    if run.collection != collection.run.fingerprint:
        raise CalibrationError(
            f"{folder} holds outcomes of another collection than {collection.folder}; find them again in another folder"
        )
    return Outcomes(folder=folder, run=run, collection=collection)


def _read_run(folder: Path) -> OutcomeRun:
    path = folder / RUN
    try:
        run: OutcomeRun = read_typed(OutcomeRun, json.loads(path.read_text("utf-8")), "run")
        if run.format != FORMAT:
            raise ValueError(f"format {run.format}, this version reads {FORMAT}")
    except (FileNotFoundError, NotADirectoryError):
        raise CalibrationError(f"{folder} holds no outcomes: it has no {RUN}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, error) from None
    return run


def _name(cell: Cell) -> str:
    return Path(cell.file).with_suffix(".json").name


def _damaged(path: Path, error: Exception) -> CalibrationError:
    reason = " ".join(str(error).split())[:160] or type(error).__name__
    return CalibrationError(f"{path} is damaged ({reason}); remove it and run the same command again")
