"""TensorRT and TensorRT-RTX: compiled plans, opened and run on the GPU. One file for both and for every release.

Caches, activations and outputs stay on the device; what a call fetches is copied when it is read. Written against the
names that releases 10.3 to 11.4 and TensorRT-RTX share, and run over doubles of engine and driver alone: no plan has
been run on a GPU with it yet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from semspec.runtime.backends.base import PlanDevice
from semspec.runtime.backends.cuda import DeviceTensor, Gpu
from semspec.runtime.errors import BackendError
from semspec.runtime.records import Array, TensorSpec

__all__ = ["DTYPES", "TrtBackend", "TrtSession", "create"]

MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
EXTRAS = {"tensorrt": "tensorrt", "tensorrt-rtx": "rtx"}
DTYPES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT32": "int32", "INT64": "int64"}
KEPT = ("INTERNAL_ERROR", "ERROR")
MOST_TEXT = 300  # characters of what an engine says, in an error


def create(name: str, *, threads: int | None, spin: bool) -> TrtBackend:
    """See semspec.runtime.backends.open_backend; threads and spin are of engines on a CPU."""
    try:
        trt = import_module(MODULES[name])
    except (ImportError, OSError, RuntimeError) as error:  # RuntimeError: its installer's stub
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BackendError(
            f"backend {name!r} cannot be imported ({first}); install it with: pip install 'semspec[{EXTRAS[name]}]'"
        ) from None
    return TrtBackend(
        name, trt, Gpu()
    )  # the driver first: without one, a runtime of the engine crashes the process


class TrtBackend:
    """Plans and memory of one GPU."""

    def __init__(self, name: str, trt: Any, gpu: Gpu) -> None:
        self.name, self.trt, self.gpu = name, trt, gpu
        self.said: list[str] = []
        self._logger = _make_logger(trt, self.said)
        self._runtime = trt.Runtime(self._logger)
        if self._runtime is None:
            raise BackendError(f"{name} {trt.__version__} has no runtime here: {self.reason()}")
        self._work: DeviceTensor | None = None

    @property
    def plans(self) -> PlanDevice:
        """What its plans must be for."""
        return PlanDevice(engine=self.name, version=str(self.trt.__version__), capability=self.gpu.capability)

    def open(self, graph: Path) -> TrtSession:
        """Load a plan. Raises BackendError for what this release or this GPU does not read."""
        self.gpu.use()
        self.said.clear()
        try:
            content = graph.read_bytes()
        except OSError as error:
            raise BackendError(f"plan {graph} cannot be read: {error.strerror}") from None
        engine = self._runtime.deserialize_cuda_engine(content)
        if engine is None:
            raise BackendError(
                f"{self.name} {self.trt.__version__} on {self.gpu.name} ({self.gpu.capability}) cannot load {graph}: "
                f"{self.reason()}; build it here with: semspec build BUNDLE --backend {self.name}"
            )
        return TrtSession(engine, self, graph)

    def zeros(self, shape: tuple[int, ...], dtype: str) -> DeviceTensor:
        self.gpu.use()
        return self.gpu.zeros(shape, dtype)

    def part(self, tensor: DeviceTensor, index: int) -> DeviceTensor:
        return tensor.part(index)

    def store(self, rows: DeviceTensor, buffer: DeviceTensor, at: int) -> None:
        self.gpu.write_rows(rows, buffer, at)

    def work(self, n_bytes: int) -> DeviceTensor:
        """Memory for one pass at a time: all sessions share it, since one stream carries all of their passes."""
        if self._work is None or self._work.n_bytes < n_bytes:
            self.gpu.wait()
            self._work = self.gpu.empty((n_bytes,), "uint8")
        return self._work

    def reason(self) -> str:
        """What the engine said last."""
        text = " ".join(" ".join(self.said).split()) or "it gave no reason"
        return text if len(text) <= MOST_TEXT else f"{text[: MOST_TEXT - 4]} ..."


class TrtSession:
    """One opened plan: a context for each of its profiles, and buffers that are allocated once."""

    def __init__(self, engine: Any, backend: TrtBackend, path: Path) -> None:
        self._engine, self._backend, self._path = engine, backend, path
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        inputs = [name for name in names if engine.get_tensor_mode(name).name == "INPUT"]
        self.inputs = tuple(map(self._spec, inputs))
        self.outputs = tuple(self._spec(name) for name in names if name not in inputs)
        self._specs = {spec.name: spec for spec in (*self.inputs, *self.outputs)}
        self._profiles = [
            {spec.name: _sizes(engine, spec.name, index) for spec in self.inputs}
            for index in range(engine.num_optimization_profiles)
        ]
        self._bound: dict[str, DeviceTensor] = {}  # inputs and outputs
        self._buffers: dict[str, DeviceTensor] = {}
        self._contexts: list[Any] = []

    def most(self, input_name: str) -> tuple[int, ...]:
        """The largest shape of an input that some profile takes."""
        return max((profile[input_name][1] for profile in self._profiles), key=math.prod)

    def bind(self, input_name: str, output_name: str, tensor: DeviceTensor) -> None:
        for name in (input_name, output_name) if output_name else (input_name,):
            spec = self._specs.get(name)
            if spec is None or spec.dtype != tensor.dtype or not _matches(tensor.shape, spec.shape):
                raise BackendError(
                    f"{name} of {self._path} cannot be bound to {tensor.dtype}{list(tensor.shape)}"
                )
            self._bound[name] = tensor
        self._contexts.clear()

    def run(self, feeds: Mapping[str, Array], fetch: Sequence[str]) -> dict[str, DeviceTensor]:
        backend = self._backend
        backend.gpu.use()
        backend.said.clear()
        context = self._context(self._profile(feeds))
        fed = {name: np.ascontiguousarray(array) for name, array in feeds.items()}
        for name, array in fed.items():
            backend.gpu.write(array, self._buffers[name].address)
            if not context.set_input_shape(name, array.shape):
                raise self._failure(f"does not take {name} of shape {list(array.shape)}")
        n_bytes = int(self._engine.device_memory_size_v2)
        context.set_device_memory(backend.work(n_bytes).address, n_bytes)
        if context.infer_shapes() or not context.execute_async_v3(backend.gpu.stream):
            raise self._failure("failed in a pass")
        backend.gpu.wait()  # until here the copies read `fed`; what went wrong on the device is told now
        return {name: self._buffers[name].shaped(tuple(context.get_tensor_shape(name))) for name in fetch}

    def close(self) -> None:
        # an engine must outlive its contexts, and buffers what writes them
        self._contexts.clear()
        self._engine = None
        self._bound.clear()
        self._buffers.clear()

    def _spec(self, name: str) -> TensorSpec:
        dtype = self._engine.get_tensor_dtype(name).name
        return TensorSpec(name, DTYPES.get(dtype, dtype), tuple(self._engine.get_tensor_shape(name)))

    def _profile(self, feeds: Mapping[str, Array]) -> int:
        """The first that takes all of `feeds`: they are ordered from few rows to many. Raises BackendError."""
        if self._engine is None:
            raise BackendError("this session is closed; open the plan again")
        wanted = {spec.name: spec for spec in self.inputs if spec.name not in self._bound}
        wrong = [f"{name} is missing" for name in wanted.keys() - feeds.keys()]
        wrong += [f"{name} is unknown" for name in feeds.keys() - wanted.keys()]
        for name in feeds.keys() & wanted.keys():
            if feeds[name].dtype != wanted[name].dtype:
                wrong.append(f"{name} is {feeds[name].dtype}, expected {wanted[name].dtype}")
            elif not any(_fits(feeds[name].shape, profile[name]) for profile in self._profiles):
                most = [list(profile[name][1]) for profile in self._profiles]
                wrong.append(
                    f"{name} has shape {list(feeds[name].shape)}, at most {' or '.join(map(str, most))}"
                )
        for index, profile in enumerate(self._profiles):
            if not wrong and all(_fits(array.shape, profile[name]) for name, array in feeds.items()):
                return index
        shapes = ", ".join(f"{name}{list(array.shape)}" for name, array in feeds.items())
        raise BackendError(
            f"a pass was given wrong inputs: {'; '.join(sorted(wrong)) or f'no profile takes {shapes}'}"
        )

    def _context(self, index: int) -> Any:
        """Of one profile, every address set."""
        if not self._contexts:
            self._prepare()
        return self._contexts[index]

    def _prepare(self) -> None:
        """Buffers for the largest call of any profile, then a context for each."""
        trt, gpu = self._backend.trt, self._backend.gpu
        contexts = []
        sizes: dict[str, tuple[int, ...]] = {}
        for index, profile in enumerate(self._profiles):
            context = self._engine.create_execution_context(
                trt.ExecutionContextAllocationStrategy.USER_MANAGED
            )
            if context is None or not context.set_optimization_profile_async(index, gpu.stream):
                raise self._failure("cannot be run")
            for name, (_, most) in profile.items():
                if not context.set_input_shape(name, most):
                    raise self._failure(f"does not take its own largest {name}")
            contexts.append(context)
            for spec in (*self.inputs, *self.outputs):
                shape = tuple(context.get_tensor_shape(spec.name))
                if min(shape, default=1) < 0:
                    raise self._failure(f"does not tell the size of {spec.name}")
                sizes[spec.name] = max(sizes.get(spec.name, ()), shape, key=math.prod)
        for name, shape in sizes.items():
            bound = self._bound.get(name)
            self._buffers[name] = bound or gpu.empty(shape, self._specs[name].dtype)
            for context in contexts:
                context.set_tensor_address(name, self._buffers[name].address)
                if bound and name in self._profiles[0]:
                    context.set_input_shape(name, bound.shape)
        gpu.wait()
        self._contexts = contexts

    def _failure(self, what: str) -> BackendError:
        return BackendError(f"{self._backend.name}: {self._path} {what}: {self._backend.reason()}")


def _sizes(engine: Any, name: str, profile: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The least and the largest shape of an input; of one whose size is fixed, that."""
    fixed = tuple(engine.get_tensor_shape(name))
    if min(fixed, default=0) >= 0:
        return fixed, fixed
    least, _, most = engine.get_tensor_profile_shape(name, profile)
    return tuple(least), tuple(most)


def _fits(shape: tuple[int, ...], sizes: tuple[tuple[int, ...], tuple[int, ...]]) -> bool:
    least, most = sizes
    return len(shape) == len(most) and all(
        low <= size <= high for low, size, high in zip(least, shape, most, strict=True)
    )


def _matches(shape: tuple[int, ...], sizes: tuple[int | str, ...]) -> bool:
    """Sizes of a plan's own tensor, -1 where a call sets it."""
    return len(shape) == len(sizes) and all(size in (-1, own) for own, size in zip(shape, sizes, strict=True))


def _make_logger(trt: Any, said: list[str]) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity.name in KEPT:
                said.append(message)

    return Logger()
