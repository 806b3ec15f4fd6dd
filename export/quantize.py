"""Weight schemes: how a matrix becomes the blocks that MatMulNBits and GatherBlockQuantized read.

A row of K weights is cut into blocks; each block has a scale and, in int4, a zero point:

    w ~ scale * (q - zero_point)        q and zero_point integers in 0 .. 2^bits - 1

It knows numbers only: no files, no graphs. Weights are used as given; activations are not looked at here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from semspec.runtime.errors import ConfigError
from semspec.runtime.records import Floats

__all__ = ["BLOCK_SIZES", "QUANTIZERS", "SCHEMES", "Packed", "Scheme", "pack", "scheme", "unpack"]

Bytes = npt.NDArray[np.uint8]

BLOCK_SIZES = (32, 64, 128)
CHUNK_BLOCKS = 1 << 16  # weights in flight per thread: the temporaries stay in its second-level cache
CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # shares of a block's range tried by the clip search


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How one class of weights is stored: name, bits, weights per block (0: not blocked)."""

    name: str
    bits: int
    block_size: int

    def __str__(self) -> str:
        return f"{self.name} block {self.block_size}" if self.block_size else self.name

    @property
    def bits_per_weight(self) -> float:
        """Storage for each weight, fp32 scales and packed zero points included."""
        if not self.block_size:
            return float(self.bits)
        overhead = 32 + (self.bits if self.bits == 4 else 0)
        return self.bits + overhead / self.block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """data: (N, blocks, block_size * bits / 8), low bits first. scales: (N, blocks).

    zero_points: (N, ceil(blocks / 2)), two to a byte, low nibble first; None means 2^(bits - 1).
    """

    data: Bytes
    scales: Floats
    zero_points: Bytes | None


BITS: Mapping[str, int] = {"fp32": 32, "int8": 8, "int4": 4}
SCHEMES = tuple(BITS)


def scheme(text: str, block_size: int) -> Scheme:
    """`int4`, or `int4/64` with its own block size instead of the given one. Raises ConfigError for unknown ones."""
    name, _, own = text.partition("/")
    if own:
        block_size = int(own) if own.isdecimal() else 0
    if name not in BITS:
        raise ConfigError(
            f"precision must be one of {', '.join(SCHEMES)}, or one with its block size such as int4/64, got {text!r}"
        )
    if block_size not in BLOCK_SIZES:
        raise ConfigError(
            f"block size must be one of {', '.join(map(str, BLOCK_SIZES))}, got {own or block_size}"
        )
    return Scheme(name=name, bits=BITS[name], block_size=0 if name == "fp32" else block_size)


