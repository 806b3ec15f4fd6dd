"""One matrix for embedding and head where a file carries it twice.

GGUF files of tied models often hold the head again, rounded more finely. Storing both would cost the bundle a
fifth of its size for two roundings of the same numbers. Where they are stored unrounded (fp32) both are kept.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from semspec.export.checkpoint import Checkpoint
from semspec.models.decoder import EMBEDDING, HEAD
from semspec.models.ops import Weights
from semspec.models.reference import row_blocks
from semspec.models.spec import ModelSpec
from semspec.runtime.records import Floats

__all__ = ["SAME_MATRIX", "SharedHead", "head_difference"]

# Relative difference below which the two are roundings of one matrix. Measured: 0.04 for Q5_0 against Q8_0,
# 0.07 for Q4_K against Q6_K; matrices that were trained apart differ by more than 1.
SAME_MATRIX = 0.1
BLOCK_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class SharedHead:
    """A checkpoint's weights with the head's matrix, the finer of the two, in place of the embedding's."""

    weights: Checkpoint

    def shape(self, name: str) -> tuple[int, ...]:
        return self.weights.shape(HEAD if name == EMBEDDING else name)

    def read(self, name: str, rows: slice | None = None) -> Floats:
        return self.weights.read(HEAD if name == EMBEDDING else name, rows)

    def steps(self, name: str, bits: int, rows: slice | None = None) -> Floats | None:
        """See Checkpoint.steps."""
        return self.weights.steps(HEAD if name == EMBEDDING else name, bits, rows)

    @staticmethod
    def spec(spec: ModelSpec) -> ModelSpec:
        """The same model, tied."""
        return dataclasses.replace(spec, tied=True)


def head_difference(weights: Weights) -> float:
    """|embedding - head| / |head| over all entries (Frobenius norms), infinite for different shapes.

    Stops early, with the value so far, once a first block is clearly another matrix.
    """
    if weights.shape(EMBEDDING) != weights.shape(HEAD):
        return float("inf")
    apart: Any = 0.0
    size: Any = 0.0
    for rows in row_blocks(weights.shape(HEAD), BLOCK_BYTES):
        head = weights.read(HEAD, rows)
        size += float(np.vdot(head, head))
        head -= weights.read(EMBEDDING, rows)
        apart += float(np.vdot(head, head))
        if apart > size:
            break
    return float(np.sqrt(apart / size)) if size else float("inf")
