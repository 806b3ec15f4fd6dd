"""Rotary tables against transformers' own."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from graphs import ROPES
from numpy.testing import assert_allclose, assert_array_equal
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from semspec.models.rope import rope_tables
from semspec.models.spec import Rope
from semspec.runtime.records import Floats

POSITIONS = [0, 31, 33, 200]
HEAD_SIZE = 16

YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 8.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "llama3-narrow": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 2.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": YARN,
    "yarn-attention-factor": {**YARN, "attention_factor": 1.7},
    "yarn-mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn-one-mscale": {**YARN, "mscale": 0.7},
    "yarn-betas": {**YARN, "beta_fast": 4, "beta_slow": 0.5},
    "yarn-untruncated": {**YARN, "truncate": False},
    "yarn-without-original": {"rope_type": "yarn", "factor": 4.0},
    "yarn-no-ramp": {**YARN, "original_max_position_embeddings": 6, "beta_fast": 2, "beta_slow": 1},
    "yarn-shrinks": {**YARN, "factor": 0.5},
}


def theirs(scaling: dict[str, Any], head_size: int = HEAD_SIZE) -> tuple[Floats, Floats]:
    """Cosines and sines of transformers at POSITIONS."""
    config = LlamaConfig(head_dim=head_size, max_position_embeddings=256, rope_scaling=dict(scaling))
    frequencies, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    angles = np.outer(POSITIONS, frequencies.double().numpy())
    return np.cos(angles) * factor, np.sin(angles) * factor


def ours(scaling: dict[str, Any] | None, head_size: int = HEAD_SIZE) -> tuple[Floats, Floats]:
    rope = Rope.from_config({"rope_scaling": scaling}, max_positions=256)
    cos, sin = rope_tables(rope, head_size, 201)
    return cos[POSITIONS], sin[POSITIONS]


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("head_size", [16, 64, 128])
def test_tables_are_those_of_transformers(scaling: dict[str, Any], head_size: int) -> None:
    """D27: every scaling with every number it may carry, at the context's edges and beyond them."""
    for found, expected in zip(ours(scaling, head_size), theirs(scaling, head_size), strict=True):
        assert_allclose(found, expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_scaling_matters_at_every_position_but_the_first(kind: str) -> None:
    """D27: the comparison above would not mean anything if the scalings were nothing."""
    plain, scaled = ours(None)[1], ours(ROPES[kind])[1]
    assert_allclose(scaled[0], 0)
    assert (np.abs(scaled - plain).max(axis=-1)[1:] > 0.1).all()


def test_yarn_raises_the_attention() -> None:
    """D27: yarn's attention factor is in the tables, 0.1 ln(8) + 1 in both, so scores carry its square."""
    assert_allclose(ours(ROPES["yarn"])[0][0], 0.1 * np.log(8) + 1, rtol=1e-6)


def test_plain_tables_by_hand() -> None:
    """Plane i of D = 4 turns by position / 100^(i / 2)."""
    cos, sin = rope_tables(Rope(theta=100.0), 4, 3)
    assert cos.dtype == sin.dtype == np.float32
    assert_allclose(cos, np.cos([[0, 0], [1, 0.1], [2, 0.2]]), rtol=1e-6)
    assert_allclose(sin, np.sin([[0, 0], [1, 0.1], [2, 0.2]]), rtol=1e-6)


def test_factors_are_llama3_written_out() -> None:
    """GGUF has no llama3: its converter stores plain / scaled for each plane. Both forms give one table."""
    llama3 = Rope.from_config({"rope_scaling": SCALINGS["llama3"]}, 256)
    config = LlamaConfig(head_dim=HEAD_SIZE, rope_scaling=dict(SCALINGS["llama3"]))
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / 10_000.0 ** (np.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)
    written = Rope(kind="factors", factors=tuple((plain / scaled.double().numpy()).tolist()))
    for one, other in zip(
        rope_tables(llama3, HEAD_SIZE, 201), rope_tables(written, HEAD_SIZE, 201), strict=True
    ):
        assert_allclose(one, other, rtol=0, atol=5e-5)


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_spellings_of_the_key_are_one(kind: str) -> None:
    """D27: `type` (old), `rope_type`, and the newer rope_parameters with the base inside."""
    scaling = ROPES[kind]
    assert scaling is not None
    old = {("type" if key == "rope_type" else key): value for key, value in scaling.items()}
    expected = Rope.from_config({"rope_theta": 5e5, "rope_scaling": scaling}, 256)
    assert (expected.kind, expected.factor, expected.theta) == (kind, 8.0, 5e5)
    assert Rope.from_config({"rope_theta": 5e5, "rope_scaling": old}, 256) == expected
    assert Rope.from_config({"rope_parameters": {**scaling, "rope_theta": 5e5}}, 256) == expected


@pytest.mark.parametrize(
    "config",
    [{}, {"rope_scaling": None}, {"rope_scaling": {}}, {"rope_parameters": {"rope_theta": 10_000.0}}],
    ids=str,
)
def test_no_scaling_is_none(config: dict[str, Any]) -> None:
    """Every way in which configurations say nothing; original_positions is what yarn would start from."""
    assert Rope.from_config(config, 256) == Rope(original_positions=256)


def test_tables_do_not_depend_on_how_many_are_made() -> None:
    """A graph with a longer context must rotate as one with a shorter."""
    rope = dataclasses.replace(Rope.from_config({"rope_scaling": YARN}, 256), theta=1e6)
    for short, long in zip(rope_tables(rope, 64, 10), rope_tables(rope, 64, 300), strict=True):
        assert_array_equal(short, long[:10])
