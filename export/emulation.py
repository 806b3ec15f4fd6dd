"""What the TensorRT graphs compute, done in numpy: weights from their codes, rounded inputs, narrow activations.

For precisions that onnxruntime has no kernels for. It judges numbers, not graphs: no node of a graph is run, and
sums are in fp32 where an engine has its own order.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from semspec.export.engine_plan import EnginePlan
from semspec.export.precisions import PLAIN
from semspec.export.qdq_weights import decode, round_input
from semspec.models.decoder import decode as run_decoder
from semspec.models.ops import Linear
from semspec.models.reference import NumpyOps, ReferenceRun
from semspec.models.spec import ModelSpec
from semspec.runtime.records import Floats

__all__ = ["run_emulated"]


def run_emulated(
    spec: ModelSpec, plan: EnginePlan, ids: Sequence[int], *, keep_states: Collection[int] = ()
) -> ReferenceRun:
    """As run_reference, in the plan's precision. Memory: one linear's weights beside what run_reference needs."""
    ops = EmulatedOps(spec, plan, ids, keep_states)
    logits = run_decoder(spec, ops)
    return ReferenceRun(logits=logits, states=ops.states, state_peaks=tuple(ops.state_peaks))


class EmulatedOps(NumpyOps):
    """The reference's operations, each result rounded to the activations' dtype."""

    def __init__(
        self, spec: ModelSpec, plan: EnginePlan, ids: Sequence[int], keep_states: Collection[int]
    ) -> None:
        super().__init__(spec, plan.weights, np.asarray(ids, np.int64), keep_states)
        self.plan, self.encoder = plan, plan.encoder()
        self.cos, self.sin = self._narrow(self.cos), self._narrow(self.sin)

    def embed(self, weight: str) -> Floats:
        rows, storage = super().embed(weight), self.plan.precision.head
        if storage != PLAIN:
            rows = decode(*self.encoder.encode(weight, rows, storage, None), storage)
        return self._narrow(rows)

    def norm(self, x: Floats, weight: str) -> Floats:
        return self._narrow(super().norm(x, weight))

    def add_norm(self, stream: Floats, branch: Floats, weight: str) -> tuple[Floats, Floats]:
        total = self._narrow(stream + branch)
        return self.norm(total, weight), total

    def linear(self, x: Floats, linear: Linear) -> Floats:
        precision = self.plan.precision
        if precision.inputs:
            x = round_input(x, precision.inputs, self.plan.input_scales[linear.name])
        return self._weighed(x, linear, precision.weights)

    def attend(self, qkv: Floats, layer: int) -> Floats:
        return self._narrow(super().attend(qkv, layer))

    def gate(self, gate_up: Floats) -> Floats:
        return self._narrow(super().gate(gate_up))

    def head(self, normed: Floats, linear: Linear) -> Floats:
        return self._weighed(normed, linear, self.plan.precision.head)

    def _weighed(self, x: Floats, linear: Linear, storage: str) -> Floats:
        parts = []
        scale = self.encoder.matrix_scale(linear.weights) if storage == "fp4" else None
        for name, rows in self.encoder.rows(linear.weights):
            if storage == PLAIN:
                wide = self._narrow(rows)
            else:
                wide = self._narrow(decode(*self.encoder.encode(name, rows, storage, scale), storage, scale))
            parts.append(x @ wide.T)
        product = self._narrow(np.concatenate(parts, axis=-1))
        if linear.biases:
            product = self._narrow(
                product + np.concatenate([self.weights.read(name) for name in linear.biases])
            )
        return product

    def _narrow(self, values: Floats) -> Floats:
        """Rounded to the activations' dtype; what it cannot hold is infinite, as it would be there."""
        if self.plan.precision.activation == "float32":
            return values
        with np.errstate(over="ignore"):
            narrow: Floats = values.astype(np.dtype(self.plan.precision.activation)).astype(np.float32)
        return narrow
