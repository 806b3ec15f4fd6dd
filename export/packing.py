"""From a checkpoint's tensors to stored ones: read by blocks of rows, packed, written, dropped.

Which class of weights gets which scheme is decided here (Schemes); how a scheme works, in quantize.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from semspec.export.quantize import INFORMED, QUANTIZERS, Packed, Scheme, pack, scheme
from semspec.export.tally import Rounding
from semspec.export.writer import Stored, WeightFile
from semspec.models.ops import Linear, Weights
from semspec.models.reference import row_blocks
from semspec.runtime.errors import ConfigError, SourceError
from semspec.runtime.records import Array, Floats

__all__ = [
    "AUTO",
    "INFORMED_BITS",
    "Moments",
    "PackedWeights",
    "Schemes",
    "Steps",
    "StoredMatrix",
    "no_moments",
    "no_steps",
]

AUTO = "auto"
INFORMED_BITS = 4.8  # a weight, or as few as there can be, where ranges are given and no more is said
BITS_RANGE = (4, 9)  # int4 without its scales; int8 in blocks of 32
BLOCK_BYTES = 32 << 20  # of fp32 weights being packed at once

Moments: TypeAlias = Callable[[str], "Floats | None"]
Steps: TypeAlias = Callable[[str, int, slice], "Floats | None"]


def no_moments(name: str) -> None:
    """No ranges were measured."""


def no_steps(name: str, bits: int, rows: slice) -> None:
    """The checkpoint's numbers are on no grid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schemes:
    """Schemes of the three classes of weights, and the quantizer that fills them.

    bits_per_weight: the mean over layers and head to spend; budget.py turns it into `finer`: Linear.name -> scheme,
    where it is not `layers`, the coarsest one. An embedding of its own reads ids, not channels, so an informed
    quantizer has nothing to know of it: it falls to `mse`, and describe() says so.
    """

    layers: Scheme
    head: Scheme
    embedding: Scheme
    quantizer: str = "mse"
    bits_per_weight: float | None = None
    finer: Mapping[str, Scheme] = field(default_factory=dict)

    @classmethod
    def choose(
        cls,
        layers: str = "int4",
        *,
        head: str | None = None,
        embedding: str | None = None,
        block_size: int = 32,
        quantizer: str = "mse",
        bits_per_weight: float | None = None,
    ) -> Schemes:
        """Schemes by name, with a block size of their own behind a slash if wanted (`int4/64`).

        Under int4 layers, head and embedding default to int8, otherwise to the layers' own name. block_size is
        for the layers; the others default to blocks of 32, where a lone row of logits costs no second one.
        quantizer: one of QUANTIZERS, or `auto` until informed() decides. bits_per_weight: chooses all that itself,
        but for an embedding of its own. Raises ConfigError for unknown names, and for choices that exclude each other.
        """
        name = layers.partition("/")[0]
        if bits_per_weight is not None and (layers != "int4" or head is not None or block_size != 32):
            raise ConfigError(
                "--bits-per-weight chooses bits and block sizes of layers and head itself: leave out --precision, "
                "--head-precision and --block-size"
            )
        if bits_per_weight is not None and not BITS_RANGE[0] <= bits_per_weight <= BITS_RANGE[1]:
            raise ConfigError(
                f"--bits-per-weight must be between {BITS_RANGE[0]} and {BITS_RANGE[1]}, got {bits_per_weight}"
            )
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
            bits_per_weight=bits_per_weight,
        )

    def of(self, linear: Linear) -> Scheme:
        """The scheme of a linear inside the layers."""
        return self.finer.get(linear.name, self.layers)

    def informed(self, has_ranges: bool) -> Schemes:
        """The same with the quantizer that `auto` stands for: `gptq` where activation ranges were given, else `mse`.

        Where ranges were given and nothing else was chosen, bits are mixed, INFORMED_BITS a weight. Raises ConfigError
        for a quantizer or a budget that lacks its ranges, and for ranges that nothing would use.
        """
        if has_ranges and (self.layers.bits != 4 or self.quantizer not in (AUTO, *INFORMED)):
            raise ConfigError(
                f"--ranges are for int4 layers with {' or '.join(INFORMED)}, got {self.layers} with {self.quantizer}; "
                f"leave them out"
            )
        if not has_ranges and (self.quantizer in INFORMED or self.bits_per_weight is not None):
            what = "--bits-per-weight" if self.quantizer not in INFORMED else f"quantizer {self.quantizer}"
            raise ConfigError(
                f"{what} needs the activation ranges of this very model: make them with "
                f"`semspec calibrate --ranges FILE` and pass them with --ranges FILE"
            )
        if self.quantizer != AUTO:
            return self
        if not has_ranges:
            return replace(self, quantizer="mse")
        nothing_chosen = self == Schemes.choose(quantizer=AUTO)
        bits = INFORMED_BITS if nothing_chosen else self.bits_per_weight
        return replace(self, quantizer="gptq", bits_per_weight=bits)

    def allotted(self, linears: Mapping[str, Scheme], head: Scheme, *, tied: bool) -> Schemes:
        """With a scheme for each linear of the layers, by Linear.name, and the head; a tied one is the embedding."""
        coarsest = min(linears.values(), key=lambda own: own.bits_per_weight)
        return replace(
            self,
            layers=coarsest,
            head=head,
            embedding=head if tied else self.embedding,
            finer={name: own for name, own in linears.items() if own != coarsest},
        )

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
        if self.finer:
            others = Counter(map(str, self.finer.values()))
            described["finer"] = ", ".join(f"{count} linears {own}" for own, count in sorted(others.items()))
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
    steps(name, bits, rows): see Checkpoint.steps. roundings: first tensor name of a matrix -> what became of it, of
    those stored so far.
    """

    def __init__(
        self,
        weights: Weights,
        file: WeightFile,
        quantizer: str,
        dtypes: tuple[str, ...] = ("float32",),
        moments: Moments = no_moments,
        steps: Steps = no_steps,
    ) -> None:
        self.weights, self.file, self.quantizer, self.dtypes = weights, file, quantizer, dtypes
        self.moments, self.steps = moments, steps
        self.roundings: dict[str, Rounding] = {}

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
            blocks = (block for _, _, block in self._blocks(names))
            data = self.file.get(key) or self.file.put(key, blocks, dtype, shape)
            size = int(np.prod(shape))
            self.roundings[names[0]] = Rounding(scheme=scheme, n_weights=size, n_bytes=data.length)
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
        rounding = self.roundings[names[0]] = Rounding(scheme=scheme, moments=self.moments(names[0]))
        for name, rows, block in self._blocks(names):
            try:
                packed = pack(block, scheme, quantizer, moments, self.steps(name, scheme.bits, rows))
                rounding.add(block, packed)
                yield packed
            except ConfigError as error:
                raise SourceError(f"tensor {name}: {error}") from None

    def _blocks(self, names: tuple[str, ...]) -> Iterator[tuple[str, slice, Floats]]:
        for name in names:
            for rows in row_blocks(self.weights.shape(name), BLOCK_BYTES):
                yield name, rows, self.weights.read(name, rows)
