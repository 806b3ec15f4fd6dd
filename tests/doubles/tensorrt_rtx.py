"""A DOUBLE of TensorRT-RTX's runtime: tensorrt.py beside this, and what only RTX has: graphs that it makes itself.

Its contexts, where they were asked to, run plainly at first, record the second run of a state and replay all further
ones, as the engine's documentation says; here that is counted (COUNTS), and done plainly. `capturable` of a plan: what
its contexts say when asked.
"""

from __future__ import annotations

import enum
from collections import Counter
from typing import Any

from tensorrt import STREAM, Context, Engine, ExecutionContextAllocationStrategy, ILogger, __version__
from tensorrt import Runtime as _Runtime

__all__ = ["CudaGraphStrategy", "ExecutionContextAllocationStrategy", "ILogger", "Runtime", "__version__"]

CudaGraphStrategy = enum.Enum("CudaGraphStrategy", "DISABLED WHOLE_GRAPH_CAPTURE")
COUNTS: Counter[str] = Counter()  # passes of contexts that make graphs


class _Config:
    def __init__(self) -> None:
        self.strategy: Any = ExecutionContextAllocationStrategy.STATIC
        self.cuda_graph_strategy = CudaGraphStrategy.DISABLED
        self.cache: object = None

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        self.strategy = strategy

    def create_runtime_cache(self) -> object:
        return object()

    def set_runtime_cache(self, cache: object) -> bool:
        self.cache = cache
        return True


class _Context(Context):
    def __init__(self, engine: Engine, makes_graphs: bool) -> None:
        super().__init__(engine)
        self.makes_graphs = makes_graphs
        self.n_alike = 0  # runs in this state

    def is_stream_capturable(self, stream: int) -> bool:
        return stream == STREAM and bool(self.engine.plan.get("capturable", True))

    def execute_async_v3(self, stream: int) -> bool:
        if self.makes_graphs:
            if self.engine.driver.double_capturing():
                return self._refuse("this stream is being captured already")
            self.n_alike = self.n_alike + 1 if self.ran == self.state else 0
            COUNTS[("plain", "recorded", "replayed")[min(self.n_alike, 2)]] += 1
        return super().execute_async_v3(stream)


class _Engine(Engine):
    def create_runtime_config(self) -> _Config:
        return _Config()

    def create_execution_context(self, config: Any) -> Context:
        assert config.strategy is ExecutionContextAllocationStrategy.USER_MANAGED and config.cache is not None
        return _Context(self, config.cuda_graph_strategy is CudaGraphStrategy.WHOLE_GRAPH_CAPTURE)


class Runtime(_Runtime):
    engine = _Engine
