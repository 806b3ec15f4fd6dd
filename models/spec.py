"""ModelSpec: everything the decoder must know about one model, as one frozen record.

It knows shapes and switches, not weights. `ModelSpec.from_config` reads the keys of a transformers
`config.json`; GGUF metadata is brought into the same form first (families.py), so there is one reader.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["ModelSpec", "Rope", "UnsupportedModel"]

# kind -> the keys of rope_scaling without which it means nothing
ROPE_KINDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
    "factors": ("factors",),
}


class UnsupportedModel(ValueError):
    """The configuration describes a model that semspec does not know; the message lists what it knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding: base and scaling.

    kind: `default`, `linear`, `llama3`, `yarn` as in transformers' rope_scaling; `factors` divides each of
    the D/2 frequencies by its own factor (how GGUF stores llama3).
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    original_positions: int = 0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("theta", "factor"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise UnsupportedModel(f"rope {name} must be above 0, got {getattr(self, name)}")

    @classmethod
    def from_config(cls, config: Mapping[str, Any], max_positions: int) -> Rope:
        """Read rope_theta with rope_scaling (keys `type` or `rope_type`), or the newer rope_parameters.

        Raises UnsupportedModel for a kind that is not in ROPE_KINDS, and for one that lacks its numbers.
        """
        nested = config.get("rope_parameters")
        given = nested or config.get("rope_scaling") or {}
        scaling = {
            "original_max_position_embeddings": config.get("original_max_position_embeddings"),
            **given,
        }
        theta = float(scaling.get("rope_theta", config.get("rope_theta", 10_000.0)))
        # a rope_scaling that names no kind is a fault; rope_parameters are written for unscaled models too
        kind: Any = given.get("rope_type", given.get("type", None if given and not nested else "default"))
        if kind not in ROPE_KINDS:
            raise UnsupportedModel(
                f"rope scaling {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}"
            )
        lacking = [key for key in ROPE_KINDS[kind] if scaling.get(key) is None]
        if lacking:
            raise UnsupportedModel(f"rope scaling {kind!r} lacks {', '.join(lacking)}")
        optional = {
            key: scaling[key] for key in ("attention_factor", "mscale", "mscale_all_dim") if key in scaling
        }
        return cls(
            theta=theta,
            kind=kind,
            factor=float(scaling.get("factor", 1.0)),
            original_positions=int(scaling["original_max_position_embeddings"] or max_positions),
            low_frequency_factor=float(scaling.get("low_freq_factor", 1.0)),
            high_frequency_factor=float(scaling.get("high_freq_factor", 4.0)),
            beta_fast=float(scaling.get("beta_fast") or 32.0),
            beta_slow=float(scaling.get("beta_slow") or 1.0),
            truncate=bool(scaling.get("truncate", True)),
            factors=tuple(float(value) for value in scaling.get("factors", ())),
            **optional,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One decoder-only model. Letters as in runtime/records.py: V, E, L, H, D."""

    family: str
    vocab_size: int  # V, rows of the embedding, padding included
    width: int  # E
    n_layers: int  # L
    n_heads: int
    n_kv_heads: int  # H
    head_size: int  # D
    ffn_width: int
    max_positions: int
    norm_eps: float
    rope: Rope
    tied: bool  # the head is the embedding
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "n_layers", "n_heads", "n_kv_heads", "head_size", "ffn_width"):
            if getattr(self, name) < 1:
                raise UnsupportedModel(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.n_heads % self.n_kv_heads:
            raise UnsupportedModel(
                f"{self.n_heads} query heads cannot be grouped over {self.n_kv_heads} key heads: not a multiple"
            )
        if self.head_size % 2:
            raise UnsupportedModel(f"head size must be even for rotary positions, got {self.head_size}")
        if self.rope.kind == "factors" and len(self.rope.factors) != self.head_size // 2:
            raise UnsupportedModel(
                f"rope factors must be {self.head_size // 2}, half the head size, got {len(self.rope.factors)}"
            )
        if not (math.isfinite(self.norm_eps) and self.norm_eps > 0):
            raise UnsupportedModel(f"norm epsilon must be positive, got {self.norm_eps}")
        if self.activation != "silu":
            raise UnsupportedModel(f"activation {self.activation!r} is not supported; supported: silu")

    @property
    def query_width(self) -> int:
        """Columns of all query heads together: n_heads * D."""
        return self.n_heads * self.head_size

    @property
    def kv_width(self) -> int:
        """Columns of all key heads together: H * D."""
        return self.n_kv_heads * self.head_size

    def default_pooled_layers(self) -> tuple[int, ...]:
        """State indices pooled unless asked otherwise: 0.7 of the depth, and the last (after the final norm).

        Source: the pilot's best layer (later layers carry the meaning) beside the paper's choice.
        """
        middle = max(1, min(self.n_layers - 1, round(0.7 * self.n_layers)))
        return (middle, self.n_layers) if middle < self.n_layers else (self.n_layers,)
