"""What the TensorRT graphs of one model are made of: precision, scaled weights, steps of rounded inputs.

parse, check what needs no weights -> plan_engine: what can be refused is refused -> fit_engine: scales, measured
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from semspec.export.packing import AUTO, Moments, Schemes, no_moments
from semspec.export.precisions import DEFAULTS, Precision, parse_precision
from semspec.export.qdq_weights import FP4_BLOCK, QdqEncoder, fit_block_size
from semspec.export.quantize import INFORMED, Scheme
from semspec.export.ranges import Ranges
from semspec.export.scaling import FoldedWeights, choose_folding, folded_moments
from semspec.export.smoothing import choose_smoothing, input_scales
from semspec.models.decoder import EMBEDDING, head_linear, layer_linears
from semspec.models.ops import Weights
from semspec.models.spec import ModelSpec
from semspec.runtime.errors import ConfigError

__all__ = ["ENGINE_GRAPHS", "EnginePlan", "check_engine", "engine_bytes", "fit_engine", "plan_engine"]

ENGINE_GRAPHS = ("native", "primitive")
BITS: Mapping[str, float] = {"int8": 8.0, "fp8": 8.0, "int4": 4.0, "fp4": 4.5}
ACTIVATION_BITS: Mapping[str, int] = {"float32": 32, "float16": 16, "bfloat16": 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """Graphs for TensorRT, ready to be written. block_size, quantizer: of int4, else 0 and empty. input_scales:
    Linear.name -> step of its rounded input, where the precision rounds inputs."""

    precision: Precision
    weights: Weights
    block_size: int = 0
    quantizer: str = ""
    moments: Moments = no_moments
    input_scales: Mapping[str, float] = field(default_factory=dict)

    def encoder(self) -> QdqEncoder:
        """What turns its weights into codes."""
        return QdqEncoder(
            weights=self.weights,
            activation=self.precision.activation,
            block_size=self.block_size,
            quantizer=self.quantizer or "mse",
            moments=self.moments,
        )

    def describe(self, graphs: Iterable[str]) -> dict[str, str]:
        """For the manifest: graph -> precision, of those in `graphs` that are for TensorRT; the quantizer of int4."""
        name = self.precision.name
        if self.block_size:
            name = f"{name}/{self.block_size}"
        name += self.precision.suffix
        described = {graph: name for graph in graphs if graph in ENGINE_GRAPHS}
        return described | ({"engine_quantizer": self.quantizer} if self.quantizer else {})


def check_engine(text: str, *, has_ranges: bool) -> Precision:
    """The precision that `text` names. Raises ConfigError: an unknown one, or one whose ranges are missing."""
    precision, _ = parse_precision(text)
    if precision.needs_ranges and not has_ranges:
        raise ConfigError(
            f"engine precision {precision.name} rounds the inputs of products by how large they were measured to be: "
            f"make ranges of this very model with `semspec calibrate --ranges FILE` and pass them with --ranges FILE"
        )
    return precision


def plan_engine(
    spec: ModelSpec, weights: Weights, text: str | None, asked: Schemes, ranges: Ranges | None
) -> EnginePlan:
    """What `text`, a precision, asks of a model; None: what is nearest to the CPU graph's. asked: the CPU's schemes, as
    the user gave them. Raises ConfigError for what does not fit the model."""
    text = text or DEFAULTS[asked.layers.name]
    precision = check_engine(text, has_ranges=ranges is not None)
    names = tuple(name for linear in layer_linears(spec) for name in linear.weights)
    if precision.weights == "fp4" and any(weights.shape(name)[1] % FP4_BLOCK for name in names):
        raise ConfigError(f"engine precision nvfp4 needs rows of whole blocks of {FP4_BLOCK}; use fp8")
    if precision.weights != "int4":
        return EnginePlan(precision=precision, weights=weights)
    quantizer = asked.quantizer
    if quantizer == AUTO:
        quantizer = "mse" if ranges is None else "gptq"
    return EnginePlan(
        precision=precision,
        weights=weights,
        block_size=fit_block_size(weights, names, parse_precision(text)[1]),
        quantizer=quantizer,
    )


def fit_engine(
    plan: EnginePlan, spec: ModelSpec, ranges: Ranges | None, on_linear: Callable[[int, int], None]
) -> EnginePlan:
    """The plan with what the ranges tell: channels scaled, and the steps of rounded inputs. on_linear(done, total)."""
    kind = plan.precision.inputs
    if ranges is None:
        return plan
    if plan.quantizer in INFORMED:
        scheme = Scheme(name="int4", bits=4, block_size=plan.block_size, symmetric=True)
        folding = choose_folding(spec, plan.weights, ranges, lambda _: scheme, on_linear)
        moments = folded_moments(spec, ranges, folding)
        return replace(plan, weights=FoldedWeights(plan.weights, folding), moments=moments)
    if kind == "int8":
        folding = choose_smoothing(spec, plan.weights, ranges, on_linear)
        scales = input_scales(spec, ranges, kind, folding)
        return replace(plan, weights=FoldedWeights(plan.weights, folding), input_scales=scales)
    if kind:
        return replace(plan, input_scales=input_scales(spec, ranges, kind))
    return plan


def engine_bytes(plan: EnginePlan, spec: ModelSpec) -> int:
    """Size of the stored weights, close enough to refuse a disk that is too small."""
    plain = ACTIVATION_BITS[plan.precision.activation]

    def bits(names: tuple[str, ...], storage: str) -> float:
        size = sum(rows * columns for rows, columns in map(plan.weights.shape, names))
        scales = plain / plan.block_size if storage == "int4" else 0.0
        return size * (BITS.get(storage, plain) + scales)

    total = bits((EMBEDDING,), plan.precision.head)
    total += sum(bits(linear.weights, plan.precision.weights) for linear in layer_linears(spec))
    head = head_linear(spec)
    if not spec.tied:
        total += bits(head.weights, plan.precision.head)
    return int(total / 8 * 1.02) + (16 << 20)
