"""ONNX files: weights streamed into one data file, nodes collected into small graph files beside it.

A tensor is written once, under a key; several graphs, and several names in one graph, may refer to its bytes.
Nothing here serializes weights through protobuf, so size does not matter, and the same calls give the same
bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from semspec.runtime.records import Array, TensorSpec

__all__ = ["GraphBuilder", "Stored", "WeightFile"]

ALIGNMENT = 4096  # so that a runtime can map a tensor instead of copying it
OPSET = 21
# opset -> the lowest IR version that has it; 10 is what onnxruntime 1.23 and TensorRT 10.3 read
IR_VERSIONS = {21: 10, 23: 11, 24: 12}
MICROSOFT = "com.microsoft"

DTYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "float8_e4m3fn": TensorProto.FLOAT8E4M3FN,
    "float4_e2m1fn": TensorProto.FLOAT4E2M1,
    "int4": TensorProto.INT4,
    "int8": TensorProto.INT8,
    "uint8": TensorProto.UINT8,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Where a tensor lies: file beside the graph, offset and length in bytes."""

    file: str
    offset: int
    length: int
    dtype: str
    shape: tuple[int, ...]


class WeightFile:
    """One data file, appended to; a context manager.

    Raises OSError as the disk gives it (no space, for one).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tensors: dict[str, Stored] = {}
        self._file = path.open("xb")

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def get(self, key: str) -> Stored | None:
        """The tensor stored under `key`, or None."""
        return self._tensors.get(key)

    def put(self, key: str, blocks: Iterable[Array], dtype: str, shape: tuple[int, ...]) -> Stored:
        """Append a tensor that arrives in blocks of rows, each used and dropped.

        Raises ValueError when the blocks do not add up to `shape`, or the key is taken: bugs of the caller.
        """
        if key in self._tensors:
            raise ValueError(f"{key} is already stored")
        offset = -(-self._file.tell() // ALIGNMENT) * ALIGNMENT
        self._file.write(b"\0" * (offset - self._file.tell()))
        for block in blocks:
            self._file.write(np.ascontiguousarray(block, dtype).view(np.uint8).data)
        stored = Stored(
            file=self.path.name, offset=offset, length=self._file.tell() - offset, dtype=dtype, shape=shape
        )
        expected = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if stored.length != expected:
            raise ValueError(
                f"{key}: {stored.length} bytes were written, {shape} of {dtype} needs {expected}"
            )
        self._tensors[key] = stored
        return stored


class GraphBuilder:
    """Collects nodes, constants and references to stored weights; values are named by strings."""

    def __init__(self, name: str, opset: int = OPSET) -> None:
        self.name, self._opset = name, opset
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, onnx.TensorProto] = {}
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []

    def inputs(self, specs: Sequence[TensorSpec]) -> None:
        """Declare the graph's inputs."""
        self._inputs += [_value_info(spec) for spec in specs]

    def outputs(self, specs: Sequence[TensorSpec]) -> None:
        """Declare the graph's outputs; nodes produce them under their names."""
        self._outputs += [_value_info(spec) for spec in specs]

    def node(
        self, op: str, inputs: Sequence[str], output: str, *, domain: str = "", **attributes: Any
    ) -> str:
        """Add a node with one output; returns its name."""
        return self.nodes(op, inputs, (output,), domain=domain, **attributes)[0]

    def nodes(
        self, op: str, inputs: Sequence[str], outputs: Sequence[str], *, domain: str = "", **attributes: Any
    ) -> Sequence[str]:
        """Add a node with several outputs; an empty name leaves one out."""
        name = next(output for output in outputs if output)
        self._nodes.append(
            helper.make_node(op, list(inputs), list(outputs), name=name, domain=domain, **attributes)
        )
        return outputs

    def constant(self, name: str, value: Array) -> str:
        """A small constant kept inside the graph file, if a node reads it."""
        return self._initializer(onnx.numpy_helper.from_array(np.asarray(value), name))

    def weight(
        self, name: str, stored: Stored, shape: tuple[int, ...] | None = None, dtype: str | None = None
    ) -> str:
        """Refer to a stored tensor, under another shape of as many elements, or as another dtype, if one is given."""
        data_type = DTYPES[dtype or stored.dtype]
        tensor = TensorProto(name=name, data_type=data_type, dims=shape or stored.shape)
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", stored.file), ("offset", stored.offset), ("length", stored.length)):
            tensor.external_data.add(key=key, value=str(value))
        return self._initializer(tensor)

    def _initializer(self, tensor: onnx.TensorProto) -> str:
        """Add it, or find it there. Raises ValueError where its name stands for something else: a caller's bug."""
        known = self._initializers.setdefault(tensor.name, tensor)
        if known != tensor:
            raise ValueError(f"initializer {tensor.name} is there already, with other contents")
        return str(tensor.name)

    def save(self, path: Path, metadata: dict[str, str]) -> None:
        """Write the graph file; the same graph gives the same bytes."""
        read = {name for node in self._nodes for name in node.input}
        initializers = [tensor for name, tensor in self._initializers.items() if name in read]
        graph = helper.make_graph(self._nodes, self.name, self._inputs, self._outputs, initializers)
        domains = sorted({node.domain for node in self._nodes} - {""})
        opsets = [helper.make_opsetid("", self._opset), *(helper.make_opsetid(name, 1) for name in domains)]
        model = helper.make_model(
            graph, opset_imports=opsets, ir_version=IR_VERSIONS[self._opset], producer_name="semspec"
        )
        helper.set_model_props(model, dict(sorted(metadata.items())))
        with path.open("xb") as file:
            file.write(model.SerializeToString(deterministic=True))


def _value_info(spec: TensorSpec) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(spec.name, DTYPES[spec.dtype], list(spec.shape))
