"""Channel scales: what a linear reads is divided by s, its columns are multiplied by s, and nothing else changes.

A channel that carries much gets a larger share of its block's codes. The division costs nothing at run time, for it
is folded into whatever wrote the channel:

    input norm -> q, k, v        value rows -> attention output        second norm -> gate, up        up rows -> down

Grouped heads share a value row, so their columns share a scale. Source: AWQ, arXiv 2306.00978; the exponents are
chosen from the ranges alone, layer by layer. Exact but for rounding: the folded fp32 model is the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from semspec.export.packing import Moments, Steps
from semspec.export.quantize import Scheme, pack, unpack
from semspec.export.ranges import Ranges
from semspec.models.decoder import head_linear, layer_linears
from semspec.models.ops import Linear, Weights
from semspec.models.spec import ModelSpec
from semspec.runtime.records import Floats

__all__ = [
    "FoldedWeights",
    "Folding",
    "choose_folding",
    "folded_moments",
    "folding_of",
    "over_groups",
    "rounding_error",
    "sample_rows",
    "unfolded_steps",
]

EXPONENTS = tuple(step / 10 for step in range(11))
N_SAMPLES = 8  # strips of rows that stand for a matrix
SAMPLE_ROWS = 64
SMALLEST = 1e-30  # mean |x| of a channel that was always 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Folding:
    """inputs: Linear.name -> (E,), the scale of what it reads, positive. columns: tensor name -> what its columns are
    multiplied by; rows: tensor name -> what its rows (or entries, of a vector) are divided by."""

    inputs: Mapping[str, Floats]
    columns: Mapping[str, Floats]
    rows: Mapping[str, Floats]


@dataclass(frozen=True, slots=True)
class FoldedWeights:
    """A checkpoint's weights, scaled."""

    weights: Weights
    folding: Folding

    def shape(self, name: str) -> tuple[int, ...]:
        return self.weights.shape(name)

    def read(self, name: str, rows: slice | None = None) -> Floats:
        values = self.weights.read(name, rows)
        divisor = self.folding.rows.get(name)
        if divisor is not None:
            part = divisor if rows is None else divisor[rows]
            values = values / (part if values.ndim == 1 else part[:, None])
        factor = self.folding.columns.get(name)
        return values if factor is None else values * factor


def choose_folding(
    spec: ModelSpec,
    weights: Weights,
    ranges: Ranges,
    scheme_of: Callable[[Linear], Scheme],
    on_linear: Callable[[int, int], None] | None = None,
) -> Folding:
    """The scales with which rounding each linear of the layers to scheme_of(linear) adds least to its outputs.

    Tried for each linear: mean |x| to the powers 0, 0.1 .. 1. The error is that of plain rounding on a sample of rows,
    each channel weighed by its second moment. on_linear(done, total).
    """

    def scale_of(linear: Linear) -> Floats:
        found = ranges.linears[linear.name]
        mean_abs = over_groups(spec, linear, found.mean_abs, np.mean)
        return _best_scale(sample_rows(weights, linear), mean_abs, found.second_moment, scheme_of(linear))

    return folding_of(spec, scale_of, on_linear)


def folding_of(
    spec: ModelSpec,
    scale_of: Callable[[Linear], Floats],
    on_linear: Callable[[int, int], None] | None = None,
) -> Folding:
    """What scaling the input of every linear of the layers by scale_of(linear) does to columns and rows.

    Heads that share a value row must have one scale: see over_groups. on_linear(done, total).
    """
    inputs: dict[str, Floats] = {}
    columns: dict[str, Floats] = {}
    rows: dict[str, Floats] = {}
    total = 4 * spec.n_layers
    for done, linear in enumerate(layer_linears(spec), 1):
        scale = inputs[linear.name] = scale_of(linear)
        columns.update(dict.fromkeys(linear.weights, scale))
        source = _one_head_each(spec, scale) if _is_grouped(linear) else scale
        rows.update(dict.fromkeys(_sources(spec, linear), source))
        if on_linear is not None:
            on_linear(done, total)
    return Folding(inputs=inputs, columns=columns, rows=rows)


