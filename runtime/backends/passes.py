"""One pass through a compiled plan, ready to be run again: a context of its engine, and the graph recorded of it.

It knows when what was recorded still holds. It chooses no shapes and allocates nothing: trt.py does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from semspec.runtime.backends.cuda import DeviceTensor, Gpu, Graph
from semspec.runtime.errors import BackendError

__all__ = ["Pass"]


class Pass:
    """context: of the engine, with the address of every tensor set; nobody else changes it.

    A graph is of the shapes, addresses and working memory of when it was recorded. So whatever changes here drops it,
    and what stays as it is is not set again. Not for use by several threads at once.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._memory = 0
        self._graph: Graph | None = None
        self.kept = False  # it is replayed from now on, by us or by the engine

    def fit(self, shapes: Mapping[str, tuple[int, ...]], memory: DeviceTensor) -> str:
        """For the next run. The name of an input whose shape the engine refuses, else ""."""
        for name, shape in shapes.items():
            if self._shapes.get(name) != shape:
                self.drop()
                self._memory = 0  # an engine lays out its memory by the shapes
                if not self._context.set_input_shape(name, shape):
                    return name
                self._shapes[name] = shape
        if self._memory != memory.address:
            self.drop()
            self._context.set_device_memory(memory.address, memory.n_bytes)
            self._memory = memory.address
        return ""

    def run(self, gpu: Gpu) -> bool:
        """Put it on the stream; False where the engine refuses."""
        if self._graph is not None:
            self._graph.launch()
            return True
        return not self._context.infer_shapes() and bool(self._context.execute_async_v3(gpu.stream))

    def keep(self, gpu: Gpu, *, by_engine: bool) -> None:
        """Replay it from now on. After it has run: what an engine prepares in a first run is none of the work.

        by_engine: it does so itself, unasked, and is only asked whether it can. Raises BackendError where it cannot be.
        """
        if not by_engine:
            self._graph = gpu.record(lambda: self._ask(gpu))
        elif not self._context.is_stream_capturable(gpu.stream):
            raise BackendError("the engine says that its passes cannot be captured")
        self.kept = True

    def drop(self) -> None:
        """The graph; the next run is a plain one."""
        self._graph, self.kept = None, False

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor, in the shapes that it was fitted to."""
        return tuple(self._context.get_tensor_shape(name))

    def _ask(self, gpu: Gpu) -> None:
        if not self._context.execute_async_v3(gpu.stream):
            raise BackendError("the engine refused to have a pass recorded")
