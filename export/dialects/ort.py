"""Dialect `ort`: the decoder as ONNX Runtime's fused operators, for the graphs `cpu` and `cuda`.

Values are names of graph tensors. Weights are row-major as in checkpoints (N, K), so nothing is transposed.
`cpu` computes in fp32 and gives the same bits however a text is cut; how is told at `spare`.
"""

from __future__ import annotations

import numpy as np

from semspec.export.dialects.lone_row import INT8_ACTIVATIONS, LoneRow
from semspec.export.dialects.outputs import add_pooled, add_signals
from semspec.export.packing import PackedWeights, Schemes, StoredMatrix
from semspec.export.quantize import Scheme, readable_embedding
from semspec.export.writer import DTYPES, MICROSOFT, GraphBuilder
from semspec.models.decoder import decode
from semspec.models.ops import Linear
from semspec.models.rope import rope_tables
from semspec.models.spec import ModelSpec
from semspec.runtime.contract import GraphSpec
from semspec.runtime.errors import ConfigError, SourceError

__all__ = ["OrtOps", "build_ort_graph", "check_model"]

# `spare`: on the CPU a row computed alone goes through other kernels than a row among several, and other kernels
# round differently. Where `spare` is 1 the last row is computed twice and the copy dropped. Attention needs it
# for S = 1. Products with blocks of 64 and 128 work on pairs of rows, so they need it for every odd S (measured);
# there, and in fp32, the row is repeated from the embedding on. With blocks of 32 int8 never needs it, and int4 on some
# processors (measured): lone_row.py.
STABLE_BLOCK = 32
FLOAT32, FLOAT16, INT32 = (DTYPES[name] for name in ("float32", "float16", "int32"))
HEAD_SIZE_STEP = 16  # GroupQueryAttention refuses other head sizes when it runs (onnxruntime 1.23 to 1.32)


def build_ort_graph(
    spec: ModelSpec, graph: GraphSpec, schemes: Schemes, weights: PackedWeights
) -> GraphBuilder:
    """The whole decoder as one graph that follows the contract; weights go to their file on the way.

    Raises what check_model raises, before anything is read.
    """
    check_model(spec, schemes)
    builder = GraphBuilder(f"{spec.family}-{graph.graph}")
    builder.inputs(graph.inputs())
    ops = OrtOps(spec, graph, schemes, weights, builder)
    logits = decode(spec, ops)
    ops.finish(logits)
    builder.outputs(graph.outputs())
    return builder


def check_model(spec: ModelSpec, schemes: Schemes) -> None:
    """Refuse what the engine's kernels cannot compute, or compute wrongly.

    Raises SourceError for the model, ConfigError for the schemes.
    """
    if spec.head_size % HEAD_SIZE_STEP:
        raise SourceError(
            f"attention heads of size {spec.head_size} are not supported: ONNX Runtime's attention needs a multiple "
            f"of {HEAD_SIZE_STEP}; choose another model"
        )
    if spec.tied:
        schemes.check_tied()
    embedding = schemes.embedding
    if not readable_embedding(embedding, spec.width):
        raise ConfigError(
            f"embedding precision {embedding} cuts rows of {spec.width} into {-(-spec.width // embedding.block_size)} "
            "blocks, an odd number, which not every onnxruntime reads alike; use another block size (such as int4/32) "
            "or int8"
        )


