"""Dialect `primitive`: the decoder in plain operators, for TensorRT 10.3 to 10.14 (JetPack 6, 7.0, 7.1).

The graph reads the cache and returns the new rows; the runtime writes them. Cached and new rows are scored apart and
weighed together, so no cache is ever copied. Indices are int32, which these releases handle best.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from semspec.export.dialects.explicit import MASKED, ExplicitOps, scope
from semspec.export.precisions import Precision
from semspec.export.qdq_weights import QdqWeights
from semspec.export.writer import DTYPES, GraphBuilder
from semspec.models.decoder import decode
from semspec.models.spec import ModelSpec
from semspec.runtime.contract import GraphSpec

__all__ = ["PrimitiveOps", "build_primitive_graph"]

INT32 = DTYPES["int32"]
OPSET = 21  # has int4
OPSETS = {"fp4": 23}


def build_primitive_graph(
    spec: ModelSpec,
    graph: GraphSpec,
    precision: Precision,
    weights: QdqWeights,
    input_scales: Mapping[str, float],
) -> GraphBuilder:
    """As build_native_graph."""
    builder = GraphBuilder(f"{spec.family}-{graph.graph}", OPSETS.get(precision.weights, OPSET))
    ops = PrimitiveOps(spec, graph, precision, weights, input_scales, builder)
    ops.prepare()
    ops.finish(decode(spec, ops))
    return builder


class PrimitiveOps(ExplicitOps):
    """Ops on the names of graph tensors."""

    new_rows: list[str]  # (1, B, H, S, D) of each layer, key before value

    def prepare(self) -> None:
        """What every layer shares: rotary rows of the positions, and what of the cache and of the new rows is seen."""
        node, constant = self.builder.node, self.builder.constant
        self.new_rows = []
        first, step = constant("first", np.array(0, np.int32)), constant("step", np.array(1, np.int32))
        n_new = node("Squeeze", [node("Shape", ["input_ids"], "n_new", start=1, end=2)], "n_new.scalar")
        rows = node("Range", [first, node("Cast", [n_new], "row_count", to=INT32), step], "new_rows")
        start = node("Unsqueeze", ["past_len", "1"], "start")
        positions = node("Add", [start, rows], "positions")
        for table in ("cos", "sin"):
            picked = node("Gather", [table, positions], f"{table}.rows")
            node("Unsqueeze", [picked, "1"], f"{table}.picked")  # (B, 1, S, D / 2)
        masked, seen = (
            constant(name, np.array(value, np.float32)) for name, value in (("masked", MASKED), ("seen", 0.0))
        )
        places = constant("places", np.arange(self.graph.capacity, dtype=np.int32))
        filled = node("Less", [places, start], "filled")  # (B, C)
        cached = node("Where", [filled, seen, masked], "mask.cached.rows")
        node(
            "Unsqueeze", [cached, constant("1,2", np.array([1, 2], np.int64))], "mask.cached"
        )  # (B, 1, 1, C)
        future = node("Less", [node("Unsqueeze", [rows, "-1"], "rows"), rows], "future")  # (S, S)
        new = node("Where", [future, masked, seen], "mask.new.rows")
        # queries of one key head stand one below the other, so keys and values are never repeated; masks are
        n_grouped = self.spec.n_heads // self.spec.n_kv_heads
        node("Concat", [new] * n_grouped, "mask.new", axis=0)  # (G S, S)
        self.scalar("scale", self.spec.head_size**-0.5)

    def norm(self, x: str, weight: str) -> str:
        """In fp32 throughout: squares of large states, and of an embedding's small numbers, leave fp16's range."""
        node, name = self.builder.node, scope(weight)
        epsilon = self.builder.constant("epsilon", np.array(self.spec.norm_eps, np.float32))
        wide = self._cast(x, f"{name}.wide", "float32")
        mean = node("ReduceMean", [node("Mul", [wide, wide], f"{name}.squares"), "-1"], f"{name}.mean")
        scale = node("Sqrt", [node("Add", [mean, epsilon], f"{name}.shifted")], f"{name}.scale")
        unit = self._cast(node("Div", [wide, scale], f"{name}.unit"), f"{name}.narrow", self.dtype)
        return node("Mul", [unit, self.vector(weight)], name)

    def add_norm(self, stream: str, branch: str, weight: str) -> tuple[str, str]:
        total = self.builder.node("Add", [stream, branch], f"{scope(weight)}.stream")
        return self.norm(total, weight), total

    def attend(self, qkv: str, layer: int) -> str:
        node, name, constant = self.builder.node, f"layers.{layer}", self.builder.constant
        spec = self.spec
        query, key, value = self.heads(qkv, layer)
        query = node("Mul", [self._rotated(query, f"{name}.query"), "scale"], f"{name}.query.scaled")
        key = self._rotated(key, f"{name}.key")
        self.new_rows += [node("Unsqueeze", [rows, "0"], f"{rows}.new") for rows in (key, value)]
        grouped = constant("grouped", np.array([0, spec.n_kv_heads, -1, spec.head_size], np.int64))
        query = node("Reshape", [query, grouped], f"{name}.query.grouped")  # (B, H, G S, D)
        scores = [
            self._scores(query, f"kv.{layer}.key", f"{name}.cached", "mask.cached"),
            self._scores(query, key, f"{name}.new", "mask.new"),
        ]
        joined = node("Concat", scores, f"{name}.scores", axis=-1)  # (B, H, G S, C + S)
        wide = node("Softmax", [joined], f"{name}.weights.wide", axis=-1)
        attended = self._weighed(self._cast(wide, f"{name}.weights", self.dtype), layer, value)
        ungrouped = constant("ungrouped", np.array([0, spec.n_heads, -1, spec.head_size], np.int64))
        heads = node("Reshape", [attended, ungrouped], f"{name}.attended.heads")
        rows = node("Transpose", [heads], f"{name}.attended.rows", perm=[0, 2, 1, 3])
        flat = constant("flat", np.array([0, 0, spec.query_width], np.int64))
        return node("Reshape", [rows, flat], f"{name}.attended")

    def finish(self, logits: str) -> None:
        self.builder.node("Concat", self.new_rows, "kv_new", axis=0)
        super().finish(logits)

    def _scores(self, query: str, keys: str, name: str, mask: str) -> str:
        """Masked scores in fp32: (B, H, G S, rows of keys)."""
        node = self.builder.node
        turned = node("Transpose", [keys], f"{name}.keys", perm=[0, 1, 3, 2])
        products = node("MatMul", [query, turned], f"{name}.products")
        return node("Add", [self._cast(products, f"{name}.products.wide", "float32"), mask], f"{name}.scores")

    def _weighed(self, weights: str, layer: int, value: str) -> str:
        """The weighed sum of cached values and new ones: (B, H, G S, D)."""
        node, constant, name = self.builder.node, self.builder.constant, f"layers.{layer}"
        capacity = constant("capacity", np.array([self.graph.capacity], np.int64))
        end, axis = constant("end", np.array([2**31 - 1], np.int64)), constant("3", np.array([3], np.int64))
        old = node("Slice", [weights, "0", capacity, axis], f"{name}.weights.cached")
        new = node("Slice", [weights, capacity, end, axis], f"{name}.weights.new")
        sums = [
            node("MatMul", [old, f"kv.{layer}.value"], f"{name}.attended.cached"),
            node("MatMul", [new, value], f"{name}.attended.new"),
        ]
        return node("Add", sums, f"{name}.attended.grouped")

    def _rotated(self, x: str, name: str) -> str:
        """Halves (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)."""
        node = self.builder.node
        one, two = self.builder.nodes("Split", [x], [f"{name}.1", f"{name}.2"], axis=-1, num_outputs=2)
        cosines, sines = "cos.picked", "sin.picked"
        first = node(
            "Sub",
            [node("Mul", [one, cosines], f"{name}.1.cos"), node("Mul", [two, sines], f"{name}.2.sin")],
            f"{name}.first",
        )
        second = node(
            "Add",
            [node("Mul", [two, cosines], f"{name}.2.cos"), node("Mul", [one, sines], f"{name}.1.sin")],
            f"{name}.second",
        )
        return node("Concat", [first, second], f"{name}.rotated", axis=-1)

    def _cast(self, x: str, name: str, dtype: str) -> str:
        return x if self.dtype == "float32" else self.builder.node("Cast", [x], name, to=DTYPES[dtype])
