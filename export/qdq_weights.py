"""Weights of the TensorRT graphs: as the codes and scales that DequantizeLinear reads, each matrix stored once.

    plain          (N, K) in the activations' dtype
    int8, fp8      codes (N, K), a scale for each row
    int4           codes (N, K), two to a byte, a scale for each block of a row
    fp4            as int4 in blocks of 16; the scales are fp8 themselves, under one fp32 scale of the matrix

Symmetric throughout: w ~ scale * code, no zero points, which TensorRT does not read. Every scale is above zero, which
it insists on. Which precision means which storage is told in precisions.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from semspec.export.packing import BLOCK_BYTES, Moments, no_moments
from semspec.export.precisions import PLAIN
from semspec.export.quantize import INFORMED, Scheme, pack
from semspec.export.writer import Stored, WeightFile
from semspec.models.ops import Weights
from semspec.models.reference import row_blocks
from semspec.runtime.errors import ConfigError, SourceError
from semspec.runtime.records import Array, Floats

__all__ = [
    "FP4_BLOCK",
    "LARGEST",
    "QdqEncoder",
    "QdqMatrix",
    "QdqWeights",
    "decode",
    "fit_block_size",
    "round_input",
]

LARGEST: Mapping[str, float] = {"int8": 127.0, "fp8": 448.0, "fp4": 6.0}
CODE_DTYPES: Mapping[str, str] = {
    "int8": "int8",
    "fp8": "float8_e4m3fn",
    "int4": "int4",
    "fp4": "float4_e2m1fn",
}
FP4_BLOCK = 16
SIGNS = np.uint8(0x88)  # from two codes around 8 to two in two's complement
SMALLEST_FP8 = 2.0**-9


@dataclass(frozen=True, slots=True, kw_only=True)
class QdqMatrix:
    """A stored matrix (N, K). dtype: of its codes. scales: None where it is plain. block_size: 0 where a scale belongs
    to a row. matrix_scale: of fp4, fp32: what its fp8 scales are multiplied by."""

    shape: tuple[int, int]
    dtype: str
    codes: Stored
    scales: Stored | None = None
    block_size: int = 0
    matrix_scale: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QdqEncoder:
    """From a model's matrices to codes and scales, by rows, and back.

    activation: dtype of plain values and of scales. block_size, quantizer: of int4; the informed quantizers need
    moments, tensor name -> second moments of what its matrix reads.
    """

    weights: Weights
    activation: str
    block_size: int = 0
    quantizer: str = "mse"
    moments: Moments = no_moments

    def narrow(self, name: str, values: Floats) -> Array:
        """In the activations' dtype. Raises SourceError for values that it cannot hold."""
        largest = float(ml_dtypes.finfo(self.activation).max)
        peak = float(np.abs(values).max())
        if not peak <= largest:
            raise SourceError(
                f"tensor {name}: weights reach {peak:.3g} and {self.activation} ends at {largest:.5g}; "
                "use --engine-precision bf16"
            )
        narrow: Array = values.astype(self.activation)
        return narrow

    def matrix_scale(self, names: tuple[str, ...]) -> float:
        """What the fp8 scales of fp4 codes are multiplied by, so that they reach fp8's end and no further."""
        peak = max(float(np.abs(rows).max()) for _, rows in self.rows(names))
        return (peak or 1.0) / (LARGEST["fp4"] * LARGEST["fp8"])

    def rows(self, names: tuple[str, ...]) -> Iterator[tuple[str, Floats]]:
        """(name, some rows) of matrices, in order. Raises SourceError naming one whose values are not finite."""
        for name in names:
            for block in row_blocks(self.weights.shape(name), BLOCK_BYTES):
                rows = self.weights.read(name, block)
                if not np.isfinite(rows).all():
                    raise SourceError(f"tensor {name}: weights contain NaN or infinity")
                yield name, rows

    def encode(
        self, name: str, rows: Floats, storage: str, matrix_scale: float | None
    ) -> tuple[Array, Array]:
        """Codes as bytes (n, K) or (n, K / 2), and scales (n,) or (n, blocks)."""
        if storage == "int4":
            return self._int4(name, rows)
        if storage == "fp4":
            assert matrix_scale is not None
            return _fp4(rows, matrix_scale)
        scales = self._scales(np.abs(rows).max(axis=1) / np.float32(LARGEST[storage]))
        steps = rows / scales.astype(np.float32)[:, None]
        return _codes(steps, storage), scales

    def _int4(self, name: str, rows: Floats) -> tuple[Array, Array]:
        moments = self.moments(name) if self.quantizer in INFORMED else None
        quantizer = "mse" if self.quantizer in INFORMED and moments is None else self.quantizer
        scheme = Scheme(name="int4", bits=4, block_size=self.block_size, symmetric=True)
        packed = pack(rows, scheme, quantizer, moments)
        return packed.data.reshape(len(rows), -1) ^ SIGNS, self._scales(packed.scales)

    def _scales(self, values: Floats) -> Array:
        """As they are stored: in the activations' dtype, rounded before codes are chosen, and above zero."""
        smallest = np.float32(2.0**-24 if self.activation == "float16" else 2.0**-126)
        scales: Array = np.where(values > 0, np.maximum(values, smallest), np.float32(1)).astype(
            self.activation
        )
        return scales


