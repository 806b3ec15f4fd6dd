"""How numbers are stored in checkpoints, and how stored rows become fp32.

Knows the public block layouts of GGUF and the plain floats that safetensors shares with it. Does not know
files, names or models: bytes in, fp32 out.

A quantized row is a run of blocks; a block holds `n_values` numbers in `n_bytes` bytes:

    Q4_0   d f16 | 16 bytes of nibbles                      d * (q - 8)
    Q4_1   d f16 | m f16 | 16 bytes of nibbles              d * q + m
    Q5_0   d f16 | 4 bytes of fifth bits | 16 nibbles       d * (q - 16)
    Q5_1   d f16 | m f16 | 4 fifth bits | 16 nibbles        d * q + m
    Q8_0   d f16 | 32 int8                                  d * q
    Q4_K   d f16 | dmin f16 | 12 | 128 nibbles              (d * s) * q - (dmin * m), s and m of each 32
    Q5_K   d f16 | dmin f16 | 12 | 32 fifth bits | 128      the same
    Q6_K   128 low nibbles | 64 high pairs | 16 int8 | d    (d * s) * (q - 32), s of each 16

The first nibbles of a run are its first half, the high nibbles its second. Products are rounded in the order
written, so the result has the bits of the reference implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from semspec.runtime.records import Floats

__all__ = ["STORAGES", "Bytes", "Storage"]

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """One way of storing numbers.

    n_values numbers take n_bytes bytes; decode(blocks (n, n_bytes), out (n, n_values)) writes fp32 to `out`. grid_bits:
    the numbers of a block are whole multiples of one step, |d|, that span no more than 2^grid_bits; None: they are not.
    """

    name: str
    n_values: int
    n_bytes: int
    decode: Callable[[Bytes, Floats], None]
    grid_bits: int | None = None

    def steps(self, blocks: Bytes, out: Floats) -> None:
        """Write the step of each block, at least 0, to `out` (n, 1); only where there are grid_bits."""
        out[...] = np.abs(_half(blocks, 0))

    def row_bytes(self, n_columns: int) -> int:
        """Bytes of one row; n_columns must be a multiple of n_values."""
        return n_columns // self.n_values * self.n_bytes


def _f32(blocks: Bytes, out: Floats) -> None:
    out[...] = blocks.view("<f4")


def _f16(blocks: Bytes, out: Floats) -> None:
    out[...] = blocks.view("<f2")


def _bf16(blocks: Bytes, out: Floats) -> None:
    bits = out.view(np.uint32)
    bits[...] = blocks.view("<u2")
    bits <<= 16


def _q4_0(blocks: Bytes, out: Floats) -> None:
    codes = _nibbles(blocks[:, 2:])
    codes -= 8  # wraps below zero, as the int8 view expects
    out[...] = codes.view(np.int8)
    out *= _half(blocks, 0)


def _q4_1(blocks: Bytes, out: Floats) -> None:
    out[...] = _nibbles(blocks[:, 4:])
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _q5_0(blocks: Bytes, out: Floats) -> None:
    codes = _nibbles(blocks[:, 6:])
    codes |= _fifth_bits(blocks[:, 2:6])
    codes -= 16
    out[...] = codes.view(np.int8)
    out *= _half(blocks, 0)


def _q5_1(blocks: Bytes, out: Floats) -> None:
    codes = _nibbles(blocks[:, 8:])
    codes |= _fifth_bits(blocks[:, 4:8])
    out[...] = codes
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _q8_0(blocks: Bytes, out: Floats) -> None:
    out[...] = blocks[:, 2:].view(np.int8)
    out *= _half(blocks, 0)


def _q4_k(blocks: Bytes, out: Floats) -> None:
    out[...] = _runs_of_nibbles(blocks[:, 16:], run=32)
    _scale_and_shift(blocks, out)


def _q5_k(blocks: Bytes, out: Floats) -> None:
    codes = _runs_of_nibbles(blocks[:, 48:], run=32)
    runs, fifths = codes.reshape(-1, 8, 32), blocks[:, 16:48]
    for run in range(8):  # bit r of byte i is the fifth bit of value i in run r
        runs[:, run] |= ((fifths >> np.uint8(run)) & np.uint8(1)) << np.uint8(4)
    out[...] = codes
    _scale_and_shift(blocks, out)


def _q6_k(blocks: Bytes, out: Floats) -> None:
    codes = _runs_of_nibbles(blocks[:, :128], run=64)
    halves = codes.reshape(-1, 2, 4, 32)
    pairs = blocks[:, 128:192].reshape(-1, 2, 32)
    for part in range(4):  # bits 2p, 2p+1 of byte i are the high bits of value i in part p of a half
        halves[:, :, part] |= ((pairs >> np.uint8(2 * part)) & np.uint8(3)) << np.uint8(4)
    codes -= 32
    out[...] = codes.view(np.int8)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    scales *= _half(blocks, 208)
    out *= np.repeat(scales, 16, axis=1)


def _half(blocks: Bytes, at: int) -> Floats:
    """The f16 at byte `at` of every block, as an fp32 column (n, 1)."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """(n, k) bytes -> (n, 2k): all low nibbles, then all high ones."""
    half = packed.shape[1]
    codes = np.empty((len(packed), 2 * half), np.uint8)
    np.bitwise_and(packed, 15, out=codes[:, :half])
    np.right_shift(packed, 4, out=codes[:, half:])
    return codes


def _runs_of_nibbles(packed: Bytes, *, run: int) -> Bytes:
    """(n, 128) bytes -> (n, 256), `_nibbles` of every `run` bytes by themselves."""
    split = np.ascontiguousarray(packed).reshape(-1, run)
    return _nibbles(split).reshape(len(packed), 256)


def _fifth_bits(packed: Bytes) -> Bytes:
    """(n, 4) bytes -> (n, 32), each 0 or 16."""
    bits = np.unpackbits(packed, axis=1, bitorder="little")
    bits <<= 4
    return bits


def _scale_and_shift(blocks: Bytes, out: Floats) -> None:
    """out = (d * s) * out - (dmin * m) with the 6-bit s and m of each run of 32, packed in bytes 4..16.

    Runs 0..3: s and m are the low six bits of bytes 0..3 and 4..7. Runs 4..7: the nibbles of bytes 8..11 with
    the top two bits of bytes 0..3 (s) and 4..7 (m) above them.
    """
    low, high, mixed = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([low & 63, (mixed & 15) | ((low >> 2) & 48)], axis=1).astype(np.float32)
    shifts = np.concatenate([high & 63, (mixed >> 4) | ((high >> 2) & 48)], axis=1).astype(np.float32)
    scales *= _half(blocks, 0)
    shifts *= _half(blocks, 2)
    out *= np.repeat(scales, 32, axis=1)
    out -= np.repeat(shifts, 32, axis=1)


STORAGES: Mapping[str, Storage] = {
    row.name: row
    for row in (
        Storage(name="F32", n_values=1, n_bytes=4, decode=_f32),
        Storage(name="F16", n_values=1, n_bytes=2, decode=_f16),
        Storage(name="BF16", n_values=1, n_bytes=2, decode=_bf16),
        Storage(name="Q4_0", n_values=32, n_bytes=18, decode=_q4_0, grid_bits=4),
        Storage(name="Q4_1", n_values=32, n_bytes=20, decode=_q4_1),
        Storage(name="Q5_0", n_values=32, n_bytes=22, decode=_q5_0, grid_bits=5),
        Storage(name="Q5_1", n_values=32, n_bytes=24, decode=_q5_1),
        Storage(name="Q8_0", n_values=32, n_bytes=34, decode=_q8_0, grid_bits=8),
        Storage(name="Q4_K", n_values=256, n_bytes=144, decode=_q4_k),
        Storage(name="Q5_K", n_values=256, n_bytes=176, decode=_q5_k),
        Storage(name="Q6_K", n_values=256, n_bytes=210, decode=_q6_k),
    )
}
