"""Optimization profiles: which sizes a plan is compiled for. A pure function of a graph's sizes and a few settings.

Two profiles, since one step of a model and a pass over many rows want other kernels: `decode` reads one token,
`block` a review or a piece of a prompt. What a call may not exceed stands in the plan's record, for the runtime.

`decode` is tuned for one row and takes two: fixed at one, weights in fp16 are stored a second time, turned (measured
with TensorRT-RTX 1.7: plans of 1.3 to 1.8 times their weights), and attention has no fused kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from semspec.runtime.contract import GraphSpec
from semspec.runtime.errors import ConfigError
from semspec.runtime.records import TensorSpec

__all__ = ["PROBE_PROFILES", "SPAN", "BuildSizes", "Profile", "Profiles", "input_shapes", "make_profiles"]

Sizes: TypeAlias = tuple[int, int, int]  # least, tuned for, most
Profile: TypeAlias = Mapping[str, Sizes]  # letter -> sizes
Profiles: TypeAlias = Mapping[str, Profile]

SPAN = 256  # cache rows are read in multiples of it
TYPICAL_SPAN = 1024  # kernels are chosen for this many
TYPICAL_BLOCK = 32  # rows of a review
PROBE_PROFILES: Profiles = {"score": {"B": (1, 1, 64)}}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSizes:
    """chunk: most tokens of a pass; longer prompts are read in several. rows: most rows of logits in a pass, which take
    V numbers each in the plan's working memory; longer reviews are read in several. batch: most texts in a pass.
    Raises ConfigError below 1."""

    chunk: int = 512
    rows: int = 128
    batch: int = 1

    def __post_init__(self) -> None:
        for name in ("chunk", "rows", "batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")


def make_profiles(spec: GraphSpec, sizes: BuildSizes) -> Profiles:
    """Profiles `decode` and `block` of a model's graph; a letter that the graph's inputs lack is left out.

    A chunk beyond the context is cut to it, and rows beyond the chunk are cut to that; no past is in range, since
    `past_len` is a number and no shape.
    """
    chunk = min(sizes.chunk, spec.max_context)
    rows = min(sizes.rows, chunk)
    longest = min(-(-spec.max_context // SPAN) * SPAN, spec.capacity)
    span = (min(SPAN, longest), min(TYPICAL_SPAN, longest), longest)
    batch = (1, 1, sizes.batch)
    block = (1, min(TYPICAL_BLOCK, chunk), chunk)
    wanted = (1, min(TYPICAL_BLOCK, rows), rows)
    letters = {size for port in spec.inputs() for size in port.shape if isinstance(size, str)}
    profiles: dict[str, dict[str, Sizes]] = {
        "decode": {"B": batch, "S": (1, 1, min(2, chunk)), "R": (1, 1, min(2, rows)), "T": span},
        "block": {"B": batch, "S": block, "R": wanted, "T": span},
    }
    return {
        name: {letter: sizes for letter, sizes in profile.items() if letter in letters}
        for name, profile in profiles.items()
    }


def input_shapes(
    inputs: Sequence[TensorSpec], profile: Profile
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """Input -> its least, tuned and greatest shape, of every input with a size that a call sets.

    Raises KeyError for a letter that the profile lacks: a bug of ours.
    """

    def at(port: TensorSpec, place: int) -> tuple[int, ...]:
        return tuple(profile[size][place] if isinstance(size, str) else size for size in port.shape)

    return {
        port.name: (at(port, 0), at(port, 1), at(port, 2))
        for port in inputs
        if any(isinstance(size, str) for size in port.shape)
    }
