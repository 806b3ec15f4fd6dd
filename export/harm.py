"""What rounding one linear does to the whole model: KL of the next-token distributions over a piece of text.

Each linear is rounded in turn while the others stay exact. The models so made differ from the true one in one matrix,
so they travel through the layers side by side and every weight is read once:

    before layer l: the true stream, and one for each linear rounded so far; four more leave it in layer l

Rounding errors are small, so their effects on the KL nearly add up, and a linear's effect is nearly proportional to
the mean square of what it adds to its output: that is how other schemes' harm follows from one measured one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from semspec.export.quantize import Scheme, pack, unpack
from semspec.models.decoder import EMBEDDING, head_linear, layer_linears
from semspec.models.layerwise import HeldWeights, Streams, advance, begin
from semspec.models.ops import Weights
from semspec.models.reference import NumpyOps
from semspec.models.spec import ModelSpec
from semspec.runtime.records import Floats

__all__ = ["RoundedWeights", "measure_harm"]


@dataclass(frozen=True, slots=True)
class RoundedWeights:
    """Weights of which some are replaced by what `scheme` makes of them, rounded to nearest."""

    weights: Weights
    names: tuple[str, ...]
    scheme: Scheme

    def shape(self, name: str) -> tuple[int, ...]:
        return self.weights.shape(name)

    def read(self, name: str, rows: slice | None = None) -> Floats:
        values = self.weights.read(name, rows)
        if name not in self.names:
            return values
        return unpack(pack(values, self.scheme, "rtn"), self.scheme.bits)[:, : values.shape[1]]


def measure_harm(
    spec: ModelSpec,
    weights: Weights,
    ids: Sequence[int],
    schemes: Mapping[str, Scheme],
    on_layer: Callable[[int, int], None] | None = None,
) -> dict[str, float]:
    """Linear.name -> mean KL(exact || this linear rounded) in nats over `ids`, for every linear in `schemes`.

    ids: (S,), one text from its start. schemes: Linear.name -> how to round it. A tied head is rounded at both ends.
    on_layer(done, total) is called after each layer. Not guaranteed: that the harms of several linears add up.

    Memory: one layer and the head in fp32, two (S, E) for each linear, and a few (S, V).
    """
    exact = begin(spec, weights, [ids])
    rounded: dict[str, Streams] = {}
    head = head_linear(spec)
    if spec.tied and head.name in schemes:
        rounded[head.name] = begin(spec, RoundedWeights(weights, (EMBEDDING,), schemes[head.name]), [ids])
    for layer in range(spec.n_layers):
        held = HeldWeights(weights)
        rounded = _advance_all(spec, held, ids, rounded)
        for linear in layer_linears(spec):
            if linear.name in schemes and linear.name.startswith(f"layers.{layer}."):
                one = RoundedWeights(held, linear.weights, schemes[linear.name])
                rounded[linear.name] = advance(spec, one, [ids], exact, _ignore)
        exact = advance(spec, held, [ids], exact, _ignore)
        if on_layer is not None:
            on_layer(layer + 1, spec.n_layers)
    return _compare(spec, weights, ids, exact, rounded, schemes.get(head.name))


def _advance_all(
    spec: ModelSpec, weights: Weights, ids: Sequence[int], streams: Mapping[str, Streams]
) -> dict[str, Streams]:
    return {name: advance(spec, weights, [ids], stream, _ignore) for name, stream in streams.items()}


def _compare(
    spec: ModelSpec,
    weights: Weights,
    ids: Sequence[int],
    exact: Streams,
    rounded: Mapping[str, Streams],
    head_scheme: Scheme | None,
) -> dict[str, float]:
    """The logits of all, against the exact ones."""
    head = head_linear(spec)
    ops = NumpyOps(spec, HeldWeights(weights), np.asarray(ids, np.int64), ())
    truth = _Truth(ops.linear(exact.normed[0], head))
    harm = {
        name: truth.divergence(ops.linear(streams.normed[0], head))
        for name, streams in rounded.items()
        if name != head.name
    }
    if head_scheme is not None:
        ops.weights = RoundedWeights(weights, head.weights, head_scheme)
        normed = rounded.get(head.name, exact).normed[0]
        harm[head.name] = truth.divergence(ops.linear(normed, head))
    return harm


class _Truth:
    """Logits (S, V) that others are compared with."""

    def __init__(self, logits: Floats) -> None:
        self.logits, self.totals = logits, _log_totals(logits)
        self.probabilities = np.exp(logits - self.totals[:, None])

    def divergence(self, logits: Floats) -> float:
        """Mean KL in nats: sum p (l - l') - (log Z - log Z'). Differences are taken first, so small ones survive."""
        apart = np.einsum("sv,sv->s", self.probabilities, self.logits - logits)
        return float(np.mean(apart - (self.totals - _log_totals(logits))))


def _log_totals(logits: Floats) -> Floats:
    """log of the sum of exponentials, (S,)."""
    peak = logits.max(axis=-1)
    totals: Floats = peak + np.log(np.exp(logits - peak[:, None]).sum(axis=-1, dtype=np.float64))
    return totals


def _ignore(name: str, x: Floats) -> None:
    """Nobody looks at what linears read."""
