"""GGUF in transformers' terms: tensor names, the row order of rotary heads, and the keys of a config.json.

Knows how llama.cpp's converter renames and reorders what it writes. Does not know the container (gguf.py)
nor which tensors a decoder needs (checkpoint.py). A key that would change the mathematics and is not
understood is an error; any other unknown key of the architecture is reported in the log.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from semspec.export.gguf import GgufFile, read_header, read_tensor
from semspec.export.rows import Rows, StoredTensor, quoted, read_rows, read_steps
from semspec.models.families import FAMILIES, Family
from semspec.models.spec import ModelSpec
from semspec.runtime.errors import SourceError
from semspec.runtime.records import Floats, Ints

__all__ = ["GgufWeights", "open_gguf_weights"]

_log = logging.getLogger(__name__)

_EMBEDDING = "token_embd.weight"
_ROPE_FACTORS = "rope_freqs.weight"  # becomes part of the configuration

_MODEL_NAMES: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

# Keys (without the architecture) that change the mathematics, and the one value that leaves it as it is.
_NEUTRAL: Mapping[str, float] = {
    "expert_count": 0,
    "attention.sliding_window": 0,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "logit_scale": 1.0,
    "rope.scale_linear": 1.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}
# Keys that are read below, or that only describe.
_KNOWN = frozenset({
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count", "rope.scaling.type",
    "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "expert_used_count", "tensor_data_layout",
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufWeights:
    """One GGUF file as a model. tensors: by transformers' name."""

    file: GgufFile
    family: Family
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.file.path,)

    def read(self, name: str, spec: ModelSpec, rows: Rows) -> Floats:
        """Rows of a tensor in transformers' row order."""
        return read_rows(self.tensors[name], self._in_file(name, spec, rows))

    def steps(self, name: str, spec: ModelSpec, bits: int, rows: Rows) -> Floats | None:
        """See rows.read_steps."""
        return read_steps(self.tensors[name], bits, self._in_file(name, spec, rows))

    def _in_file(self, name: str, spec: ModelSpec, rows: Rows) -> Rows:
        """Where the file has these rows."""
        n_heads = 0
        if self.family.permuted and ".self_attn.q_proj." in name:
            n_heads = spec.n_heads
        elif self.family.permuted and ".self_attn.k_proj." in name:
            n_heads = spec.n_kv_heads
        if not n_heads:
            return rows
        order = _file_rows(n_heads, spec.head_size)
        return order if rows is None else order[rows]


def open_gguf_weights(path: Path) -> GgufWeights:
    """Read the header and translate it.

    Raises SourceError: what gguf.read_header raises, an unknown architecture (the known are listed), a
    missing or contradictory key, one part of a split file.
    """
    file = read_header(path)
    family = _family(file)
    if int(_number(file, "split.count", 1)) > 1:
        raise SourceError(
            f"{path}: is one part of a split GGUF; join the parts with llama-gguf-split --merge"
        )
    _refuse_other_mathematics(file, family)
    tensors = {}
    for name, tensor in file.tensors.items():
        if name != _ROPE_FACTORS:
            tensors[_translate(file, name)] = tensor
    return GgufWeights(file=file, family=family, config=_config(file, family), tensors=tensors)


