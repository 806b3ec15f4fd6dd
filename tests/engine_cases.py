"""Graphs for TensorRT of tiny models, run by ONNX Runtime on the CPU: their mathematics, not an engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnxruntime
import pytest
from graphs import Graph, tiny_variant
from onnx import TensorProto, helper, numpy_helper
from transformers import PreTrainedModel

from semspec.calibration.ranges import take_ranges
from semspec.calibration.texts import CalibrationText
from semspec.export.checkpoint import open_checkpoint
from semspec.export.engine_graphs import RUNS_NATIVE, write_engine_graphs
from semspec.export.engine_plan import EnginePlan, fit_engine, plan_engine
from semspec.export.packing import Schemes
from semspec.export.precisions import Precision, parse_precision
from semspec.export.ranges import Ranges
from semspec.models.ops import Weights
from semspec.models.spec import ModelSpec
from semspec.runtime.contract import GraphSpec

STATES = (0, 1, 2, 3)
needs_native = pytest.mark.skipif(
    tuple(map(int, onnxruntime.__version__.split(".")[:2])) < tuple(map(int, RUNS_NATIVE.split("."))),
    reason=f"onnxruntime {onnxruntime.__version__} cannot run native graphs, {RUNS_NATIVE} and above can",
)
NATIVE = pytest.param("native", marks=needs_native)
# Widths that every block size divides, and weights small enough that fp16's steps and four bits are no chaos.
WIDE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.1,
}


@cache
def int8_sums_overflow() -> bool:
    """Whether onnxruntime's products of int8 by int8 saturate here, as on processors without VNNI they do."""
    value, array = helper.make_tensor_value_info, numpy_helper.from_array
    full, none = np.full((16, 64), 127, np.int8), np.zeros(16, np.int8)
    constants = {
        "one": np.float32(1),
        "zero": np.int8(0),
        "w": full,
        "ones": np.ones(16, np.float32),
        "zeros": none,
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "one", "zero"], ["codes"]),
        helper.make_node("DequantizeLinear", ["codes", "one", "zero"], ["rounded"]),
        helper.make_node("DequantizeLinear", ["w", "ones", "zeros"], ["wide"], axis=0),
        helper.make_node("Transpose", ["wide"], ["turned"], perm=[1, 0]),
        helper.make_node("MatMul", ["rounded", "turned"], ["y"]),
    ]
    ends = [value("x", TensorProto.FLOAT, ["S", 64])], [value("y", TensorProto.FLOAT, ["S", 16])]
    graph = helper.make_graph(nodes, "sums", *ends, [array(np.asarray(a), n) for n, a in constants.items()])
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found = session.run(None, {"x": np.full((4, 64), 127, np.float32)})[0]
    return bool((found != 64 * 127 * 127).any())


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCase:
    """A graph for TensorRT with what it was made from."""

    model: PreTrainedModel
    spec: ModelSpec
    plan: EnginePlan
    graph: Graph


def engine_case(
    folder: Path,
    name: str,
    graph: str,
    precision: str,
    *,
    max_context: int = 255,
    quantizer: str = "mse",
    custom: Precision | None = None,
    weights: Weights | None = None,
    **changes: Any,
) -> EngineCase:
    """The graph of one variant of graphs.VARIANTS, every state pooled and an output.

    custom: in the precision's place. weights: in the variant's place.
    """
    model, spec, own = tiny_variant(name, **changes)
    weights = weights or own
    asked = Schemes.choose("int4", quantizer=quantizer)
    needs = parse_precision(precision)[0].reads_ranges
    ranges = tiny_ranges(name, tuple(sorted(changes.items()))) if needs else None
    plan = fit_engine(
        plan_engine(spec, weights, precision, asked, ranges), spec, ranges, lambda done, total: None
    )
    if custom:
        plan = replace(plan, precision=custom)
    activation = plan.precision.activation
    sizes = GraphSpec(
        graph=graph,
        n_layers=spec.n_layers,
        n_kv_heads=spec.n_kv_heads,
        head_size=spec.head_size,
        width=spec.width,
        vocab_size=spec.vocab_size,
        max_context=max_context,
        pooled_layers=STATES,
        hidden_layers=STATES,
        activation=activation,
        cache=activation,
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_engine_graphs(folder, spec, plan, {graph: sizes}, lambda name: {"graph": name})
    return EngineCase(
        model=model, spec=spec, plan=plan, graph=Graph(path=folder / f"{graph}.onnx", spec=sizes)
    )


@cache
def tiny_ranges(name: str, changes: tuple[tuple[str, Any], ...]) -> Ranges:
    """Of one variant, over 4 random texts of 90 tokens."""
    model, _, _ = tiny_variant(name, **dict(changes))
    ids = np.random.default_rng(11).integers(0, model.config.vocab_size, (4, 90))
    text = CalibrationText(windows=tuple(map(tuple, ids.tolist())), sha256="0" * 64)
    with TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "model"
        model.save_pretrained(checkpoint)
        return take_ranges(open_checkpoint(checkpoint), text, Path(folder) / "ranges", name=name)
