"""Every precision of every graph, compiled with TensorRT-RTX where it is allowed, refused where it is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import rtx
from engine_cases import WIDE, engine_case

from semspec.export.engines.capability import PRECISIONS
from semspec.runtime.errors import ConfigError

pytestmark = rtx.needs_rtx

MODEL = "qwen2-yarn-untied"
GRAPHS = pytest.mark.parametrize("graph", ["native", "primitive"])


@GRAPHS
@pytest.mark.parametrize("precision", PRECISIONS)
def test_exported_graphs_compile_in_every_allowed_precision(
    tmp_path: Path, graph: str, precision: str
) -> None:
    """One plan for all devices of the list fails where a single one of them refuses."""
    case = engine_case(tmp_path, MODEL, graph, precision, **WIDE)
    plan = rtx.compiled(case.graph.path, case.graph.spec, tmp_path / "plan", rtx.fits(precision))
    assert plan.size == (tmp_path / "plan").stat().st_size > plan.weights_bytes
    assert plan.n_attentions == (case.spec.n_layers if graph == "native" else 0)


@pytest.mark.parametrize(
    ("precision", "capability", "least"),
    [("fp8", "8.0", "8.9"), ("fp8", "8.6", "8.9"), ("nvfp4", "8.6", "12.0"), ("nvfp4", "8.9", "12.0")],
)
def test_table_and_compiler_refuse_the_same(
    tmp_path: Path, precision: str, capability: str, least: str
) -> None:
    """A table that refuses what would work is as wrong as one that lets through what cannot (D41)."""
    case = engine_case(tmp_path, MODEL, "native", precision, **WIDE)
    said = rtx.compiler_says(case.graph.path, case.graph.spec, capability)
    assert f"Cannot compile for target(s) sm{capability.replace('.', '')}" in said
    with pytest.raises(ConfigError, match=f"{precision}, which needs compute capability {least} or above"):
        rtx.compiled(case.graph.path, case.graph.spec, tmp_path / "plan", (capability,))
    assert not (tmp_path / "plan").exists()


def test_nothing_of_ours_compiles_below_8_0(tmp_path: Path) -> None:
    """The pooled sum is a product in fp32, so the table has no row for Turing."""
    case = engine_case(tmp_path, MODEL, "native", "fp16", **WIDE)
    assert "FP32 GEMM is not supported" in rtx.compiler_says(case.graph.path, case.graph.spec, "7.5")
