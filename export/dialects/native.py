"""Dialect `native`: the decoder in ONNX's own fused operators, for TensorRT from 10.15 on and TensorRT-RTX.

The cache is written in place by TensorScatter and read up to the rows that `span` names. What may be seen is always
said by an explicit mask: TensorRT drops Attention's nonpad_kv_seqlen in silence, and with it whatever rests on it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from semspec.export.dialects.explicit import MASKED, ExplicitOps, scope
from semspec.export.precisions import Precision
from semspec.export.qdq_weights import QdqWeights
from semspec.export.writer import GraphBuilder
from semspec.models.decoder import decode
from semspec.models.spec import ModelSpec
from semspec.runtime.contract import GraphSpec

__all__ = ["NativeOps", "build_native_graph"]

OPSET = 24  # has TensorScatter


def build_native_graph(
    spec: ModelSpec,
    graph: GraphSpec,
    precision: Precision,
    weights: QdqWeights,
    input_scales: Mapping[str, float],
) -> GraphBuilder:
    """The whole decoder as one graph that follows the contract; weights go to their file on the way.

    Raises SourceError for weights that the precision cannot hold.
    """
    builder = GraphBuilder(f"{spec.family}-{graph.graph}", OPSET)
    ops = NativeOps(spec, graph, precision, weights, input_scales, builder)
    ops.prepare()
    ops.finish(decode(spec, ops))
    return builder


class NativeOps(ExplicitOps):
    """Ops on the names of graph tensors."""

    def prepare(self) -> None:
        """What every layer shares: positions (B, S), the rows read, and what of them each new row may see."""
        node, constant = self.builder.node, self.builder.constant
        first, step = constant("first", np.array(0, np.int64)), constant("step", np.array(1, np.int64))
        n_new = node("Squeeze", [node("Shape", ["input_ids"], "n_new", start=1, end=2)], "row_count")
        rows = node("Range", [first, n_new, step], "new_rows")
        start = node("Unsqueeze", ["past_len", "1"], "start")
        node("Add", [start, rows], "positions")
        node("Shape", ["span"], "n_read")
        future = node("Less", [node("Unsqueeze", ["positions", "-1"], "rows"), "span"], "future")  # (B, S, T)
        hidden = node("Where", [future, self.scalar("masked", MASKED), self.scalar("seen", 0.0)], "mask.rows")
        node("Unsqueeze", [hidden, "1"], "mask")

    def norm(self, x: str, weight: str) -> str:
        return self._norm(x, weight)

    def add_norm(self, stream: str, branch: str, weight: str) -> tuple[str, str]:
        total = self.builder.node("Add", [stream, branch], f"{scope(weight)}.stream")
        return self._norm(total, weight), total

    def attend(self, qkv: str, layer: int) -> str:
        node, name = self.builder.node, f"layers.{layer}"
        query, key, value = self.heads(qkv, layer)
        keys = self._cached(f"{layer}.key", self._rotated(key, f"{name}.key.rotated"))
        values = self._cached(f"{layer}.value", value)
        inputs = [self._rotated(query, f"{name}.query.rotated"), keys, values, "mask"]
        attended = node("Attention", inputs, f"{name}.attended.heads")
        rows = node("Transpose", [attended], f"{name}.attended.rows", perm=[0, 2, 1, 3])
        flat = self.builder.constant("flat", np.array([0, 0, self.spec.query_width], np.int64))
        return node("Reshape", [rows, flat], f"{name}.attended")

    def _norm(self, x: str, weight: str) -> str:
        inputs = [x, self.vector(weight)]
        return self.builder.node(
            "RMSNormalization", inputs, scope(weight), axis=-1, epsilon=self.spec.norm_eps
        )

    def _rotated(self, x: str, name: str) -> str:
        return self.builder.node("RotaryEmbedding", [x, "cos", "sin", "positions"], name)

    def _cached(self, part: str, rows: str) -> str:
        """The cache with the new rows in their places, as far as it is read: (B, H, T, D)."""
        node = self.builder.node
        cache = node("TensorScatter", [f"kv.{part}", rows, "past_len"], f"kv_out.{part}", axis=2)
        axis = self.builder.constant("2", np.array([2], np.int64))
        return node("Slice", [cache, "0", "n_read", axis], f"kv_read.{part}")
