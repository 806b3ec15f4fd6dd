"""The run: every mode on every problem, interleaved, on one opened bundle; resumed from its journal.

    for each problem, seed and repeat:  for each mode, first another one each time:  forget all, answer, write down

It decides what is measured and in which order; what the numbers amount to is summary.py's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from time import perf_counter
from typing import Any

from semspec.calibration.bench.answers import check_gold, is_correct
from semspec.calibration.bench.data import fingerprint
from semspec.calibration.bench.journal import CELLS, RESULTS, Journal, write_once
from semspec.calibration.bench.machine import describe_machine
from semspec.calibration.bench.modes import parse_modes
from semspec.calibration.bench.records import Cell, Mode, Problem, Result
from semspec.calibration.bench.settings import FORMAT, Origin, Settings, plan_cells
from semspec.calibration.bench.summary import Table, summarize
from semspec.runtime.bundle import MANIFEST, Bundle, sha256_of
from semspec.runtime.config import SamplingParams, SpecConfig
from semspec.runtime.errors import CalibrationError, ConfigError
from semspec.runtime.llm import LLM
from semspec.runtime.records import Progress
from semspec.runtime.stats import peak_mib

__all__ = ["INSTRUCTION", "Run", "conclude", "run"]

INSTRUCTION = "Think it through step by step. End with the final answer alone inside \\boxed{}."
WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished run. results: in the order of plan_cells."""

    folder: Path
    origin: Origin
    results: tuple[Result, ...]
    table: Table


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
    """Measure, or go on measuring, and write results.json.

    seeds: answers to a problem, by chance 0, 1, ..; repeats: times each is measured. shard: (i, n), the i-th of n
    equal parts of the problems, i from 1. Every answer starts with empty caches, after a short warm-up of each mode.
    One set of engines serves all modes: where a mode needs the draft model, waiting engines give up the cores in all.
    Main thread only, where problems have answers.

    Raises ConfigError for settings that do not fit each other, the bundle, or what `out` holds; CalibrationError
    for answers that cannot be read and a damaged `out`; errors of LLM. What was measured before an error stays.
    """
    _check(problems, sampling, seeds, repeats, shard)
    limits = {"seeds": seeds, "repeats": repeats, "backend": backend, "threads": threads}
    settings = _settings(bundle, problems, modes, sampling=asdict(sampling), **limits)
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    machines = (describe_machine(),)
    origin = Origin(format=FORMAT, started=now, settings=settings, shard=shard, machines=machines)
    planned = list(plan_cells(settings, shard))
    with Journal(out, origin) as journal:
        missing = [cell for cell in planned if cell not in journal.results]
        if missing:
            with LLM(bundle, spec=_widest(modes), backend=backend, threads=threads) as llm:
                for result in _measure_all(llm, missing, problems, modes, sampling):
                    journal.append(result)
                    if on_progress is not None:
                        on_progress("measuring", len(journal.results), len(planned))
        return conclude(out, journal.origin, journal.results)


def conclude(out: Path, origin: Origin, found: Mapping[Cell, Result]) -> Run:
    """The table of a whole run, written to results.json: same journal, same bytes.

    Raises CalibrationError when a planned cell is missing, when there is another one, and where results.json says
    something else.
    """
    planned = list(plan_cells(origin.settings, origin.shard))
    if lacking := [cell for cell in planned if cell not in found]:
        raise CalibrationError(f"{out / CELLS} lacks {lacking[0]}; run it to its end")
    if strange := sorted(found.keys() - set(planned)):
        raise CalibrationError(
            f"{out / CELLS} has {strange[0]}, which the run does not plan; remove its line"
        )
    results = tuple(found[cell] for cell in planned)
    table = summarize(results, parse_modes(origin.settings.modes), greedy=origin.settings.greedy)
    content = {
        "origin": asdict(origin),
        "table": asdict(table),
        "results": [asdict(result) for result in results],
    }
    write_once(out / RESULTS, json.dumps(content, indent=1) + "\n")
    return Run(folder=out, origin=origin, results=results, table=table)


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
    models = Bundle.open(bundle).manifest.models
    return Settings(
        bundle_sha256=sha256_of(bundle / MANIFEST),
        models={role: {"name": model.name, **model.precision} for role, model in models.items()},
        problems_sha256=fingerprint(problems),
        problems=tuple(problem.id for problem in problems),
        modes=tuple(mode.name for mode in modes),
        instruction=INSTRUCTION,
        **others,
    )


def _widest(modes: Sequence[Mode]) -> SpecConfig:
    """How to open the bundle so that every mode has what it needs, and nothing is opened in vain."""
    model = [mode.spec for mode in modes if mode.spec.mode != "autoregressive" and mode.spec.draft == "model"]
    return model[0] if model else SpecConfig(mode="autoregressive")


def _messages(problem: Problem) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{problem.question}\n\n{INSTRUCTION}"}]


def _measure_all(
    llm: LLM,
    cells: Sequence[Cell],
    problems: Sequence[Problem],
    modes: Sequence[Mode],
    sampling: SamplingParams,
) -> Iterator[Result]:
    """Results of the cells, in order, as they are measured; what cannot be asked is said before the first."""
    asked = {problem.id: problem for problem in problems}
    by_name = {mode.name: mode for mode in modes}
    for name in dict.fromkeys(cell.problem for cell in cells):
        _check_prompt(llm, asked[name])
    for mode in modes:  # the first passes read weights from the disk and make the engine's buffers
        llm.chat(
            _messages(asked[cells[0].problem]), SamplingParams(max_tokens=WARM_UP_TOKENS), spec=mode.spec
        )
    for cell in cells:
        params = replace(sampling, seed=cell.seed)
        yield _measure(llm, asked[cell.problem], by_name[cell.mode], cell, params)


def _check_prompt(llm: LLM, problem: Problem) -> None:
    n_tokens, most = len(llm.tokenizer.encode_chat(_messages(problem))), llm.target.max_context
    if n_tokens > most:
        raise ConfigError(
            f"problem {problem.id!r} has {n_tokens} tokens and the context holds {most}; leave it out, or export with "
            f"a larger --max-context"
        )


def _measure(llm: LLM, problem: Problem, mode: Mode, cell: Cell, sampling: SamplingParams) -> Result:
    """Answer once, with nothing remembered of earlier answers; judged after the clock has stopped."""
    llm.target.rewind(0)
    if llm.draft is not None:
        llm.draft.rewind(0)
    started = perf_counter()
    deltas = list(llm.stream_chat(_messages(problem), sampling, spec=mode.spec))
    seconds = perf_counter() - started
    stats = deltas[-1].stats
    text, finish_reason = "".join(delta.text for delta in deltas), str(deltas[-1].finish_reason)
    correct = None
    if problem.answer is not None:
        correct = is_correct(text, problem.answer, whole=finish_reason != "length")
    return Result(
        cell=cell,
        text=text,
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        finish_reason=finish_reason,
        correct=correct,
        seconds=seconds,
        prompt_tokens=stats.prompt_tokens,
        generated_tokens=stats.generated_tokens,
        ttft_ms=stats.ttft_ms,
        tpot_ms=stats.tpot_ms,
        phase_ms=stats.phase_ms,
        num_rounds=stats.num_rounds,
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted_draft_tokens=stats.num_accepted_draft_tokens,
        n_from_draft=sum(delta.n_from_draft for delta in deltas),
        peak_mib=peak_mib(),
    )
