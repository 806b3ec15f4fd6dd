"""Families: one row each. A new family is a row here, plus an operation where its mathematics differs.

A row says which weights exist beyond the common ones and how GGUF files of the family are written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from semspec.models.spec import ModelSpec, Rope, UnsupportedModel

__all__ = ["FAMILIES", "Family", "read_spec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What distinguishes one family.

    model_type: in config.json; gguf: `general.architecture`. permuted: llama.cpp stores the query and key
    rows of this family in another order for its rotary kernel (undone when read).
    """

    model_type: str
    gguf: str
    permuted: bool = False
    qkv_bias: bool = False  # always, or only when the configuration's attention_bias says so
    optional_biases: bool = False  # attention_bias and mlp_bias in the configuration count


FAMILIES: Mapping[str, Family] = {
    row.model_type: row
    for row in (
        Family(model_type="llama", gguf="llama", permuted=True, optional_biases=True),
        Family(model_type="qwen2", gguf="qwen2", qkv_bias=True),
    )
}


def read_spec(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec from the keys of a config.json.

    Raises UnsupportedModel: unknown family (the known are listed), a mixture of experts, sliding windows in
    use, quantized weights of another tool, a missing or unusable key.
    """
    family = _family(config)
    _refuse_unsupported(config)
    try:
        width, n_heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        n_layers, vocab_size = int(config["num_hidden_layers"]), int(config["vocab_size"])
        ffn_width = int(config["intermediate_size"])
    except KeyError as missing:
        raise UnsupportedModel(f"config.json lacks {missing.args[0]!r}") from None
    max_positions = int(config.get("max_position_embeddings") or 2048)
    attention_bias = family.optional_biases and bool(config.get("attention_bias", False))
    return ModelSpec(
        family=family.model_type,
        vocab_size=vocab_size,
        width=width,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=int(config.get("num_key_value_heads") or n_heads),
        head_size=int(config.get("head_dim") or width // n_heads),
        ffn_width=ffn_width,
        max_positions=max_positions,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=Rope.from_config(config, max_positions),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias or attention_bias,
        output_bias=attention_bias,
        mlp_bias=family.optional_biases and bool(config.get("mlp_bias", False)),
        activation=str(config.get("hidden_act", "silu")),
    )


def _family(config: Mapping[str, Any]) -> Family:
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise UnsupportedModel(
            f"model family {model_type!r} is not supported; supported: {', '.join(FAMILIES)}"
        )
    return FAMILIES[str(model_type)]


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    if "quantization_config" in config:
        method = dict(config["quantization_config"] or {}).get("quant_method", "unknown")
        raise UnsupportedModel(
            f"the checkpoint is already quantized with {method!r}; give the original fp16/bf16 weights or a GGUF file"
        )
    if config.get("num_local_experts") or config.get("num_experts"):
        raise UnsupportedModel("mixture-of-experts models are not supported; give a dense model")
    if config.get("use_sliding_window"):
        raise UnsupportedModel(
            "use_sliding_window is not supported for this family; set it to false to export"
        )
    if float(config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UnsupportedModel("partial_rotary_factor other than 1 is not supported")
