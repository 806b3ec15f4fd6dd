"""Real compilation with TensorRT-RTX, which needs no GPU: every precision, every graph, every trap.

What is seen here is that plans come to be, hold what they should and only that; none is run.
"""

from __future__ import annotations

from pathlib import Path

import contract_graphs
import pytest
import rtx
from engine_cases import WIDE, EngineCase, engine_case

from semspec.export.engines.capability import PRECISIONS, allowed_precisions
from semspec.export.engines.compiler import Compiled, compile_graph
from semspec.export.engines.profiles import PROBE_PROFILES
from semspec.export.engines.worker import compile_apart
from semspec.export.probe_graph import write_probe_graph
from semspec.runtime.errors import BackendError, BundleError, ConfigError

pytestmark = rtx.needs_rtx

MODEL = "qwen2-yarn-untied"
# Matrices that outweigh the kernels of a plan: 13 million weights in three layers.
HEAVY = {**WIDE, "hidden_size": 512, "intermediate_size": 2048, "head_dim": 64}
HEAVY |= {"num_attention_heads": 8, "num_key_value_heads": 8}
GRAPHS = pytest.mark.parametrize("graph", ["native", "primitive"])


def fits(precision: str) -> tuple[str, ...]:
    """The capabilities of these tests that run a precision."""
    name = precision.partition("/")[0]
    return tuple(
        capability
        for capability in rtx.CAPABILITIES
        if name in allowed_precisions("tensorrt-rtx", "1.7.1.116", [capability])
    )


@GRAPHS
@pytest.mark.parametrize("precision", [*PRECISIONS, "int4/64", "int4/128"])
def test_exported_graphs_compile_in_every_allowed_precision(
    tmp_path: Path, graph: str, precision: str
) -> None:
    """One plan for all devices of the list fails where a single one of them refuses."""
    case = engine_case(tmp_path, MODEL, graph, precision, **WIDE)
    plan = rtx.compiled(case.graph.path, case.graph.spec, tmp_path / "plan", fits(precision))
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


def test_weights_stored_twice_are_refused(tmp_path: Path) -> None:
    """A profile of exactly one row turns weights in fp16 and keeps both: nearly twice the memory, in silence."""
    spec = contract_graphs.graph_spec(n_layers=4, n_kv_heads=8, head_size=128, width=1024, vocab_size=16_384)
    graph = contract_graphs.ContractGraph(spec).save(tmp_path / "native.onnx")
    two = rtx.job(graph, spec, tmp_path / "plan", ("12.0",)).profiles
    assert rtx.compiled(graph, spec, tmp_path / "plan", ("12.0",)).size > 0
    one = {**two, "decode": {**two["decode"], "S": (1, 1, 1), "R": (1, 1, 1)}}
    with pytest.raises(BackendError, match=r"stored the weights of .* wider than they are, or twice"):
        compile_graph(rtx.library(), rtx.job(graph, spec, tmp_path / "again", ("12.0",), profiles=one))


@GRAPHS
def test_same_graph_gives_the_same_bytes(tmp_path: Path, graph: str) -> None:
    """Plans are reused by content: content must not depend on the hour."""
    case = engine_case(tmp_path, MODEL, graph, "int4", **WIDE)
    hashes = []
    for _ in range(2):
        hashes.append(compile_apart(rtx.job(case.graph.path, case.graph.spec, tmp_path / "plan")).sha256)
        (tmp_path / "plan").unlink()
    assert hashes[0] == hashes[1]


def test_probe_compiles(tmp_path: Path) -> None:
    """Its own graph and plan, so that recalibration never rebuilds a model's."""
    import tiny_probes

    weights = tiny_probes.probe(48, n_layers=2, n_features=3, hidden=(8,))
    write_probe_graph(tmp_path / "probe.onnx", weights)
    job = rtx.job(
        tmp_path / "probe.onnx", None, tmp_path / "plan", probe=weights.shape, profiles=PROBE_PROFILES
    )
    assert compile_graph(rtx.library(), job).size == (tmp_path / "plan").stat().st_size


# what goes wrong in silence


def test_attention_without_a_mask_is_refused(tmp_path: Path) -> None:
    """It compiles, and every row sees the rows after it."""
    spec = contract_graphs.graph_spec()
    graph = contract_graphs.ContractGraph(spec, faults=["no-mask"]).save(tmp_path / "native.onnx")
    assert rtx.compiler_says(graph, spec, "8.6") == ""
    with pytest.raises(BackendError, match=r"sees no mask in attention layer\.0"):
        rtx.compiled(graph, spec, tmp_path / "plan")


def test_input_without_use_is_refused(tmp_path: Path) -> None:
    """Parsers drop what they do not know, such as the lengths of caches, and compilers only warn."""
    spec = contract_graphs.graph_spec()
    graph = contract_graphs.ContractGraph(spec, faults=["unused-input"]).save(tmp_path / "native.onnx")
    with pytest.raises(BackendError, match=r"does not use an input of .*native\.onnx .*next_ids"):
        rtx.compiled(graph, spec, tmp_path / "plan")


def test_other_ports_than_the_contracts_are_refused(tmp_path: Path) -> None:
    """A plan whose ports differ would fail in its first call, on the device."""
    graph = contract_graphs.ContractGraph(contract_graphs.graph_spec()).save(tmp_path / "native.onnx")
    other = contract_graphs.graph_spec(n_layers=3)
    with pytest.raises(BundleError, match=r"lacks kv\.2\.key; lacks kv\.2\.value; export again"):
        rtx.compiled(graph, other, tmp_path / "plan")


def test_file_that_is_no_graph_is_refused(tmp_path: Path) -> None:
    """The parser's words, in one line."""
    (tmp_path / "native.onnx").write_text("no graph")
    with pytest.raises(BackendError, match=r"tensorrt-rtx .* cannot read .*native.onnx: ") as caught:
        rtx.compiled(tmp_path / "native.onnx", contract_graphs.graph_spec(), tmp_path / "plan")
    assert "\n" not in str(caught.value)
