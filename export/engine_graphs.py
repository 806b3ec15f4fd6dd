"""Graphs for TensorRT: written beside the others, and judged.

onnxruntime runs them on the CPU, which checks their mathematics: not the engine, its kernels, nor a GPU's rounding.
Precisions it has no kernels for are judged by emulation, and the figures say so. No bits are promised here: cuts of
a text must agree closely, not exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from semspec.export.dialects.native import build_native_graph
from semspec.export.dialects.primitive import build_primitive_graph
from semspec.export.emulation import run_emulated
from semspec.export.engine_plan import EnginePlan
from semspec.export.precisions import PRECISIONS, Precision
from semspec.export.qdq_weights import QdqWeights
from semspec.export.verify import Quality, check_fp16, closeness, compare
from semspec.export.writer import WeightFile
from semspec.models.reference import ReferenceRun
from semspec.models.spec import ModelSpec
from semspec.runtime.backends import open_backend
from semspec.runtime.contract import GraphSpec
from semspec.runtime.errors import BackendError, BundleError
from semspec.runtime.model import CachedModel
from semspec.runtime.records import Floats

__all__ = ["ENGINE_DATA", "check_cuts", "engine_quality_line", "verify_engine", "write_engine_graphs"]

ENGINE_DATA = "engines.data"
BUILDERS = {"native": build_native_graph, "primitive": build_primitive_graph}
RUNS_NATIVE = "1.25"  # the first onnxruntime with TensorScatter on the CPU
SINGLE_STEPS = 8
CHUNKS = (3, 5, 1, 7, 2, 6, 4)
CUT_KL = 0.01  # nats, mean over a text, that another cut of it may differ by

# precision -> (largest mean KL in nats, smallest top-1 agreement) that is still the model, next better precision
LIMITS: Mapping[str, tuple[float, float, str]] = {
    "fp32": (1e-3, 0.99, ""),
    "fp16": (0.01, 0.95, "fp32"),
    "bf16": (0.05, 0.9, "fp32"),
    "int8": (0.05, 0.93, "fp16"),
    "int8-w8a8": (0.6, 0.6, "int8"),
    "int4": (0.6, 0.6, "int8"),
    "fp8": (0.3, 0.75, "int8"),
    "nvfp4": (0.6, 0.6, "fp8"),
}


def write_engine_graphs(
    folder: Path,
    spec: ModelSpec,
    plan: EnginePlan,
    graphs: Mapping[str, GraphSpec],
    about: Callable[[str], dict[str, str]],
) -> int:
    """`native` and `primitive`, those of them in `graphs`, over one data file, whose size is returned.

    about(graph): what a file says of itself. Raises SourceError for weights that the precision cannot hold.
    """
    with WeightFile(folder / ENGINE_DATA) as file:
        weights = QdqWeights(plan.encoder(), file)
        for name, build in BUILDERS.items():
            if name in graphs:
                builder = build(spec, graphs[name], plan.precision, weights, plan.input_scales)
                builder.save(folder / f"{name}.onnx", about(name))
    return (folder / ENGINE_DATA).stat().st_size


def verify_engine(
    path: Path,
    spec: ModelSpec,
    plan: EnginePlan,
    graph: GraphSpec,
    reference: ReferenceRun,
    ids: Sequence[int],
    level: str,
) -> Quality:
    """The gate of one graph file over the text `ids`, whose reference is given.

    Where onnxruntime has no kernels for the precision, numbers of the reference's own operations are judged instead,
    and no graph is looked at. Raises BundleError for a graph that is refused, saying why and what to do; BackendError
    where onnxruntime cannot open it.
    """
    if not plan.precision.gated:
        run = run_emulated(spec, plan, ids, keep_states=tuple(reference.states))
        quality = compare(reference, run.logits, run.states, ids, level)
        return _judged(replace(quality, emulated=True), plan.precision)
    try:
        opened = CachedModel(open_backend("cpu"), path, graph)
    except BackendError as error:
        raise BackendError(
            f"the gate runs graph {graph.graph!r} on onnxruntime, and this one cannot: {error}; native needs "
            f"onnxruntime {RUNS_NATIVE} or above; install one, or skip the gate with --verify off"
        ) from error
    with opened as model:
        logits, states = check_cuts(model, ids)
    n_last = len(next(iter(states.values())))
    last = {index: reference.states[index][-n_last:] for index in states}
    return _judged(compare(replace(reference, states=last), logits, states, ids, level), plan.precision)


def engine_quality_line(quality: Quality) -> str:
    """The figures in a line, with what they are of."""
    of = "numpy's emulation of its numbers" if quality.emulated else "its graph on the CPU, not an engine"
    return f"mean KL {quality.kl:.3g} nats, top-1 {quality.top1:.3f} over {quality.tokens} tokens; of {of}"


def check_cuts(model: CachedModel, ids: Sequence[int]) -> tuple[Floats, dict[int, Floats]]:
    """Logits (S, V), after other ways of cutting the text came near them; pooled layers' states of the last rows.

    One pass; odd chunks over the rows of another text, which a mask must hide; and, after wrong tokens and a rewind,
    the last SINGLE_STEPS one by one. Raises BundleError naming the cut.
    """
    n = len(ids)
    last = max(1, n - SINGLE_STEPS)
    model.rewind(0)
    whole = model.forward(ids, rows=range(n)).logits.copy()
    model.rewind(0)
    model.forward(ids[::-1])
    model.rewind(0)
    chunks: list[Floats] = []
    while model.length < n:
        chunk = ids[model.length : model.length + CHUNKS[len(chunks) % len(CHUNKS)]]
        chunks.append(model.forward(chunk, rows=range(len(chunk))).logits.copy())
    _require_close(np.concatenate(chunks), whole, "chunks of odd sizes")
    model.rewind(last)
    model.forward(ids[: min(5, n - last)])
    model.rewind(last)
    singles, states = [], []
    for token in ids[last:]:
        found = model.forward([token], pool=np.ones(1, np.float32))
        assert found.pooled is not None
        singles.append(found.logits[0].copy())
        states.append(found.pooled.copy())  # a sum over one row is that row's state
    _require_close(np.stack(singles), whole[last:], "a rewind and single steps")
    layers = enumerate(model.spec.pooled_layers)
    return whole, {index: np.stack([row[k] for row in states]) for k, index in layers}


def _require_close(found: Floats, expected: Floats, cut: str) -> None:
    kl, _ = closeness(expected, found)
    if not kl <= CUT_KL:
        raise BundleError(
            f"the graph is not one model: after {cut} its answers differ from those of one pass by {kl:.3g} nats "
            f"(at most {CUT_KL:g}); this is a fault of semspec or of onnxruntime: report it"
        )


def _judged(quality: Quality, precision: Precision) -> Quality:
    """The figures, if they are the model's still. Raises BundleError with limits and the next better precision."""
    most_kl, least_top1, better = LIMITS[precision.name]
    if precision.suffix:
        most_kl, least_top1 = most_kl + LIMITS["bf16"][0], min(least_top1, LIMITS["bf16"][1])
        better = PRECISIONS[better].widened
    if precision.activation == "float16":
        check_fp16(quality.state_peak, f"use --engine-precision {precision.widened}")
    if not (quality.kl <= most_kl and quality.top1 >= least_top1):
        repair = f"use --engine-precision {better}" if better else "this is a fault of semspec: report it"
        raise BundleError(
            f"the {precision.name}{precision.suffix} graph is not the model any more: mean KL {quality.kl:.3g} (at "
            f"most {most_kl:g}), top-1 {quality.top1:.2f} (at least {least_top1:g}); {repair}"
        )
    return quality
