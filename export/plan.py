"""One model's export, decided: which weights, in which schemes, into which graphs, before anything is written.

request, checkpoint, ranges -> make_plan: what can be refused is refused -> fit_plan: scales and bits, measured
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from semspec.export.budget import allot, steps_for
from semspec.export.checkpoint import Checkpoint, expected_tensors
from semspec.export.dialects.ort import check_model
from semspec.export.engine_plan import (
    ENGINE_GRAPHS,
    EnginePlan,
    check_engine,
    engine_bytes,
    fit_engine,
    plan_engine,
)
from semspec.export.packing import Moments, Schemes, Steps, no_moments
from semspec.export.probe_graph import ProbeFile
from semspec.export.quantize import INFORMED, Scheme
from semspec.export.ranges import Ranges
from semspec.export.scaling import FoldedWeights, choose_folding, folded_moments, unfolded_steps
from semspec.export.tying import SAME_MATRIX, SharedHead, head_difference
from semspec.export.verify import LEVELS
from semspec.models.decoder import EMBEDDING, HEAD
from semspec.models.ops import Linear, Weights
from semspec.models.spec import ModelSpec
from semspec.runtime.contract import GRAPHS, GraphSpec
from semspec.runtime.errors import ConfigError
from semspec.runtime.records import Progress
from semspec.runtime.segments import Boundary

__all__ = ["ACTIVATIONS", "ExportSettings", "ModelRequest", "Plan", "fit_plan", "make_plan", "stage"]

logger = logging.getLogger(__name__)

ACTIVATIONS = {"cpu": "float32", "cuda": "float16"}  # of the graphs for ONNX Runtime
DEFAULT_CONTEXT = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """One model to export. path: a folder of safetensors or a GGUF file. source: what the user called it. schemes: of
    the graphs for ONNX Runtime; engine: precision of those for TensorRT (precisions.py), None: the nearest to them.
    probe: one trained elsewhere on its states, which comes in a pair or not at all."""

    path: Path
    name: str
    source: str
    schemes: Schemes
    licence: str = ""
    probe: ProbeFile | None = None
    engine: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSettings:
    """What applies to both models. Raises ConfigError for unknown graphs or levels.

    graphs: `cpu` always, the contract's others on request. max_context: tokens a model can remember; None: 8192, or
    what the model was trained for if that is less. hidden_layers: states to return, negative counts from the last.
    pooled_layers: states to pool; None: 0.7 of the depth and the last. boundary, segment_cap: where segments end; None:
    as suits the target (boundary.py). ranges: files of `semspec calibrate --ranges`,
    each used for the model it was made from. verify: `quick`, `full` or `off`.
    """

    graphs: tuple[str, ...] = ("cpu",)
    max_context: int | None = None
    hidden_layers: tuple[int, ...] = ()
    pooled_layers: tuple[int, ...] | None = None
    boundary: Boundary | None = None
    segment_cap: int | None = None
    ranges: tuple[Path, ...] = ()
    verify: str = "quick"

    def __post_init__(self) -> None:
        unknown = [graph for graph in self.graphs if graph not in GRAPHS]
        if unknown or "cpu" not in self.graphs or len(set(self.graphs)) != len(self.graphs):
            raise ConfigError(
                f"graphs must be cpu, and any of {', '.join(graph for graph in GRAPHS if graph != 'cpu')} behind it; "
                f"got {','.join(self.graphs) or 'none'}"
            )
        if self.segment_cap is not None and self.segment_cap < 1:
            raise ConfigError(f"the segment cap must be at least 1 token, got {self.segment_cap}")
        if self.verify not in LEVELS:
            raise ConfigError(f"verify must be one of {', '.join(LEVELS)}, got {self.verify!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One model, ready to be written: its weights as they will be stored, and the graphs to build.

    weights, ranges, moments, steps, schemes: of the graphs for ONNX Runtime; engine: the same of those for TensorRT.
    """

    name: str
    checkpoint: Checkpoint
    spec: ModelSpec
    weights: Weights
    ranges: Ranges | None
    moments: Moments
    steps: Steps
    schemes: Schemes
    graphs: Mapping[str, GraphSpec]
    n_bytes: int
    engine: EnginePlan | None = None


def make_plan(
    checkpoint: Checkpoint, request: ModelRequest, ranges: Ranges | None, settings: ExportSettings
) -> Plan:
    """What `request` asks of `checkpoint`, before anything is measured or written.

    Raises ConfigError for settings and schemes that do not fit the model or each other; SourceError for a model that
    the engine cannot run, and for a damaged file.
    """
    spec: ModelSpec = checkpoint.spec
    weights: Weights = checkpoint
    steps: Steps = checkpoint.steps
    engine_only = _only_for_engine(request, ranges, settings)
    schemes = request.schemes.informed(ranges is not None and not engine_only)
    check_model(spec, schemes)
    rounds = schemes.head.block_size > 0  # fp32 promises the checkpoint's own numbers, both of them
    if not spec.tied and rounds and schemes.head == schemes.embedding:
        difference = head_difference(checkpoint)
        if difference < SAME_MATRIX:
            logger.info("%s: head and embedding differ by %.3f and are stored once", request.name, difference)
            shared = SharedHead(checkpoint)
            spec, weights, steps = SharedHead.spec(spec), shared, shared.steps
    if spec.tied:
        schemes.check_tied()
    engine = None
    if set(ENGINE_GRAPHS) & set(settings.graphs):
        engine = plan_engine(spec, weights, request.engine, request.schemes, ranges)
    graphs = {graph: _graph_spec(spec, graph, settings, engine) for graph in settings.graphs}
    return Plan(
        name=request.name,
        checkpoint=checkpoint,
        spec=spec,
        weights=weights,
        ranges=ranges,
        moments=no_moments,
        steps=steps,
        schemes=schemes,
        graphs=graphs,
        n_bytes=_estimate_bytes(spec, schemes, graphs.values())
        + (engine_bytes(engine, spec) if engine else 0),
        engine=engine,
    )


