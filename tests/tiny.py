"""Tiny random checkpoints, made by transformers, saved as a user would save them.

Initializer range 0.3-0.5: the default 0.02 gives a near-constant arg-max that hides faults.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

COMMON: dict[str, Any] = {
    "vocab_size": 99,  # not a multiple of 32
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,  # unlike hidden_size / heads
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def tiny_model(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random fp32 model of `family` (llama or qwen2) in evaluation mode; biases and norms are not trivial."""
    torch.manual_seed(seed)
    settings = {**COMMON, **changes}
    model: PreTrainedModel
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**settings))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_(0, 0.3)
            elif "norm" in name:
                parameter.uniform_(0.6, 1.4)
    return model.eval()


def save_tiny(
    folder: Path, family: str, seed: int = 0, *, shard: str = "5GB", **changes: Any
) -> PreTrainedModel:
    """Save `tiny_model` as safetensors in `folder` (sharded by `shard`) and return it."""
    model = tiny_model(family, seed, **changes)
    model.save_pretrained(folder, max_shard_size=shard)
    return model
