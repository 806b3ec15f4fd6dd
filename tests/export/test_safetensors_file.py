"""Folders of safetensors: shards that agree with their index, and what must not be opened or run."""

from __future__ import annotations

import json
import os
import pickle
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny import save_tiny

from semspec.export.checkpoint import open_checkpoint
from semspec.export.rows import read_rows
from semspec.export.safetensors_file import INDEX, SINGLE, find_weights, read_safetensors_header
from semspec.runtime.errors import SourceError


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A tiny llama in several shards."""
    folder = tmp_path / "model"
    save_tiny(folder, "llama", shard="60KB")
    assert len(list(folder.glob("*.safetensors"))) >= 3
    return folder


@pytest.fixture
def single(tmp_path: Path) -> Path:
    """A tiny llama in one file."""
    folder = tmp_path / "model"
    save_tiny(folder, "llama")
    return folder


def edit_tensors(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def edit_json(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


def refused(folder: Path, message: str) -> None:
    with pytest.raises(SourceError, match=message) as caught:
        open_checkpoint(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_shards_and_dtypes_are_read_alike(tmp_path: Path, sharded: Path) -> None:
    """Sharded or not, the numbers are the model's; F16 and BF16 become the nearest fp32, which is exact."""
    tensors, paths = find_weights(sharded)
    stored = {name: array for path in paths for name, array in load_file(path).items()}
    assert tensors.keys() == stored.keys()
    for name, array in stored.items():
        np.testing.assert_array_equal(read_rows(tensors[name]), array)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        array = stored["model.norm.weight"].astype(dtype)
        save_file({"w": array}, tmp_path / "other.safetensors")
        found = read_rows(read_safetensors_header(tmp_path / "other.safetensors")["w"])
        np.testing.assert_array_equal(found, array.astype(np.float32))


def test_missing_shard(sharded: Path) -> None:
    """D50: the file is named before anything is exported."""
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    refused(sharded, f"{shard.name}: is missing")


