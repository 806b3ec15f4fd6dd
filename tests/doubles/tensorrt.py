"""A DOUBLE of TensorRT's runtime: its names, and ONNX Runtime on the CPU behind them. For tests without a GPU.

A "plan" is a JSON file: a graph, its profiles, the bytes that a pass works in (`memory`), and whether a pass waits for
the device (`waits`). Addresses are host addresses (driver.c beside this), read and written where the caller said. As
strict as the engine: shapes outside the profile, unset addresses, a cache whose input and output are two buffers,
memory that was given back, and another stream than the driver's are refused; so are recording a context that did not
run since it was changed, and launching what was recorded of one that was changed afterwards. Nothing about speed,
kernels or rounding of an engine can be learned from it.
"""

from __future__ import annotations

import ctypes
import enum
import itertools
import json
import sys
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

__version__ = "0.0.double"
STREAM = 2  # the only one that driver.c gives out
ILLEGAL_ADDRESS, LAUNCH_FAILED = 700, 719  # what the driver says of a pass that went wrong
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
WORKED: list[int] = []  # the address of the memory that each pass worked in
_numbers = itertools.count()
_passes: dict[int, Callable[[], int]] = {}  # what the driver was given, by number


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)
def _perform(number: int) -> int:
    try:
        return _passes[number]()
    except Exception:  # noqa: BLE001 - it must not pass through the driver, which is C
        traceback.print_exc()
        return LAUNCH_FAILED


def find_driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.double_put.argtypes = [ctypes.c_void_p, type(_perform), ctypes.c_int]
    driver.double_holds.argtypes = [ctypes.c_uint64, ctypes.c_size_t]
    driver.cuStreamSynchronize.argtypes = [ctypes.c_void_p]
    return driver


class ILogger:
    def log(self, severity: Any, message: str) -> None: ...


class Engine:
    def __init__(self, plan: dict[str, Any], logger: ILogger, driver: ctypes.CDLL) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        self.session = onnxruntime.InferenceSession(str(Path(plan["graph"])), options)
        self.plan, self.profiles, self.logger, self.driver = plan, plan["profiles"], logger, driver
        inputs, outputs = self.session.get_inputs(), self.session.get_outputs()
        self.nodes = {node.name: node for node in (*inputs, *outputs)}
        self.n_inputs = len(inputs)
        self.num_io_tensors = len(self.nodes)
        self.num_optimization_profiles = len(self.profiles)
        self.device_memory_size_v2: int = plan.get("memory", 4096)

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


class Runtime:
    engine = Engine

    def __init__(self, logger: ILogger) -> None:
        self.driver = find_driver()
        if not self.driver.double_ready():
            raise SystemExit("a real engine crashes here: cuInit was not called before its runtime was made")
        self.logger = logger

    def deserialize_cuda_engine(self, content: bytes) -> Engine | None:
        try:
            plan = json.loads(content)
        except ValueError:
            self.logger.log(Severity.ERROR, "Magic tag does not match\n(another line)")
            return None
        return self.engine(plan, self.logger, self.driver)


class Context:
    def __init__(self, engine: Engine) -> None:
        self.engine, self.profile, self.memory = engine, -1, 0
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.state = 0  # how often it was changed
        self.ran = -1  # the state in which it ran last

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self.state += 1
        self.profile = index
        return stream == STREAM

    def set_device_memory(self, address: int, size: int) -> None:
        self.state += 1
        self.memory = address if size >= self.engine.device_memory_size_v2 else 0

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.state += 1
        least, _, most = self.engine.get_tensor_profile_shape(name, self.profile)
        if len(shape) != len(most) or not all(
            low <= size <= high for low, size, high in zip(least, shape, most, strict=True)
        ):
            return self._refuse(f"{name} {shape} is outside of profile {self.profile}")
        self.shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.state += 1
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
        driver = self.engine.driver
        fault = self._fault(stream)
        if fault:
            return self._refuse(fault)
        recorded = driver.double_capturing()
        if recorded and self.ran != self.state:
            return self._refuse("it must run once, after what was changed, before it is recorded")
        if self.engine.plan.get("waits") and driver.cuStreamSynchronize(stream):
            return self._refuse("a pass of this plan waits for the device")
        number = next(_numbers)
        _passes[number] = self._work()
        status = driver.double_put(stream, _perform, number)
        if not recorded:
            del _passes[number]
        self.ran = self.state
        return status == 0 or self._refuse(f"the pass failed: {status}")

    def _refuse(self, why: str) -> bool:
        self.engine.logger.log(Severity.ERROR, why)
        return False

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

    def _work(self) -> Callable[[], int]:
        """What the stream will do: with the shapes, addresses and memory of now, whatever is set later."""
        engine, state, memory, size = self.engine, self.state, self.memory, self.engine.device_memory_size_v2
        places = {
            name: (self.addresses[name], self.get_tensor_shape(name), np.dtype(TYPES[node.type][1]))
            for name, node in engine.nodes.items()
        }
        names = list(places)
        fed, computed = names[: engine.n_inputs], names[engine.n_inputs :]
        alive = weakref.ref(self)

        def work() -> int:
            context = alive()
            if context is None or context.state != state:
                sys.stderr.write(
                    "what was recorded of a context was launched after the context was changed\n"
                )
                return LAUNCH_FAILED
            spans = [(at, int(np.prod(shape)) * dtype.itemsize) for at, shape, dtype in places.values()]
            if not all(engine.driver.double_holds(*span) for span in [*spans, (memory, size)]):
                return ILLEGAL_ADDRESS
            ctypes.memset(memory, 0x5A, size)  # what else lies there is lost
            found = engine.session.run(computed, {name: _view(*places[name]).copy() for name in fed})
            for name, values in zip(computed, found, strict=True):
                _view(*places[name])[...] = values
            WORKED.append(memory)
            return 0

        return work


def _view(address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    memory = (ctypes.c_uint8 * (int(np.prod(shape)) * dtype.itemsize)).from_address(address)
    return np.frombuffer(memory, dtype).reshape(shape)