class QdqWeights:
    """Stores what graphs ask for, each thing once, whichever graph asks first."""

    def __init__(self, encoder: QdqEncoder, file: WeightFile) -> None:
        self.encoder, self.file, self.activation = encoder, file, encoder.activation
        self._matrix_scales: dict[str, float] = {}

    def vector(self, names: tuple[str, ...]) -> Stored:
        """Vectors one behind the other: norm weights, biases."""
        key = f"{'+'.join(names)}:{self.activation}"
        values = [self.encoder.narrow(name, self.encoder.weights.read(name)) for name in names]
        size = sum(len(value) for value in values)
        return self.file.get(key) or self.file.put(key, values, self.activation, (size,))

    def table(self, key: str, values: Floats) -> Stored:
        """A computed table, such as the rotary cosines."""
        key = f"{key}:{self.activation}"
        return self.file.get(key) or self.file.put(key, (values,), self.activation, values.shape)

    def matrix(self, names: tuple[str, ...], storage: str) -> QdqMatrix:
        """Matrices of equal width one below the other.

        Raises SourceError naming the tensor whose values are not finite, or beyond what the storage can hold.
        """
        shapes = [self.encoder.weights.shape(name) for name in names]
        shape = (sum(n_rows for n_rows, _ in shapes), shapes[0][1])
        key = f"{'+'.join(names)}:{storage}"
        if storage == PLAIN:
            blocks = (self.encoder.narrow(name, rows) for name, rows in self.encoder.rows(names))
            codes = self.file.get(key) or self.file.put(key, blocks, self.activation, shape)
            return QdqMatrix(shape=shape, dtype=self.activation, codes=codes)
        codes = self.file.get(f"{key}:codes") or self._encode(key, names, storage, shape)
        return QdqMatrix(
            shape=shape,
            dtype=CODE_DTYPES[storage],
            codes=codes,
            scales=self.file.get(f"{key}:scales"),
            block_size={"int4": self.encoder.block_size, "fp4": FP4_BLOCK}.get(storage, 0),
            matrix_scale=self._matrix_scales.get(key),
        )

    def _encode(self, key: str, names: tuple[str, ...], storage: str, shape: tuple[int, int]) -> Stored:
        """Stream the codes to the file; the scales, at most an eighth of them, follow from memory."""
        n_rows, n_columns = shape
        scales: list[Array] = []
        matrix_scale = None
        if storage == "fp4":
            matrix_scale = self._matrix_scales[key] = self.encoder.matrix_scale(names)

        def codes() -> Iterator[Array]:
            for name, rows in self.encoder.rows(names):
                block_codes, block_scales = self.encoder.encode(name, rows, storage, matrix_scale)
                scales.append(block_scales)
                yield block_codes

        n_bytes = n_columns // 2 if storage in ("int4", "fp4") else n_columns
        stored = self.file.put(f"{key}:codes", codes(), "uint8", (n_rows, n_bytes))
        dtype = "uint8" if storage == "fp4" else self.activation
        self.file.put(f"{key}:scales", scales, dtype, (n_rows, *scales[0].shape[1:]))
        return stored


