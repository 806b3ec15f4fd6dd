"""From a checkpoint's tensors to stored ones: read by blocks of rows, packed, written, dropped.

Which class of weights gets which scheme is decided here (Schemes); how a scheme works, in quantize.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from semspec.export.quantize import INFORMED, QUANTIZERS, Packed, Scheme, pack, scheme
from semspec.export.writer import Stored, WeightFile
from semspec.models.ops import Weights
from semspec.models.reference import row_blocks
from semspec.runtime.errors import ConfigError, SourceError
from semspec.runtime.records import Array, Floats

__all__ = ["Moments", "PackedWeights", "Schemes", "StoredMatrix", "no_moments"]

AUTO = "auto"
BLOCK_BYTES = 32 << 20  # of fp32 weights being packed at once

Moments: TypeAlias = Callable[[str], "Floats | None"]


def no_moments(name: str) -> None:
    """No ranges were measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schemes:
    """Schemes of the three classes of weights, and the quantizer that fills them.

    An embedding of its own reads ids, not channels, so an informed quantizer has nothing to know of it: it falls to
    `mse`, and describe() says so.
    """

    layers: Scheme
    head: Scheme
    embedding: Scheme
    quantizer: str = "mse"

    @classmethod
    def choose(
        cls,
        layers: str = "int4",
        *,
        head: str | None = None,
        embedding: str | None = None,
        block_size: int = 32,
        quantizer: str = "mse",
    ) -> Schemes:
        """Schemes by name, with a block size of their own behind a slash if wanted (`int4/64`).

        Under int4 layers, head and embedding default to int8, otherwise to the layers' own name. block_size is
        for the layers; the others default to blocks of 32, where a lone row of logits costs no second one.
        quantizer: one of QUANTIZERS, or `auto` until informed() decides. Raises ConfigError for unknown names.
        """
        name = layers.partition("/")[0]
        outer = "int8" if name == "int4" else name
        if quantizer not in (AUTO, *QUANTIZERS):
            raise ConfigError(
                f"quantizer must be {AUTO} or one of {', '.join(QUANTIZERS)}, got {quantizer!r}"
            )
        return cls(
            layers=scheme(layers, block_size),
            head=scheme(head or outer, 32),
            embedding=scheme(embedding or head or outer, 32),
            quantizer=quantizer,
        )

    def informed(self, has_ranges: bool) -> Schemes:
        """The same with the quantizer that `auto` stands for: `gptq` where activation ranges were given, else `mse`.

        Raises ConfigError for a quantizer that lacks its ranges, and for ranges that nothing would use.
        """
        if has_ranges and (self.layers.bits != 4 or self.quantizer not in (AUTO, *INFORMED)):
            raise ConfigError(
                f"--ranges are for int4 layers with {' or '.join(INFORMED)}, got {self.layers} with {self.quantizer}; "
                f"leave them out"
            )
        if not has_ranges and self.quantizer in INFORMED:
            raise ConfigError(
                f"quantizer {self.quantizer} needs the activation ranges of this very model: make them with "
                f"`semspec calibrate --ranges FILE` and pass them with --ranges FILE"
            )
        if self.quantizer != AUTO:
            return self
        return replace(self, quantizer="gptq" if has_ranges else "mse")

    @property
    def coarsest(self) -> tuple[str, Scheme]:
        """The class of weights with the fewest bits, layers before head before embedding: what errors come from.

        Returned as the option that sets it, and its scheme.
        """
        classes = {
            "--precision": self.layers,
            "--head-precision": self.head,
            "--embedding-precision": self.embedding,
        }
        return min(classes.items(), key=lambda item: item[1].bits)

    def check_tied(self) -> None:
        """A tied head is stored once, so it has one precision. Raises ConfigError when two were asked for."""
        if self.head != self.embedding:
            raise ConfigError(
                f"this model ties its head to its embedding, which is stored once: head precision "
                f"{self.head} and embedding precision {self.embedding} must be equal"
            )

    def describe(self, *, tied: bool = True) -> dict[str, str]:
        """For the manifest: class of weights -> scheme. tied: embedding and head are one matrix."""
        names = {"layers": self.layers, "head": self.head, "embedding": self.embedding}
        described = {name: str(value) for name, value in names.items()} | {"quantizer": self.quantizer}
        if self.quantizer in INFORMED and self.embedding.bits == 4 and not tied:
            described["embedding_quantizer"] = "mse"
        return described


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMatrix:
    """A matrix (N, K) as stored: plain fp32 rows (scales None), or blocks with scales and zero points."""

    shape: tuple[int, int]
    scheme: Scheme
    data: Stored
    scales: Stored | None = None
    zero_points: Stored | None = None


