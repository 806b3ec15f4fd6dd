"""The weights behind a bundle: found again, proved the same, and written for peers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_pairs
from safetensors.numpy import load_file

from semspec.calibration.bench.originals import find_original, make_genai_pair, make_hf
from semspec.export.checkpoint import open_checkpoint
from semspec.export.pipeline import export_pair
from semspec.runtime.bundle import Bundle
from semspec.runtime.errors import BundleError, ConfigError


def exported(checkpoint: Path, out: Path) -> Bundle:
    """A bundle that says where it came from."""
    request = replace(tiny_pairs.request(checkpoint), source=str(checkpoint))
    return Bundle.open(export_pair(request, None, out, tiny_pairs.settings()).path)


@pytest.mark.parametrize("tied", [True, False])
def test_the_folder_for_peers_has_the_very_weights(tied: bool, tmp_path: Path) -> None:
    """Bit for bit in fp32, under transformers' names, a tied head once."""
    checkpoint = tiny_pairs.save_checkpoint(tmp_path / "checkpoint", tie_word_embeddings=tied)
    bundle = exported(checkpoint, tmp_path / "bundle")
    folder = make_hf(bundle, "target", tmp_path / "work")
    found, source = load_file(folder / "model.safetensors"), open_checkpoint(checkpoint)
    assert found.keys() == source.names() and ("lm_head.weight" in found) == (not tied)
    for name, array in found.items():
        assert array.dtype == np.float32 and np.array_equal(array, source.read(name))
    config = json.loads((folder / "config.json").read_text("utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"] and config["rope_scaling"]
    for file in bundle.tokenizer.iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes()


def test_a_gguf_file_is_de_quantized(tmp_path: Path) -> None:
    """What the exporter read is what a peer gets: rows in transformers' order."""
    checkpoint = tiny_pairs.save_gguf_checkpoint(tmp_path / "model.gguf")
    folder = make_hf(exported(checkpoint, tmp_path / "bundle"), "target", tmp_path / "work")
    found, source = load_file(folder / "model.safetensors"), open_checkpoint(checkpoint)
    assert all(np.array_equal(array, source.read(name)) for name, array in found.items())


def test_what_was_made_is_made_once(tmp_path: Path) -> None:
    """Reused as it is, also where the checkpoint is gone by now; what a killed run left is removed when it is made."""
    checkpoint = tiny_pairs.save_checkpoint(tmp_path / "checkpoint")
    bundle, work = exported(checkpoint, tmp_path / "bundle"), tmp_path / "work"
    sha256 = bundle.model("target").source["sha256"]
    left = work / sha256[:16] / ".hf.1.partial"
    left.mkdir(parents=True)
    folder = make_hf(bundle, "target", work)
    assert not left.exists()
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    checkpoint.rename(tmp_path / "elsewhere")
    assert make_hf(bundle, "target", work) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_other_weights_are_refused(tmp_path: Path) -> None:
    """The comparison would be of two models, and nobody would know."""
    checkpoint = tiny_pairs.save_checkpoint(tmp_path / "checkpoint")
    bundle = exported(checkpoint, tmp_path / "bundle")
    tiny_pairs.perturb(checkpoint, 0.01)
    with pytest.raises(
        ConfigError, match=r"the weights of the target changed since the export: .* sha256 [0-9a-f]{64}"
    ):
        make_hf(bundle, "target", tmp_path / "work")
    assert not list((tmp_path / "work").rglob("model.safetensors"))


def test_weights_that_are_gone_are_named(tmp_path: Path) -> None:
    """The manifest says where they came from; so does the error."""
    checkpoint = tiny_pairs.save_checkpoint(tmp_path / "checkpoint")
    bundle = exported(checkpoint, tmp_path / "bundle")
    checkpoint.rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=f"no such file or folder: {checkpoint}"):
        find_original(bundle, "target")
    with pytest.raises(BundleError, match="has no draft"):
        find_original(bundle, "draft")


def test_a_recipe_is_known_by_its_hash(smollm2_gguf: Path, smollm2_bundle: Path) -> None:
    """A bundle of a recipe says which file it was, not how to fetch it; peers find it in the cache all the same."""
    assert find_original(Bundle.open(smollm2_bundle), "target").samefile(smollm2_gguf)


def test_two_exports_of_genai_become_one_folder(tmp_path: Path) -> None:
    """genai takes no path that leads out of the folder of its configuration: the models are links in it."""
    for name in ("one", "two"):
        folder = tmp_path / name / "genai-1"
        folder.mkdir(parents=True)
        (folder / "model.onnx").write_text(name, "utf-8")
        model = {"decoder": {"filename": "model.onnx", "head_size": 8}, "vocab_size": 5}
        (folder / "genai_config.json").write_text(json.dumps({"model": model, "search": {}}), "utf-8")
    pair = make_genai_pair(tmp_path / "one" / "genai-1", tmp_path / "two" / "genai-1")
    model = json.loads((pair / "genai_config.json").read_text("utf-8"))["model"]
    assert (pair / model["decoder"]["filename"]).read_text("utf-8") == "one"
    assert (pair / model["draft"]["filename"]).read_text("utf-8") == "two"
    assert make_genai_pair(tmp_path / "one" / "genai-1", tmp_path / "two" / "genai-1") == pair
