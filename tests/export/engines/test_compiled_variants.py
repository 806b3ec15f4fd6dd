"""Further forms of the quantized precisions, compiled with TensorRT-RTX: activations in bf16, larger blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import rtx
from engine_cases import WIDE, engine_case

from semspec.export.precisions import PLAIN, PRECISIONS

pytestmark = rtx.needs_rtx

MODEL = "qwen2-yarn-untied"
WIDENED = [row.widened for row in PRECISIONS.values() if row.weights != PLAIN]


@pytest.mark.parametrize("precision", WIDENED)
def test_quantized_graphs_with_wide_activations_compile(tmp_path: Path, precision: str) -> None:
    """Models whose states fp16 does not hold, such as SmolLM2, have no other quantized plan."""
    case = engine_case(tmp_path, MODEL, "native", precision, **WIDE)
    assert case.graph.spec.activation == case.graph.spec.cache == "bfloat16"
    assert rtx.compiled(case.graph.path, case.graph.spec, tmp_path / "plan", rtx.fits(precision)).size > 0


@pytest.mark.parametrize("graph", ["native", "primitive"])
@pytest.mark.parametrize("precision", ["int4/64", "int4/128"])
def test_coarser_blocks_compile(tmp_path: Path, graph: str, precision: str) -> None:
    """For 8.0 alone, which has the kernels of most devices that want them."""
    case = engine_case(tmp_path, MODEL, graph, precision, **WIDE)
    assert rtx.compiled(case.graph.path, case.graph.spec, tmp_path / "plan", ("8.0",)).size > 0
