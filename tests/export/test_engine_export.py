"""Exports with graphs for TensorRT, from the options to the bundle: what is in it, and what is refused before."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_pairs
from commands import one_line, run
from engine_cases import WIDE, needs_native

from semspec.calibration.ranges import take_ranges
from semspec.calibration.texts import CalibrationText
from semspec.export.checkpoint import open_checkpoint
from semspec.export.pipeline import export_pair
from semspec.runtime.backends import open_backend
from semspec.runtime.bundle import Bundle
from semspec.runtime.errors import ConfigError
from semspec.runtime.model import CachedModel

GRAPHS = ("cpu", "native", "primitive")
IDS = np.random.default_rng(0).integers(0, 260, 40).tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose rows every block size divides."""
    return tiny_pairs.save_checkpoint(tmp_path_factory.mktemp("engines") / "model", "qwen2", **WIDE)


@pytest.fixture(scope="module")
def ranges(model: Path) -> Path:
    """Its ranges, over random ids."""
    windows = tuple(tuple(row) for row in np.random.default_rng(1).integers(0, 260, (3, 90)).tolist())
    take_ranges(
        open_checkpoint(model),
        CalibrationText(windows=windows, sha256="0" * 64),
        model.parent / "r",
        name="m",
    )
    return model.parent / "r"


def export(model: Path, out: Path, precision: str, engine: str | None = None, **changes: Any) -> Bundle:
    """A bundle of one model with all its graphs. changes: of the settings."""
    asked = replace(tiny_pairs.request(model, precision, quantizer="auto"), engine=engine)
    settings = tiny_pairs.settings(**{"graphs": GRAPHS, "hidden_layers": (0, -1), **changes})
    return Bundle.open(export_pair(asked, None, out, settings).path, verify=True)


@pytest.mark.parametrize(
    ("precision", "engine", "said", "with_ranges"),
    [
        ("fp32", None, "fp16", False),
        ("int8", None, "int8", False),
        ("int4", None, "int4/128", False),
        ("int4", None, "int4/128", True),
        ("int8", "int4/32", "int4/32", True),
        ("fp32", "fp32", "fp32", False),
        ("int8", "bf16", "bf16", False),
        ("int8", "int8-w8a8", "int8-w8a8", True),
        ("int4", "fp8", "fp8", True),
        ("fp32", "nvfp4", "nvfp4", True),
    ],
)
def test_bundles_hold_the_graphs_that_were_asked_for(
    tmp_path: Path,
    model: Path,
    ranges: Path,
    precision: str,
    engine: str | None,
    said: str,
    with_ranges: bool,
) -> None:
    """D41: the precision stands beside the graph's name; where the CPU can run them they give the model's answers."""
    bundle = export(model, tmp_path / "out", precision, engine, ranges=(ranges,) if with_ranges else ())
    found = bundle.model("target")
    assert tuple(found.graphs) == GRAPHS
    assert found.precision["native"] == found.precision["primitive"] == said
    quantizer = ("gptq" if with_ranges else "mse") if said.startswith("int4") else None
    assert found.precision.get("engine_quantizer") == quantizer
    activation = {"fp32": "float32", "bf16": "bfloat16"}.get(said, "float16")
    assert {found.graphs[graph].activation for graph in GRAPHS[1:]} == {activation}
    if said in ("bf16", "nvfp4"):
        return
    logits = []
    for graph in ("cpu", "primitive"):
        path = bundle.graph_file("target", graph)
        with CachedModel(open_backend("cpu", threads=1), path, found.graphs[graph]) as opened:
            logits.append(opened.forward(IDS, rows=range(40), hidden=(0, 3)).logits.copy())
    spread = np.abs(logits[0]).mean()
    assert all(np.abs(other - logits[0]).mean() < spread for other in logits[1:])


def test_the_same_export_gives_the_same_bytes(tmp_path: Path, model: Path) -> None:
    """Plans are reused by content, so content must not depend on when it was made."""
    for name in ("one", "other"):
        export(model, tmp_path / name, "int4")
    one, other = (tiny_pairs.tree(tmp_path / name) for name in ("one", "other"))
    assert one == other
    assert "target/onnx/engines.data" in one


@needs_native
def test_the_gate_judges_every_graph(tmp_path: Path, model: Path) -> None:
    """Figures for each in the manifest and on the screen, with what they are of."""
    arguments = ["--target", model, "--out", "out", "--precision", "fp32", "--max-context", 100]
    done = run("semspec-export", *arguments, "--graphs", "cpu,native,primitive", cwd=tmp_path)
    assert done.status == 0, done.err
    assert "native: mean KL" in done.err and "not an engine" in done.err
    quality = json.loads((tmp_path / "out" / "semspec.json").read_text(encoding="utf-8"))["models"]["target"][
        "quality"
    ]
    assert quality["kl"] < 1e-5
    for graph in GRAPHS[1:]:
        assert quality[graph]["kl"] < 1e-3 and quality[graph]["emulated"] is False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--graphs", "cpu,tensorrt"], "graphs must be cpu, and any of cuda, native, primitive behind it"),
        (["--graphs", "native"], "graphs must be cpu, and any of cuda, native, primitive behind it"),
        (
            ["--engine-precision", "fp16"],
            "an engine precision is for the graphs native and primitive: add one",
        ),
        (
            ["--graphs", "cpu,native", "--engine-precision", "int3"],
            "must be one of fp32, fp16, bf16, int8, int8-w8a8",
        ),
        (["--graphs", "cpu,native", "--engine-precision", "int8/64"], "only int4 has a block size"),
        (["--graphs", "cpu,native", "--engine-precision", "int4/16"], "one of 32, 64, 128"),
        (
            ["--graphs", "cpu,native", "--engine-precision", "fp16+bf16"],
            "only a quantized one may be followed by +bf16",
        ),
        (
            ["--graphs", "cpu,native", "--engine-precision", "fp8"],
            "make ranges of this very model with `semspec",
        ),
        (["--graphs", "cpu,primitive", "--engine-precision", "int8-w8a8"], "calibrate --ranges FILE"),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(
    tmp_path: Path, model: Path, options: list[str], message: str
) -> None:
    """D41: in one line, before a download or a weight is read."""
    done = run("semspec-export", "--target", model, "--out", "out", *options, cwd=tmp_path)
    assert message in one_line(done, 2)
    assert not (tmp_path / "out").exists()


def test_rows_that_no_block_divides_are_refused(tmp_path: Path) -> None:
    """By the widths found; the draft's precision may be another than the target's."""
    odd = tiny_pairs.save_checkpoint(tmp_path / "odd", "qwen2", hidden_size=80, intermediate_size=96)
    asked = tiny_pairs.request(odd, "fp32")
    settings = tiny_pairs.settings(graphs=("cpu", "native"))
    with pytest.raises(ConfigError, match=r"no block size divides 80, 96; use int8"):
        export_pair(replace(asked, engine="int4"), None, tmp_path / "out", settings)
    pair = replace(asked, engine="fp16"), replace(asked, engine="int8")
    export_pair(*pair, tmp_path / "out", settings)
    models = Bundle.open(tmp_path / "out").manifest.models
    assert [models[role].precision["native"] for role in ("target", "draft")] == ["fp16", "int8"]
