"""An export with activation ranges, from the file to the bundle: they are used, for the model they are of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_pairs

from semspec.calibration.ranges import take_ranges
from semspec.calibration.texts import CalibrationText
from semspec.export.checkpoint import open_checkpoint
from semspec.export.pipeline import export_pair
from semspec.export.verify import closeness
from semspec.models.reference import run_reference
from semspec.runtime.backends import open_backend
from semspec.runtime.bundle import Bundle
from semspec.runtime.errors import SourceError
from semspec.runtime.model import CachedModel

IDS = np.random.default_rng(0).integers(0, 260, 100).tolist()


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint, and its ranges over another text than IDS."""
    folder = tmp_path_factory.mktemp("informed")
    # larger random weights are chaos after int4, whatever rounded them
    model = tiny_pairs.save_checkpoint(folder / "model", "qwen2", initializer_range=0.1)
    windows = tuple(tuple(row) for row in np.random.default_rng(1).integers(0, 260, (4, 120)).tolist())
    text = CalibrationText(windows=windows, sha256="0" * 64)
    take_ranges(open_checkpoint(model), text, folder / "ranges", name="model")
    return model, folder / "ranges"


def kl_of(model: Path, out: Path, quantizer: str, ranges: tuple[Path, ...]) -> float:
    """KL of an int4 export to its checkpoint, after its manifest was held against what was asked for."""
    asked = tiny_pairs.request(model, "int4", quantizer=quantizer)
    export_pair(asked, None, out, tiny_pairs.settings(ranges=ranges))
    bundle = Bundle.open(out, verify=True)
    described = bundle.model("target")
    assert described.precision["quantizer"] == ("gptq" if quantizer == "auto" else quantizer)
    checkpoint = open_checkpoint(model)
    with CachedModel(
        open_backend("cpu"), bundle.graph_file("target", "cpu"), described.graphs["cpu"]
    ) as target:
        logits = target.forward(IDS, rows=range(len(IDS))).logits
        return closeness(run_reference(checkpoint.spec, checkpoint, IDS).logits, logits)[0]


def test_ranges_bring_the_export_nearer_to_its_checkpoint(
    measured: tuple[Path, Path], tmp_path: Path
) -> None:
    """D36: on a text that the ranges are not of; `auto` takes gptq where it gets ranges."""
    model, ranges = measured
    rtn = kl_of(model, tmp_path / "rtn", "rtn", ())
    assert kl_of(model, tmp_path / "auto", "auto", (ranges,)) < 0.9 * rtn


def test_ranges_of_another_model_are_refused(measured: tuple[Path, Path], tmp_path: Path) -> None:
    """By hash, before anything is written."""
    other = tiny_pairs.save_checkpoint(tmp_path / "other", "qwen2", seed=7)
    asked = tiny_pairs.request(other, "int4", quantizer="auto")
    with pytest.raises(SourceError, match="is of another checkpoint"):
        export_pair(asked, None, tmp_path / "out", tiny_pairs.settings(ranges=(measured[1],)))
    assert not (tmp_path / "out").exists()
