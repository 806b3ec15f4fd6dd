"""Asks the processor, in the graph itself: does a row alone get the bits it gets beside another?

onnxruntime has kernels for one row and for several. In int4 with blocks of 32 they round alike where there is
AVX-512, and not where there is only AVX2 (measured). A bundle goes from one to the other, so the question goes with it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from semspec.export.quantize import Scheme
from semspec.export.writer import DTYPES, MICROSOFT, GraphBuilder

__all__ = ["INT8_ACTIVATIONS", "LoneRow"]

INT8_ACTIVATIONS = 4  # accuracy level of MatMulNBits: activations are rounded to int8 block by block
N_READ, N_SUMS = (
    256,
    32,
)  # a product too small to be felt, with too many sums for all to round alike by chance


class LoneRow:
    """The question's nodes in one graph, for each kind of weights once."""

    def __init__(self, builder: GraphBuilder) -> None:
        self.builder = builder
        self._rows: tuple[str, str] | None = None
        self._kinds: dict[str, str] = {}

    def differs(self, schemes: Iterable[Scheme], name: str) -> str:
        """`name`, int64 (1,): 1 where products in one of `schemes`, which are in blocks, round a lone row otherwise.

        A product of one row and the same of that row twice are compared to the bit, in every pass (0.09 ms on
        a 2.0 GHz core with AVX2).
        """
        kinds = dict.fromkeys(self._kind(scheme) for scheme in schemes)
        return self.builder.node("Max", list(kinds), name)

    def _kind(self, scheme: Scheme) -> str:
        """int64 (1,): the answer for one kind of weights."""
        kind = f"lone.int{scheme.bits}.{scheme.block_size}{'.symmetric' if scheme.symmetric else ''}"
        if kind not in self._kinds:
            node, weights = self.builder.node, self._weights(scheme, kind)
            settings = {
                "bits": scheme.bits,
                "block_size": scheme.block_size,
                "accuracy_level": INT8_ACTIVATIONS,
            }
            sums = [
                node(
                    "MatMulNBits",
                    [rows, *weights],
                    f"{kind}.{rows}",
                    domain=MICROSOFT,
                    N=N_SUMS,
                    K=N_READ,
                    **settings,
                )
                for rows in self._one_and_two()
            ]
            unequal = node("Not", [node("Equal", sums, f"{kind}.equal")], f"{kind}.unequal")
            flags = node("Cast", [unequal], f"{kind}.flags", to=DTYPES["int64"])
            most = node("ReduceMax", [flags], f"{kind}.most", keepdims=0)
            shape = self.builder.constant("1", np.array([1], np.int64))
            self._kinds[kind] = node("Reshape", [most, shape], f"{kind}.differs")
        return self._kinds[kind]

    def _weights(self, scheme: Scheme, kind: str) -> list[str]:
        """Codes, scales and zero points by chance, always the same."""
        chance, constant, n_blocks = (
            np.random.default_rng(0),
            self.builder.constant,
            N_READ // scheme.block_size,
        )
        width = scheme.block_size * scheme.bits // 8
        codes = chance.integers(256, size=(N_SUMS, n_blocks, width), dtype=np.uint8)
        scales = chance.random(N_SUMS * n_blocks, np.float32)
        names = [constant(f"{kind}.codes", codes), constant(f"{kind}.scales", scales)]
        if scheme.bits == 4 and not scheme.symmetric:
            zeros = chance.integers(256, size=N_SUMS * -(-n_blocks // 2), dtype=np.uint8)
            names.append(constant(f"{kind}.zero_points", zeros))
        return names

    def _one_and_two(self) -> tuple[str, str]:
        """A row, and the row twice. Both hang on an input: what does not is computed when the graph is opened, by other
        kernels."""
        if self._rows is None:
            node, constant = self.builder.node, self.builder.constant
            row = constant("lone.row", np.random.default_rng(1).standard_normal((1, N_READ), np.float32))
            first = node("Min", ["spare", constant("0", np.array([0], np.int64))], "lone.first")
            twice = node("Concat", [first, first], "lone.twice", axis=0)
            self._rows = node("Gather", [row, first], "one"), node("Gather", [row, twice], "two")
        return self._rows
