"""A DOUBLE of TensorRT-RTX's runtime: its names, and ONNX Runtime on the CPU behind them. For tests without a GPU.

A "plan" is a JSON file naming a graph and its profiles. Addresses are host addresses (driver.c beside this), read and
written where the caller said. As strict as the engine: shapes outside the profile, unset addresses, a cache whose input
and output are two buffers, and another stream than the driver's are refused. Nothing about speed, kernels or rounding
of an engine can be learned from it.
"""

from __future__ import annotations

import ctypes
import enum
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

__version__ = "0.0.double"
STREAM = 2  # the only one that driver.c gives out
DataType = enum.Enum("DataType", "FLOAT HALF INT32 INT64")
TensorIOMode = enum.Enum("TensorIOMode", "NONE INPUT OUTPUT")
Severity = enum.Enum("Severity", "INTERNAL_ERROR ERROR WARNING INFO VERBOSE")
ExecutionContextAllocationStrategy = enum.Enum(
    "ExecutionContextAllocationStrategy", "STATIC ON_PROFILE_CHANGE USER_MANAGED"
)
TYPES = {
    "tensor(float)": (DataType.FLOAT, np.float32),
    "tensor(float16)": (DataType.HALF, np.float16),
    "tensor(int32)": (DataType.INT32, np.int32),
    "tensor(int64)": (DataType.INT64, np.int64),
}


class ILogger:
    def log(self, severity: Any, message: str) -> None: ...


class Runtime:
    def __init__(self, logger: ILogger) -> None:
        driver = ctypes.CDLL("libcuda.so.1")
        if not driver.double_ready():
            raise SystemExit("a real engine crashes here: cuInit was not called before its runtime was made")
        self.logger = logger

    def deserialize_cuda_engine(self, content: bytes) -> Engine | None:
        try:
            plan = json.loads(content)
        except ValueError:
            self.logger.log(Severity.ERROR, "Magic tag does not match\n(another line)")
            return None
        return Engine(plan, self.logger)


class Engine:
    def __init__(self, plan: dict[str, Any], logger: ILogger) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        self.session = onnxruntime.InferenceSession(str(Path(plan["graph"])), options)
        self.profiles, self.logger = plan["profiles"], logger
        inputs, outputs = self.session.get_inputs(), self.session.get_outputs()
        self.nodes = {node.name: node for node in (*inputs, *outputs)}
        self.n_inputs = len(inputs)
        self.num_io_tensors = len(self.nodes)
        self.num_optimization_profiles = len(self.profiles)
        self.device_memory_size_v2 = 4096

    def get_tensor_name(self, index: int) -> str:
        return list(self.nodes)[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if list(self.nodes).index(name) < self.n_inputs else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> DataType:
        return TYPES[self.nodes[name].type][0]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(-1 if isinstance(size, str) else size for size in self.nodes[name].shape)

    def get_tensor_profile_shape(self, name: str, index: int) -> list[tuple[int, ...]]:
        profile = self.profiles[index]
        return [
            tuple(profile[size][place] if isinstance(size, str) else size for size in self.nodes[name].shape)
            for place in range(3)
        ]

    def create_execution_context(self, strategy: Any) -> Context:
        assert strategy is ExecutionContextAllocationStrategy.USER_MANAGED
        return Context(self)


class Context:
    def __init__(self, engine: Engine) -> None:
        self.engine, self.profile, self.memory = engine, -1, 0
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self.profile = index
        return stream == STREAM

    def set_device_memory(self, address: int, size: int) -> None:
        self.memory = address if size >= self.engine.device_memory_size_v2 else 0

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        least, _, most = self.engine.get_tensor_profile_shape(name, self.profile)
        if len(shape) != len(most) or not all(
            low <= size <= high for low, size, high in zip(least, shape, most, strict=True)
        ):
            self.engine.logger.log(Severity.ERROR, f"{name} {shape} is outside of profile {self.profile}")
            return False
        self.shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return True

    def infer_shapes(self) -> list[str]:
        dynamic = list(self.engine.nodes)[: self.engine.n_inputs]
        return [name for name in dynamic if -1 in self.get_tensor_shape(name)]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        sizes: dict[str, int] = {}
        for fed, shape in self.shapes.items():
            for letter, size in zip(self.engine.nodes[fed].shape, shape, strict=True):
                if isinstance(letter, str):
                    sizes[letter] = size
        shape = self.engine.nodes[name].shape
        return tuple(sizes.get(size, -1) if isinstance(size, str) else size for size in shape)

    def execute_async_v3(self, stream: int) -> bool:
        fault = self._fault(stream)
        if fault:
            self.engine.logger.log(Severity.ERROR, fault)
            return False
        names = list(self.engine.nodes)
        fed, computed = names[: self.engine.n_inputs], names[self.engine.n_inputs :]
        found = self.engine.session.run(computed, {name: self._view(name).copy() for name in fed})
        for name, values in zip(computed, found, strict=True):
            self._view(name)[...] = values
        return True

    def _fault(self, stream: int) -> str:
        if stream != STREAM or not self.memory:
            return "no stream, or no device memory"
        for name in self.engine.nodes:
            if not self.addresses.get(name):
                return f"the address of {name} is not set"
            past = name.replace("kv_out.", "kv.")
            if past != name and self.addresses[past] != self.addresses[name]:
                return f"{name} and {past} must be one buffer"
        return ""

    def _view(self, name: str) -> Any:
        shape, dtype = self.get_tensor_shape(name), np.dtype(TYPES[self.engine.nodes[name].type][1])
        n_bytes = int(np.prod(shape)) * dtype.itemsize
        memory = (ctypes.c_uint8 * n_bytes).from_address(self.addresses[name])
        return np.frombuffer(memory, dtype).reshape(shape)
