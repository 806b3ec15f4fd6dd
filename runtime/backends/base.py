"""What a backend is: opens graphs, holds tensors on its device, runs one pass. Nothing about models or text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from semspec.runtime.records import Array, TensorSpec

__all__ = ["Backend", "PlanDevice", "Session", "Tensor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDevice:
    """What a compiled plan must be for, to be loaded: engine and release, compute capability such as 8.6."""

    engine: str
    version: str
    capability: str


class Tensor(Protocol):
    """Memory of a backend."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def numpy(self) -> Array:
        """The values on the host: the very memory where it is host memory, a copy elsewhere."""
        ...


class Session(Protocol):
    """One opened graph. Not for use by several threads at once."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...

    @property
    def outputs(self) -> tuple[TensorSpec, ...]: ...

    def most(self, input_name: str) -> tuple[int, ...] | None:
        """The largest shape that this input may have; None: any."""
        ...

    def bind(self, input_name: str, output_name: str, tensor: Tensor) -> None:
        """Use `tensor` as this input and as this output of every later run: a buffer updated in place.

        output_name: empty for a buffer that the graph only reads.
        """
        ...

    def run(self, feeds: Mapping[str, Array | Tensor], fetch: Sequence[str]) -> dict[str, Tensor]:
        """One pass; only the outputs in `fetch` are computed.

        feeds: every input that is not bound, of the shape and dtype the graph declares; a tensor of this backend is
        copied from where it lies.
        THE RETURNED TENSORS ARE REUSED by the next run with equal shapes: copy what must last.
        Raises BackendError when the engine refuses.
        """
        ...

    def close(self) -> None:
        """Release outputs, bindings and engine, in this order. Safe to call twice."""
        ...


class Backend(Protocol):
    """An engine on a device."""

    @property
    def name(self) -> str: ...

    @property
    def plans(self) -> PlanDevice | None:
        """What the plans that it loads are for; None: it loads graphs."""
        ...

    def open(self, graph: Path) -> Session:
        """Load a graph file, or a plan. Raises BackendError when the engine refuses it."""
        ...

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """A tensor of zeros on the device."""
        ...

    def part(self, tensor: Tensor, index: int | slice) -> Tensor:
        """The memory of tensor[index], not a copy; a slice has no step. tensor: from `zeros`, or an output of the last
        run, of which it may be a copy where an engine gives no part of its memory.
        """
        ...

    def store(self, rows: Tensor, buffer: Tensor, at: int) -> None:
        """Copy rows (.., S, D), an output of the last run or part of it, into buffer (.., C, D) behind its first `at`.

        One strided copy, over before the next run reads the buffer. at + S is at most C.
        """
        ...
