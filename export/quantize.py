"""Weight schemes: how a matrix becomes the blocks that MatMulNBits and GatherBlockQuantized read.

A row of K weights is cut into blocks; each block has a scale and, in int4, a zero point:

    w ~ scale * (q - zero_point)        q and zero_point integers in 0 .. 2^bits - 1

It knows numbers only: no files, no graphs. How a block's scale and codes are found is rounding.py's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from semspec.export.rounding import Compensation, Rounded, compensate, compensation, fit_range, search
from semspec.runtime.errors import ConfigError
from semspec.runtime.records import Floats

__all__ = [
    "BLOCK_SIZES",
    "INFORMED",
    "MOMENT_SPAN",
    "QUANTIZERS",
    "SCHEMES",
    "Packed",
    "Scheme",
    "pack",
    "readable_embedding",
    "scheme",
    "stored_bits",
    "unpack",
]

Bytes = npt.NDArray[np.uint8]

BLOCK_SIZES = (32, 64, 128)
MOMENT_SPAN = (
    512  # channels whose second moments are known together: some blocks, so that one makes up for others
)
STEP_BLOCK = 32  # weights that share a step in the formats whose blocks are carried over
CHUNK_WEIGHTS = 1 << 18  # in flight per thread, or so many as are
CHUNK_ROWS = (
    1 << 11
)  # rows long: shorter operations are mostly their own beginning (512: 1.6 times as long a weight)

QUANTIZERS: Mapping[str, str] = {
    "rtn": "round to nearest over each block's full range",
    "mse": "search the range with the least squared error of the weights",
    "awq": "scale channels by what they carry, then search the range with the least error of the output",
    "gptq": "as awq, and let later channels of a span make up for the rounding of earlier ones",
}
INFORMED = ("awq", "gptq")  # these need activation ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How one class of weights is stored: name, bits, weights per block (0: not blocked).

    symmetric: int4 keeps every zero point in the middle, at 8, for engines that read none.
    """

    name: str
    bits: int
    block_size: int
    symmetric: bool = False

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

    @property
    def n_bytes(self) -> int:
        """Of all three, scales in fp32."""
        return (
            self.data.nbytes
            + self.scales.nbytes
            + (0 if self.zero_points is None else self.zero_points.nbytes)
        )


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