def folded_moments(spec: ModelSpec, ranges: Ranges, folding: Folding) -> Moments:
    """Tensor name -> second moments of what its matrix reads after the folding; None for what no linear reads."""
    readers = {linear.weights[0]: linear.name for linear in (*layer_linears(spec), head_linear(spec))}

    def moments(name: str) -> Floats | None:
        reader = readers.get(name)
        if reader is None:
            return None
        found = ranges.linears[reader].moments
        scale = folding.inputs.get(reader)
        if scale is None:
            return found
        inverse = np.zeros(found.shape[0] * found.shape[1], np.float32)
        inverse[: scale.size] = 1 / scale
        spans = inverse.reshape(found.shape[:2])
        scaled: Floats = found * spans[:, :, None] * spans[:, None, :]
        return scaled

    return moments


def unfolded_steps(steps: Steps, folding: Folding) -> Steps:
    """Steps of what the folding left alone; what it scaled is on no grid any more."""
    scaled = folding.columns.keys() | folding.rows.keys()

    def unfolded(name: str, bits: int, rows: slice) -> Floats | None:
        return None if name in scaled else steps(name, bits, rows)

    return unfolded


def _best_scale(sample: Floats, mean_abs: Floats, moment: Floats, scheme: Scheme) -> Floats:
    """sample: (rows, E)."""
    size = np.maximum(mean_abs, np.float32(max(1e-6 * float(mean_abs.max()), SMALLEST)))
    best, least = np.ones_like(size), np.inf
    for exponent in EXPONENTS:
        scale: Floats = size ** np.float32(exponent)
        scale /= np.sqrt(float(scale.max()) * float(scale.min()))
        scaled: Floats = sample * scale
        error = rounding_error(scaled, scheme, np.divide(moment, np.square(scale), dtype=np.float32))
        if error < least:
            best, least = scale, error
    return best


def rounding_error(weight: Floats, scheme: Scheme, moment: Floats) -> float:
    """Sum over rows and channels of E[x^2] * error^2 under plain rounding. weight: (rows, E); moment: (E,)."""
    apart = unpack(pack(weight, scheme, "rtn"), scheme.bits)[:, : weight.shape[1]] - weight
    return float(np.vdot(np.square(apart).sum(axis=0, dtype=np.float64), moment))


def sample_rows(weights: Weights, linear: Linear) -> Floats:
    """Rows from all over the linear's matrices: (rows, E)."""
    return np.concatenate([strip for name in linear.weights for strip in _strips(weights, name)])


def _strips(weights: Weights, name: str) -> Iterator[Floats]:
    n_rows = weights.shape(name)[0]
    if n_rows <= N_SAMPLES * SAMPLE_ROWS:
        yield weights.read(name)
        return
    for index in range(N_SAMPLES):
        start = index * (n_rows - SAMPLE_ROWS) // (N_SAMPLES - 1)
        yield weights.read(name, slice(start, start + SAMPLE_ROWS))


def _sources(spec: ModelSpec, linear: Linear) -> tuple[str, ...]:
    """What writes the channels that this linear reads: a norm's weight, or rows of a matrix and of its bias."""
    _, index, part = linear.name.split(".")
    layer = f"model.layers.{index}"
    if part == "qkv":
        return (f"{layer}.input_layernorm.weight",)
    if part == "gate_up":
        return (f"{layer}.post_attention_layernorm.weight",)
    if part == "down":
        module, biased = "mlp.up_proj", spec.mlp_bias
    else:
        module, biased = "self_attn.v_proj", spec.qkv_bias
    kinds = ("weight", "bias") if biased else ("weight",)
    return tuple(f"{layer}.{module}.{kind}" for kind in kinds)


def over_groups(spec: ModelSpec, linear: Linear, values: Floats, together: Callable[..., Floats]) -> Floats:
    """Values of the linear's channels (E,); where heads share a value row, what `together`, a reduction such as
    np.mean, makes of theirs."""
    if not _is_grouped(linear):
        return values
    grouped = values.reshape(spec.n_kv_heads, -1, spec.head_size)
    one = np.broadcast_to(together(grouped, axis=1, keepdims=True), grouped.shape)
    return np.ascontiguousarray(one).reshape(-1)


def _is_grouped(linear: Linear) -> bool:
    return linear.name.endswith("attention_output")


def _one_head_each(spec: ModelSpec, values: Floats) -> Floats:
    """(heads * D) -> (kv heads * D), of values that are the same within a group."""
    return np.ascontiguousarray(values.reshape(spec.n_kv_heads, -1, spec.head_size)[:, 0]).reshape(-1)
