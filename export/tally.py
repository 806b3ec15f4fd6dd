"""What storing the weights took and lost, kind of matrix by kind: the table that `semspec inspect` shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from semspec.export.quantize import MOMENT_SPAN, Packed, Scheme, unpack
from semspec.models.decoder import EMBEDDING, head_linear, layer_linears
from semspec.models.spec import ModelSpec
from semspec.runtime.bundle import WeightClass
from semspec.runtime.records import Floats

__all__ = ["Rounding", "weight_classes"]


@dataclass(slots=True, kw_only=True)
class Rounding:
    """What storing a matrix took and lost: bytes; mean squares of its outputs, and of what rounding adds to them.

    moments: second moments of its input by spans, as pack() takes them; None: every channel counts the same and no two
    go together, so the squares are those of the weights.
    """

    scheme: Scheme
    moments: Floats | None = None
    n_weights: int = 0
    n_bytes: int = 0
    squares: float = 0.0
    squared_errors: float = 0.0

    def add(self, block: Floats, packed: Packed) -> None:
        """Count rows of the matrix in."""
        self.n_weights += block.size
        self.n_bytes += packed.n_bytes
        apart = unpack(packed, self.scheme.bits)[:, : block.shape[1]] - block
        self.squares += self._square(block)
        self.squared_errors += self._square(apart)

    def _square(self, rows: Floats) -> float:
        if self.moments is None:
            return float(np.vdot(rows, rows))
        total = 0.0
        for at, moments in enumerate(self.moments):
            span = rows[:, at * MOMENT_SPAN : (at + 1) * MOMENT_SPAN]
            total += float(np.vdot(span @ moments[: span.shape[1], : span.shape[1]], span))
        return total


def weight_classes(spec: ModelSpec, roundings: Mapping[str, Rounding]) -> dict[str, WeightClass]:
    """Kind -> what became of its matrices: `qkv`, `attention_output`, `gate_up`, `down`, `head`, `embedding`.

    roundings: first tensor name of a matrix -> its own. A tied head is the embedding, and is counted as `head`.
    """
    kinds: dict[str, list[Rounding]] = {}
    for linear in (*layer_linears(spec), head_linear(spec)):
        kinds.setdefault(linear.name.split(".")[-1], []).append(roundings[linear.weights[0]])
    if not spec.tied:
        kinds["embedding"] = [roundings[EMBEDDING]]
    return {kind: _together(own) for kind, own in kinds.items()}


def _together(roundings: list[Rounding]) -> WeightClass:
    squares = sum(rounding.squares for rounding in roundings)
    errors = sum(rounding.squared_errors for rounding in roundings)
    return WeightClass(
        schemes=dict(sorted(Counter(str(rounding.scheme) for rounding in roundings).items())),
        n_weights=sum(rounding.n_weights for rounding in roundings),
        n_bytes=sum(rounding.n_bytes for rounding in roundings),
        error=float(np.sqrt(errors / squares)) if squares else 0.0,
        error_of="outputs" if all(rounding.moments is not None for rounding in roundings) else "weights",
    )