def stored_bits(scheme: Scheme, shape: tuple[int, ...]) -> int:
    """Of a matrix (N, K) in blocks: rows are padded to whole ones, zero points of a row to whole bytes."""
    n_rows, n_columns = shape
    n_blocks = -(-n_columns // scheme.block_size)
    zero_points = -(-n_blocks // 2) if scheme.bits == 4 else 0
    return 8 * n_rows * (n_blocks * (scheme.block_size * scheme.bits // 8 + 4) + zero_points)


def readable_embedding(scheme: Scheme, width: int) -> bool:
    """Whether every onnxruntime reads rows of `width` alike: 1.23 takes the zero points of all rows as one run of
    nibbles, 1.32 starts each row at a byte, so an int4 row must have an even number of blocks."""
    return scheme.bits != 4 or -(-width // scheme.block_size) % 2 == 0


def pack(
    weight: Floats,
    scheme: Scheme,
    quantizer: str = "mse",
    moments: Floats | None = None,
    steps: Floats | None = None,
) -> Packed:
    """Quantize rows of a matrix; rows do not influence each other, so a matrix may come in pieces.

    weight: (N, K); K is padded with zeros to whole blocks. quantizer: see QUANTIZERS; they differ in int4 only, int8
    takes each block's largest value. moments: (K / MOMENT_SPAN rounded up, MOMENT_SPAN, MOMENT_SPAN), E[x x'] of the
    input by spans of its channels, for the quantizers that need them. steps: (N, K / 32), what the weights of each 32
    are whole multiples of, no more than the scheme can tell apart: in blocks of 32 nothing is rounded then, whatever
    the quantizer. Raises ConfigError for an unknown quantizer, one that needs moments and has none, and for weights
    that are not finite.

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
    if steps is not None and size == STEP_BLOCK:
        return _carry_over(weight, steps, scheme.bits)
    if n_columns % size:
        weight = np.pad(weight, ((0, 0), (0, n_blocks * size - n_columns)))
    codes = np.empty((n_rows, n_blocks * size), np.uint8)
    scales = np.empty((n_rows, n_blocks), np.float32)
    zeros = np.empty((n_rows, n_blocks), np.uint8)
    span, quantize = _rounding(scheme, quantizer, moments)

    def one(part: tuple[slice, int]) -> None:
        # transposed: a block is a column, so every operation runs over long contiguous rows
        rows, start = part
        columns = slice(start, min(start + span, n_blocks * size))
        q, s, z = quantize(np.ascontiguousarray(weight[rows, columns].T), start)
        codes[rows, columns] = q.T
        blocks = slice(start // size, columns.stop // size)
        scales[rows, blocks], zeros[rows, blocks] = s.T, z.T

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(one, _parts(n_rows, n_blocks * size, span)))
    if scheme.bits == 8:
        return Packed(data=codes.reshape(n_rows, n_blocks, size), scales=scales, zero_points=None)
    data = codes[:, ::2] | (codes[:, 1::2] << 4)
    return Packed(
        data=data.reshape(n_rows, n_blocks, size // 2), scales=scales, zero_points=_pair_nibbles(zeros)
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


def _carry_over(weight: Floats, steps: Floats, bits: int) -> Packed:
    """Codes that stand for exactly these weights."""
    n_rows, n_blocks = steps.shape
    inverse = np.divide(np.float32(1), steps, out=np.zeros_like(steps), where=steps > 0)
    counts = np.rint(weight.reshape(n_rows, n_blocks, -1) * inverse[:, :, None])
    if bits == 8:
        return Packed(data=(counts + np.float32(128)).astype(np.uint8), scales=steps, zero_points=None)
    # the file's steps may be negative, so -8 .. 7 of them are -7 .. 8 of ours
    zeros = np.float32(15) - np.maximum(counts.max(axis=2), np.float32(7))
    codes = (counts + zeros[:, :, None]).astype(np.uint8)
    data = codes[:, :, ::2] | (codes[:, :, 1::2] << 4)
    return Packed(data=data, scales=steps, zero_points=_pair_nibbles(zeros.astype(np.uint8)))


def _parts(n_rows: int, n_columns: int, span: int) -> Iterator[tuple[slice, int]]:
    """(rows, first column) of pieces that are `span` wide."""
    step = max(CHUNK_ROWS, CHUNK_WEIGHTS // span)
    for start in range(0, n_columns, span):
        for row in range(0, n_rows, step):
            yield slice(row, min(row + step, n_rows)), start


def _pair_nibbles(zeros: Bytes) -> Bytes:
    """(N, blocks) -> (N, ceil(blocks / 2)); an odd last one is padded with 8."""
    if zeros.shape[1] % 2:
        zeros = np.pad(zeros, ((0, 0), (0, 1)), constant_values=8)
    return np.ascontiguousarray(zeros[:, ::2] | (zeros[:, 1::2] << 4))


def _rounding(
    scheme: Scheme, quantizer: str, moments: Floats | None
) -> tuple[int, Callable[[Floats, int], Rounded]]:
    """How many columns are rounded together, and the function (columns (span, m), first column) that does it."""
    size = scheme.block_size
    if scheme.bits == 8:
        return size, lambda columns, start: _int8(columns)
    if quantizer == "rtn":
        return size, lambda columns, start: fit_range(columns, scheme.symmetric)
    if quantizer == "mse":
        return size, lambda columns, start: search(columns, symmetric=scheme.symmetric)
    if moments is None:
        raise ConfigError(
            f"quantizer {quantizer} needs activation ranges; make them with `semspec calibrate --ranges`"
        )
    spans = moments
    if quantizer == "awq":
        weights = np.diagonal(spans, axis1=1, axis2=2).reshape(-1)
        return size, lambda columns, start: search(columns, weights[start : start + size], scheme.symmetric)
    known = compensation(spans)

    def compensated(columns: Floats, start: int) -> Rounded:
        # behind the last channel there is nothing that moves, so what is cut off comes last in any order
        place, width = start // MOMENT_SPAN, len(columns)
        own = Compensation(known.order[place, :width], known.factor[place, :width, :width])
        return compensate(columns, spans[place, :width, :width], own, size, scheme.symmetric)

    return MOMENT_SPAN, compensated


def _int8(columns: Floats) -> Rounded:
    """Symmetric around 128. columns: (block, m) -> codes (block, m), scales (1, m), zero points (1, m)."""
    scales = np.abs(columns).max(axis=0) / np.float32(127)
    tiny = np.finfo(np.float32).tiny
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales >= tiny)
    codes = np.rint(columns * inverse) + np.float32(128)
    return codes, scales[None], np.full_like(scales, 128)[None]
