"""Results of a benchmark, made up: what is not said is the same for all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from semspec.calibration.bench.records import Cell, Result
from semspec.calibration.bench.settings import FORMAT, Origin, Settings

BASE = Result(
    cell=Cell(problem="a", mode="autoregressive", seed=0, repeat=0),
    text="5",
    token_ids=(1, 2, 3, 4),
    finish_reason="stop",
    correct=True,
    seconds=2.0,
    prompt_tokens=10,
    generated_tokens=4,
    ttft_ms=100.0,
    tpot_ms=50.0,
    phase_ms={"prefill": 90.0, "target": 150.0},
    num_rounds=4,
    num_draft_tokens=0,
    num_accepted_draft_tokens=0,
    n_from_draft=0,
    peak_mib=100.0,
)


def result(
    problem: str = "a", mode: str = "autoregressive", seed: int = 0, repeat: int = 0, **changes: Any
) -> Result:
    """One result; changes: fields of it."""
    cell = Cell(problem=problem, mode=mode, seed=seed, repeat=repeat)
    return replace(BASE, **{"cell": cell, **changes})


def settings(**changes: Any) -> Settings:
    """Of a run of three problems, two modes, greedy; changes: fields of it."""
    return replace(SETTINGS, **changes)


def origin(
    *, shard: tuple[int, int] = (1, 1), started: str = "2030-01-01T00:00:00+00:00", **changes: Any
) -> Origin:
    """Of a run on a made-up machine; changes: fields of its settings."""
    machines = ({"processor": "slide rule", "cores": 1},)
    return Origin(
        format=FORMAT, started=started, settings=settings(**changes), shard=shard, machines=machines
    )


SETTINGS = Settings(
    bundle_sha256="0" * 64,
    models={"target": {"name": "T", "layers": "int4"}},
    problems_sha256="1" * 64,
    problems=("a", "b", "c"),
    modes=("autoregressive", "ngram"),
    seeds=1,
    repeats=1,
    sampling={"temperature": 0.0, "stop": (), "seed": None},
    instruction="Answer.",
    backend="cpu",
    threads=None,
)
