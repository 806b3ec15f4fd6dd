"""A graph of a few nodes for tests of backends: what it computes is known, and a sum lives in one buffer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from semspec.runtime.records import Array


def write_graph(path: Path) -> Path:
    """scaled = x * factor, and total_out = total + the sum of x: a sum that lives in one buffer."""
    value = helper.make_tensor_value_info
    inputs = [
        value("x", TensorProto.FLOAT, ["S", 2]),
        value("factor", TensorProto.FLOAT, [1]),
        value("total", TensorProto.FLOAT, [2]),
    ]
    outputs = [value("scaled", TensorProto.FLOAT, ["S", 2]), value("total_out", TensorProto.FLOAT, [2])]
    nodes = [
        helper.make_node("Mul", ["x", "factor"], ["scaled"]),
        helper.make_node("ReduceSum", ["x", "axis"], ["sum"], keepdims=0),
        helper.make_node("Add", ["total", "sum"], ["total_out"]),
    ]
    axis = helper.make_tensor("axis", TensorProto.INT64, [1], [0])
    graph = helper.make_graph(nodes, "sums", inputs, outputs, [axis])
    return save(graph, path)


def save(graph: onnx.GraphProto, path: Path) -> Path:
    """As a model that onnxruntime 1.23 can read too."""
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)]), path)
    return path


def feeds(n_rows: int = 3, factor: float = 2.0, **changes: Any) -> dict[str, Array]:
    """n_rows rows of ones."""
    return {
        "x": np.ones((n_rows, 2), np.float32),
        "factor": np.array([factor], np.float32),
        **changes,
    }