def _only_for_engine(request: ModelRequest, ranges: Ranges | None, settings: ExportSettings) -> bool:
    """Whether the ranges are there for the TensorRT graphs alone: the CPU's layers have no use for any."""
    if ranges is None or request.schemes.layers.bits == 4 or not set(ENGINE_GRAPHS) & set(settings.graphs):
        return False
    return check_engine(request.engine or "fp16", has_ranges=True).reads_ranges


def _graph_spec(
    spec: ModelSpec, graph: str, settings: ExportSettings, engine: EnginePlan | None
) -> GraphSpec:
    context = settings.max_context
    if context is None:
        context = min(DEFAULT_CONTEXT, spec.max_positions)
    if not 2 <= context <= spec.max_positions:
        raise ConfigError(
            f"max context must be between 2 and {spec.max_positions}, the positions this model was trained for, "
            f"got {context}"
        )
    pooled = settings.pooled_layers
    activation = ACTIVATIONS.get(graph) or (engine.precision.activation if engine else "")
    return GraphSpec(
        graph=graph,
        n_layers=spec.n_layers,
        n_kv_heads=spec.n_kv_heads,
        head_size=spec.head_size,
        width=spec.width,
        vocab_size=spec.vocab_size,
        max_context=context,
        pooled_layers=spec.default_pooled_layers()
        if pooled is None
        else _layers(spec, pooled, "probe layers"),
        hidden_layers=_layers(spec, settings.hidden_layers, "hidden layers"),
        activation=activation,
        cache=activation,
    )


def _layers(spec: ModelSpec, asked: tuple[int, ...], what: str) -> tuple[int, ...]:
    """State indices 0..L, ascending; negative ones count from L. Raises ConfigError listing the valid range."""
    last = spec.n_layers
    found = [index + last + 1 if index < 0 else index for index in asked]
    if any(not 0 <= index <= last for index in found) or len(set(found)) != len(found):
        raise ConfigError(
            f"{what} must be different state indices in 0..{last} (0 the embedding, {last} after the final norm) "
            f"or -{last + 1}..-1, got {', '.join(map(str, asked))}"
        )
    return tuple(sorted(found))


def fit_plan(plan: Plan, role: str, on_progress: Progress | None) -> Plan:
    """The plan with what its ranges tell: channels scaled, and bits shared out where a budget was given."""
    if plan.engine is not None:
        engine = fit_engine(plan.engine, plan.spec, plan.ranges, stage(f"{role}: engine scales", on_progress))
        plan = replace(plan, engine=engine)
    if plan.ranges is None or plan.schemes.quantizer not in INFORMED:
        return plan
    on_linear = stage(f"{role}: scales", on_progress)
    mixed = plan.schemes.bits_per_weight is not None

    def scheme_of(linear: Linear) -> Scheme:
        return steps_for(plan.weights.shape(linear.weights[0])[1])[0] if mixed else plan.schemes.of(linear)

    folding = choose_folding(plan.spec, plan.weights, plan.ranges, scheme_of, on_linear)
    weights, moments = FoldedWeights(plan.weights, folding), folded_moments(plan.spec, plan.ranges, folding)
    schemes = plan.schemes
    if mixed:
        on_layer = stage(f"{role}: harm", on_progress)
        schemes = allot(plan.spec, weights, moments, plan.ranges.windows[0], schemes, on_layer)
    steps = unfolded_steps(plan.steps, folding)
    return replace(plan, weights=weights, moments=moments, steps=steps, schemes=schemes)


def _estimate_bytes(spec: ModelSpec, schemes: Schemes, graphs: Iterable[GraphSpec]) -> int:
    """Size of the weights stored for ONNX Runtime, close enough to refuse a disk that is too small."""
    shapes = expected_tensors(spec)
    outer = {EMBEDDING: schemes.embedding, HEAD: schemes.head}
    dtypes = [ACTIVATIONS[graph.graph] for graph in graphs if graph.graph in ACTIVATIONS]
    plain = sum(8 * np.dtype(dtype).itemsize for dtype in dtypes)  # stored in each graph's dtype
    bits = 0.0
    for name, shape in shapes.items():
        scheme = outer.get(name, schemes.layers)
        least = schemes.bits_per_weight or 0.0
        bits += float(np.prod(shape)) * (max(scheme.bits_per_weight, least) if scheme.block_size else plain)
    return int(bits / 8 * 1.02) + (64 << 20)


def stage(name: str, on_progress: Progress | None) -> Callable[[int, int], None]:
    """Progress of one stage."""

    def on_step(done: int, total: int) -> None:
        if on_progress:
            on_progress(name, done, total)

    return on_step
