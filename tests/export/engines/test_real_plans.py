"""SmolLM2 itself, compiled with TensorRT-RTX in every precision, for every device that runs it. Ten minutes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import rtx
import tiny_pairs
import tiny_probes

from semspec.calibration.ranges import take_ranges
from semspec.calibration.texts import CalibrationText
from semspec.export.checkpoint import open_checkpoint
from semspec.export.engines.build import BuildReport, BuildRequest, build_plans
from semspec.export.pipeline import export_pair
from semspec.export.plan import ExportSettings
from semspec.export.precisions import PLAIN, PRECISIONS
from semspec.runtime.bundle import Bundle, sha256_of
from semspec.runtime.errors import ConfigError

pytestmark = [rtx.needs_rtx, pytest.mark.slow]

MIB = 1 << 20
LAYERS, TABLE = 106_168_320, 28_311_552  # weights of the linears; of the embedding, which is the head
BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "int8": 8, "int8-w8a8": 8, "int4": 4.25, "fp8": 8, "nvfp4": 4.5}
# Most of a plan that is no weights; steps of rounded inputs are part of the kernels, so that no two layers share any.
KERNELS, ROUNDING = {"native": 32 * MIB, "primitive": 58 * MIB}, 34 * MIB


@pytest.fixture(scope="module")
def ranges(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a few words: steps and scales are values, and nothing here depends on them."""
    out = tmp_path_factory.mktemp("ranges") / "smollm2"
    text = CalibrationText(windows=(tuple(range(1000, 1064)),), sha256="0" * 64)
    take_ranges(open_checkpoint(smollm2_gguf), text, out, name="smollm2")
    return out


def export(
    out: Path, gguf: Path, *precisions: str, graphs: tuple[str, ...], ranges: Path | None = None
) -> Path:
    """SmolLM2 as the target and, with two precisions, as its own draft."""
    target, *drafts = (
        replace(tiny_pairs.request(gguf, "int8"), engine=precision) for precision in precisions
    )
    settings = ExportSettings(
        graphs=("cpu", *graphs), max_context=2048, verify="off", ranges=(ranges,) if ranges else ()
    )
    return export_pair(target, drafts[0] if drafts else None, out, settings).path


def build(bundle: Path, capabilities: tuple[str, ...], graph: str | None = None) -> BuildReport:
    return build_plans(bundle, BuildRequest(engine="tensorrt-rtx", capabilities=capabilities, graph=graph))


@pytest.mark.parametrize("name", PRECISIONS)
def test_every_allowed_precision_compiles_to_what_its_weights_take(
    tmp_path: Path, smollm2_gguf: Path, ranges: Path, name: str
) -> None:
    """Sizes follow from the number of weights and their bits; quantized weights that were widened, or a table that is
    kept twice, would not fit in. What was told of the memory before bounds what was taken."""
    row = PRECISIONS[name]
    precision = row.widened if row.weights != PLAIN else name  # fp16 does not hold this model's states
    needed = ranges if row.needs_ranges else None
    bundle = export(tmp_path / "out", smollm2_gguf, precision, graphs=("native", "primitive"), ranges=needed)
    table = 8 if row.weights != PLAIN else BITS[name]
    expected = (LAYERS * BITS[name] + TABLE * table) / 8
    for graph, kernels in KERNELS.items():
        (plan,) = build(bundle, rtx.fits(name), graph).plans
        assert plan.compiled is not None and plan.compiled.peak_bytes < plan.need.build
        assert plan.compiled.weights_bytes == pytest.approx(expected, abs=4 * MIB)
        assert expected < plan.size < expected + kernels + (ROUNDING if row.needs_ranges else 0)
    if rtx.fits(name) != rtx.CAPABILITIES:
        with pytest.raises(ConfigError, match=f"target native is in {name}, which needs compute capability"):
            build(bundle, rtx.CAPABILITIES)


@rtx.needs_turns
def test_a_real_model_compiled_apart_has_the_same_bytes(tmp_path: Path, smollm2_gguf: Path) -> None:
    """As tiny ones in test_build.py, which take a second each; this takes long enough for threads to come and go."""
    found = []
    for name in ("one", "the-other-one"):
        bundle = export(tmp_path / name, smollm2_gguf, "int4+bf16", graphs=("native",))
        found.append([sha256_of(plan.path) for plan in build(bundle, ("8.6",)).plans])
    assert found[0] == found[1] != []


def test_pair_and_probes_compile_and_a_second_build_keeps_the_bytes(
    tmp_path: Path, smollm2_gguf: Path
) -> None:
    """A real pair from checkpoints to plans, and nothing compiled twice."""
    bundle = export(tmp_path / "out", smollm2_gguf, "int8+bf16", "int4+bf16", graphs=("native",))
    spec = Bundle.open(bundle).model("target").graphs["cpu"]
    tiny_probes.add_probes(bundle, layers=spec.pooled_layers[-1:])
    report = build(bundle, ("8.6", "8.9"))
    homes = ["target", "draft", *["probes/1"] * 3]
    assert [plan.home for plan in report.plans if plan.compiled] == homes
    first = {path: (sha256_of(path), path.stat().st_ino) for path in bundle.rglob("*.plan")}
    assert not [plan for plan in build(bundle, ("8.6", "8.9")).plans if plan.compiled]
    assert first == {path: (sha256_of(path), path.stat().st_ino) for path in bundle.rglob("*.plan")}
