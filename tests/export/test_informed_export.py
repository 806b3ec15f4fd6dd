"""An export with activation ranges, from the file to the bundle: they are used, for the model they are of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_pairs

from semspec.calibration.ranges import take_ranges
from semspec.calibration.texts import CalibrationText
from semspec.export.checkpoint import open_checkpoint
from semspec.export.packing import Schemes
from semspec.export.pipeline import export_pair
from semspec.export.verify import closeness
from semspec.models.reference import run_reference
from semspec.runtime.backends import open_backend
from semspec.runtime.bundle import Bundle
from semspec.runtime.errors import ConfigError, SourceError
from semspec.runtime.model import CachedModel

IDS = np.random.default_rng(0).integers(0, 260, 100).tolist()


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint, and its ranges over another text than IDS."""
    folder = tmp_path_factory.mktemp("informed")
    # larger random weights are chaos after int4, whatever rounded them
    wide = {"hidden_size": 64, "intermediate_size": 128}
    model = tiny_pairs.save_checkpoint(folder / "model", "qwen2", initializer_range=0.1, **wide)
    return model, ranges_of(model, folder / "ranges")


def ranges_of(model: Path, out: Path) -> Path:
    """Over random ids."""
    windows = tuple(tuple(row) for row in np.random.default_rng(1).integers(0, 260, (4, 120)).tolist())
    text = CalibrationText(windows=windows, sha256="0" * 64)
    take_ranges(open_checkpoint(model), text, out, name="model")
    return out


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


def test_bits_are_mixed_within_the_budget(measured: tuple[Path, Path], tmp_path: Path) -> None:
    """With ranges and nothing else chosen: 4.8 bits a weight; a larger budget is spent, and buys quality."""
    model, ranges = measured
    sizes, divergences = {}, {}
    for bits in (None, 6.5):
        out = tmp_path / str(bits)
        asked = tiny_pairs.request(model, "int4", quantizer="auto", bits_per_weight=bits)
        report = export_pair(asked, None, out, tiny_pairs.settings(ranges=(ranges,), verify="quick"))
        found = report.models["target"]
        read = [own for kind, own in found.weights.items() if kind != "embedding"]
        sizes[bits] = 8 * sum(own.n_bytes for own in read) / sum(own.n_weights for own in read)
        assert found.quality is not None
        divergences[bits] = found.quality.kl
        assert Bundle.open(out).model("target").weights == found.weights
        assert all(own.error_of == "outputs" for own in read)
    assert 4.3 < sizes[None] <= 4.8 < sizes[6.5] <= 6.5
    assert divergences[6.5] < divergences[None]


def test_narrow_rows_take_the_bits_they_need(tmp_path: Path) -> None:
    """The default budget is a wish: rows of 48 are padded to two blocks of 32. A budget of one's own is an order."""
    model = tiny_pairs.save_checkpoint(tmp_path / "model", "qwen2", initializer_range=0.1)
    ranges = tiny_pairs.settings(ranges=(ranges_of(model, tmp_path / "ranges"),))
    asked = tiny_pairs.request(model, "int4", quantizer="auto")
    weights = export_pair(asked, None, tmp_path / "out", ranges).models["target"].weights
    assert all(8 * own.n_bytes / own.n_weights > 4.8 for own in weights.values())
    asked = tiny_pairs.request(model, "int4", quantizer="auto", bits_per_weight=5.0)
    with pytest.raises(ConfigError, match=r"--bits-per-weight 5\.0 is too few: .* take \d\.\d\d; raise"):
        export_pair(asked, None, tmp_path / "out2", ranges)


def test_an_ample_budget_names_its_coarsest_linears(measured: tuple[Path, Path], tmp_path: Path) -> None:
    """Most linears are int8 then; the gate still judges by the int4 ones, and `finer` are those that are finer."""
    model, ranges = measured
    asked = tiny_pairs.request(model, "int4", quantizer="auto", bits_per_weight=7.5)
    export_pair(asked, None, tmp_path / "out", tiny_pairs.settings(ranges=(ranges,)))
    found = Bundle.open(tmp_path / "out").model("target")
    assert found.precision["layers"].startswith("int4") and "int8" in found.precision["finer"]
    int8 = sum(n for own in found.weights.values() for name, n in own.schemes.items() if "int8" in name)
    assert int8 > sum(n for own in found.weights.values() for n in own.schemes.values()) / 2


@pytest.mark.parametrize("bits", [3.9, 9.1, float("nan"), float("inf")])
def test_budgets_that_are_none_are_refused(bits: float) -> None:
    """What no choice of 4 and 8 bits could come near."""
    with pytest.raises(ConfigError, match="--bits-per-weight must be between 4 and 9, got"):
        Schemes.choose(bits_per_weight=bits)


def test_a_budget_excludes_other_choices(measured: tuple[Path, Path], tmp_path: Path) -> None:
    """It chooses them itself, and by ranges only."""
    model, _ = measured
    with pytest.raises(ConfigError, match="leave out --precision, --head-precision and --block-size"):
        tiny_pairs.request(model, "int4", quantizer="auto", bits_per_weight=5.0, block_size=64)
    asked = tiny_pairs.request(model, "int4", quantizer="auto", bits_per_weight=5.0)
    with pytest.raises(ConfigError, match="--bits-per-weight needs the activation ranges"):
        export_pair(asked, None, tmp_path / "out", tiny_pairs.settings())
