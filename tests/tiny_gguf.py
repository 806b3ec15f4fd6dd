"""GGUF files of tiny models, written with gguf-py the way llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from transformers import PreTrainedModel

Floats = npt.NDArray[np.float32]

NAMES: Mapping[str, str] = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permute(weights: Floats, n_heads: int) -> Floats:
    """The converter's reordering of query and key rows for llama's rotary kernel."""
    split = weights.reshape(n_heads, 2, weights.shape[0] // n_heads // 2, *weights.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(weights.shape))


def gguf_name(name: str) -> str:
    """The name llama.cpp gives to a tensor of transformers."""
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[part]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    edit: Callable[[dict[str, Floats]], object] = lambda tensors: None,
    keys: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
    leave_out: tuple[str, ...] = (),
    types: Mapping[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """Write `model` to `path`.

    edit(tensors by GGUF name) and keys(writer) may change what is written; leave_out names standard keys to
    drop; types: GGUF name -> type other than F32.
    """
    config: Any = model.config
    tensors: dict[str, Floats] = {}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = parameter.numpy()
        if config.model_type == "llama" and ".q_proj." in name:
            values = permute(values, config.num_attention_heads)
        if config.model_type == "llama" and ".k_proj." in name:
            values = permute(values, config.num_key_value_heads)
        tensors[gguf_name(name)] = values
    edit(tensors)
    writer = gguf.GGUFWriter(path, config.model_type)
    arch = config.model_type
    for key, value in {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
    }.items():
        if key not in leave_out:
            writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.rope.freq_base", config.rope_theta)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    keys(writer)
    for name, values in tensors.items():
        kind = (types or {}).get(name)
        if kind is None:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
