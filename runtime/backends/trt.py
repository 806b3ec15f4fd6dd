"""TensorRT and TensorRT-RTX: compiled plans, opened and run on the GPU. One file for both and for every release.

Caches, activations and outputs stay on the device; what a call fetches is copied when it is read. Written against the
names that releases 10.3 to 11.4 and TensorRT-RTX share, and run over doubles of engine and driver alone: no plan has
been run on a GPU with it yet.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from semspec.runtime.backends.base import PlanDevice
from semspec.runtime.backends.cuda import DeviceTensor, Gpu
from semspec.runtime.backends.passes import Pass
from semspec.runtime.errors import BackendError
from semspec.runtime.records import Array, TensorSpec

__all__ = ["DTYPES", "TrtBackend", "TrtSession", "create"]

MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
EXTRAS = {"tensorrt": "tensorrt", "tensorrt-rtx": "rtx"}
DTYPES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT32": "int32", "INT64": "int64"}
KEPT = ("INTERNAL_ERROR", "ERROR")
MOST_TEXT = 300  # characters of what an engine says, in an error
MOST_GRAPHS = 32  # shapes that a session keeps in mind; each may cost a context of the engine

Feed: TypeAlias = "Array | DeviceTensor"

logger = logging.getLogger(__name__)


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
        self.has_own_graphs = hasattr(trt, "CudaGraphStrategy")  # TensorRT-RTX, from 1.2 on
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

    def part(self, tensor: DeviceTensor, index: int | slice) -> DeviceTensor:
        return tensor.part(index)

    def store(self, rows: DeviceTensor, buffer: DeviceTensor, at: int) -> None:
        self.gpu.write_rows(rows, buffer, at)

    def work(self, n_bytes: int) -> DeviceTensor:
        """Memory for one pass at a time: all sessions share it, since one stream carries all of their passes.

        It MOVES when one of them needs more: what was set up or recorded with the address of before must not run.
        """
        if self._work is None or self._work.n_bytes < n_bytes:
            self.gpu.wait()
            self._work = None  # given back before more is taken
            self._work = self.gpu.empty((n_bytes,), "uint8")
        return self._work

    def reason(self) -> str:
        """What the engine said last."""
        text = " ".join(" ".join(self.said).split()) or "it gave no reason"
        return text if len(text) <= MOST_TEXT else f"{text[: MOST_TEXT - 4]} ..."


class TrtSession:
    """One opened plan: contexts of the engine, and buffers that are allocated once.

    Shapes that come once, such as the end of a prompt, share a context of their profile. Those that come again get one
    of their own, whose pass is replayed as a CUDA graph from then on: NVIDIA promises a graph for one context, of which
    nothing was changed. Only a plan that updates its caches in place has graphs: all else that differs between two
    passes of its shapes lies in its inputs, which are copied before each. On TensorRT-RTX the engine makes its graphs
    itself, since it alone knows when its kernels for a shape are ready; there too a context of their own keeps a graph.

    Shapes are those of the exact number of tokens S, in no buckets, and of the span of the cache, which grows in steps
    (contract.span_of): a pass has no padded rows, and few S come while decoding, 1 for a drafted token, n + 1 for a
    review of n. Whole segments are of many lengths; one that does not come again is not replayed.
    """

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
        self._n_bytes = int(engine.device_memory_size_v2)
        self._bound: dict[str, DeviceTensor] = {}  # inputs and outputs
        self._buffers: dict[str, DeviceTensor] = {}
        self._shared: list[Pass] = []  # one a profile
        # profile and shapes -> their own, None where they came once; the latest last
        self._own: OrderedDict[tuple[object, ...], Pass | None] = OrderedDict()
        self._kernels: Any = None  # of TensorRT-RTX: what one context has compiled, for all others
        self._no_graphs = "its caches are not updated in place"  # why there are none, "" where there are

    @property
    def graphs(self) -> str:
        """Who replays passes as CUDA graphs: `backend`, `engine`, or `none: ` and why."""
        if self._no_graphs:
            return f"none: {self._no_graphs}"
        return "engine" if self._backend.has_own_graphs else "backend"

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
        if output_name:
            self._no_graphs = ""
        self._drop_contexts()

    def run(self, feeds: Mapping[str, Feed], fetch: Sequence[str]) -> dict[str, DeviceTensor]:
        gpu = self._backend.gpu
        gpu.use()
        self._backend.said.clear()
        profile = self._profile(feeds)
        fed = {name: _ready(feed) for name, feed in feeds.items()}
        one = self._pass(profile, {name: feed.shape for name, feed in fed.items()})
        for name, feed in fed.items():
            gpu.write(feed, self._buffers[name].address)
        if not one.run(gpu):
            raise self._failure("failed in a pass")
        gpu.wait()  # until here the copies read `fed`; what went wrong on the device is told now
        found = {name: self._buffers[name].shaped(one.shape(name)) for name in fetch}
        if one not in self._shared and not one.kept:
            self._keep(one)
        return found

    def close(self) -> None:
        # graphs go before their contexts, these before the engine, and what they write last
        self._drop_contexts()
        self._kernels = self._engine = None
        self._bound.clear()
        self._buffers.clear()

    def _drop_contexts(self) -> None:
        self._drop_own()
        self._shared.clear()

    def _drop_own(self) -> None:
        """Graphs first, then the contexts that they were made of."""
        for one in filter(None, self._own.values()):
            one.drop()
        self._own.clear()

    def _spec(self, name: str) -> TensorSpec:
        dtype = self._engine.get_tensor_dtype(name).name
        return TensorSpec(name, DTYPES.get(dtype, dtype), tuple(self._engine.get_tensor_shape(name)))

    def _profile(self, feeds: Mapping[str, Feed]) -> int:
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

    def _pass(self, profile: int, shapes: Mapping[str, tuple[int, ...]]) -> Pass:
        """Ready to be run. Raises BackendError."""
        if not self._shared:
            self._prepare()
        memory = self._backend.work(self._n_bytes)
        one = self._own_pass(profile, shapes) or self._shared[profile]
        refused = one.fit(shapes, memory)
        if refused:
            raise self._failure(f"does not take {refused} of shape {list(shapes[refused])}")
        return one

    def _own_pass(self, profile: int, shapes: Mapping[str, tuple[int, ...]]) -> Pass | None:
        """Of these shapes alone, from the second time on that they come."""
        if self._no_graphs:
            return None
        key = self._key(profile, shapes)
        again = key in self._own
        one = self._own.pop(key, None)
        if again and one is None:
            try:
                one = self._connect(self._context(profile, graphs=True))
            except BackendError as error:  # no memory for one more, above all
                self._give_up(str(error))
                return None
        self._own[key] = one
        if len(self._own) > MOST_GRAPHS:
            self._own.popitem(last=False)
        return one

    def _key(self, profile: int, shapes: Mapping[str, tuple[int, ...]]) -> tuple[object, ...]:
        return (profile, *(shapes[name] for name in sorted(shapes)))

    def _keep(self, one: Pass) -> None:
        """Have the pass that was just done replayed from now on."""
        try:
            one.keep(self._backend.gpu, by_engine=self._backend.has_own_graphs)
        except BackendError as error:
            said = f": {self._backend.reason()}" if self._backend.said else ""
            self._give_up(f"{error}{said}")

    def _give_up(self, why: str) -> None:
        """Passes work without graphs too; but whoever waits for them is told, once, and what none will use is freed."""
        self._no_graphs = why
        logger.warning("%s runs without CUDA graphs: %s", self._path, self._no_graphs)
        self._drop_own()

    def _prepare(self) -> None:
        """Buffers for the largest call of any profile, and a context for each."""
        gpu = self._backend.gpu
        contexts = [self._context(index, graphs=False) for index in range(len(self._profiles))]
        sizes: dict[str, tuple[int, ...]] = {}
        for context, profile in zip(contexts, self._profiles, strict=True):
            for name, (_, most) in profile.items():
                if not context.set_input_shape(name, most):
                    raise self._failure(f"does not take its own largest {name}")
            for spec in (*self.inputs, *self.outputs):
                shape = tuple(context.get_tensor_shape(spec.name))
                if min(shape, default=1) < 0:
                    raise self._failure(f"does not tell the size of {spec.name}")
                sizes[spec.name] = max(sizes.get(spec.name, ()), shape, key=math.prod)
        for name, shape in sizes.items():
            self._buffers[name] = self._bound.get(name) or gpu.empty(shape, self._specs[name].dtype)
        self._shared = [self._connect(context) for context in contexts]

    def _context(self, profile: int, *, graphs: bool) -> Any:
        """A new one. graphs: on TensorRT-RTX, whether it replays its passes itself."""
        trt, engine = self._backend.trt, self._engine
        ours = way = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if self._backend.has_own_graphs:
            way = config = engine.create_runtime_config()
            if config is None:
                raise self._failure("cannot be configured")
            config.set_execution_context_allocation_strategy(ours)
            self._kernels = self._kernels or config.create_runtime_cache()
            config.set_runtime_cache(self._kernels)
            if graphs:
                config.cuda_graph_strategy = wanted = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
                if config.cuda_graph_strategy != wanted:
                    raise self._failure("takes no CUDA graphs")
        context = engine.create_execution_context(way)
        if context is None or not context.set_optimization_profile_async(profile, self._backend.gpu.stream):
            raise self._failure("cannot be run")
        return context

    def _connect(self, context: Any) -> Pass:
        """With the address of every tensor, and the shapes of those that are bound."""
        for name, buffer in self._buffers.items():
            if not context.set_tensor_address(name, buffer.address):
                raise self._failure(f"does not take the buffer of {name}")
            if name in self._bound and name in self._profiles[0]:
                context.set_input_shape(name, buffer.shape)
        return Pass(context)

    def _failure(self, what: str) -> BackendError:
        return BackendError(f"{self._backend.name}: {self._path} {what}: {self._backend.reason()}")


def _ready(feed: Feed) -> Feed:
    """To be copied as it lies."""
    return feed if isinstance(feed, DeviceTensor) else np.ascontiguousarray(feed)


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
