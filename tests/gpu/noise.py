"""Noise: weights of any shape that cost nothing to make, cut from one pool of random numbers.

How long a pass takes does not depend on what the weights are, as long as all of them are there and no two matrices
are alike: an engine that stores equal ones once would read less than a model has. So every matrix begins at a place of
its own in the pool, and the packing of real weights, minutes for a large model, is left out. What such a model says
means nothing; its numbers stay finite, within fp16 too.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np

from semspec.export.checkpoint import expected_tensors
from semspec.export.packing import BLOCK_BYTES, PackedWeights
from semspec.export.qdq_weights import QdqEncoder
from semspec.export.quantize import Packed, Scheme
from semspec.models.ops import Weights
from semspec.models.reference import row_blocks
from semspec.models.spec import ModelSpec
from semspec.runtime.errors import ConfigError
from semspec.runtime.records import Array, Floats

__all__ = ["Noise", "NoiseEncoder", "NoisePacked"]

DEVIATION = 0.02  # of weights
CODE_DEVIATION = {4: 4.6, 8: 74.0}  # of evenly spread codes, which are scaled to the same
PLACES = 1 << 20  # where in the pool a matrix may begin
STRIDE = 104_729  # prime: the first so many matrices begin at different places
MOST_VALUES = BLOCK_BYTES // 4  # asked for at once
MIDDLE = 0x88  # two zero points of int4


class Noise:
    """Weights of one model. The same tensor is the same at every reading."""

    def __init__(self, spec: ModelSpec) -> None:
        self._shapes = expected_tensors(spec)
        self._places = {name: place * STRIDE % PLACES for place, name in enumerate(self._shapes)}

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str, rows: slice | None = None) -> Floats:
        """In fp32; norms are near 1. rows: as row_blocks cuts them, None for a vector."""
        values: Floats = self.plain(name, rows or slice(0, self._shapes[name][0]), "float32")
        return values + np.float32(1) if "norm" in name else values

    def plain(self, name: str, rows: slice, dtype: str) -> Array:
        """Rows of a tensor in a floating type; a view, not to be written."""
        shape = (rows.stop - rows.start, *self._shapes[name][1:])
        start = (self._places[name] + rows.start) % PLACES
        return _values(dtype)[start : start + int(np.prod(shape))].reshape(shape)

    def codes(self, name: str, n_rows: int, n_bytes: int) -> Array:
        """Random bytes (n_rows, n_bytes) for some rows of a matrix; a view."""
        start = self._places[name]
        return _codes()[start : start + n_rows * n_bytes].reshape(n_rows, n_bytes)


class NoiseEncoder(QdqEncoder):
    """What the TensorRT graphs store of a Noise: plain values, int8 and int4 codes."""

    __slots__ = ()

    def rows(self, names: tuple[str, ...]) -> Iterator[tuple[str, Array]]:
        noise = _noise(self.weights)
        for name in names:
            for block in row_blocks(noise.shape(name), BLOCK_BYTES):
                yield name, noise.plain(name, block, self.activation)

    def narrow(self, name: str, values: Array) -> Array:
        return values if values.dtype == self.activation else super().narrow(name, values)

    def encode(
        self, name: str, rows: Floats, storage: str, matrix_scale: float | None
    ) -> tuple[Array, Array]:
        bits = {"int4": 4, "int8": 8}.get(storage)
        if bits is None:
            raise ConfigError(f"noise is stored plainly, in int8 and in int4, not in {storage}")
        n_rows, n_columns = rows.shape
        shape = (n_rows, n_columns // self.block_size) if bits == 4 else (n_rows,)
        codes = _noise(self.weights).codes(name, n_rows, n_columns * bits // 8)
        return codes, np.full(shape, DEVIATION / CODE_DEVIATION[bits], self.activation)


class NoisePacked(PackedWeights):
    """What a graph for ONNX Runtime stores of a Noise, in its one dtype."""

    def _blocks(self, names: tuple[str, ...]) -> Iterator[tuple[str, slice, Floats]]:
        noise = _noise(self.weights)
        for name in names:
            for rows in row_blocks(noise.shape(name), BLOCK_BYTES):
                yield name, rows, noise.plain(name, rows, self.dtypes[0])

    def _packed(self, names: tuple[str, ...], scheme: Scheme) -> Iterator[Packed]:
        width, deviation = scheme.block_size * scheme.bits // 8, CODE_DEVIATION[scheme.bits]
        for name, _, block in self._blocks(names):
            n_rows, n_columns = block.shape
            n_blocks = -(-n_columns // scheme.block_size)
            codes = _noise(self.weights).codes(name, n_rows, n_blocks * width)
            zeros = np.full((n_rows, -(-n_blocks // 2)), MIDDLE, np.uint8)
            yield Packed(
                data=codes.reshape(n_rows, n_blocks, width),
                scales=np.full((n_rows, n_blocks), DEVIATION / deviation, np.float32),
                zero_points=zeros if scheme.bits == 4 else None,
            )


@cache
def _values(dtype: str) -> Array:
    """The pool, in a floating type."""
    if dtype != "float32":
        return _values("float32").astype(dtype)
    values = np.random.default_rng(0).standard_normal(PLACES + MOST_VALUES, np.float32)
    return values * np.float32(DEVIATION)


@cache
def _codes() -> Array:
    """The pool of bytes."""
    return np.random.default_rng(1).integers(0, 256, PLACES + MOST_VALUES, np.uint8)


def _noise(weights: Weights) -> Noise:
    assert isinstance(weights, Noise)
    return weights
