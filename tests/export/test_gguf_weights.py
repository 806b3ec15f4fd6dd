"""GGUF in transformers' terms: names, row order, configuration."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from graphs import rebuild
from tiny import tiny_model
from tiny_gguf import write_gguf
from transformers import PreTrainedModel

from semspec.export.checkpoint import open_checkpoint
from semspec.runtime.errors import SourceError


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(1, 60)[None] % 97).logits
    return found


@pytest.mark.parametrize(
    ("family", "heads"), [("llama", (4, 2)), ("llama", (4, 4)), ("llama", (6, 1)), ("qwen2", (6, 3))], ids=str
)
def test_rotary_row_order_is_undone(tmp_path: Path, family: str, heads: tuple[int, int]) -> None:
    """D23: llama's query and key rows by their own head counts, biases too; qwen2 is not permuted."""
    changes: dict[str, Any] = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    model = tiny_model(family, num_attention_heads=heads[0], num_key_value_heads=heads[1], **changes)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", model))
    weights = model.state_dict()
    assert checkpoint.names() == weights.keys()
    for name in checkpoint.names():
        np.testing.assert_array_equal(checkpoint.read(name), weights[name].numpy(), err_msg=name)
        rows = slice(3, 21)
        np.testing.assert_array_equal(checkpoint.read(name, rows), weights[name].numpy()[rows], err_msg=name)
    torch.testing.assert_close(logits(rebuild(checkpoint)), logits(model), atol=1e-4, rtol=0)


def test_quantized_rows_are_reordered(tmp_path: Path) -> None:
    """D23: blocks are gathered by row before they are de-quantized, and no row is mixed with another."""
    model = tiny_model("llama", hidden_size=64)
    kinds = dict.fromkeys(
        ("blk.0.attn_q.weight", "blk.0.attn_k.weight", "token_embd.weight"), gguf.GGMLQuantizationType.Q8_0
    )
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", model, types=kinds))
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"):
        expected = model.state_dict()[name].numpy()
        found = checkpoint.read(name)
        assert np.abs(found - expected).max() < np.abs(expected).max() / 250
        np.testing.assert_array_equal(checkpoint.read(name, slice(5, 9)), found[5:9])


def test_smollm2_says_paris(smollm2_gguf: Path) -> None:
    """D23 on a real file: with the row order wrong it still writes fluently, but not this."""
    model = rebuild(open_checkpoint(smollm2_gguf))
    ids = torch.tensor([[504, 3575, 282, 4649, 314]])  # "The capital of France is"
    for _ in range(2):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    assert ids[0, 5:].tolist() == [7042, 30]  # " Paris."


def test_configuration_of_a_real_file(smollm2_gguf: Path) -> None:
    """What the published config.json of SmolLM2-135M-Instruct says, from the metadata alone."""
    config = open_checkpoint(smollm2_gguf).config
    assert config["rms_norm_eps"] == pytest.approx(1e-5)
    assert {key: value for key, value in config.items() if key != "rms_norm_eps"} == {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "intermediate_size": 1536,
        "max_position_embeddings": 8192, "rope_theta": 100000.0, "hidden_act": "silu",
        "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
    }  # fmt: skip


