"""Pooled: the weighted sum of states that a pass made, in memory, or still on the device that made it.

    Pooled        in memory: those of the CPU, and all that was copied
    HeldPooled    of a graph that leaves its outputs on the device: copied from there when somebody looks, and not at
                  all where the next pass goes on from it or a probe on the same device reads it

It knows memory of a backend; it knows no model and no probe.
"""

from __future__ import annotations

from collections.abc import Sequence

from semspec.runtime.backends.base import Backend, Tensor
from semspec.runtime.errors import ConfigError
from semspec.runtime.records import Array, Floats

__all__ = ["HeldPooled", "Pooled"]


class Pooled:
    """(K, E), a state of each pooled layer. Of use until the model's next pass: `copy` what must last."""

    def __init__(self, values: Floats) -> None:
        self._values = values

    @property
    def shape(self) -> tuple[int, ...]:
        """(K, E)."""
        return self._values.shape

    @property
    def values(self) -> Floats:
        """(K, E), in memory."""
        return self._values

    @property
    def feed(self) -> Array | Tensor:
        """(1, K, E), where it is: for a pass that goes on from it."""
        return self.values[None]

    def copy(self) -> Pooled:
        """In memory, for good."""
        return Pooled(self.values.copy())


class HeldPooled(Pooled):
    """On a device. tensor: (1, K, E), an output of the last pass of a session of `backend`."""

    def __init__(self, tensor: Tensor, backend: Backend) -> None:
        self.backend = backend
        self._tensor: Tensor | None = tensor
        self._read: Floats | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self._there().shape[1:]

    @property
    def values(self) -> Floats:
        """(K, E): copied from the device when first read."""
        tensor = self._there()
        if self._read is None:
            self._read = tensor.numpy()[0]
        return self._read

    @property
    def feed(self) -> Array | Tensor:
        return self._there()

    def copy_to(self, buffer: Tensor, layers: Sequence[int]) -> None:
        """States of these of the K layers, on the device, into buffer (1, n, E) of the same backend."""
        backend = self.backend
        states = backend.part(self._there(), 0)
        for place, layer in enumerate(layers):
            backend.store(backend.part(states, slice(layer, layer + 1)), buffer, place)

    def close(self) -> None:
        """The model reads on, over it."""
        self._tensor = self._read = None

    def _there(self) -> Tensor:
        if self._tensor is None:
            raise ConfigError(
                "states that a pass pooled are gone with the model's next pass; copy what must last"
            )
        return self._tensor
