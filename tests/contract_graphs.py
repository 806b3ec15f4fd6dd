"""Small graphs in the contract's shape, written by hand: what the compiler of plans is tested on.

A decoder of one-matrix layers over the real ports of `native` or `primitive`: its numbers mean nothing, its inputs,
outputs, caches, attention and quantized products are those of an exported model. Faults can be asked for.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from semspec.runtime.bundle import MANIFEST, sha256_of
from semspec.runtime.contract import GraphSpec
from semspec.runtime.records import Array, TensorSpec
from semspec.runtime.typed import plain

TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
}
FP8_MOST = 448.0
ACTIVATIONS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def graph_spec(graph: str = "native", activation: str = "float16", **changes: Any) -> GraphSpec:
    """Sizes of a tiny graph. changes: fields of GraphSpec."""
    sizes: dict[str, Any] = {
        "n_layers": 2,
        "n_kv_heads": 2,
        "head_size": 64,
        "width": 256,
        "vocab_size": 512,
        "max_context": 1023,
        "pooled_layers": (1, 2),
    }
    return GraphSpec(graph=graph, activation=activation, cache=activation, **{**sizes, **changes})


class ContractGraph:
    """Writes one. precision: `plain`, or how weights (and inputs) of products are quantized: int4, int8, int8-w8a8,
    fp8, nvfp4. block_size: of int4. faults: `no-mask`, `unused-input` (next_ids)."""

    def __init__(
        self,
        spec: GraphSpec,
        precision: str = "plain",
        *,
        block_size: int = 32,
        faults: Sequence[str] = (),
        data: str = "weights.data",
    ) -> None:
        self.spec, self.precision, self.block_size, self.faults = spec, precision, block_size, set(faults)
        self.data = data
        self.dtype = TYPES[spec.activation]
        self.index = np.int32 if spec.graph == "primitive" else np.int64
        self.nodes: list[onnx.NodeProto] = []
        self.arrays: dict[str, onnx.TensorProto] = {}
        self.rng = np.random.default_rng(0)

    def save(self, path: Path) -> Path:
        """The file, with its weights beside it."""
        self._decode()
        graph = helper.make_graph(
            self.nodes,
            "contract",
            [_info(port) for port in self.spec.inputs()],
            [_info(port) for port in self.spec.outputs()],
            list(self.arrays.values()),
        )
        opsets = [helper.make_opsetid("", 24), helper.make_opsetid("trt", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
        path.parent.mkdir(parents=True, exist_ok=True)
        onnx.save_model(model, str(path), save_as_external_data=True, location=self.data, size_threshold=1024)
        return path

    def node(self, op: str, inputs: Sequence[str], output: str, domain: str = "", **attributes: Any) -> str:
        self.nodes.append(
            helper.make_node(op, list(inputs), [output], name=output, domain=domain, **attributes)
        )
        return output

    def constant(self, name: str, value: Array | onnx.TensorProto) -> str:
        tensor = value if isinstance(value, onnx.TensorProto) else numpy_helper.from_array(value, name)
        self.arrays.setdefault(name, tensor)
        return name

    def _decode(self) -> None:
        self._positions()
        states = {
            0: self.node(
                "Gather",
                [self._floats("embedding", (self.spec.vocab_size, self.spec.width)), "input_ids"],
                "state.0",
            )
        }
        for layer in range(self.spec.n_layers):
            states[layer + 1] = self._layer(layer, states[layer])
        wanted = self.node("Gather", [states[self.spec.n_layers], "logit_rows"], "wanted", axis=1)
        self._product(wanted, "head", self.spec.width, self.spec.vocab_size, "logits")
        self._pool(states)
        self._signals()
        for layer in self.spec.hidden_layers:
            self.node("Identity", [states[layer]], f"hidden.{layer}")
        if self.spec.graph == "primitive":
            rows = [f"layer.{i}.{part}" for i in range(self.spec.n_layers) for part in ("key", "value")]
            axis = self.constant("0", np.array([0], np.int64))
            self.node(
                "Concat",
                [self.node("Unsqueeze", [row, axis], f"{row}.new") for row in rows],
                "kv_new",
                axis=0,
            )

    def _positions(self) -> None:
        """`read`: which cache rows may be attended, (B, 1, S, T) in native and (B, 1, 1, C) in primitive."""
        node, constant = self.node, self.constant
        ends = constant("ends", np.array([-1], np.int64))
        column = node("Unsqueeze", ["past_len", ends], "past_column")
        if self.spec.graph == "primitive":
            rows = constant("rows", np.arange(self.spec.capacity, dtype=self.index)[None])
            open_ = node("Less", [rows, column], "open")
            shape = constant("mask.shape", np.array([-1, 1, 1, self.spec.capacity], np.int64))
            self._mask(node("Reshape", [open_, shape], "open.4"), "read")
            return
        n_new = node("Squeeze", [node("Shape", ["input_ids"], "n_new", start=1, end=2)], "n_new.0")
        zero, one = (constant(f"scalar.{i}", np.array(i, np.int64)) for i in (0, 1))
        counted = node("Range", [zero, n_new, one], "counted")
        places = node("Unsqueeze", [node("Add", [column, counted], "places"), ends], "places.column")
        self._mask(node("LessOrEqual", ["span", places], "open"), "read.3")
        axis = constant("1", np.array([1], np.int64))
        node("Unsqueeze", ["read.3", axis], "read")

    def _mask(self, open_: str, name: str) -> None:
        least = {"float16": -3e4, "bfloat16": -1e30, "float32": -1e30}[self.spec.activation]
        self.node("Where", [open_, self._scalar(0.0), self._scalar(least)], name)

    def _layer(self, layer: int, x: str) -> str:
        spec, name = self.spec, f"layer.{layer}"
        inner = spec.n_kv_heads * spec.head_size
        query, key, value = (
            self._heads(
                self._product(x, f"{name}.{part}", spec.width, inner, f"{name}.{part}.flat"), f"{name}.{part}"
            )
            for part in ("query", "key", "value")
        )
        attended = (
            self._attend_primitive(name, layer, query, key, value)
            if spec.graph == "primitive"
            else self._attend_native(name, layer, query, key, value)
        )
        back = self.node("Transpose", [attended], f"{name}.back", perm=[0, 2, 1, 3])
        shape = self.constant("flat", np.array([0, 0, inner], np.int64))
        flat = self.node("Reshape", [back, shape], f"{name}.flat")
        return self.node(
            "Add", [x, self._product(flat, f"{name}.out", inner, spec.width)], f"state.{layer + 1}"
        )

    def _heads(self, x: str, name: str) -> str:
        shape = self.constant("heads", np.array([0, 0, self.spec.n_kv_heads, self.spec.head_size], np.int64))
        return self.node(
            "Transpose", [self.node("Reshape", [x, shape], f"{name}.heads")], name, perm=[0, 2, 1, 3]
        )

    def _attend_native(self, name: str, layer: int, query: str, key: str, value: str) -> str:
        read = []
        for part, rows in (("key", key), ("value", value)):
            cache = self.node(
                "TensorScatter", [f"kv.{layer}.{part}", rows, "past_len"], f"kv_out.{layer}.{part}", axis=2
            )
            read.append(self.node("Gather", [cache, "span"], f"{name}.{part}.read", axis=2))
        inputs = [query, *read, "" if "no-mask" in self.faults else "read"]
        return self.node("Attention", inputs, f"{name}.attended", scale=self.spec.head_size**-0.5)

    def _attend_primitive(self, name: str, layer: int, query: str, key: str, value: str) -> str:
        """Old rows and new rows are scored apart; new rows see each other all, for brevity."""
        node = self.node
        scores = []
        for which, rows in (("old", f"kv.{layer}.key"), ("new", key)):
            turned = node("Transpose", [rows], f"{name}.{which}.turned", perm=[0, 1, 3, 2])
            scores.append(node("MatMul", [query, turned], f"{name}.{which}.scores"))
        scores[0] = node("Add", [scores[0], "read"], f"{name}.old.masked")
        both = node(
            "Softmax", [node("Concat", scores, f"{name}.scores", axis=-1)], f"{name}.weights", axis=-1
        )
        axis = self.constant("3", np.array([3], np.int64))
        zero, most = (self.constant(f"row.{i}", np.array([i], np.int64)) for i in (0, 1 << 30))
        cut = self.constant("capacity", np.array([self.spec.capacity], np.int64))
        old = node("Slice", [both, zero, cut, axis], f"{name}.old.weights")
        new = node("Slice", [both, cut, most, axis], f"{name}.new.weights")
        values = [
            node("MatMul", [old, f"kv.{layer}.value"], f"{name}.old"),
            node("MatMul", [new, value], f"{name}.new"),
        ]
        return node("Add", values, f"{name}.attended")

    def _pool(self, states: dict[int, str]) -> None:
        axis = self.constant("1", np.array([1], np.int64))
        row = self.node("Unsqueeze", ["pool", axis], "pool.row")
        sums = []
        for layer in self.spec.pooled_layers:
            wide = self.node("Cast", [states[layer]], f"pool.{layer}.wide", to=TensorProto.FLOAT)
            sums.append(self.node("MatMul", [row, wide], f"pool.{layer}"))
        self.node("Add", ["pooled_in", self.node("Concat", sums, "pool.new", axis=1)], "pooled")

    def _signals(self) -> None:
        node = self.node
        wide = node("Cast", ["logits"], "logits.wide", to=TensorProto.FLOAT)
        last = self.constant("last", np.array([-1], np.int64))
        node("ReduceLogSumExp", [wide, last], "lse", keepdims=0)
        law = node("Softmax", [wide], "law", axis=-1)
        mean = node("ReduceSum", [node("Mul", [law, wide], "law.logits"), last], "mean", keepdims=0)
        node("Sub", ["lse", mean], "entropy")
        ids = (
            node("ArgMax", [wide], "best", axis=-1, keepdims=0)
            if "unused-input" in self.faults
            else "next_ids"
        )
        column = node("Unsqueeze", [ids, last], "next")
        picked = node("GatherElements", [wide, column], "picked", axis=2)
        node("Squeeze", [picked, last], "next_logits")
        outputs = {port.name: port for port in self.spec.outputs()}
        count = self.constant("top", np.array([outputs["top_ids"].shape[-1]], np.int64))
        ids = "top_ids" if self.index is np.int64 else "top_ids.wide"
        self.nodes.append(helper.make_node("TopK", [wide, count], ["top_logits", ids], name="topk", axis=-1))
        if ids != "top_ids":
            node("Cast", [ids], "top_ids", to=TensorProto.INT32)

    # products

    def _product(self, x: str, name: str, width: int, n_rows: int, output: str = "") -> str:
        weight = {
            "plain": self._floats,
            "int4": self._int4,
            "int8": self._int8,
            "int8-w8a8": self._int8,
            "fp8": self._fp8,
            "nvfp4": self._nvfp4,
        }[self.precision](f"{name}.weight", (width, n_rows))
        if self.precision in ("int8-w8a8", "fp8"):
            x = self._rounded(x, name)
        if self.precision == "nvfp4":
            x = self._rounded_fp4(x, name)
        return self.node("MatMul", [x, weight], output or name)

    def _floats(self, name: str, shape: tuple[int, ...]) -> str:
        return self.constant(name, _tensor(name, self.rng.standard_normal(shape) / 16, self.dtype))

    def _scalar(self, value: float) -> str:
        name = f"scalar.{value}"
        return self.constant(name, _tensor(name, np.array(value), self.dtype))

    def _int4(self, name: str, shape: tuple[int, int]) -> str:
        codes = _tensor(f"{name}.codes", self.rng.integers(-7, 8, shape), TensorProto.INT4)
        scales = np.full((shape[0] // self.block_size, shape[1]), 0.01)
        inputs = [self.constant(codes.name, codes), self._scales(name, scales)]
        return self.node("DequantizeLinear", inputs, name, axis=0, block_size=self.block_size)

    def _int8(self, name: str, shape: tuple[int, int]) -> str:
        codes = _tensor(f"{name}.codes", self.rng.integers(-127, 128, shape), TensorProto.INT8)
        inputs = [self.constant(codes.name, codes), self._scales(name, np.full(shape[1], 0.001))]
        return self.node("DequantizeLinear", inputs, name, axis=1)

    def _fp8(self, name: str, shape: tuple[int, int]) -> str:
        values = self.rng.uniform(-FP8_MOST, FP8_MOST, shape)
        codes = _tensor(f"{name}.codes", values, TensorProto.FLOAT8E4M3FN)
        inputs = [self.constant(codes.name, codes), self._scales(name, np.full(shape[1], 0.001))]
        return self.node("DequantizeLinear", inputs, name, axis=1)

    def _rounded(self, x: str, name: str) -> str:
        kind = TensorProto.FLOAT8E4M3FN if self.precision == "fp8" else TensorProto.INT8
        zero = self.constant(f"zero.{kind}", _tensor(f"zero.{kind}", np.array(0), kind))
        scale = self._scalar(0.05)
        rounded = self.node("QuantizeLinear", [x, scale, zero], f"{name}.rounded")
        return self.node("DequantizeLinear", [rounded, scale, zero], f"{name}.input")

    def _scales(self, name: str, values: Array) -> str:
        return self.constant(f"{name}.scales", _tensor(f"{name}.scales", values, self.dtype))

    def _nvfp4(self, name: str, shape: tuple[int, int]) -> str:
        """fp4 codes, fp8 scales of blocks of 16, an fp32 scale of all."""
        codes = _tensor(f"{name}.codes", self.rng.choice([-1.5, 0.5, 3.0], shape), TensorProto.FLOAT4E2M1)
        scales = _tensor(f"{name}.scales", np.full((shape[0] // 16, shape[1]), 1.0), TensorProto.FLOAT8E4M3FN)
        return self._dequantized_fp4(
            self.constant(codes.name, codes), self.constant(scales.name, scales), name, 0
        )

    def _rounded_fp4(self, x: str, name: str) -> str:
        one = self.constant("fp4.scale", np.array(0.01, np.float32))
        narrow = [f"{name}.fp4", f"{name}.fp4.scales"]
        self.nodes.append(
            helper.make_node(
                "TRT_FP4DynamicQuantize",
                [x, one],
                narrow,
                domain="trt",
                name=narrow[0],
                axis=-1,
                block_size=16,
                scale_type=TensorProto.FLOAT8E4M3FN,
            )
        )
        return self._dequantized_fp4(narrow[0], narrow[1], f"{name}.input", -1)

    def _dequantized_fp4(self, codes: str, scales: str, name: str, axis: int) -> str:
        one = self.constant("fp4.scale", np.array(0.01, np.float32))
        wide = self.node("DequantizeLinear", [scales, one], f"{name}.scales.wide")
        wide = self.node("Cast", [wide], f"{name}.scales.cast", to=self.dtype)
        return self.node("DequantizeLinear", [codes, wide], name, axis=axis, block_size=16)


def _tensor(name: str, values: Array, kind: int) -> onnx.TensorProto:
    dtype = {
        TensorProto.FLOAT: np.float32,
        TensorProto.FLOAT16: np.float16,
        TensorProto.BFLOAT16: ml_dtypes.bfloat16,
        TensorProto.INT8: np.int8,
        TensorProto.INT4: ml_dtypes.int4,
        TensorProto.FLOAT8E4M3FN: ml_dtypes.float8_e4m3fn,
        TensorProto.FLOAT4E2M1: ml_dtypes.float4_e2m1fn,
    }[kind]
    tensor = numpy_helper.from_array(np.asarray(values).astype(dtype), name)
    assert tensor.data_type == kind
    return tensor


def _info(port: TensorSpec) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(port.name, TYPES[port.dtype], list(port.shape))


def graft(bundle: Path, out: Path, precision: str = "fp16", *, graph: str = "native", **changes: Any) -> Path:
    """A copy of a bundle whose models have such a graph in place of an exported one. changes: as ContractGraph's."""
    shutil.copytree(bundle, out)
    manifest = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
    for role, model in manifest["models"].items():
        spec = graph_spec(graph, ACTIVATIONS.get(precision, "float16"))
        kind = "plain" if precision in ACTIVATIONS else precision
        folder = out / role / "onnx"
        ContractGraph(spec, kind, data=f"{graph}.data", **changes).save(folder / f"{graph}.onnx")
        model["graphs"][graph] = plain(spec)
        model["precision"][graph] = precision
        for name in (f"{graph}.onnx", f"{graph}.data"):
            path = folder / name
            entry = {"size": path.stat().st_size, "sha256": sha256_of(path)}
            manifest["files"][f"{role}/onnx/{name}"] = entry
    (out / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    return out
