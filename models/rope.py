"""Rotary tables: cosines and sines for every position, with the scalings of spec.Rope applied."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from semspec.models.spec import Rope

__all__ = ["rope_tables"]

Doubles = npt.NDArray[np.float64]


def rope_tables(
    rope: Rope, head_size: int, n_positions: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Cosines and sines, each (n_positions, D/2), in the half-split order of transformers.

    yarn's attention factor is multiplied into both, so scores need nothing more.
    Source of the scalings: the llama 3 release and the YaRN paper (arXiv 2309.00071), as in transformers.
    """
    frequencies = _frequencies(rope, head_size)
    angles = np.arange(n_positions, dtype=np.float64)[:, None] * frequencies[None, :]
    factor = _attention_factor(rope)
    return (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(np.float32)


def _frequencies(rope: Rope, head_size: int) -> Doubles:
    """Radians per position of each of the D/2 planes."""
    plain: Doubles = 1.0 / rope.theta ** (np.arange(0, head_size, 2, dtype=np.float64) / head_size)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain, head_size)
    if rope.kind == "factors":
        return plain / np.asarray(rope.factors, np.float64)
    return plain


def _llama3(rope: Rope, plain: Doubles) -> Doubles:
    """Slow planes are divided by `factor`, fast ones kept, those between interpolated."""
    wavelengths = 2 * math.pi / plain
    turns = rope.original_positions / wavelengths  # full turns over the original context
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return kept * plain + (1 - kept) * plain / rope.factor


def _yarn(rope: Rope, plain: Doubles, head_size: int) -> Doubles:
    """Planes below the ramp are kept, above it divided by `factor`; the ramp runs between two turn counts."""

    def plane_of(turns: float) -> float:
        wavelength = rope.original_positions / (turns * 2 * math.pi)
        return head_size * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = plane_of(rope.beta_fast), plane_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    planes = np.arange(head_size // 2, dtype=np.float64)
    interpolated = np.clip((planes - low) / ((high - low) or 0.001), 0.0, 1.0)
    return (1 - interpolated) * plain + interpolated * plain / rope.factor


def _attention_factor(rope: Rope) -> float:
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
