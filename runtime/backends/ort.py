"""ONNX Runtime, on the CPU and through its CUDA provider.

On the CPU every tensor is a numpy array that the engine reads and writes in place: nothing is copied but the
few numbers of a call. On a device outputs stay where they were computed, and are copied when somebody reads them. That
path follows the same calls and was tried on the CPU, as if it were a device; it has not been run on a GPU.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from semspec.runtime.errors import BackendError
from semspec.runtime.records import Array, TensorSpec

try:
    import onnxruntime as ort
except ImportError as error:
    raise BackendError(
        f"backend 'cpu' needs onnxruntime, which cannot be imported ({error}); "
        "install it with: pip install 'semspec[cpu]' (or 'semspec[gpu]' for CUDA)"
    ) from None

__all__ = ["OrtBackend", "OrtSession", "create"]

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
MAX_PLANS = 64  # call shapes whose buffers are kept


def create(name: str, *, threads: int | None, spin: bool) -> OrtBackend:
    """See semspec.runtime.backends.open_backend."""
    provider = PROVIDERS[name]
    if provider not in ort.get_available_providers():
        raise BackendError(
            f"backend {name!r} needs onnxruntime's {provider}, which this build lacks "
            f"(it has {', '.join(ort.get_available_providers())}); install it with: pip install 'semspec[gpu]'"
        )
    backend = OrtBackend(name, threads, spin)
    if name != "cpu":
        try:
            backend.zeros((1,), "float32")
        except Exception as error:  # as in open
            raise BackendError(
                f"backend {name!r} finds no device that it can use ({_first_line(error)}); use backend 'cpu', or "
                "repair its driver and libraries"
            ) from error
    return backend


class OrtBackend:
    """Sessions and tensors of one provider. staying: outputs stay with it until they are read; None: on a device."""

    def __init__(self, name: str, threads: int | None, spin: bool, *, staying: bool | None = None) -> None:
        self.name, self._threads, self._spin = name, threads, spin
        self.staying = name != "cpu" if staying is None else staying
        self._engines: weakref.WeakValueDictionary[Path, Any] = weakref.WeakValueDictionary()

    def open(self, graph: Path) -> OrtSession:
        """Load a graph file; its weights are looked for beside it.

        Of a graph that is open already the weights are shared. Each session has buffers of its own, and two may run at
        once, in two threads.
        """
        path = graph.resolve()
        engine = self._engines.get(path)
        if engine is None:
            engine = self._engines[path] = self._load(graph)
        return OrtSession(engine, self)

    def _load(self, graph: Path) -> Any:
        options = ort.SessionOptions()
        options.intra_op_num_threads = self._threads or _default_threads()
        options.inter_op_num_threads = 1
        options.log_severity_level = 4  # its errors arrive as exceptions; on stderr they would come twice
        options.add_session_config_entry("session.intra_op.allow_spinning", str(int(self._spin)))
        # graphs for TensorRT are judged here: onnxruntime would round the inputs of their int8 products on its own
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        try:  # enable_fallback=0: onnxruntime must not carry on with another provider, at opening or later
            session = ort.InferenceSession(
                str(graph), options, providers=[PROVIDERS[self.name]], enable_fallback=0
            )
        except Exception as error:  # onnxruntime raises a dozen unrelated classes
            raise BackendError(f"onnxruntime cannot open {graph}: {_first_line(error)}") from error
        if session.get_providers()[0] != PROVIDERS[self.name]:
            raise BackendError(
                f"onnxruntime opened {graph} on {session.get_providers()[0]} instead of {PROVIDERS[self.name]}: "
                f"the device or its libraries are missing; use backend 'cpu' or repair them"
            )
        return session

    @property
    def plans(self) -> None:
        """It loads graphs."""

    def zeros(self, shape: tuple[int, ...], dtype: str) -> OrtTensor:
        """On the CPU the memory is taken from the system page by page as rows are written."""
        if self.name == "cpu":
            return OrtTensor(_lazy_zeros(shape, dtype))
        return OrtTensor(ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, dtype), self.name, 0))

    def part(self, tensor: OrtTensor, index: int | slice) -> OrtTensor:
        """Of an output that stays on a device a copy of it all, in memory: onnxruntime reads no part of one."""
        return OrtTensor(tensor.numpy()[index])

    def store(self, rows: OrtTensor, buffer: OrtTensor, at: int) -> None:
        new = rows.numpy()
        self._array(buffer)[..., at : at + new.shape[-2], :] = new

    def _array(self, tensor: OrtTensor) -> Array:
        """Memory that can be written here. Raises BackendError on a device, whose graphs write their own caches."""
        if not isinstance(tensor.value, np.ndarray):
            raise BackendError(f"backend {self.name!r} runs no graph that leaves its cache to the runtime")
        return tensor.value


class OrtTensor:
    """A numpy array on the CPU, an OrtValue on a device."""

    def __init__(self, value: Any) -> None:
        self.value = value

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape if isinstance(self.value, np.ndarray) else self.value.shape())

    def numpy(self) -> Array:
        value: Array = self.value if isinstance(self.value, np.ndarray) else self.value.numpy()
        return value

    @property
    def address(self) -> int:
        return int(self.value.ctypes.data if isinstance(self.value, np.ndarray) else self.value.data_ptr())


@dataclass(slots=True)
class _Plan:
    """A binding with the buffers of one call shape; the buffers are fed and fetched in place."""

    binding: Any
    feeds: dict[str, Array]
    fetched: dict[str, OrtTensor]


class OrtSession:
    """One opened graph with its bound buffers. See backends.base.Session."""

    def __init__(self, session: Any, backend: OrtBackend) -> None:
        self._session, self._backend = session, backend
        self._bound: dict[tuple[str, str], OrtTensor] = {}
        self._plans: dict[tuple[Any, ...], _Plan] = {}
        self.inputs = tuple(_tensor_spec(node) for node in session.get_inputs())
        self.outputs = tuple(_tensor_spec(node) for node in session.get_outputs())
        self._specs = {spec.name: spec for spec in (*self.inputs, *self.outputs)}

    def __del__(self) -> None:
        self.close()

    def most(self, input_name: str) -> None:
        """Any shape is taken."""

    def bind(self, input_name: str, output_name: str, tensor: OrtTensor) -> None:
        self._bound[input_name, output_name] = tensor
        self._plans.clear()

    def run(self, feeds: Mapping[str, Array | OrtTensor], fetch: Sequence[str]) -> dict[str, OrtTensor]:
        fed = {name: feed.numpy() if isinstance(feed, OrtTensor) else feed for name, feed in feeds.items()}
        key = (tuple(fetch), *((name, array.shape, array.dtype) for name, array in fed.items()))
        plan = self._plans.get(key) or self._plan(key, fed, fetch)
        for name, array in fed.items():
            np.copyto(plan.feeds[name], array, casting="no")
        try:
            self._session.run_with_iobinding(plan.binding)
        except Exception as error:  # as in open
            raise BackendError(f"onnxruntime failed in a pass: {_first_line(error)}") from error
        return dict(plan.fetched)  # theirs to change; ours keeps the memory the engine writes to

    def close(self) -> None:
        # onnxruntime 1.23 on Python 3.10 crashed when a session went before its bindings
        for plan in self._plans.values():
            plan.binding = None
        self._plans.clear()
        self._bound.clear()
        self._session = None

    def _plan(self, key: tuple[Any, ...], feeds: Mapping[str, Array], fetch: Sequence[str]) -> _Plan:
        """Allocate and bind the buffers of a new call shape."""
        if self._session is None:
            raise BackendError("this session is closed; open the graph again")
        self._check_feeds(feeds)
        sizes = self._sizes(feeds)
        device = self._backend.name
        plan = _Plan(binding=self._session.io_binding(), feeds={}, fetched={})
        for name, array in feeds.items():
            plan.feeds[name] = np.empty(array.shape, self._specs[name].dtype)
            self._bind_input(plan.binding, name, OrtTensor(plan.feeds[name]), "cpu")
        for name in fetch:
            shape = tuple(sizes[size] if isinstance(size, str) else size for size in self._specs[name].shape)
            plan.fetched[name] = self._output(name, shape)
            self._bind_output(
                plan.binding, name, plan.fetched[name], device if self._backend.staying else "cpu"
            )
        for (input_name, output_name), tensor in self._bound.items():
            self._bind_input(plan.binding, input_name, tensor, device)
            if output_name:
                self._bind_output(plan.binding, output_name, tensor, device)
        if len(self._plans) >= MAX_PLANS:
            del self._plans[next(iter(self._plans))]
        self._plans[key] = plan
        return plan

    def _output(self, name: str, shape: tuple[int, ...]) -> OrtTensor:
        """Memory for one, where it stays."""
        dtype = np.dtype(self._specs[name].dtype)
        if not self._backend.staying:
            return OrtTensor(np.empty(shape, dtype))
        return OrtTensor(
            ort.OrtValue.ortvalue_from_shape_and_type(list(shape), dtype.type, self._backend.name, 0)
        )

    def _bind_input(self, binding: Any, name: str, tensor: OrtTensor, device: str) -> None:
        dtype = np.dtype(self._specs[name].dtype)
        binding.bind_input(name, device, 0, dtype, tensor.shape, tensor.address)

    def _bind_output(self, binding: Any, name: str, tensor: OrtTensor, device: str) -> None:
        dtype = np.dtype(self._specs[name].dtype)
        binding.bind_output(name, device, 0, dtype, tensor.shape, tensor.address)

    def _check_feeds(self, feeds: Mapping[str, Array]) -> None:
        """Names, ranks, fixed sizes and dtypes; all differences at once."""
        bound = {name for name, _ in self._bound}
        wanted = {spec.name: spec for spec in self.inputs if spec.name not in bound}
        wrong = [f"{name} is missing" for name in wanted.keys() - feeds.keys()]
        wrong += [f"{name} is unknown" for name in feeds.keys() - wanted.keys()]
        for name in feeds.keys() & wanted.keys():
            spec, array = wanted[name], feeds[name]
            fits = len(array.shape) == len(spec.shape) and all(
                isinstance(size, str) or size == actual
                for size, actual in zip(spec.shape, array.shape, strict=True)
            )
            if array.dtype != spec.dtype or not fits:
                wrong.append(
                    f"{name} is {array.dtype}{list(array.shape)}, expected {spec.dtype}{list(spec.shape)}"
                )
        if wrong:
            raise BackendError(f"a pass was given wrong inputs: {'; '.join(sorted(wrong))}")

    def _sizes(self, feeds: Mapping[str, Array]) -> dict[str, int]:
        """What each letter stands for; one size in all inputs, the bound ones included. Raises BackendError."""
        shapes = {name: array.shape for name, array in feeds.items()}
        shapes |= {name: tensor.shape for (name, _), tensor in self._bound.items()}
        sizes: dict[str, int] = {}
        for name, shape in shapes.items():
            for letter, size in zip(self._specs[name].shape, shape, strict=True):
                if isinstance(letter, str) and sizes.setdefault(letter, size) != size:
                    raise BackendError(
                        f"a pass was given wrong inputs: {name} has {letter} = {size} where others have {sizes[letter]}"
                    )
        return sizes


def _default_threads() -> int:
    """0, which is onnxruntime's own count of cores, unless this process may use fewer: it would not notice."""
    if sys.platform == "linux":
        usable = len(os.sched_getaffinity(0))
        if usable < (os.cpu_count() or 1):
            return usable
    return 0


def _lazy_zeros(shape: tuple[int, ...], dtype: str) -> Array:
    """Zeros whose memory is taken from the system a small page at a time, when it is first written.

    numpy asks for huge pages, so the first row of each head of a cache would take, and clear, 2 MiB.
    """
    n_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    if n_bytes == 0 or not hasattr(mmap, "MAP_PRIVATE"):
        return np.zeros(shape, dtype)
    memory = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, dtype).reshape(shape)


def _tensor_spec(node: Any) -> TensorSpec:
    dtypes = {"float": "float32", "double": "float64"}
    dtype = node.type.removeprefix("tensor(").removesuffix(")")
    return TensorSpec(node.name, dtypes.get(dtype, dtype), tuple(node.shape))


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