def pack(weight: Floats, scheme: Scheme, quantizer: str = "mse") -> Packed:
    """Quantize rows of a matrix; rows do not influence each other, so a matrix may come in pieces.

    weight: (N, K); K is padded with zeros to whole blocks. quantizer: `rtn` takes each block's full range,
    `mse` searches the clipped range with the least squared error (int4 only; int8 has nothing to gain).
    Raises ConfigError for an unknown quantizer, and for weights that are not finite.

    >>> weight = np.arange(32, dtype=np.float32)[None] % 16 - 5
    >>> packed = pack(weight, Scheme(name="int4", bits=4, block_size=32))
    >>> packed.scales.tolist(), packed.zero_points.tolist()  # 5 in the low nibble, padding in the high one
    ([[1.0]], [[133]])
    >>> unpack(packed, 4)[0, :4].tolist()
    [-5.0, -4.0, -3.0, -2.0]
    """
    if quantizer not in QUANTIZERS:
        raise ConfigError(f"quantizer must be one of {', '.join(QUANTIZERS)}, got {quantizer!r}")
    if not np.isfinite(weight).all():
        raise ConfigError("weights contain NaN or infinity")
    n_rows, n_columns = weight.shape
    size = scheme.block_size
    n_blocks = -(-n_columns // size)
    if n_columns % size:
        weight = np.pad(weight, ((0, 0), (0, n_blocks * size - n_columns)))
    blocks = weight.reshape(n_rows * n_blocks, size)
    codes = np.empty((n_rows * n_blocks, size), np.uint8)
    scales = np.empty(n_rows * n_blocks, np.float32)
    zeros = np.empty(n_rows * n_blocks, np.uint8)
    quantize = _int8 if scheme.bits == 8 else QUANTIZERS[quantizer]

    def one(part: slice) -> None:
        # transposed: a block is a column, so every operation runs over long contiguous rows
        columns = np.ascontiguousarray(blocks[part].T)
        q, scales[part], zeros[part] = quantize(columns)
        codes[part] = q.T

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(one, _parts(len(blocks), CHUNK_BLOCKS // size)))
    if scheme.bits == 8:
        return Packed(
            data=codes.reshape(n_rows, n_blocks, size),
            scales=scales.reshape(n_rows, n_blocks),
            zero_points=None,
        )
    data = codes[:, ::2] | (codes[:, 1::2] << 4)
    return Packed(
        data=data.reshape(n_rows, n_blocks, size // 2),
        scales=scales.reshape(n_rows, n_blocks),
        zero_points=_pair_nibbles(zeros.reshape(n_rows, n_blocks)),
    )


def unpack(packed: Packed, bits: int) -> Floats:
    """The weights that `packed` stands for: (N, blocks * block_size), padding included."""
    n_rows, n_blocks, _ = packed.data.shape
    if bits == 8:
        codes = packed.data.astype(np.float32)
        zeros = np.full((n_rows, n_blocks), 128, np.float32)
    else:
        codes = (
            np.stack((packed.data & 15, packed.data >> 4), axis=-1)
            .reshape(n_rows, n_blocks, -1)
            .astype(np.float32)
        )
        assert packed.zero_points is not None
        nibbles = np.stack((packed.zero_points & 15, packed.zero_points >> 4), axis=-1)
        zeros = nibbles.reshape(n_rows, -1)[:, :n_blocks].astype(np.float32)
    weights: Floats = (codes - zeros[:, :, None]) * packed.scales[:, :, None]
    return weights.reshape(n_rows, -1)


def _parts(total: int, step: int) -> Iterator[slice]:
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))


def _pair_nibbles(zeros: Bytes) -> Bytes:
    """(N, blocks) -> (N, ceil(blocks / 2)); an odd last one is padded with 8."""
    if zeros.shape[1] % 2:
        zeros = np.pad(zeros, ((0, 0), (0, 1)), constant_values=8)
    return np.ascontiguousarray(zeros[:, ::2] | (zeros[:, 1::2] << 4))


Quantized = tuple[Floats, Floats, Floats]


def _int8(columns: Floats) -> Quantized:
    """Symmetric around 128. columns: (block, m) -> codes (block, m), scales (m,), zero points (m,)."""
    scales = np.abs(columns).max(axis=0) / np.float32(127)
    codes = np.rint(columns * _inverse(scales)) + np.float32(128)
    return codes, scales, np.full_like(scales, 128)


def _rtn(columns: Floats) -> Quantized:
    """Asymmetric int4 over each block's full range, zero included."""
    low, high = _range(columns)
    return _round(columns, low, high)


def _mse(columns: Floats) -> Quantized:
    """Asymmetric int4: of the clipped ranges, the one whose squared error is least in each block."""
    low, high = _range(columns)
    best = _round(columns, low, high)
    best_error = _error(columns, *best)
    for clip in CLIPS[1:]:
        tried = _round(columns, low * np.float32(clip), high * np.float32(clip))
        error = _error(columns, *tried)
        better = error < best_error
        for kept, new in zip(best, tried, strict=True):
            np.copyto(kept, new, where=better)
        np.copyto(best_error, error, where=better)
    return best


def _range(columns: Floats) -> tuple[Floats, Floats]:
    zero = np.float32(0)
    return np.minimum(columns.min(axis=0), zero), np.maximum(columns.max(axis=0), zero)


def _round(columns: Floats, low: Floats, high: Floats) -> Quantized:
    scales = (high - low) / np.float32(15)
    inverse = _inverse(scales)
    zeros = np.rint(-low * inverse)
    codes = columns * inverse
    codes += zeros
    np.rint(codes, out=codes)
    np.clip(codes, 0, 15, out=codes)
    return codes, scales, zeros


def _error(columns: Floats, codes: Floats, scales: Floats, zeros: Floats) -> Floats:
    difference = codes - zeros
    difference *= scales
    difference -= columns
    error: Floats = np.einsum("ij,ij->j", difference, difference)
    return error


def _inverse(scales: Floats) -> Floats:
    """1 / scales, 0 where a block is zero or too near it to divide by."""
    tiny = np.finfo(np.float32).tiny
    return np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales >= tiny)


QUANTIZERS: Mapping[str, Callable[[Floats], Quantized]] = {"rtn": _rtn, "mse": _mse}