def _translate(file: GgufFile, name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight. Raises SourceError: unknown name."""
    if match := re.fullmatch(r"blk\.(0|[1-9]\d{0,8})\.(\w+)\.(weight|bias)", name, re.ASCII):
        layer, part, kind = match.groups()
        if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"
    part, _, kind = name.rpartition(".")
    if part in _MODEL_NAMES and kind == "weight":
        return f"{_MODEL_NAMES[part]}.{kind}"
    raise SourceError(f"{file.path}: tensor {quoted(name)} is unknown: not part of any supported model")


def _file_rows(n_heads: int, head_size: int) -> Ints:
    """Row of the file for every row of the model: (n_heads * head_size,).

    llama.cpp's rotary kernel pairs neighbouring rows, transformers pairs row i with row i + D/2 of a head; so
    the converter wrote row (head, part, i) of (n_heads, 2, D/2) to (head, i, part).

    >>> _file_rows(1, 6).tolist()
    [0, 2, 4, 1, 3, 5]
    """
    order = np.arange(n_heads * head_size, dtype=np.int64)
    return order.reshape(n_heads, head_size // 2, 2).swapaxes(1, 2).reshape(-1)


def _family(file: GgufFile) -> Family:
    architecture = file.metadata.get("general.architecture")
    for family in FAMILIES.values():
        if family.gguf == architecture:
            return family
    known = ", ".join(dict.fromkeys(family.gguf for family in FAMILIES.values()))
    raise SourceError(
        f"{file.path}: general.architecture {quoted(architecture)} is not supported; supported: {known}"
    )


def _refuse_other_mathematics(file: GgufFile, family: Family) -> None:
    prefix = f"{family.gguf}."
    for key, value in file.metadata.items():
        if not key.startswith(prefix):
            continue
        short = key.removeprefix(prefix)
        if short in _NEUTRAL and value != _NEUTRAL[short]:
            raise SourceError(
                f"{file.path}: {key} is {quoted(value)}, which is not supported; only {_NEUTRAL[short]} is"
            )
        if short.startswith("rope.scaling.") and short not in _NEUTRAL and short not in _KNOWN:
            raise SourceError(f"{file.path}: key {quoted(key)} is not supported")
        if short not in _NEUTRAL and short not in _KNOWN:
            _log.warning("%s: key %s is not known and not used", file.path, quoted(key))


def _config(file: GgufFile, family: Family) -> dict[str, Any]:
    """The keys of a transformers config.json."""
    arch = family.gguf
    if _EMBEDDING not in file.tensors:
        raise SourceError(f"{file.path}: has no tensor {_EMBEDDING!r}")
    width, n_heads = _count(file, f"{arch}.embedding_length"), _count(file, f"{arch}.attention.head_count")
    head_size = _head_size(file, arch, width, n_heads)
    config: dict[str, Any] = {
        "model_type": family.model_type,
        "vocab_size": file.tensors[_EMBEDDING].shape[0],
        "hidden_size": width,
        "num_hidden_layers": _count(file, f"{arch}.block_count"),
        "num_attention_heads": n_heads,
        "num_key_value_heads": _count(file, f"{arch}.attention.head_count_kv", n_heads),
        "head_dim": head_size,
        "intermediate_size": _count(file, f"{arch}.feed_forward_length"),
        "max_position_embeddings": _count(file, f"{arch}.context_length"),
        "rms_norm_eps": _number(file, f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_theta": _number(file, f"{arch}.rope.freq_base", 10_000.0),
        "hidden_act": "silu",
    }
    if scaling := _rope_scaling(file, arch, head_size):
        config["rope_scaling"] = scaling
    if family.optional_biases:
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    return config | _special_ids(file)


def _head_size(file: GgufFile, arch: str, width: int, n_heads: int) -> int:
    """key_length, or the width shared out; every key that says something about it must agree."""
    head_size = _count(file, f"{arch}.attention.key_length", width // n_heads or 1)
    for key in (f"{arch}.attention.value_length", f"{arch}.rope.dimension_count"):
        if (other := _count(file, key, head_size)) != head_size:
            raise SourceError(
                f"{file.path}: {key} is {other}, but the head size is {head_size}; they must be equal"
            )
    if head_size % 2:
        raise SourceError(f"{file.path}: head size is {head_size}; rotary embedding needs an even one")
    return head_size


def _rope_scaling(file: GgufFile, arch: str, head_size: int) -> dict[str, Any]:
    kind = file.metadata.get(f"{arch}.rope.scaling.type", "none")
    has_factors = _ROPE_FACTORS in file.tensors
    if kind not in ("none", "linear", "yarn"):
        raise SourceError(
            f"{file.path}: {arch}.rope.scaling.type {quoted(kind)} is not supported; supported: linear, yarn"
        )
    if has_factors and kind != "none":
        raise SourceError(
            f"{file.path}: has both {_ROPE_FACTORS!r} and rope scaling {kind!r}; one is supported"
        )
    if has_factors:
        factors = read_tensor(file, _ROPE_FACTORS).reshape(-1)
        if factors.size != head_size // 2 or not (factors > 0).all():
            raise SourceError(f"{file.path}: {_ROPE_FACTORS!r} must hold {head_size // 2} numbers above 0")
        return {"rope_type": "factors", "factors": factors.tolist()}
    if kind == "none":
        return {}
    scaling = {"rope_type": kind, "factor": _number(file, f"{arch}.rope.scaling.factor")}
    original = f"{arch}.rope.scaling.original_context_length"
    if original in file.metadata:
        scaling["original_max_position_embeddings"] = _count(file, original)
    for name in ("beta_fast", "beta_slow"):
        if f"{arch}.rope.scaling.yarn_{name}" in file.metadata:
            scaling[name] = _number(file, f"{arch}.rope.scaling.yarn_{name}")
    return scaling


def _special_ids(file: GgufFile) -> dict[str, Any]:
    """bos, pad, and every id that ends a text or a turn."""

    def ids(*names: str) -> list[int]:
        keys = [f"tokenizer.ggml.{name}_token_id" for name in names]
        return list(dict.fromkeys(int(_number(file, key)) for key in keys if key in file.metadata))

    found = {
        "bos_token_id": ids("bos"),
        "pad_token_id": ids("padding"),
        "eos_token_id": ids("eos", "eot", "eom"),
    }
    return {key: values[0] if len(values) == 1 else values for key, values in found.items() if values}


def _count(file: GgufFile, key: str, default: int | None = None) -> int:
    """A whole number above 0. A list, one a layer, is taken when all its numbers are equal."""
    value = file.metadata.get(key, default)
    if isinstance(value, list) and value and all(item == value[0] for item in value):
        value = value[0]
    if value is None:
        raise SourceError(f"{file.path}: key {key} is missing")
    if type(value) is not int or value < 1:
        raise SourceError(f"{file.path}: {key} is {quoted(value)}; it must be one whole number above 0")
    return value


def _number(file: GgufFile, key: str, default: float | None = None) -> float:
    value = file.metadata.get(key, default)
    if value is None:
        raise SourceError(f"{file.path}: key {key} is missing")
    if type(value) not in (int, float) or not math.isfinite(value):
        raise SourceError(f"{file.path}: {key} is {quoted(value)}; it must be a number")
    return float(value)
