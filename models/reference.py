"""The decoder in numpy, fp32, one weight in memory at a time: the truth that graphs are held against.

It reads one text from its start, without a cache, so nothing a cache could get wrong is shared with what it
judges. Speed is not its aim; memory is: a large matrix is used by blocks of rows and dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from semspec.models.decoder import decode
from semspec.models.ops import Linear, Weights
from semspec.models.rope import rope_tables
from semspec.models.spec import ModelSpec

__all__ = ["NumpyOps", "ReferenceRun", "run_reference"]

Floats = npt.NDArray[np.float32]

BLOCK_BYTES = 64 << 20  # of fp32 weights in memory at once


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRun:
    """logits: (S, V). states: index -> (S, E). state_peaks: max |state| at each index 0..L."""

    logits: Floats
    states: dict[int, Floats]
    state_peaks: tuple[float, ...]


def run_reference(
    spec: ModelSpec, weights: Weights, ids: Sequence[int], *, keep_states: Collection[int] = ()
) -> ReferenceRun:
    """Logits of every row of one text, and the states asked for.

    ids: (S,), S at least 1. Memory: the logits (S, V), a few (S, E), and BLOCK_BYTES of weights.
    """
    ops = NumpyOps(spec, weights, np.asarray(ids, np.int64), keep_states)
    logits = decode(spec, ops)
    return ReferenceRun(logits=logits, states=ops.states, state_peaks=tuple(ops.state_peaks))


class NumpyOps:
    """Ops on arrays of shape (S, columns): one text, so no batch axis."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, ids: npt.NDArray[np.int64], keep_states: Collection[int]
    ) -> None:
        self.spec, self.weights, self.ids = spec, weights, ids
        self.keep_states = frozenset(keep_states)
        self.states: dict[int, Floats] = {}
        self.state_peaks: list[float] = []
        self.cos, self.sin = rope_tables(spec.rope, spec.head_size, len(ids))

    def embed(self, weight: str) -> Floats:
        wanted, places = np.unique(self.ids, return_inverse=True)
        table = np.stack([self.weights.read(weight, slice(int(i), int(i) + 1))[0] for i in wanted])
        return table[places]

    def norm(self, x: Floats, weight: str) -> Floats:
        scale = np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + np.float32(self.spec.norm_eps))
        normed: Floats = x / scale * self.weights.read(weight)
        return normed

    def add_norm(self, stream: Floats, branch: Floats, weight: str) -> tuple[Floats, Floats]:
        total = stream + branch
        return self.norm(total, weight), total

    def linear(self, x: Floats, linear: Linear) -> Floats:
        parts = [self._product(x, name) for name in linear.weights]
        if linear.biases:
            parts = [part + self.weights.read(bias) for part, bias in zip(parts, linear.biases, strict=True)]
        return np.concatenate(parts, axis=-1)

    def _product(self, x: Floats, name: str) -> Floats:
        n_rows, _ = self.weights.shape(name)
        out = np.empty((len(x), n_rows), np.float32)
        for rows in row_blocks(self.weights.shape(name), BLOCK_BYTES):
            out[:, rows] = x @ self.weights.read(name, rows).T
        return out

    def attend(self, qkv: Floats, layer: int) -> Floats:
        spec, n = self.spec, len(self.ids)
        query, key, value = np.split(qkv, (spec.query_width, spec.query_width + spec.kv_width), axis=-1)
        query = self._rotate(query.reshape(n, spec.n_heads, spec.head_size))
        key = self._rotate(key.reshape(n, spec.n_kv_heads, spec.head_size))
        value = value.reshape(n, spec.n_kv_heads, spec.head_size)
        future = np.triu(np.full((n, n), -np.inf, np.float32), k=1)
        out = np.empty((n, spec.n_heads, spec.head_size), np.float32)
        group = spec.n_heads // spec.n_kv_heads
        for head in range(spec.n_heads):
            scores = query[:, head] @ key[:, head // group].T / np.float32(np.sqrt(spec.head_size)) + future
            scores -= scores.max(axis=-1, keepdims=True)
            np.exp(scores, out=scores)
            out[:, head] = scores @ value[:, head // group] / scores.sum(axis=-1, keepdims=True)
        return out.reshape(n, spec.query_width)

    def _rotate(self, x: Floats) -> Floats:
        """Half-split rotation of (S, heads, D) by each row's position."""
        first, second = np.split(x, 2, axis=-1)
        cos, sin = self.cos[:, None, :], self.sin[:, None, :]
        return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)

    def gate(self, gate_up: Floats) -> Floats:
        gate, up = np.split(gate_up, 2, axis=-1)
        # exp(-x) overflows to inf for large negative gates, where silu is 0 as it should be
        with np.errstate(over="ignore"):
            gated: Floats = gate / (1 + np.exp(-gate)) * up
        return gated

    def state(self, index: int, x: Floats) -> None:
        self.state_peaks.append(float(np.abs(x).max()))
        if index in self.keep_states:
            self.states[index] = x.copy()

    def head(self, normed: Floats, linear: Linear) -> Floats:
        return self.linear(normed, linear)


def row_blocks(shape: tuple[int, ...], block_bytes: int) -> Iterator[slice]:
    """Slices that cut (rows, columns) of fp32 into blocks of at most `block_bytes`, at least one row each.

    >>> list(row_blocks((5, 100), 800))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    n_rows, n_columns = shape
    step = max(1, block_bytes // (4 * n_columns))
    for start in range(0, n_rows, step):
        yield slice(start, min(start + step, n_rows))
