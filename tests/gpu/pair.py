"""A tiny random pair as a bundle, made without torch: numpy draws it, the exporter exports it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tiny_tokenizers

from semspec.export.checkpoint import expected_tensors
from semspec.export.packing import Schemes
from semspec.export.pipeline import export_pair
from semspec.export.plan import ExportSettings, ModelRequest
from semspec.export.safetensors_writer import write_safetensors
from semspec.models.families import read_spec

__all__ = ["MAX_CONTEXT", "ROUNDED", "make_pair"]

MAX_CONTEXT = 700  # more than two spans of the cache
STATES = (0, -1)
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 270,  # 260 are tokens of tiny_tokenizers.byte_level
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "eos_token_id": 258,
}
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}</s>{% endfor %}"
DEVIATION = 0.1  # small enough that fp16's steps and four bits are no chaos
DRAFT_NOISE = 0.3  # of the target's deviation: a draft that is often wrong
# precisions that the graphs for ONNX Runtime have too; others are plain in all graphs
ROUNDED = ("int4", "int8")


def make_pair(folder: Path, graph: str, precision: str) -> Path:
    """A bundle in `folder` with the CPU's graph and `graph`, which may be the same one."""
    schemes = Schemes.choose(precision if precision in ROUNDED else "fp32")
    target, draft = (
        ModelRequest(
            path=_save_checkpoint(folder / role, noise),
            name=role,
            source=role,
            schemes=schemes,
            engine=precision,
        )
        for role, noise in (("target", 0.0), ("draft", DRAFT_NOISE))
    )
    settings = ExportSettings(
        graphs=tuple(dict.fromkeys(("cpu", graph))),
        max_context=MAX_CONTEXT,
        hidden_layers=STATES,
        verify="off",  # random weights are no model: what is asked here is whether engines agree
    )
    return export_pair(target, draft, folder / "bundle", settings).path


def _save_checkpoint(folder: Path, noise: float) -> Path:
    rng, other = np.random.default_rng(1), np.random.default_rng(2)
    tensors = {}
    for name, shape in expected_tensors(read_spec(CONFIG)).items():
        drawn = rng.standard_normal(shape, np.float32) + noise * other.standard_normal(shape, np.float32)
        tensors[name] = np.float32(DEVIATION) * drawn + np.float32("norm" in name)
    tiny_tokenizers.save(
        folder, tiny_tokenizers.byte_level(), generation={"eos_token_id": 258}, template=TEMPLATE
    )
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
    return folder
