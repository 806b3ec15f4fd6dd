"""Ops: the operations a decoder is made of, as a protocol over some value type V.

`models/reference.py` implements it on numpy arrays; each dialect in `semspec.export.dialects` implements it
on the names of graph tensors. The decoder is written once, in terms of this protocol.

What an implementation keeps to itself: where ids, positions, masks and caches come from, how weights are
stored, and which rows of logits are wanted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["Linear", "Ops", "Weights"]

V = TypeVar("V")


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """y = x W^T + b, where W is several checkpoint matrices one below the other.

    name: in the graph. weights, biases: checkpoint names; biases is empty or as long as weights.
    """

    name: str
    weights: tuple[str, ...]
    biases: tuple[str, ...] = ()


class Weights(Protocol):
    """Where weights come from: checkpoint name -> fp32 array, read when asked for."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor: (rows, columns) or (n,)."""
        ...

    def read(self, name: str, rows: slice | None = None) -> npt.NDArray[np.float32]:
        """The tensor, or a block of its rows, as fp32."""
        ...


class Ops(Protocol[V]):
    """Values have shape (B, S, columns) unless said otherwise."""

    def embed(self, weight: str) -> V:
        """Rows of the embedding for the ids of this call: (B, S, E)."""
        ...

    def norm(self, x: V, weight: str) -> V:
        """x / sqrt(mean(x^2) + eps) * weight."""
        ...

    def add_norm(self, stream: V, branch: V, weight: str) -> tuple[V, V]:
        """(norm(stream + branch), stream + branch)."""
        ...

    def linear(self, x: V, linear: Linear) -> V:
        """Product with stacked weights: (B, S, rows of all weights)."""
        ...

    def attend(self, qkv: V, layer: int) -> V:
        """Causal grouped-query attention over cache and new rows, rotary included.

        qkv: (B, S, (heads + 2 H) D), queries first; returns (B, S, heads * D).
        """
        ...

    def gate(self, gate_up: V) -> V:
        """silu(first half) * second half: (B, S, 2 F) -> (B, S, F)."""
        ...

    def state(self, index: int, x: V) -> None:
        """Offer hidden state `index` (0 embedding, i output of layer i, L after the final norm) as an output."""
        ...

    def head(self, normed: V, linear: Linear) -> V:
        """Logits of the wanted rows: (B, R, V)."""
        ...