class OrtOps:
    """Ops on the names of graph tensors."""

    def __init__(
        self,
        spec: ModelSpec,
        graph: GraphSpec,
        schemes: Schemes,
        weights: PackedWeights,
        builder: GraphBuilder,
    ) -> None:
        self.spec, self.graph, self.schemes = spec, graph, schemes
        self.weights, self.builder = weights, builder
        self.dtype = graph.activation
        self.pads_rows = graph.graph == "cpu"
        layers = (schemes.layers, *schemes.finer.values())
        self.pads_attention = self.pads_rows and all(scheme.block_size == STABLE_BLOCK for scheme in layers)
        self.asked = [scheme for scheme in layers if self.pads_attention and _is_asked(scheme)]
        self.n_products = "n_new" if self.pads_attention and not self.asked else "n_rows"
        self.lone = LoneRow(builder)
        self.pooled: dict[int, str] = {}
        self._integers()
        self._positions()

    # what every layer shares

    def _integers(self) -> None:
        for value in (0, 1, -1):
            self.builder.constant(str(value), np.array([value], np.int64))
        self.builder.node("Shape", ["input_ids"], "n_new", start=1, end=2)

    def _positions(self) -> None:
        """Lengths as GroupQueryAttention wants them, and the rotary tables."""
        node, n_rows = self.builder.node, "n_new"
        if self.pads_rows:
            n_rows = self._row_indices()
        total = node("Add", ["past_len", n_rows], "total_lengths")
        node("Cast", [node("Sub", [total, "1"], "last_rows")], "seqlens_k", to=INT32)
        longest = node("ReduceMax", [total], "longest", keepdims=0)
        node("Cast", [longest], "total_sequence_length", to=INT32)
        tables = rope_tables(self.spec.rope, self.spec.head_size, self.graph.capacity)
        for name, table in zip(("cos", "sin"), tables, strict=True):
            stored = self.weights.table(f"{name}:{self.dtype}", table.astype(self.dtype))
            self.builder.weight(name, stored)

    def _row_indices(self) -> str:
        """Where they may be repeated, `id_indices`: ids that go through products, and `row_indices`: rows of those that
        go through attention. Returns the name of the number of rows in attention."""
        node = self.builder.node
        n_rows = node("Add", ["n_new", "spare"], "n_rows")
        if self.asked:
            differs = self.lone.differs(self.asked, "lone_row_differs")
            self.n_products = node(
                "Add", ["n_new", node("Mul", ["spare", differs], "spare_row")], "n_products"
            )
        if self.n_products != "n_new":
            self._repeat_last("n_new", self.n_products, "id_indices")
        if self.pads_attention:
            self._repeat_last(self.n_products, n_rows, "row_indices")
        return n_rows

    def _repeat_last(self, n_known: str, n_wanted: str, name: str) -> None:
        """0 .. n_known - 1, and its last number again up to n_wanted of them."""
        node = self.builder.node
        first = self.builder.constant("first", np.array(0, np.int64))
        step = self.builder.constant("step", np.array(1, np.int64))
        count = node("Squeeze", [n_wanted], f"{name}.count")
        counted = node("Range", [first, count, step], f"{name}.counted")
        node("Min", [counted, node("Sub", [n_known, "1"], f"{name}.last")], name)

    # the Ops protocol

    def embed(self, weight: str) -> str:
        ids = "input_ids"
        if self._repeats_ids:
            ids = self.builder.node("Gather", [ids, "id_indices"], "ids", axis=1)
        stored = self.weights.matrix((weight,), self.schemes.embedding, self.dtype)
        if not stored.scheme.block_size:
            table = self.builder.weight(f"{weight}", stored.data)
            return self.builder.node("Gather", [table, ids], "embedded")
        data, scales, zero_points = self._blocks(weight, stored)
        embedded = self.builder.node(
            "GatherBlockQuantized",
            [data, ids, scales, *zero_points],
            "embedded",
            domain=MICROSOFT,
            bits=stored.scheme.bits,
            block_size=stored.scheme.block_size,
            gather_axis=0,
            quantize_axis=1,
        )
        if stored.shape[1] % stored.scheme.block_size:
            width = self.builder.constant("width", np.array([stored.shape[1]], np.int64))
            axis = self.builder.constant("2", np.array([2], np.int64))
            return self.builder.node("Slice", [embedded, "0", width, axis], "embedded.unpadded")
        return embedded

    def norm(self, x: str, weight: str) -> str:
        """Plain operators: the fused one is not in the standard, and this runs once a pass.

        Always in fp32: the squares of an embedding's small numbers, and epsilon, vanish in fp16.
        """
        node, name = self.builder.node, _scope(weight)
        epsilon = self.builder.constant("epsilon", np.array(self.spec.norm_eps, np.float32))
        wide = x if self.dtype == "float32" else node("Cast", [x], f"{name}.wide", to=FLOAT32)
        mean = node("ReduceMean", [node("Mul", [wide, wide], f"{name}.squares"), "-1"], f"{name}.mean")
        scale = node("Sqrt", [node("Add", [mean, epsilon], f"{name}.shifted")], f"{name}.scale")
        unit = node("Div", [wide, scale], f"{name}.unit")
        if self.dtype != "float32":
            unit = node("Cast", [unit], f"{name}.narrow", to=FLOAT16)
        return node("Mul", [unit, self._vector(weight)], name)

    def add_norm(self, stream: str, branch: str, weight: str) -> tuple[str, str]:
        name = _scope(weight)
        self.builder.nodes(
            "SkipSimplifiedLayerNormalization",
            [stream, branch, self._vector(weight)],
            [name, "", "", f"{name}.stream"],
            domain=MICROSOFT,
            epsilon=self.spec.norm_eps,
        )
        return name, f"{name}.stream"

    def linear(self, x: str, linear: Linear) -> str:
        return self._product(x, linear, self.schemes.of(linear))

    def attend(self, qkv: str, layer: int) -> str:
        """GroupQueryAttention over the bound cache: past and present are one buffer, written in place."""
        rows = qkv
        if self.pads_attention:
            rows = self.builder.node("Gather", [qkv, "row_indices"], f"layers.{layer}.rows", axis=1)
        cache = [f"kv.{layer}.key", f"kv.{layer}.value"]
        attended = f"layers.{layer}.attended"
        self.builder.nodes(
            "GroupQueryAttention",
            [rows, "", "", *cache, "seqlens_k", "total_sequence_length", "cos", "sin"],
            [
                f"{attended}.padded" if self.pads_attention else attended,
                f"kv_out.{layer}.key",
                f"kv_out.{layer}.value",
            ],
            domain=MICROSOFT,
            num_heads=self.spec.n_heads,
            kv_num_heads=self.spec.n_kv_heads,
            do_rotary=1,
        )
        if self.pads_attention:
            self._drop_spare(f"{attended}.padded", attended, self.n_products)
        return attended

    def gate(self, gate_up: str) -> str:
        """QuickGelu with alpha 1 is silu."""
        name = gate_up.removesuffix(".gate_up")
        self.builder.nodes("Split", [gate_up], [f"{name}.gate", f"{name}.up"], axis=-1, num_outputs=2)
        silu = self.builder.node("QuickGelu", [f"{name}.gate"], f"{name}.silu", domain=MICROSOFT, alpha=1.0)
        return self.builder.node("Mul", [silu, f"{name}.up"], f"{name}.gated")

    def state(self, index: int, x: str) -> None:
        if index not in self.graph.pooled_layers and index not in self.graph.hidden_layers:
            return
        if self._repeats_ids:
            x = self._drop_spare(x, f"states.{index}", "n_new")
        if index in self.graph.hidden_layers:
            self.builder.node("Identity", [x], f"hidden.{index}")
        if index in self.graph.pooled_layers:
            self.pooled[index] = x

    def head(self, normed: str, linear: Linear) -> str:
        """Logits of the wanted rows; an odd last one is computed twice where its bits would differ."""
        node = self.builder.node
        asked = _is_asked(self.schemes.head)
        if not self.pads_rows or (self.schemes.head.block_size == STABLE_BLOCK and not asked):
            wanted = node("Gather", [normed, "logit_rows"], "wanted", axis=1)
            return self._product(wanted, linear, self.schemes.head, "logits")
        n_wanted = node("Shape", ["logit_rows"], "n_wanted")
        two = self.builder.constant("2", np.array([2], np.int64))
        odd = node("Mod", [n_wanted, two], "head_spare")
        if asked:
            differs = self.lone.differs([self.schemes.head], "lone_head_differs")
            odd = node("Mul", [odd, differs], "head_asked")
        last = node("Gather", ["logit_rows", "-1"], "last_wanted")
        repeated = node("Concat", ["logit_rows", node("Expand", [last, odd], "wanted_again")], "rows", axis=0)
        wanted = node("Gather", [normed, repeated], "wanted", axis=1)
        padded = self._product(wanted, linear, self.schemes.head, "logits.padded")
        return node("Slice", [padded, "0", n_wanted, "1"], "logits")

    # outputs that are not the decoder's business

    def finish(self, logits: str) -> None:
        """Pooled sums, and the numbers that spare a device the copy of V logits."""
        add_pooled(self.builder, self.graph, self.pooled)
        if self.graph.graph != "cpu":
            add_signals(self.builder, self.graph, logits)

    # pieces

    @property
    def _repeats_ids(self) -> bool:
        """Whether products may see a spare row."""
        return self.pads_rows and self.n_products != "n_new"

    def _product(self, x: str, linear: Linear, scheme: Scheme, name: str = "") -> str:
        name = name or linear.name
        stored = self.weights.matrix(linear.weights, scheme, self.dtype)
        bias = self._bias(linear)
        if not scheme.block_size:
            weight = self.builder.weight(_joined(linear.weights), stored.data)
            target = f"{name}.product" if bias else name
            self.builder.node("FusedMatMul", [x, weight], target, domain=MICROSOFT, transB=1)
            return self.builder.node("Add", [target, *bias], name) if bias else name
        data, scales, zero_points = self._blocks(_joined(linear.weights), stored, three_dimensional=True)
        # positional inputs: zero points, the deprecated g_idx, bias
        optional = [*(zero_points or [""]), "", *bias] if bias else zero_points
        attributes = {"accuracy_level": INT8_ACTIVATIONS} if self.graph.graph == "cpu" else {}
        return self.builder.node(
            "MatMulNBits",
            [x, data, scales, *optional],
            name,
            domain=MICROSOFT,
            N=stored.shape[0],
            K=stored.shape[1],
            bits=scheme.bits,
            block_size=scheme.block_size,
            **attributes,
        )

    def _blocks(
        self, name: str, stored: StoredMatrix, three_dimensional: bool = False
    ) -> tuple[str, str, list[str]]:
        """Names of codes, scales and zero points; the embedding reads the codes as (N, bytes), products as blocks."""
        assert stored.scales is not None
        n_rows, n_blocks, width = stored.data.shape
        if three_dimensional:
            data = self.builder.weight(f"{name}.blocks", stored.data)
        else:
            data = self.builder.weight(f"{name}.rows", stored.data, (n_rows, n_blocks * width))
        scales = self.builder.weight(f"{name}.scales", stored.scales)
        zeros = [self.builder.weight(f"{name}.zero_points", stored.zero_points)] if stored.zero_points else []
        return data, scales, zeros

    def _bias(self, linear: Linear) -> list[str]:
        if not linear.biases:
            return []
        return [self.builder.weight(_joined(linear.biases), self.weights.vector(linear.biases, self.dtype))]

    def _vector(self, name: str) -> str:
        return self.builder.weight(name, self.weights.vector((name,), self.dtype))

    def _drop_spare(self, x: str, name: str, n_kept: str) -> str:
        return self.builder.node("Slice", [x, "0", n_kept, "1"], name)


def _is_asked(scheme: Scheme) -> bool:
    """Whether it hangs on the processor that a product gives one row the bits it gives the same row among many."""
    return scheme.bits == 4 and scheme.block_size == STABLE_BLOCK


def _scope(weight: str) -> str:
    return weight.removeprefix("model.").removesuffix(".weight")


def _joined(names: tuple[str, ...]) -> str:
    return "+".join(names)
