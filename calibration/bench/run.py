"""The run: every mode on every problem, interleaved, on one opened bundle; resumed from its journal.

    for each problem, seed and repeat:  for each mode, first another one each time:  forget all, answer, write down

It decides what is measured and in which order; what the numbers amount to is summary.py's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from semspec.calibration.bench.answering import INSTRUCTION, Answerers, chat_of
from semspec.calibration.bench.answers import check_gold
from semspec.calibration.bench.data import fingerprint
from semspec.calibration.bench.divergences import Divergence, find_divergences, measure_margins
from semspec.calibration.bench.journal import (
    CELLS,
    DIVERGENCES,
    RESULTS,
    Journal,
    read_divergences,
    write_once,
)
from semspec.calibration.bench.machine import describe_machine
from semspec.calibration.bench.peer_names import check_installed, parse_peer
from semspec.calibration.bench.peer_notes import note_peers
from semspec.calibration.bench.records import Cell, Mode, Problem, Result
from semspec.calibration.bench.settings import FORMAT, Origin, Settings, plan_cells
from semspec.calibration.bench.summary import Table, summarize
from semspec.runtime.bundle import Bundle
from semspec.runtime.config import SamplingParams, SpecConfig
from semspec.runtime.errors import CalibrationError, ConfigError
from semspec.runtime.llm import LLM
from semspec.runtime.probe_set import identity_of
from semspec.runtime.records import Progress

__all__ = ["Run", "conclude", "prepare", "run"]

WARM_UP_TOKENS = 8

Measure: TypeAlias = "Callable[[Sequence[Divergence]], Iterable[Divergence]]"
"""Gives divergences their margins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished run. results: in the order of plan_cells. divergences: sorted by cell, with their margins."""

    folder: Path
    origin: Origin
    results: tuple[Result, ...]
    table: Table
    divergences: tuple[Divergence, ...]


def run(
    bundle: Path,
    problems: Sequence[Problem],
    modes: Sequence[Mode],
    out: Path,
    sampling: SamplingParams,
    *,
    seeds: int = 1,
    repeats: int = 1,
    shard: tuple[int, int] = (1, 1),
    backend: str = "cpu",
    threads: int | None = None,
    on_progress: Progress | None = None,
) -> Run:
    """Measure, or go on measuring, and write divergences.jsonl and results.json.

    seeds: answers to a problem, by chance 0, 1, ..; repeats: times each is measured. shard: (i, n), the i-th of n
    equal parts of the problems, i from 1. Every answer starts with empty caches, after a short warm-up of each mode.
    Modes with the draft model share one set of engines and those without it another (answering.py): each as a user
    would open it, at the price of the target's memory twice where a run has both. Peers are opened beside them.
    Where an exact mode diverged, the target is opened once more, the same way, for the margins.
    Main thread only, where problems have answers.

    Raises ConfigError for settings that do not fit each other, the bundle, or what `out` holds; CalibrationError
    for answers that cannot be read and a damaged `out`; errors of LLM. What was measured before an error stays.
    """
    limits = {"seeds": seeds, "repeats": repeats, "backend": backend, "threads": threads}
    settings = prepare(bundle, problems, modes, sampling, shard=shard, **limits)
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    machines = (describe_machine(),)
    origin = Origin(format=FORMAT, started=now, settings=settings, shard=shard, machines=machines)
    planned = list(plan_cells(settings, shard))
    with Journal(out, origin) as journal:
        missing = [cell for cell in planned if cell not in journal.results]
        if missing:
            with Answerers(bundle, backend=backend, threads=threads, on_progress=on_progress) as answerers:
                for result in _measure_all(answerers, missing, problems, modes, sampling):
                    journal.append(result)
                    if on_progress is not None:
                        on_progress("measuring", len(journal.results), len(planned))
                note_peers(out, answerers.peers)
        margins = partial(
            _measure_margins, bundle, problems, journal.results, backend=backend, threads=threads
        )
        return conclude(out, journal.origin, journal.results, margins)


def prepare(
    bundle: Path,
    problems: Sequence[Problem],
    modes: Sequence[Mode],
    sampling: SamplingParams,
    *,
    shard: tuple[int, int],
    **limits: Any,
) -> Settings:
    """The settings of a run with these arguments, which fit each other; raises as run, before anything is measured."""
    _check(problems, sampling, limits["seeds"], limits["repeats"], shard)
    if limits["backend"] != "cpu" and any(mode.peer for mode in modes):
        raise ConfigError(
            f"peers run on the CPU, and --backend is {limits['backend']}: leave one of them out"
        )
    return _settings(bundle, problems, modes, sampling=asdict(sampling), **limits)


def conclude(out: Path, origin: Origin, found: Mapping[Cell, Result], measure: Measure) -> Run:
    """The divergences and the table of a whole run, written to the folder: same journal, same bytes.

    measure: is called where something diverged and divergences.jsonl is not there; once written, its margins stay.

    Raises CalibrationError when a planned cell is missing, when there is another one, and where one of the files
    says something else; errors of `measure`.
    """
    planned = list(plan_cells(origin.settings, origin.shard))
    if lacking := [cell for cell in planned if cell not in found]:
        raise CalibrationError(f"{out / CELLS} lacks {lacking[0]}; run it to its end")
    if strange := sorted(found.keys() - set(planned)):
        raise CalibrationError(
            f"{out / CELLS} has {strange[0]}, which the run does not plan; remove its line"
        )
    results = tuple(found[cell] for cell in planned)
    table = summarize(results, origin.settings.every_mode(), greedy=origin.settings.greedy)
    divergences = _settle(out, find_divergences(results, table), measure)
    content = {
        "origin": asdict(origin),
        "table": asdict(table),
        "results": [asdict(result) for result in results],
    }
    write_once(out / RESULTS, json.dumps(content, indent=1) + "\n")
    return Run(folder=out, origin=origin, results=results, table=table, divergences=divergences)


def _settle(out: Path, found: tuple[Divergence, ...], measure: Measure) -> tuple[Divergence, ...]:
    """What was found, with the margins of divergences.jsonl, or measured and written there."""
    path = out / DIVERGENCES
    if path.exists():
        settled = read_divergences(path)
        if tuple(replace(one, margin=None) for one in settled) != found:
            raise CalibrationError(f"{path} is of another run and is not overwritten; give another --out")
        return settled
    settled = tuple(measure(found)) if found else ()
    write_once(path, "".join(f"{one.to_json()}\n" for one in settled))
    return settled


def _measure_margins(
    bundle: Path,
    problems: Sequence[Problem],
    results: Mapping[Cell, Result],
    divergences: Sequence[Divergence],
    **engine: Any,
) -> Iterator[Divergence]:
    """Margins under the target as it was opened for the run, but alone."""
    with LLM(bundle, spec=SpecConfig(mode="autoregressive"), **engine) as llm:
        asked = [problem for problem in problems if problem.id in {one.problem for one in divergences}]
        prompts = {problem.id: llm.tokenizer.encode_chat(chat_of(problem)) for problem in asked}
        yield from measure_margins(llm.target, divergences, results, prompts)


def _check(
    problems: Sequence[Problem], sampling: SamplingParams, seeds: int, repeats: int, shard: tuple[int, int]
) -> None:
    index, count = shard
    if not 1 <= index <= count:
        raise ConfigError(f"a shard is i/n with i from 1 to n, got {index}/{count}")
    if count > len(problems):
        raise ConfigError(f"{len(problems)} problems cannot be split into {count} shards")
    if len({problem.id for problem in problems}) < len(problems):
        raise ConfigError("two problems have the same id; results are kept by id")
    if seeds < 1 or repeats < 1:
        raise ConfigError(f"seeds and repeats must be at least 1, got {seeds} and {repeats}")
    if sampling.greedy and seeds > 1:
        raise ConfigError(
            "at temperature 0 every seed gives the same answer: ask for repeats instead of seeds"
        )
    if sampling.seed is not None:
        raise ConfigError("the run gives each answer its seed: leave it out of the sampling settings")
    for problem in problems:
        if problem.answer is not None:
            try:
                check_gold(problem.answer)
            except CalibrationError as error:
                raise CalibrationError(f"problem {problem.id!r}: {error}") from None


def _settings(bundle: Path, problems: Sequence[Problem], modes: Sequence[Mode], **others: Any) -> Settings:
    opened = Bundle.open(bundle)
    models = opened.manifest.models
    return Settings(
        bundle_sha256=identity_of(opened),
        models={role: {"name": model.name, **model.precision} for role, model in models.items()},
        problems_sha256=fingerprint(problems),
        problems=tuple(problem.id for problem in problems),
        modes=tuple(mode.name for mode in modes if not mode.peer),
        peers=tuple(mode.name for mode in modes if mode.peer),
        instruction=INSTRUCTION,
        **others,
    )


def _measure_all(
    answerers: Answerers,
    cells: Sequence[Cell],
    problems: Sequence[Problem],
    modes: Sequence[Mode],
    sampling: SamplingParams,
) -> Iterator[Result]:
    """Results of the cells, in order, as they are measured; what cannot be asked is said before the first."""
    asked = {problem.id: problem for problem in problems}
    wanted = {cell.mode: cell for cell in cells}
    by_name = {mode.name: mode for mode in modes if mode.name in wanted}
    check_installed([parse_peer(name) for name, mode in by_name.items() if mode.peer])
    for name in dict.fromkeys(cell.problem for cell in cells):
        answerers.check_prompt(asked[name])
    warm_up = replace(sampling, max_tokens=min(WARM_UP_TOKENS, sampling.max_tokens))
    # the first passes read weights from the disk and make the engine's buffers
    for name, mode in by_name.items():
        answerers.answer(mode, asked[cells[0].problem], wanted[name], warm_up)
    for cell in cells:
        params = replace(sampling, seed=cell.seed)
        yield answerers.answer(by_name[cell.mode], asked[cell.problem], cell, params)