def test_all_end_tokens_are_kept(tmp_path: Path) -> None:
    """D21: the end of a turn ends the text as the end of the text does."""

    def keys(writer: gguf.GGUFWriter) -> None:
        writer.add_eos_token_id(2)
        writer.add_eot_token_id(9)
        writer.add_eom_token_id(2)

    config = open_checkpoint(write_gguf(tmp_path / "m.gguf", tiny_model("llama"), keys=keys)).config
    assert config["eos_token_id"] == [2, 9]
    assert "bos_token_id" not in config


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling_is_read(tmp_path: Path, kind: str) -> None:
    """D27: exact at position 0 without it, wrong from there on."""
    scaling = {"rope_type": kind, "factor": 8.0, "original_max_position_embeddings": 32}
    model = tiny_model("llama", rope_scaling=dict(scaling))

    def keys(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(8.0)
        writer.add_rope_scaling_orig_ctx_len(32)

    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", model, keys=keys))
    assert checkpoint.config["rope_scaling"] == scaling
    assert (checkpoint.spec.rope.kind, checkpoint.spec.rope.factor) == (kind, 8.0)
    torch.testing.assert_close(logits(rebuild(checkpoint)), logits(model), atol=1e-4, rtol=0)


def test_llama3_factors_are_read(tmp_path: Path) -> None:
    """D27: GGUF stores llama3's scaling as one factor a frequency."""
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    path = write_gguf(
        tmp_path / "m.gguf",
        tiny_model("llama"),
        edit=lambda tensors: tensors.update({"rope_freqs.weight": factors}),
    )
    checkpoint = open_checkpoint(path)
    assert checkpoint.spec.rope.kind == "factors"
    assert checkpoint.spec.rope.factors == tuple(factors.tolist())
    assert "rope_freqs.weight" not in checkpoint.names()


def test_wrong_number_of_rope_factors(tmp_path: Path) -> None:
    """D27: half the head size, or another model's."""
    path = write_gguf(
        tmp_path / "m.gguf",
        tiny_model("llama"),
        edit=lambda tensors: tensors.update({"rope_freqs.weight": np.ones(16, np.float32)}),
    )
    with pytest.raises(SourceError, match=r"'rope_freqs\.weight' must hold 8 numbers"):
        open_checkpoint(path)


REFUSED: dict[str, tuple[Any, str]] = {
    "value_length": (("llama.attention.value_length", 8), "value_length is 8, but the head size is 16"),
    "rope.dimension_count": (
        ("llama.rope.dimension_count", 8),
        "dimension_count is 8, but the head size is 16",
    ),
    "experts": (("llama.expert_count", 8), "llama.expert_count is 8, which is not supported"),
    "window": (("llama.attention.sliding_window", 4096), "sliding_window is 4096"),
    "soft cap": (("llama.final_logit_softcapping", 30.0), r"softcapping is 30\.0"),
    "rope kind": (
        ("llama.rope.scaling.type", "longrope"),
        "'longrope' is not supported; supported: linear, yarn",
    ),
    "rope factor": (("llama.rope.scaling.type", "linear"), "llama.rope.scaling.factor is missing"),
    "rope key": (("llama.rope.scaling.new_trick", 2.0), "new_trick' is not supported"),
    "split": (("split.count", 3), "one part of a split GGUF"),
    "text for a number": (("llama.embedding_length", "48"), "embedding_length is '48'; it must be one whole"),
    "no number": (("llama.rope.freq_base", math.nan), "freq_base is nan; it must be a number"),
    "odd heads": (("llama.attention.key_length", 15), "is 16, but the head size is 15"),
    "varied heads": (("llama.attention.head_count_kv", [3, 3, 1]), r"is \[3, 3, 1\]; it must be one whole"),
    "family": (("general.architecture", "mamba"), "'mamba' is not supported; supported: llama, qwen2"),
    "missing": (("llama.block_count", None), "key llama.block_count is missing"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_change_the_mathematics_is_refused(tmp_path: Path, case: str) -> None:
    """A key that is read over in silence gives a model that is fluent and wrong."""
    (key, value), message = REFUSED[case]

    def keys(writer: gguf.GGUFWriter) -> None:
        entries = writer.kv_data[0]
        entries.pop(key, None)
        if value is None:
            return
        kind = gguf.GGUFValueType.ARRAY if isinstance(value, list) else gguf.GGUFValueType.get_type(value)
        sub_type = gguf.GGUFValueType.INT32 if isinstance(value, list) else None
        entries[key] = gguf.GGUFValue(value, kind, sub_type)

    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"), keys=keys)
    with pytest.raises(SourceError, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


def test_neutral_and_equal_values_are_accepted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Converters write such keys; a key nobody knows is reported, not dropped in silence."""

    def keys(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop("llama.attention.head_count_kv")
        writer.add_array("llama.attention.head_count_kv", [3, 3, 3])
        writer.add_uint32("llama.expert_count", 0)
        writer.add_uint32("llama.something_new", 7)

    with caplog.at_level(logging.WARNING):
        checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tiny_model("llama"), keys=keys))
    assert checkpoint.spec.n_kv_heads == 3
    assert "'llama.something_new' is not known and not used" in caplog.text


@pytest.mark.parametrize(
    "name", ["blk.0.attn_q_norm.weight", "model.norm.weight", "blk.00.attn_q.weight", "x"]
)
def test_unknown_tensors_are_refused(tmp_path: Path, name: str) -> None:
    """A tensor that is not used means a model that is not understood; a name of transformers is no key."""
    path = write_gguf(
        tmp_path / "m.gguf",
        tiny_model("llama"),
        edit=lambda tensors: tensors.update({name: np.ones(48, np.float32)}),
    )
    with pytest.raises(SourceError, match=f"tensor '{name}' is unknown"):
        open_checkpoint(path)