def decode(codes: Array, scales: Array, storage: str, matrix_scale: float | None = None) -> Floats:
    """The weights (n, K) that codes and scales of QdqEncoder.encode() stand for."""
    if storage == "int8":
        steps = codes.view(np.int8).astype(np.float32)
    elif storage == "fp8":
        steps = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    else:
        halves = np.stack((codes & np.uint8(15), codes >> np.uint8(4)), axis=-1).reshape(len(codes), -1)
        if storage == "int4":
            steps = (halves ^ np.uint8(8)).astype(np.float32) - np.float32(8)
        else:
            steps = halves.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
            scales = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(matrix_scale or 1)
    wide = scales.astype(np.float32).reshape(len(codes), -1, 1)
    weights: Floats = (steps.reshape(len(codes), wide.shape[1], -1) * wide).reshape(len(codes), -1)
    return weights


def round_input(x: Floats, kind: str, step: float) -> Floats:
    """Rows (n, K) of a product's input as they are after rounding: what the graphs' Q and DQ make of them.

    `fp4`: blocks of 16 with an fp8 scale each, found as TensorRT's documentation says, under the scale `step`.
    """
    if kind == "fp4":
        codes, scales = _fp4(x, step)
        return decode(codes, scales, "fp4", step)
    steps = _codes(x / np.float32(step), kind)
    dtype = np.dtype(np.int8 if kind == "int8" else ml_dtypes.float8_e4m3fn)
    rounded: Floats = steps.view(dtype).astype(np.float32) * np.float32(step)
    return rounded


def _codes(steps: Floats, storage: str) -> Array:
    """int8 or fp8 codes as bytes, cut off at the largest."""
    if storage == "int8":  # an input beyond its range is cut off at -128, as engines do; no weight is beyond
        return np.clip(np.rint(steps), -128, 127).astype(np.int8).view(np.uint8)
    most = np.float32(LARGEST[storage])
    codes: Array = np.clip(steps, -most, most).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return codes


def _fp4(rows: Floats, matrix_scale: float) -> tuple[Array, Array]:
    """Codes (n, K / 2), low nibble first, and fp8 scales (n, K / 16) as bytes."""
    blocks = rows.reshape(len(rows), -1, FP4_BLOCK)
    wanted = np.abs(blocks).max(axis=2) / np.float32(LARGEST["fp4"] * matrix_scale)
    scales = np.clip(wanted, SMALLEST_FP8, LARGEST["fp8"]).astype(ml_dtypes.float8_e4m3fn)
    steps = blocks / (scales.astype(np.float32) * np.float32(matrix_scale))[:, :, None]
    most = np.float32(LARGEST["fp4"])
    codes = np.clip(steps, -most, most).astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(len(rows), -1)
    return codes[:, ::2] | (codes[:, 1::2] << np.uint8(4)), scales.view(np.uint8)


def fit_block_size(weights: Weights, names: tuple[str, ...], wanted: int | None) -> int:
    """The block size of int4: `wanted`, or the largest of 128, 64, 32 that cuts every row of `names` into whole blocks.

    Raises ConfigError naming the ones that do.
    """
    widths = sorted({weights.shape(name)[1] for name in names})
    fits = [size for size in (128, 64, 32) if not any(width % size for width in widths)]
    if not fits:
        raise ConfigError(
            "engine precision int4 needs rows of whole blocks and no block size divides "
            f"{', '.join(map(str, widths))}; use int8"
        )
    if wanted is None:
        return fits[0]
    if wanted not in fits:
        raise ConfigError(
            f"engine precision int4/{wanted} needs rows of whole blocks; of {', '.join(map(str, widths))} weights they "
            f"can be {', '.join(map(str, fits))}"
        )
    return wanted
