"""Checkpoints that cannot be exported: one line that names the fault, and nothing left behind.

How each reader finds its faults is told in the tests of the readers; here it is what an export makes of them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_pairs import refused_export, request, save_checkpoint, save_gguf_checkpoint

from semspec.runtime.errors import SourceError


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A llama in shards, a tied qwen2 as GGUF; read only."""
    folder = tmp_path_factory.mktemp("sources")
    return {
        "target": save_checkpoint(folder / "target", "llama", shard="60KB"),
        "draft": save_gguf_checkpoint(folder / "draft.gguf", "qwen2", 1, tie_word_embeddings=True),
    }


def edit_tensors(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return apply


def edit_config(**changes: Any) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return apply


def only_pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04}.")


NORM = "model.norm.weight"
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing tensor": (edit_tensors(lambda t: t.pop(NORM)), f"{NORM} is missing"),
    "wrong shape": (
        edit_tensors(lambda t: t.update({NORM: t[NORM][:-1]})),
        f"{NORM} has shape [47], expected [48]",
    ),
    "unknown tensor": (
        edit_tensors(lambda t: t.update({"model.extra.weight": t[NORM]})),
        "'model.extra.weight' is unknown to family llama",
    ),
    "NaN": (
        edit_tensors(lambda t: t["model.layers.2.mlp.up_proj.weight"].__setitem__((3, 5), np.nan)),
        "'model.layers.2.mlp.up_proj.weight' holds NaN or infinity",
    ),
    "infinite norm": (
        edit_tensors(lambda t: t[NORM].__setitem__(0, np.inf)),
        f"'{NORM}' holds NaN or infinity",
    ),
    "integers": (
        edit_tensors(lambda t: t.update({NORM: t[NORM].astype(np.int32)})),
        f"'{NORM}' has dtype 'I32'; supported: F32, F16, BF16",
    ),
    "only pickled": (only_pickled, "has only pickled weights ('pytorch_model.bin')"),
    "unknown family": (edit_config(model_type="mamba"), "'mamba' is not supported; supported: llama, qwen2"),
    "experts": (edit_config(num_local_experts=8), "mixture-of-experts models are not supported"),
    "already quantized": (
        edit_config(quantization_config={"quant_method": "gptq"}),
        "already quantized with 'gptq'; give the original",
    ),
    "unknown rope": (
        edit_config(rope_scaling={"rope_type": "spiral"}),
        "rope scaling 'spiral' is not supported",
    ),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "no tokenizer": (
        lambda folder: (folder / "tokenizer.json").unlink(),
        "has no tokenizer.json; write one with",
    ),
    "broken tokenizer": (
        lambda folder: (folder / "tokenizer.json").write_text("{}"),
        "tokenizer.json: cannot be used",
    ),
    "cut file": (
        lambda folder: (folder / "model.safetensors").write_bytes(
            (folder / "model.safetensors").read_bytes()[:-4]
        ),
        "the file was cut, get it again",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_a_broken_checkpoint_is_one_line_and_leaves_nothing(
    tmp_path: Path, case: str, precision: str
) -> None:
    """D50, D53, D28: whether it shows in the header or only when the last weight is read."""
    source = save_checkpoint(tmp_path / "tiny")
    broke, message = BROKEN[case]
    broke(source)
    assert message in refused_export(SourceError, tmp_path / "empty", request(source, precision))


def test_a_broken_draft_leaves_nothing_of_the_target(sources: dict[str, Path], tmp_path: Path) -> None:
    """The target is complete on disk when the draft's last weight turns out to be NaN."""
    draft = save_checkpoint(tmp_path / "draft")
    BROKEN["infinite norm"][0](draft)
    message = refused_export(
        SourceError, tmp_path / "empty", request(sources["target"]), draft=request(draft)
    )
    assert str(draft) in message


def test_a_missing_shard_is_named(sources: dict[str, Path], tmp_path: Path) -> None:
    """D50: by its file name."""
    source = Path(shutil.copytree(sources["target"], tmp_path / "tiny"))
    shard = sorted(source.glob("*.safetensors"))[1]
    shard.unlink()
    assert f"{shard}: is missing" in refused_export(SourceError, tmp_path / "empty", request(source))


@pytest.mark.parametrize("share", [0.001, 0.5, 0.999])
def test_a_truncated_gguf_file_is_refused(sources: dict[str, Path], tmp_path: Path, share: float) -> None:
    """In its header, among its tensors, and in the last one."""
    source = Path(shutil.copy(sources["draft"], tmp_path / "cut.gguf"))
    with source.open("r+b") as file:
        file.truncate(int(source.stat().st_size * share))
    assert str(source) in refused_export(SourceError, tmp_path / "empty", request(source))


def test_an_unknown_tensor_type_of_gguf_is_named(tmp_path: Path) -> None:
    """A type of another day: its number or name, and what can be read."""
    kinds = {"blk.0.ffn_down.weight": gguf.GGMLQuantizationType.TQ2_0}
    source = save_gguf_checkpoint(tmp_path / "m.gguf", types=kinds, intermediate_size=256)
    message = refused_export(SourceError, tmp_path / "empty", request(source))
    assert "'blk.0.ffn_down.weight'" in message and "Q4_K" in message


def test_nothing_there_is_one_line(tmp_path: Path) -> None:
    """A mistyped path."""
    message = refused_export(SourceError, tmp_path / "empty", request(tmp_path / "gone"))
    assert message == f"{tmp_path / 'gone'}: no such file or folder"
