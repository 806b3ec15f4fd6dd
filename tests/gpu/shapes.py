"""Shapes of models whose speed is worth knowing, and the pairs they make. Sizes are those of public configurations."""

from __future__ import annotations

from collections.abc import Mapping

from semspec.models.spec import ModelSpec, Rope
from semspec.runtime.errors import ConfigError

__all__ = ["PAIRS", "SHAPES", "shape_of"]


def _qwen2(
    n_layers: int, width: int, n_heads: int, n_kv_heads: int, ffn_width: int, vocab_size: int, *, tied: bool
) -> ModelSpec:
    return ModelSpec(
        family="qwen2",
        vocab_size=vocab_size,
        width=width,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_size=width // n_heads,
        ffn_width=ffn_width,
        max_positions=32_768,
        norm_eps=1e-6,
        rope=Rope(theta=1_000_000.0),
        tied=tied,
        qkv_bias=True,
    )


SHAPES: Mapping[str, ModelSpec] = {
    # for trying the script itself: no model has these
    "tiny": _qwen2(4, 128, 4, 2, 256, 512, tied=False),
    "tiny-draft": _qwen2(2, 128, 4, 2, 256, 512, tied=True),
    # Qwen2.5
    "0.5B": _qwen2(24, 896, 14, 2, 4864, 151_936, tied=True),
    "1.5B": _qwen2(28, 1536, 12, 2, 8960, 151_936, tied=True),
    "7B": _qwen2(28, 3584, 28, 4, 18_944, 152_064, tied=False),
    "32B": _qwen2(64, 5120, 40, 8, 27_648, 152_064, tied=False),
}
PAIRS = (
    ("tiny", "tiny-draft"),
    ("1.5B", "0.5B"),
    ("7B", "0.5B"),
    ("7B", "1.5B"),
    ("32B", "0.5B"),
    ("32B", "1.5B"),
)
"""(target, draft)"""


def shape_of(name: str) -> ModelSpec:
    """Raises ConfigError for a name that is not in SHAPES."""
    if name not in SHAPES:
        raise ConfigError(f"shape must be one of {', '.join(SHAPES)}, got {name!r}")
    return SHAPES[name]
