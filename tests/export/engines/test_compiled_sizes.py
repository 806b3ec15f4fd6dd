"""What plans weigh: a quantized one is smaller by what quantization saves, and nothing is stored twice."""

from __future__ import annotations

from pathlib import Path

import pytest
import rtx
from engine_cases import WIDE, EngineCase, engine_case

from semspec.export.engine_graphs import ENGINE_DATA
from semspec.export.engines.compiler import Compiled

pytestmark = rtx.needs_rtx

MODEL = "qwen2-yarn-untied"
# Matrices that outweigh the kernels of a plan: 13 million weights in three layers.
HEAVY = {**WIDE, "hidden_size": 512, "intermediate_size": 2048, "head_dim": 64}
HEAVY |= {"num_attention_heads": 8, "num_key_value_heads": 8}


@pytest.fixture(scope="module")
def heavy(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """The plan of the heavy model in fp16."""
    folder = tmp_path_factory.mktemp("heavy")
    case = engine_case(folder, MODEL, "native", "fp16", **HEAVY)
    return rtx.compiled(case.graph.path, case.graph.spec, folder / "plan", ("12.0",))


@pytest.mark.parametrize("precision", ["int8", "int8-w8a8", "int4/32", "int4/64", "int4/128", "fp8", "nvfp4"])
def test_quantized_plans_are_smaller_by_what_quantization_saves(
    tmp_path: Path, heavy: Compiled, precision: str
) -> None:
    """A form that is accepted and widened again at build time saves no memory and says nothing."""
    case: EngineCase = engine_case(tmp_path, MODEL, "native", precision, **HEAVY)
    plan = rtx.compiled(case.graph.path, case.graph.spec, tmp_path / "plan", ("12.0",))
    saved = heavy.weights_bytes - plan.weights_bytes
    assert saved > (10 << 20)
    assert heavy.size - plan.size == pytest.approx(saved, abs=6 << 20)


def test_fp16_weights_are_stored_once(heavy: Compiled) -> None:
    """Two profiles share them, as long as neither is fixed at one row."""
    assert heavy.size < heavy.weights_bytes + (16 << 20)


def test_embedding_and_tied_head_are_one_table(tmp_path: Path) -> None:
    """Of a small model with many words the table is the most, and in fp16 it would be twice the head's codes again."""
    n_words = 40_000
    case = engine_case(tmp_path, "llama-llama3-tied", "native", "int8", **{**HEAVY, "vocab_size": n_words})
    plan = rtx.compiled(case.graph.path, case.graph.spec, tmp_path / "plan", ("12.0",))
    stored = (tmp_path / ENGINE_DATA).stat().st_size
    assert stored < (n_words + 30_000) * HEAVY["hidden_size"]
    assert plan.size < stored + (12 << 20)
