"""ModelSpec and Rope: valid from birth, or a line that says what is wrong."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from semspec.models.spec import ModelSpec, Rope, UnsupportedModel

SPEC = ModelSpec(
    family="llama",
    vocab_size=99,
    width=48,
    n_layers=30,
    n_heads=6,
    n_kv_heads=3,
    head_size=16,
    ffn_width=80,
    max_positions=256,
    norm_eps=1e-6,
    rope=Rope(),
    tied=False,
)


def test_widths_follow_the_heads() -> None:
    """D28: never width / heads where a head size is given."""
    assert (SPEC.query_width, SPEC.kv_width) == (96, 48)


@pytest.mark.parametrize(
    ("n_layers", "pooled"), [(30, (21, 30)), (24, (17, 24)), (3, (2, 3)), (2, (1, 2)), (1, (1,))]
)
def test_default_pooled_layers(n_layers: int, pooled: tuple[int, ...]) -> None:
    """0.7 of the depth and the last, different from each other, never the embedding."""
    assert dataclasses.replace(SPEC, n_layers=n_layers).default_pooled_layers() == pooled


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_layers": 0}, "n_layers must be at least 1, got 0"),
        ({"vocab_size": -1}, "vocab_size must be at least 1, got -1"),
        ({"n_kv_heads": 4}, "6 query heads cannot be grouped over 4 key heads: not a multiple"),
        ({"head_size": 15}, "head size must be even for rotary positions, got 15"),
        ({"norm_eps": 0.0}, "norm epsilon must be positive, got 0.0"),
        ({"norm_eps": float("nan")}, "norm epsilon must be positive, got nan"),
        ({"activation": "gelu"}, "activation 'gelu' is not supported; supported: silu"),
        (
            {"rope": Rope(kind="factors", factors=(1.0,))},
            "rope factors must be 8, half the head size, got 1",
        ),
    ],
    ids=str,
)
def test_what_no_decoder_can_compute_is_refused(changes: dict[str, Any], message: str) -> None:
    """Better here than as a shape error inside an engine."""
    with pytest.raises(UnsupportedModel, match=f"^{message}$"):
        dataclasses.replace(SPEC, **changes)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "mrope", "ntk", "", 3])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_unknown_rope_scaling_is_refused_by_name(kind: Any, key: str) -> None:
    """D27: an ignored scaling is exact at position 0 and wrong by the end of the prompt."""
    with pytest.raises(UnsupportedModel, match="supported: default, linear, llama3, yarn, factors") as caught:
        Rope.from_config({"rope_scaling": {key: kind, "factor": 2.0}}, 256)
    assert str(caught.value).startswith(f"rope scaling {kind!r} is not supported")


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"factor": 8.0}, "rope scaling None is not supported"),
        ({"rope_type": "linear"}, "rope scaling 'linear' lacks factor"),
        ({"type": "yarn", "factor": None}, "rope scaling 'yarn' lacks factor"),
        (
            {"rope_type": "llama3", "factor": 8.0},
            "rope scaling 'llama3' lacks low_freq_factor, high_freq_factor, original_max_position_embeddings",
        ),
        ({"rope_type": "linear", "factor": 0}, "rope factor must be above 0, got 0.0"),
        ({"rope_type": "linear", "factor": float("inf")}, "rope factor must be above 0, got inf"),
    ],
    ids=str,
)
def test_half_a_rope_scaling_is_refused(scaling: dict[str, Any], message: str) -> None:
    """D27: a default in place of a missing number would be another model."""
    with pytest.raises(UnsupportedModel, match=message):
        Rope.from_config({"rope_scaling": scaling}, 256)


def test_original_context_beside_the_scaling() -> None:
    """Some configurations name it at the top level; the scaling's own comes first."""
    scaling = {"rope_type": "yarn", "factor": 4.0}
    config = {"rope_scaling": scaling, "original_max_position_embeddings": 64}
    assert Rope.from_config(config, 256).original_positions == 64
    config = {**config, "rope_scaling": {**scaling, "original_max_position_embeddings": 32}}
    assert Rope.from_config(config, 256).original_positions == 32
