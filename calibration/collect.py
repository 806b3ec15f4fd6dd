"""Collect: for every question its contexts, in every context samples of both models, and what both make of them.

    for each question and slot:  context -> N draft samples -> N target samples, and the draft's read -> one file

What the models write in one slot of a question is collected before the next, which begins with it.

It decides what is collected, in which order and until when; segments are writing.py's, files collection.py's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import groupby
from pathlib import Path

from semspec.calibration.bench.data import fingerprint, question_sha256
from semspec.calibration.bench.records import Problem
from semspec.calibration.collection import (
    FORMAT,
    Cell,
    Collecting,
    Collection,
    CollectionRun,
    CollectSettings,
)
from semspec.calibration.contexts import SLOTS, Start, check_prompts, make_context
from semspec.calibration.pair import Pair, open_pairs, rng_for
from semspec.calibration.records import Context, Sample
from semspec.calibration.sharing import Budget, share_out
from semspec.calibration.writing import Author, Written, write_segments
from semspec.runtime.bundle import ROLES, Bundle
from semspec.runtime.config import SamplingParams
from semspec.runtime.errors import CalibrationError, ConfigError
from semspec.runtime.readings import Reading
from semspec.runtime.records import Progress
from semspec.runtime.segments import Boundary

__all__ = ["collect", "sample_context"]


def collect(
    bundle: Path,
    problems: Sequence[Problem],
    out: Path,
    settings: CollectSettings | None = None,
    *,
    boundary: Boundary | None = None,
    shard: tuple[int, int] = (1, 1),
    budget: float | None = None,
    backend: str = "cpu",
    threads: int | None = None,
    on_progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Collection:
    """Collect, or go on collecting, in the folder `out`; the bundle is only read.

    boundary: None for the bundle's. shard: (i, n), the i-th of n parts of the questions, i from 1. budget: minutes, by
    `clock`; a context that might not be ready in time, by the longest so far, is not begun. threads: questions that are
    worked on at once, each on a core, None for one a core. What is collected does not depend on the budget, on how
    often it was interrupted, and on a CPU on threads. on_progress is called in this thread.

    Raises CalibrationError: no questions, two with one id or that ask the same, one that leaves no room for a segment,
    a bundle without a draft, an `out` that cannot be written; ConfigError: settings out of range, an `out` of something
    else; errors of the bundle and its engines. What was collected before an error stays.
    """
    allowed, settings = Budget(budget, clock), settings or CollectSettings()
    _check_request(problems, shard)
    opened = Bundle.open(bundle)
    sampling = SamplingParams(temperature=settings.temperature, top_p=settings.top_p)
    with open_pairs(opened, sampling=sampling, boundary=boundary, backend=backend, threads=threads) as pairs:
        check_prompts(pairs[0], problems)
        run = _describe(opened, pairs[0], problems, settings, backend=backend, shard=shard)
        with Collecting(out, run) as collecting:

            def collect_cell(pair: Pair, cell: Cell) -> bool:
                """Whether there was time for it."""
                if (began := allowed.begin()) is None:
                    return False
                starts = _starts(collecting.collection, cell)
                collecting.add(cell, *_collect(pair, problems[cell.question], cell.slot, starts, settings))
                allowed.end(began)
                return True

            missing, n_cells = collecting.collection.missing, len(list(run.cells()))
            n_done = n_cells - len(missing)
            questions = [list(cells) for _, cells in groupby(missing, key=lambda cell: cell.question)]
            with closing(share_out(pairs, questions, collect_cell)) as finished:
                for _, is_there in finished:
                    n_done += is_there
                    if on_progress is not None and is_there:
                        on_progress("collecting", n_done, n_cells)
            return collecting.collection


def _collect(
    pair: Pair, problem: Problem, slot: str, starts: Sequence[Start], settings: CollectSettings
) -> tuple[Context | None, list[Sample]]:
    context = make_context(
        pair, problem, slot, max_segments=settings.max_segments, seed=settings.seed, starts=starts
    )
    return context, [] if context is None else sample_context(pair, context, settings)


def sample_context(pair: Pair, context: Context, settings: CollectSettings) -> list[Sample]:
    """Samples of the draft, then of the target, the greedy one of each first; the draft's read by the target too, in
    the passes in which it writes its own."""
    numbers = {"draft": range(settings.n_draft), "target": range(settings.n_target)}
    authors: dict[str, list[Author]] = {
        role: [None, *(rng_for(settings.seed, context.id, role, number) for number in numbers[role])]
        for role in numbers
    }
    drafted = _write(pair, "draft", context, authors["draft"])
    given = dict.fromkeys(segment.ids for segment in drafted)
    found = _write(pair, "target", context, [*authors["target"], *given])
    written, read = found[: len(authors["target"])], found[len(authors["target"]) :]
    said = {segment.ids: segment.reading for segment in read}
    return [
        *(
            _sample(pair, context, number, segment, draft=segment.reading, target=said[segment.ids])
            for number, segment in enumerate(drafted)
        ),
        *(
            _sample(pair, context, number, segment, target=segment.reading)
            for number, segment in enumerate(written)
        ),
    ]


def _write(pair: Pair, role: str, context: Context, authors: Sequence[Author]) -> list[Written]:
    return write_segments(
        pair.models[role],
        context.ids,
        authors,
        segmenter=pair.segmenter,
        sampling=pair.sampling,
        n_ids=pair.n_ids(role),
    )


def _sample(pair: Pair, context: Context, number: int, segment: Written, **readings: Reading) -> Sample:
    """The `number`-th of its author, who is the first of those that read it."""
    stream = pair.tokenizer.stream(context.ids)
    return Sample(
        context=context.id,
        author=next(iter(readings)),
        greedy=number == 0,
        ids=segment.ids,
        text=stream.push(segment.ids) + stream.finish(),  # control tokens are left out
        readings=readings,
    )


def _starts(collection: Collection, cell: Cell) -> list[Start]:
    """Where this cell's prefix may begin: behind what the slots before it hold, the last first, with what was drawn
    there; of the prompt's draws each slot takes others. Nothing behind a slot that is not collected.

    Read from the disk, so that a run which goes on begins as the one that was killed.
    """
    collected, starts = collection.run.slots(cell.question), list[Start]()
    for slot in reversed(SLOTS[: SLOTS.index(cell.slot)]):
        if slot not in collected:
            break
        context, samples = collection.read(Cell(cell.question, slot))
        if context is None or (slot == "target" and collection.run.settings.max_segments == 1):
            continue
        number = 1 if (slot, cell.slot) == ("prompt", "mixed") else 0
        drawn = {
            role: [one.ids for one in samples if one.author == role and not one.greedy] for role in ROLES
        }
        start = Start(ids=context.ids, drawn={role: segments[number] for role, segments in drawn.items()})
        starts.append(start)
    return starts


def _check_request(problems: Sequence[Problem], shard: tuple[int, int]) -> None:
    if not problems:
        raise CalibrationError("there are no questions; give at least one")
    ids, asked = set[str](), dict[str, str]()
    for problem in problems:
        if problem.id in ids:
            raise CalibrationError(f"two questions have the id {problem.id!r}; ids differ")
        ids.add(problem.id)
        other = asked.setdefault(question_sha256(problem), problem.id)
        if other != problem.id:
            raise CalibrationError(
                f"questions {other!r} and {problem.id!r} ask the same, and what is learned from one would be measured "
                "on the other; leave one out"
            )
    index, count = shard
    if not 1 <= index <= count:
        raise ConfigError(f"shard must be i/n with i in 1..n, got {index}/{count}")


def _describe(
    bundle: Bundle,
    pair: Pair,
    problems: Sequence[Problem],
    settings: CollectSettings,
    *,
    backend: str,
    shard: tuple[int, int],
) -> CollectionRun:
    """Hashes are those of the manifest, which `Bundle.open(verify=True)` holds against the files."""
    files = bundle.manifest.files
    return CollectionRun(
        format=FORMAT,
        settings=settings,
        boundary=pair.segmenter.boundary,
        models={
            role: {name: entry.sha256 for name, entry in files.items() if name.startswith(f"{role}/")}
            for role in ROLES
        },
        pooled_layers={role: pair.models[role].spec.pooled_layers for role in ROLES},
        widths={role: pair.models[role].spec.width for role in ROLES},
        questions=tuple(problem.id for problem in problems),
        questions_sha256=fingerprint(problems),
        backend=backend,
        shard=shard,
    )