class PackedWeights:
    """Stores what graphs ask for, each thing once, whichever graph asks first.

    dtypes: the floating types the graphs compute in; scales and vectors are stored in each of them. moments: tensor
    name -> second moments of what its matrix reads, as pack() takes them; without, an informed quantizer is `mse`.
    """

    def __init__(
        self,
        weights: Weights,
        file: WeightFile,
        quantizer: str,
        dtypes: tuple[str, ...] = ("float32",),
        moments: Moments = no_moments,
    ) -> None:
        self.weights, self.file, self.quantizer, self.dtypes = weights, file, quantizer, dtypes
        self.moments = moments

    def vector(self, names: tuple[str, ...], dtype: str) -> Stored:
        """Vectors one behind the other: norm weights, biases."""
        key = f"{'+'.join(names)}:{dtype}"
        stored = self.file.get(key)
        if stored is None:
            value = np.concatenate([self.weights.read(name) for name in names])
            stored = self.file.put(key, (value,), dtype, value.shape)
        return stored

    def table(self, key: str, values: Array) -> Stored:
        """A computed table, such as the rotary cosines."""
        return self.file.get(key) or self.file.put(key, (values,), values.dtype.name, values.shape)

    def matrix(self, names: tuple[str, ...], scheme: Scheme, dtype: str) -> StoredMatrix:
        """Matrices of equal width one below the other, packed; plain values and scales come in `dtype`.

        Raises SourceError naming the tensor whose values are not finite.
        """
        shape = (sum(self.weights.shape(name)[0] for name in names), self.weights.shape(names[0])[1])
        key = f"{'+'.join(names)}:{scheme}"
        if not scheme.block_size:
            key = f"{key}:{dtype}"
            blocks = (block for _, block in self._blocks(names))
            data = self.file.get(key) or self.file.put(key, blocks, dtype, shape)
            return StoredMatrix(shape=shape, scheme=scheme, data=data)
        data = self.file.get(f"{key}:codes") or self._pack(key, names, scheme, shape)
        return StoredMatrix(
            shape=shape,
            scheme=scheme,
            data=data,
            scales=self.file.get(f"{key}:scales:{dtype}"),
            zero_points=self.file.get(f"{key}:zero_points"),
        )

    def _pack(self, key: str, names: tuple[str, ...], scheme: Scheme, shape: tuple[int, int]) -> Stored:
        """Stream the codes to the file; scales and zero points, an eighth of them, follow from memory."""
        n_rows, n_columns = shape
        n_blocks = -(-n_columns // scheme.block_size)
        scales: list[Array] = []
        zero_points: list[Array] = []

        def codes() -> Iterator[Array]:
            for packed in self._packed(names, scheme):
                scales.append(packed.scales)
                if packed.zero_points is not None:
                    zero_points.append(packed.zero_points)
                yield packed.data

        width = scheme.block_size * scheme.bits // 8
        stored = self.file.put(f"{key}:codes", codes(), "uint8", (n_rows, n_blocks, width))
        for dtype in self.dtypes:
            self.file.put(f"{key}:scales:{dtype}", scales, dtype, (n_rows, n_blocks))
        if zero_points:
            self.file.put(f"{key}:zero_points", zero_points, "uint8", (n_rows, -(-n_blocks // 2)))
        return stored

    def _packed(self, names: tuple[str, ...], scheme: Scheme) -> Iterator[Packed]:
        moments = self.moments(names[0]) if self.quantizer in INFORMED else None
        quantizer = "mse" if self.quantizer in INFORMED and moments is None else self.quantizer
        for name, block in self._blocks(names):
            try:
                yield pack(block, scheme, quantizer, moments)
            except ConfigError as error:
                raise SourceError(f"tensor {name}: {error}") from None

    def _blocks(self, names: tuple[str, ...]) -> Iterator[tuple[str, Floats]]:
        for name in names:
            for rows in row_blocks(self.weights.shape(name), BLOCK_BYTES):
                yield name, self.weights.read(name, rows)
