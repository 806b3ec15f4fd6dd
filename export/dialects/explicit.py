"""What the dialects for TensorRT share: plain operators, and products with explicit Q/DQ around them.

Values are names of graph tensors. Weights stay (N, K) as in checkpoints; a Transpose between DequantizeLinear and
MatMul is what TensorRT folds into the product, weights still in their few bits. Norms, softmax and rotary tables, masks
and caches are the dialects' own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from semspec.export.dialects.outputs import add_pooled, add_signals
from semspec.export.precisions import Precision
from semspec.export.qdq_weights import FP4_BLOCK, QdqMatrix, QdqWeights
from semspec.export.writer import DTYPES, GraphBuilder
from semspec.models.ops import Linear
from semspec.models.rope import rope_tables
from semspec.models.spec import ModelSpec
from semspec.runtime.contract import GraphSpec

__all__ = ["MASKED", "ExplicitOps", "scope"]

MASKED = -30_000.0  # far below any score, and no infinity: sums of scores with it stay inside fp16
TENSORRT = "trt"  # domain of its own operators


class ExplicitOps:
    """Embedding, products, gate, states and head of Ops; norm, add_norm and attend are left to the dialects.

    input_scales: Linear.name -> what one step of its rounded input stands for, where the precision rounds inputs.
    """

    def __init__(
        self,
        spec: ModelSpec,
        graph: GraphSpec,
        precision: Precision,
        weights: QdqWeights,
        input_scales: Mapping[str, float],
        builder: GraphBuilder,
    ) -> None:
        self.spec, self.graph, self.precision = spec, graph, precision
        self.weights, self.input_scales, self.builder = weights, input_scales, builder
        self.dtype = graph.activation
        self.pooled: dict[int, str] = {}
        builder.inputs(graph.inputs())
        for value in (0, 1, -1):
            builder.constant(str(value), np.array([value], np.int64))
        for name, table in zip(
            ("cos", "sin"), rope_tables(spec.rope, spec.head_size, graph.capacity), strict=True
        ):
            builder.weight(name, weights.table(name, table))

    # the Ops protocol

    def embed(self, weight: str) -> str:
        # as the head, whose codes these are where the two are tied; TensorRT reads codes of the wanted rows alone
        matrix = self.weights.matrix((weight,), self.precision.head)
        return self.builder.node("Gather", [self._wide(weight, matrix, "table"), "input_ids"], "embedded")

    def linear(self, x: str, linear: Linear) -> str:
        if self.precision.inputs:
            x = self._rounded(x, linear)
        return self._product(x, linear, self.precision.weights, linear.name)

    def gate(self, gate_up: str) -> str:
        name = gate_up.removesuffix(".gate_up")
        self.builder.nodes("Split", [gate_up], [f"{name}.gate", f"{name}.up"], axis=-1, num_outputs=2)
        sigmoid = self.builder.node("Sigmoid", [f"{name}.gate"], f"{name}.sigmoid")
        silu = self.builder.node("Mul", [f"{name}.gate", sigmoid], f"{name}.silu")
        return self.builder.node("Mul", [silu, f"{name}.up"], f"{name}.gated")

    def state(self, index: int, x: str) -> None:
        if index in self.graph.hidden_layers:
            self.builder.node("Identity", [x], f"hidden.{index}")
        if index in self.graph.pooled_layers:
            self.pooled[index] = x

    def head(self, normed: str, linear: Linear) -> str:
        wanted = self.builder.node("Gather", [normed, "logit_rows"], "wanted", axis=1)
        return self._product(wanted, linear, self.precision.head, "logits")

    def finish(self, logits: str) -> None:
        """Everything behind the logits, and the outputs' declaration."""
        add_pooled(self.builder, self.graph, self.pooled)
        add_signals(self.builder, self.graph, logits)
        self.builder.outputs(self.graph.outputs())

    # pieces

    def scalar(self, name: str, value: float) -> str:
        """A constant in the activations' dtype."""
        return self.builder.constant(name, np.array(value, np.dtype(self.dtype)))

    def vector(self, name: str) -> str:
        """A norm's weight."""
        return self.builder.weight(name, self.weights.vector((name,)))

    def heads(self, qkv: str, layer: int) -> tuple[str, str, str]:
        """Queries (B, heads, S, D), keys and values (B, H, S, D), not rotated."""
        name, spec = f"layers.{layer}", self.spec
        sizes = np.array([spec.query_width, spec.kv_width, spec.kv_width], np.int64)
        parts = [f"{name}.{part}" for part in ("query", "key", "value")]
        self.builder.nodes("Split", [qkv, self.builder.constant("qkv_sizes", sizes)], parts, axis=-1)
        query, key, value = (
            self.split_heads(part, n_heads)
            for part, n_heads in zip(parts, (spec.n_heads, spec.n_kv_heads, spec.n_kv_heads), strict=True)
        )
        return query, key, value

    def split_heads(self, x: str, n_heads: int) -> str:
        """(B, S, n_heads * D) -> (B, n_heads, S, D)."""
        shape = self.builder.constant(
            f"heads.{n_heads}", np.array([0, 0, n_heads, self.spec.head_size], np.int64)
        )
        rows = self.builder.node("Reshape", [x, shape], f"{x}.rows")
        return self.builder.node("Transpose", [rows], f"{x}.heads", perm=[0, 2, 1, 3])

    def _product(self, x: str, linear: Linear, storage: str, name: str) -> str:
        node = self.builder.node
        weight = "+".join(linear.weights)
        matrix = self.weights.matrix(linear.weights, storage)
        turned = node("Transpose", [self._wide(weight, matrix)], f"{name}.weight", perm=[1, 0])
        if not linear.biases:
            return node("MatMul", [x, turned], name)
        bias = self.builder.weight("+".join(linear.biases), self.weights.vector(linear.biases))
        return node("Add", [node("MatMul", [x, turned], f"{name}.product"), bias], name)

    def _wide(self, name: str, matrix: QdqMatrix, use: str = "wide") -> str:
        """The matrix (N, K) in the activations' dtype. use: tells one reader of a matrix from the other."""
        if matrix.scales is None:
            return self.builder.weight(name, matrix.codes)
        codes = self.builder.weight(f"{name}.codes", matrix.codes, matrix.shape, matrix.dtype)
        attributes: dict[str, Any] = {"axis": 0}
        zeros: list[str] = []
        if matrix.block_size:
            attributes = {"axis": 1, "block_size": matrix.block_size}
        else:  # said, though they are zero: onnxruntime 1.23 takes codes without them for unsigned ones
            none = np.zeros(matrix.shape[0], np.dtype(matrix.dtype))
            zeros.append(self.builder.constant(f"zeros.{matrix.dtype}.{matrix.shape[0]}", none))
        if matrix.matrix_scale is None:
            scales = self.builder.weight(f"{name}.scales", matrix.scales)
        else:
            stored = self.builder.weight(f"{name}.scales", matrix.scales, dtype="float8_e4m3fn")
            scales = self._scaled(stored, f"{name}.scales", matrix.matrix_scale)
        return self.builder.node("DequantizeLinear", [codes, scales, *zeros], f"{name}.{use}", **attributes)

    def _rounded(self, x: str, linear: Linear) -> str:
        """x as it is after rounding: Q and DQ, by the scale of its range."""
        node, name = self.builder.node, f"{linear.name}.input"
        step = self.input_scales[linear.name]
        if self.precision.inputs == "fp4":
            return self._rounded_by_block(x, name, step)
        scale = self.scalar(f"{name}.scale", step)
        dtype = {"int8": "int8", "fp8": "float8_e4m3fn"}[self.precision.inputs]
        zero = self.builder.constant(f"zero.{dtype}", np.zeros((), np.dtype(dtype)))
        codes = node("QuantizeLinear", [x, scale, zero], f"{name}.codes")
        return node("DequantizeLinear", [codes, scale, zero], f"{name}.rounded")

    def _rounded_by_block(self, x: str, name: str, step: float) -> str:
        """NVFP4: blocks of 16 with fp8 scales found by the engine, under one measured scale."""
        scale = self.builder.constant(f"{name}.scale", np.array(step, np.float32))
        codes, scales = self.builder.nodes(
            "TRT_FP4DynamicQuantize",
            [x, scale],
            [f"{name}.codes", f"{name}.scales"],
            domain=TENSORRT,
            axis=-1,
            block_size=FP4_BLOCK,
            scale_type=DTYPES["float8_e4m3fn"],
        )
        wide = self._scaled(scales, f"{name}.scales", step)
        return self.builder.node(
            "DequantizeLinear", [codes, wide], f"{name}.rounded", axis=-1, block_size=FP4_BLOCK
        )

    def _scaled(self, scales: str, name: str, scale: float) -> str:
        """fp8 scales times the scale of all, in the activations' dtype."""
        whole = self.builder.constant(f"{name}.scale", np.array(scale, np.float32))
        wide = self.builder.node("DequantizeLinear", [scales, whole], f"{name}.fp32")
        return self.builder.node("Cast", [wide], f"{name}.wide", to=DTYPES[self.dtype])


def scope(weight: str) -> str:
    """A tensor's name as its values are called in the graph."""
    return weight.removeprefix("model.").removesuffix(".weight")
