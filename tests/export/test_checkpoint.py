"""One reader for all checkpoints: complete before use, honest about the head, the same from every format."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny import save_tiny, tiny_model
from tiny_gguf import write_gguf

from semspec.export.checkpoint import expected_tensors, open_checkpoint
from semspec.runtime.errors import SourceError

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": True}),
    ],
    ids=str,
)
def test_expected_tensors_are_transformers_parameters(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    """The table of names and shapes against the models, and the numbers of safetensors and GGUF."""
    model = save_tiny(tmp_path / "m", family, shard="60KB", **changes)
    parameters = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    for path in (tmp_path / "m", write_gguf(tmp_path / "m.gguf", model)):
        checkpoint = open_checkpoint(path)
        shapes = expected_tensors(checkpoint.spec)
        assert shapes == {name: values.shape for name, values in parameters.items()}
        assert checkpoint.names() == shapes.keys()
        for name, values in parameters.items():
            assert checkpoint.shape(name) == values.shape
            np.testing.assert_array_equal(checkpoint.read(name), values)
            np.testing.assert_array_equal(checkpoint.read(name, slice(4, 7)), values[4:7])


def test_specifications_of_both_formats_agree(tmp_path: Path) -> None:
    """The decoder sees no difference between a folder and its GGUF file."""
    model = save_tiny(tmp_path / "m", "qwen2", rms_norm_eps=2.0**-20)
    folder, file = open_checkpoint(tmp_path / "m"), open_checkpoint(write_gguf(tmp_path / "m.gguf", model))
    assert folder.spec == file.spec
    shared = folder.config.keys() & file.config.keys()
    assert {key: folder.config[key] for key in shared} == {key: file.config[key] for key in shared}


@pytest.mark.parametrize(
    ("flag", "head", "tied", "warns"),
    [
        (True, "none", True, False),
        (False, "none", True, True),
        (None, "none", True, False),
        (True, "equal", True, False),
        (False, "equal", True, True),
        (True, "own", False, True),
        (False, "own", False, False),
        (None, "own", False, False),
    ],
    ids=str,
)
def test_the_tensors_decide_whether_the_head_is_tied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, flag: bool | None, head: str, tied: bool, warns: bool
) -> None:
    """D24: never a fresh head, never the embedding in place of the head that is there."""
    folder = tmp_path / "m"
    save_tiny(folder, "llama", tie_word_embeddings=False)
    tensors = load_file(folder / "model.safetensors")
    own = tensors.pop(HEAD)
    if head != "none":
        tensors[HEAD] = own if head == "own" else tensors[EMBEDDING].copy()
    save_file(tensors, folder / "model.safetensors")
    edit_config(folder, tie_word_embeddings=flag)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.spec.tied is tied
    assert checkpoint.config["tie_word_embeddings"] is tied
    assert (HEAD in checkpoint.names()) is not tied
    assert ("tie_word_embeddings" in caplog.text) is warns
    if tied:
        with pytest.raises(KeyError):
            checkpoint.read(HEAD)
    else:
        np.testing.assert_array_equal(checkpoint.read(HEAD), own)


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_of_a_gguf_file(tmp_path: Path, tied: bool) -> None:
    """D24: GGUF has no flag; output.weight is there or not."""
    model = tiny_model("llama", tie_word_embeddings=tied)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", model))
    assert checkpoint.spec.tied is tied
    if not tied:
        np.testing.assert_array_equal(checkpoint.read(HEAD), model.state_dict()[HEAD].numpy())


def test_the_real_model_is_tied(smollm2_gguf: Path) -> None:
    """D24: 272 tensors, none of them output.weight."""
    checkpoint = open_checkpoint(smollm2_gguf)
    assert checkpoint.spec.tied
    assert len(checkpoint.names()) == 272
    assert checkpoint.sha256() == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def test_buffers_of_old_checkpoints_are_not_weights(tmp_path: Path) -> None:
    """They are computed, and old versions of transformers saved them all the same."""
    save_tiny(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    assert "model.layers.0.self_attn.rotary_emb.inv_freq" not in open_checkpoint(tmp_path).names()


def test_many_problems_are_counted(tmp_path: Path) -> None:
    """D50: a wrong folder is recognized by the first few names, and stays one line."""
    save_tiny(tmp_path, "llama")
    save_file(
        {"a\nb": np.ones(3, np.float32), EMBEDDING: np.ones((9, 9), np.float32)},
        tmp_path / "model.safetensors",
    )
    edit_config(tmp_path, num_hidden_layers=2)
    with pytest.raises(SourceError, match=r"input_layernorm\.weight is missing; .*; and \d+ more$") as caught:
        open_checkpoint(tmp_path)
    assert str(caught.value).isprintable()


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "rwkv"}, "'rwkv' is not supported; supported: llama, qwen2"),
        ({"model_type": ["llama"]}, "is not supported|unhashable"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "already quantized with 'gptq'"),
        ({"quantization_config": {"quant_method": "awq"}}, "already quantized with 'awq'"),
        ({"quantization_config": 3}, "config|int"),
        ({"hidden_size": "wide"}, "wide"),
        ({"hidden_size": None}, "NoneType"),
        ({"hidden_size": float("inf")}, "infinity"),
        ({"num_attention_heads": 0}, "zero|at least 1"),
        ({"num_attention_heads": 0, "head_dim": None}, "zero|at least 1"),
        ({"num_hidden_layers": 10**12}, f"names {10**12} layers, but there are"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "rope scaling 'dynamic' is not supported"),
        ({"rope_scaling": "yarn"}, "config|dictionary|sequence"),
    ],
    ids=str,
)
def test_configurations_that_cannot_be_used(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """D50: whatever a config.json holds, the answer is one line with the path."""
    save_tiny(tmp_path, "llama")
    edit_config(tmp_path, **changes)
    with pytest.raises(SourceError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert str(caught.value).startswith(str(tmp_path))


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"a": 1, "a": 2}', b"\xff\xfe"], ids=repr)
def test_a_broken_config_file(tmp_path: Path, raw: bytes) -> None:
    """D50: cut or overwritten."""
    save_tiny(tmp_path, "llama")
    (tmp_path / "config.json").write_bytes(raw)
    with pytest.raises(SourceError, match=r"config\.json: (is not valid JSON|must hold a JSON object)"):
        open_checkpoint(tmp_path)


def test_paths_that_hold_no_checkpoint(tmp_path: Path) -> None:
    """A mistyped path says so; a file of another kind says what to give."""
    save_tiny(tmp_path / "m", "llama")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "text").write_text("hello, this is text")
    for path, message in {
        tmp_path / "nothing": "no such file or folder",
        tmp_path / "fifo": "not a regular file",
        tmp_path / "text": "not a GGUF file",
        tmp_path / "m" / "model.safetensors": "give the folder",
    }.items():
        with pytest.raises(SourceError, match=re.escape(str(path)) + f".*{message}"):
            open_checkpoint(path)
    (tmp_path / "m" / "config.json").unlink()
    with pytest.raises(SourceError, match=r"config\.json: is missing"):
        open_checkpoint(tmp_path / "m")


def test_digests(tmp_path: Path) -> None:
    """What the manifest records: of one file its own digest, of shards one that any change changes."""
    save_tiny(tmp_path / "one", "llama")
    expected = hashlib.sha256((tmp_path / "one" / "model.safetensors").read_bytes()).hexdigest()
    assert open_checkpoint(tmp_path / "one").sha256() == expected
    save_tiny(tmp_path / "many", "llama", shard="60KB")
    first = open_checkpoint(tmp_path / "many").sha256()
    assert first == open_checkpoint(tmp_path / "many").sha256()
    save_tiny(tmp_path / "many", "llama", seed=1, shard="60KB")
    assert first != open_checkpoint(tmp_path / "many").sha256()
