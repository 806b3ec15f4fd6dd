"""Probes trained elsewhere: `semspec-export --target-probe --draft-probe` takes them in, or says why not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import one_line, run
from safetensors.numpy import save_file
from tiny_pairs import refused_export, request, save_checkpoint, settings, tree
from tiny_probes import plain_mlp, rows

from semspec.export.pipeline import export_pair
from semspec.export.plan import ModelRequest
from semspec.export.probe_graph import read_probe_file, run_probe
from semspec.runtime.backends import open_backend
from semspec.runtime.bundle import MANIFEST, Bundle
from semspec.runtime.errors import ConfigError, SourceError
from semspec.runtime.probes import Probes, read_probes

WIDTH = 48
QUICK = ("--precision", "fp32", "--max-context", 128)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints and a probe for each, of another shape; read only."""
    folder = tmp_path_factory.mktemp("sources")
    save_checkpoint(folder / "target")
    save_checkpoint(folder / "draft", "qwen2", num_hidden_layers=2)
    save_file(plain_mlp(WIDTH, 8, 4, 1), folder / "t.safetensors")
    save_file(plain_mlp(WIDTH, 1), folder / "d.safetensors", metadata={"layer": "1"})
    return folder


def with_probe(sources: Path, role: str, file: str) -> ModelRequest:
    return replace(request(sources / role), probe=read_probe_file(sources / file))


def pair(sources: Path) -> tuple[ModelRequest, ModelRequest]:
    return with_probe(sources, "target", "t.safetensors"), with_probe(sources, "draft", "d.safetensors")


def test_the_command_takes_them_in(sources: Path, tmp_path: Path) -> None:
    """Through the gate; inspect shows them, scores are those of the files, and there is no predictor and no risk."""
    files = ("--target-probe", sources / "t.safetensors", "--draft-probe", sources / "d.safetensors")
    models = ("--target", sources / "target", "--draft", sources / "draft", "--probe-layers", "1,-1")
    done = run("semspec-export", *models, *files, *QUICK, "--out", "bundle", cwd=tmp_path)
    assert done.status == 0, done.err
    shown = run("semspec", "inspect", "bundle", cwd=tmp_path).out
    assert "probes: probes/1, trained elsewhere\n" in shown and "reads states 1 of the draft" in shown
    target, draft = rows(2, WIDTH, seed=1), rows(2, WIDTH, seed=2)
    with Probes.open(Bundle.open(tmp_path / "bundle", verify=True), open_backend("cpu", threads=1)) as probes:
        found = probes.ratio_scores(target, draft)
        assert probes.has_ratio and not probes.has_predictor and not probes.set.risks
    for score, states, name in zip(found, (target[1:], draft[:1]), ("t", "d"), strict=True):
        weights = read_probe_file(sources / f"{name}.safetensors").weights
        np.testing.assert_allclose(score, run_probe(weights, states[None])[0], atol=1e-6)


def test_the_manifest_leaves_probes_out(sources: Path, tmp_path: Path) -> None:
    """They come and go with calibration; the bundle without them is the bundle that never had any, byte by byte."""
    layers = settings(pooled_layers=(1, -1))
    plain = export_pair(request(sources / "target"), request(sources / "draft"), tmp_path / "a", layers).path
    probed = export_pair(*pair(sources), tmp_path / "b", layers).path
    again = export_pair(*pair(sources), tmp_path / "c", layers).path
    assert tree(probed) == tree(again)
    own = {f"probes/1/{name}" for name in ("target.onnx", "draft.onnx", "predictor.json")}
    assert {name: data for name, data in tree(probed).items() if name not in own} == tree(plain)
    assert tree(probed).keys() - tree(plain).keys() == own and MANIFEST in tree(plain)
    assert read_probes(Bundle.open(probed)).backend == ""


def test_one_probe_without_the_other_is_refused(sources: Path, tmp_path: Path) -> None:
    """Nothing can be divided by it; said before any work."""
    refused = "give --target-probe and --draft-probe, and both models, or none"
    target, draft = pair(sources)
    alone = replace(draft, probe=None)
    assert refused in refused_export(ConfigError, tmp_path / "x", target, alone)
    assert refused in refused_export(ConfigError, tmp_path / "y", target)
    for arguments in (
        ("--target-probe", sources / "t.safetensors", "--draft", sources / "draft"),
        ("--draft-probe", sources / "d.safetensors"),
        ("--target-probe", sources / "t.safetensors", "--draft-probe", sources / "d.safetensors"),
    ):
        done = run("semspec-export", "--target", sources / "target", *arguments, "--out", "z", cwd=tmp_path)
        assert refused in one_line(done, 2)


def test_a_probe_of_another_model_is_refused(sources: Path, tmp_path: Path) -> None:
    """D44: by its width, by a state that is not pooled, and by one that no model has."""
    target, draft = pair(sources)
    save_file(plain_mlp(32, 1), tmp_path / "narrow.safetensors")
    narrow = replace(target, probe=read_probe_file(tmp_path / "narrow.safetensors"))
    message = refused_export(SourceError, tmp_path / "x", narrow, draft)
    assert "the target's probe reads states of width 32, and target has width 48" in message
    message = refused_export(ConfigError, tmp_path / "y", target, draft, pooled_layers=(0, -1))
    assert (
        "the draft's probe reads state 1, and states 0, 2 of 2 are pooled; name it in --probe-layers"
        in message
    )
    save_file(plain_mlp(WIDTH, 1), tmp_path / "far.safetensors", metadata={"layer": "-9"})
    far = replace(target, probe=read_probe_file(tmp_path / "far.safetensors"))
    assert "reads state -5" in refused_export(ConfigError, tmp_path / "z", far, draft, pooled_layers=(1, -1))


def test_a_probe_that_cannot_be_read_is_one_line(sources: Path, tmp_path: Path) -> None:
    """Before the models are looked at: there are none in these folders."""
    for name in ("empty", "nothing"):
        (tmp_path / name).mkdir()
    (tmp_path / "p.safetensors").write_bytes(b"not safetensors at all, but long enough")
    files = ("--target-probe", "p.safetensors", "--draft-probe", sources / "d.safetensors")
    models = ("--target", "empty", "--draft", "nothing")
    done = run("semspec-export", *models, *files, "--out", "z", cwd=tmp_path)
    assert "p.safetensors: header wants" in one_line(done, 1)
