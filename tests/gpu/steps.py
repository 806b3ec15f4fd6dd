"""The steps of run.sh, one function each. They add what they see to the findings; what cannot be done here is NotHere,
any other error a failure."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu.agreement import compare_answers, compare_models, verdict
from gpu.findings import Findings, NotHere, not_here
from gpu.machine import describe, try_backend
from gpu.pair import ROUNDED, make_pair
from gpu.rig import build_rig, check_precision, check_room
from gpu.shapes import shape_of
from gpu.timing import CONTEXT, PAST, time_drafting, time_passes, time_prompt

from semspec.export.engines.build import BuildRequest, build_plans
from semspec.export.engines.profiles import BuildSizes
from semspec.runtime.backends import open_backend
from semspec.runtime.bundle import Bundle
from semspec.runtime.errors import ConfigError, SemspecError
from semspec.runtime.llm import LLM
from semspec.runtime.model import CachedModel
from semspec.runtime.plans import ENGINES

__all__ = ["agree", "describe_machine", "open_one", "time_shape"]

SIZES = BuildSizes(chunk=64, rows=16)  # small, so that a long text takes several passes


def describe_machine(findings: Findings) -> None:
    """What there is; NotHere where that is no GPU."""
    facts = describe()
    findings.add(**facts)
    if facts["device"] is None:
        raise NotHere("there is no NVIDIA driver on this machine, or no GPU behind it")


def open_one(findings: Findings, backend: str, folder: Path) -> None:
    """See try_backend."""
    with not_here(SemspecError):
        findings.add(backend=backend, **try_backend(backend, folder))


def agree(findings: Findings, backend: str, graph: str, precision: str, folder: Path) -> None:
    """Export and build as a user would, then hold it against the CPU. Answers are compared where the CPU's own graph
    has the same numbers: what it rounds, it rounds otherwise than an engine, inputs too."""
    with not_here(SemspecError):
        check_precision(backend, precision)
        cpu = open_backend("cpu")
    bundle = make_pair(folder, graph, precision)
    if backend in ENGINES:
        with not_here(ConfigError):  # a graph that this release does not read
            build_plans(bundle, BuildRequest(engine=backend, graph=graph, sizes=SIZES))
    opened = Bundle.open(bundle)
    file, spec = opened.graph_file("target", graph), opened.model("target").graphs[graph]
    with LLM(bundle, backend=backend) as found:
        with CachedModel(cpu, file, spec) as same:
            models = compare_models(same, found.target)
        answers: list[dict[str, Any]] = []
        if precision not in ROUNDED or backend == "cpu":
            with LLM(bundle, backend="cpu") as expected:
                answers = compare_answers(expected, found)
    wrong = verdict(models, answers)
    findings.add(
        backend=backend, graph=graph, precision=precision, wrong=wrong, models=models, answers=answers
    )


def time_shape(
    findings: Findings, backend: str, precision: str, shape: str, seconds: float, folder: Path
) -> None:
    """What a model of this shape takes. seconds: to spend on each figure."""
    with not_here(SemspecError):
        spec, engine = shape_of(shape), open_backend(backend)
        check_precision(backend, precision)
        check_room(engine, spec, precision, folder, CONTEXT)
    rig = build_rig(engine, spec, precision, folder, CONTEXT)
    findings.add(
        backend=backend,
        asked=precision,
        shape=shape,
        graph=rig.graph.graph,
        precision=rig.precision,
        n_bytes=rig.n_bytes,
        write_s=rig.write_s,
        compile_s=rig.compile_s,
        past=PAST,
    )
    with rig.open() as model:
        findings.add(prompt=asdict(time_prompt(model, spec.vocab_size, seconds)))
        for size, rows, timed in time_passes(model, spec.vocab_size, seconds):
            findings.add(size=size, rows=rows, a_pass=asdict(timed))
        findings.add(drafted=asdict(time_drafting(model, spec.vocab_size, seconds)))
        findings.add(rows_read=model.n_rows, rows_read_in_full=model.n_full_rows)
