"""Families: configurations as transformers writes them, and refusals that name what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import (
    Gemma2Config,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
)

from semspec.models.families import FAMILIES, read_spec
from semspec.models.spec import ModelSpec, Rope, UnsupportedModel

QWEN2 = Qwen2Config(hidden_size=48, num_attention_heads=6, num_key_value_heads=3).to_dict()


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def test_llama_row() -> None:
    """D28: every number and switch from where transformers keeps it."""
    config = LlamaConfig(
        vocab_size=99,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    )
    assert read_spec(config.to_dict()) == ModelSpec(
        family="llama",
        vocab_size=99,
        width=48,
        n_layers=3,
        n_heads=6,
        n_kv_heads=3,
        head_size=16,
        ffn_width=80,
        max_positions=256,
        norm_eps=1e-5,
        rope=Rope(theta=5e5, original_positions=256),
        tied=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
    )


@pytest.mark.parametrize(
    ("config", "biases"),
    [
        (LlamaConfig(), (False, False, False)),
        (LlamaConfig(attention_bias=True), (True, True, False)),
        (LlamaConfig(mlp_bias=True), (False, False, True)),
        (Qwen2Config(), (True, False, False)),
    ],
    ids=["llama", "llama-attention", "llama-mlp", "qwen2"],
)
def test_biases(config: PretrainedConfig, biases: tuple[bool, bool, bool]) -> None:
    """D28: llama's attention_bias includes the output, qwen2's biases are always there and never do."""
    spec = read_spec(config.to_dict())
    assert (spec.qkv_bias, spec.output_bias, spec.mlp_bias) == biases


@pytest.mark.parametrize(
    ("changes", "head_size", "n_kv_heads"),
    [
        ({}, 8, 3),
        ({"head_dim": 16}, 16, 3),
        ({"head_dim": None}, 8, 3),
        ({"num_key_value_heads": None}, 8, 6),
    ],
    ids=str,
)
def test_head_sizes_and_counts_may_be_left_out(
    changes: dict[str, Any], head_size: int, n_kv_heads: int
) -> None:
    """D28: old configurations have neither head_dim nor num_key_value_heads."""
    spec = read_spec({**QWEN2, **changes})
    assert (spec.head_size, spec.n_kv_heads) == (head_size, n_kv_heads)
    lean = without(QWEN2, "head_dim", "num_key_value_heads")
    assert (read_spec(lean).head_size, read_spec(lean).n_kv_heads) == (8, 6)


@pytest.mark.parametrize(
    "config", [MixtralConfig(), Qwen2MoeConfig(), Qwen3Config(), Gemma2Config()], ids=lambda c: c.model_type
)
def test_unknown_families_are_refused_by_name(config: PretrainedConfig) -> None:
    """D28, D50: the name that was found and the names that are known, before any weight is read."""
    known = ", ".join(FAMILIES)
    message = f"^model family '{config.model_type}' is not supported; supported: {known}$"
    with pytest.raises(UnsupportedModel, match=message):
        read_spec(config.to_dict())


@pytest.mark.parametrize("config", [{}, {"model_type": None}, {"model_type": "Llama"}], ids=str)
def test_no_family_at_all(config: dict[str, Any]) -> None:
    """A folder that is no language model."""
    with pytest.raises(UnsupportedModel, match="supported: llama, qwen2"):
        read_spec(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "already quantized with 'gptq'"),
        ({"quantization_config": {}}, "already quantized with 'unknown'"),
        ({"num_local_experts": 8}, "mixture-of-experts models are not supported"),
        ({"use_sliding_window": True}, "use_sliding_window is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic' is not supported"),
        ({"hidden_act": "gelu"}, "activation 'gelu' is not supported"),
    ],
    ids=str,
)
def test_what_changes_the_mathematics_is_refused(changes: dict[str, Any], message: str) -> None:
    """Nothing in a configuration that changes the model is passed over."""
    with pytest.raises(UnsupportedModel, match=message):
        read_spec({**QWEN2, **changes})


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "intermediate_size"]
)
def test_missing_sizes_are_named(key: str) -> None:
    """No size has a default that could be right."""
    with pytest.raises(UnsupportedModel, match=f"^config.json lacks '{key}'$"):
        read_spec(without(QWEN2, key))