def test_missing_tensor_unknown_tensor_wrong_shape(single: Path) -> None:
    """D50: each is named; the expected shape is told."""
    path = single / SINGLE

    def misshape(tensors: dict[str, Any]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((3, 4), np.float32)

    edit_tensors(path, lambda tensors: tensors.pop("model.layers.2.self_attn.k_proj.weight"))
    refused(single, r"model\.layers\.2\.self_attn\.k_proj\.weight is missing")
    edit_tensors(path, misshape)
    refused(single, r"up_proj\.weight has shape \[3, 4\], expected \[80, 48\]")
    edit_tensors(path, lambda tensors: tensors.update(extra=np.zeros(3, np.float32)))
    refused(single, "'extra' is unknown to family llama")


def test_stale_index(sharded: Path) -> None:
    """D50: an index of another revision lists what is not there, or leaves out what is."""
    shard = sorted(sharded.glob("*.safetensors"))[0]
    edit_json(sharded / INDEX, lambda index: index["weight_map"].update(ghost=shard.name))
    refused(sharded, r"does not agree with .*'ghost' \(only in the index\)")
    edit_json(sharded / INDEX, lambda index: index["weight_map"].pop("ghost"))
    edit_tensors(shard, lambda tensors: tensors.update(extra=np.zeros(3, np.float32)))
    refused(sharded, r"'extra' \(only in the file\)")


def test_index_beside_another_single_file(sharded: Path) -> None:
    """D50: tools disagree on which of the two counts, so neither is guessed."""
    (sharded / SINGLE).write_bytes(sorted(sharded.glob("*.safetensors"))[0].read_bytes())
    refused(sharded, "holds both .* remove the stale one")


@pytest.mark.parametrize("weight_map", [None, {}, [], {"w": 3}], ids=str)
def test_index_without_a_map(sharded: Path, weight_map: object) -> None:
    """D50: an index is checked before it is used."""
    (sharded / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    refused(sharded, "'weight_map' must map")


def test_folders_without_weights(tmp_path: Path, single: Path) -> None:
    """D50, D53: what is missing is said in terms of what is there."""
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(empty, "is an empty folder")
    (single / SINGLE).rename(single / "model-00001-of-00002.safetensors")
    refused(single, f"neither {SINGLE} nor {INDEX}")
    (single / "model-00001-of-00002.safetensors").unlink()
    refused(single, "has no weights")
    (single / "pytorch_model.bin").write_bytes(b"")
    refused(single, r"only pickled weights \('pytorch_model.bin'\).*save_pretrained")
    (single / "model-q4.gguf").write_bytes(b"")
    refused(single, "give the file itself, such as 'model-q4.gguf'")


@pytest.mark.parametrize(
    "name", ["../w", "/etc/passwd", "a/../../w", "..", "", "w\0", "..\\w", "./../w"], ids=repr
)
def test_index_names_files_outside(sharded: Path, name: str) -> None:
    """D51: a weights file of another folder is never opened, not even to look."""
    (sharded.parent / "w").write_bytes(b"secret")
    edit_json(sharded / INDEX, lambda index: index["weight_map"].update({"model.norm.weight": name}))
    opened = record_opens()
    refused(sharded, "leads out of the folder")
    assert all(sharded in path.parents for path in opened())


@pytest.mark.parametrize("kind", ["link", "linked folder", "linked config"])
def test_links_that_lead_outside(sharded: Path, kind: str) -> None:
    """D51: the same by a symbolic link."""
    outside = sharded.parent / "outside"
    outside.mkdir()
    victim = sharded / "config.json" if kind == "linked config" else sorted(sharded.glob("*.safetensors"))[0]
    moved = victim.rename(outside / victim.name)
    if kind == "linked folder":
        (sharded / "sub").symlink_to(outside)
        edit_json(
            sharded / INDEX,
            lambda index: index["weight_map"].update(
                {name: f"sub/{file}" for name, file in index["weight_map"].items() if file == victim.name}
            ),
        )
    else:
        victim.symlink_to(moved)
    opened = record_opens()
    refused(sharded, "is a link that leads out of the folder")
    assert outside not in [path.parent for path in opened()]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["fifo", "folder", "loop"])
def test_weights_that_are_no_files(single: Path, kind: str) -> None:
    """D51: opening a FIFO would wait for ever."""
    path = single / SINGLE
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(path)
    refused(single, "cannot be read|is not a regular file")


def test_links_inside_and_hard_links_are_fine(single: Path) -> None:
    """D51: a hard link cannot be told from a file; a link within the folder stays within."""
    data = single / "data"
    data.mkdir()
    (single / SINGLE).rename(data / "weights")
    os.link(data / "weights", data / "again")
    (single / SINGLE).symlink_to(data / "again")
    open_checkpoint(single)


def test_hub_cache_is_read(tmp_path: Path, single: Path) -> None:
    """The hub's client stores blobs beside snapshots and links them; only that one way out is open."""
    repository = tmp_path / "models--org--name"
    snapshot, blobs = repository / "snapshots" / "0a1b", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in single.iterdir():
        file.rename(blobs / f"sha-{file.name}")
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", f"sha-{file.name}"))
    assert open_checkpoint(snapshot).spec.n_layers == 3
    (repository / "refs").mkdir()
    (blobs / f"sha-{SINGLE}").rename(repository / "refs" / SINGLE)
    (snapshot / SINGLE).unlink()
    (snapshot / SINGLE).symlink_to(repository / "refs" / SINGLE)
    refused(snapshot, "leads out of the folder")


class Bomb:
    """Unpickling it writes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.marker),))


def test_code_and_pickles_never_run(single: Path, caplog: pytest.LogCaptureFixture) -> None:
    """D53: neither auto_map nor a pickle beside, instead of or disguised as the weights."""
    marker = single / "marker"
    (single / "modeling_x.py").write_text(f"import os\nos.mkdir({str(marker)!r})\n")
    edit_json(
        single / "config.json",
        lambda config: config.update(auto_map={"AutoModelForCausalLM": "modeling_x.X"}),
    )
    (single / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(marker)))
    open_checkpoint(single)
    assert "never run" in caplog.text
    for protocol in (0, 2, 4):
        (single / SINGLE).write_bytes(pickle.dumps(Bomb(marker), protocol))
        refused(single, "pickle" if protocol else "not safetensors")
    (single / SINGLE).write_bytes(b"PK\x03\x04" + bytes(60))
    refused(single, "pickle")
    (single / SINGLE).unlink()
    refused(single, "only pickled weights")
    assert not marker.exists()


def test_truncated_file(single: Path) -> None:
    """An interrupted download, cut in the weights, in the header, in its length, to nothing."""
    path = single / SINGLE
    raw = path.read_bytes()
    for n_bytes in (len(raw) - 1, len(raw) // 2, 100, 5, 0):
        path.write_bytes(raw[:n_bytes])
        refused(single, f"ends at {n_bytes}; the file was cut|the file has {n_bytes}: cut")


def entry(**changes: Any) -> bytes:
    return json.dumps({"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **changes}}).encode()


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (entry(dtype="I64"), "'w' has dtype 'I64'; supported: F32, F16, BF16"),
        (entry(dtype=["F32"]), "has dtype"),
        (entry(shape=[2, -2]), "whole numbers"),
        (entry(shape=[1] * 9), "whole numbers"),
        (entry(shape=[1 << 62, 1 << 62]), "takes"),
        (entry(shape=True), "whole numbers"),
        (entry(data_offsets=[16, 0]), "its span is"),
        (entry(data_offsets=[-16, 0]), "whole numbers"),
        (entry(data_offsets=[0, 15]), "its span is"),
        (entry(data_offsets=[1 << 40, (1 << 40) + 16]), "ends at byte"),
        (b'{"w": 3}', "must be an object"),
        (b"[]", "must hold a JSON object, found list"),
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"w": ' + b"9" * 5000 + b"}", "not valid JSON|must be an object"),
        (b'{"w": {}, "w": {}}', "a name appears twice"),
    ],
)
def test_crafted_headers(tmp_path: Path, header: bytes, message: str) -> None:
    """A header is untrusted: nothing is located by numbers that do not fit the file."""
    path = tmp_path / "crafted.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    with pytest.raises(SourceError, match=re.escape(str(path)) + ".*(" + message + ")"):
        read_safetensors_header(path)


def test_a_huge_header_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    """Parsing JSON takes many times its size."""
    path = tmp_path / "huge.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 1 << 26))
        file.truncate(1 << 27)  # sparse
    with pytest.raises(SourceError, match="at most"):
        read_safetensors_header(path)


_opens: list[Path] = []
_hooked = False


def record_opens() -> Callable[[], list[Path]]:
    """Which files Python opens from now on; an audit hook stays for ever, so there is one for all tests."""
    global _hooked
    if not _hooked:
        sys.addaudithook(
            lambda event, args: (
                _opens.append(Path(args[0])) if event == "open" and isinstance(args[0], str | Path) else None
            )
        )
        _hooked = True
    _opens.clear()
    return lambda: list(_opens)
