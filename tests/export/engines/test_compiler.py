"""Real compilation with TensorRT-RTX, which needs no GPU: each trap that a compiler falls into in silence.

Plans are made and measured here; none is run.
"""

from __future__ import annotations

from pathlib import Path

import contract_graphs
import pytest
import rtx
from engine_cases import WIDE, engine_case

from semspec.export.engines.compiler import compile_graph
from semspec.export.engines.profiles import PROBE_PROFILES
from semspec.export.engines.worker import compile_apart
from semspec.export.probe_graph import write_probe_graph
from semspec.runtime.errors import BackendError, BundleError

pytestmark = rtx.needs_rtx


def test_weights_stored_twice_are_refused(tmp_path: Path) -> None:
    """A profile of exactly one row turns weights in fp16 and keeps both: nearly twice the memory, in silence."""
    spec = contract_graphs.graph_spec(n_layers=4, n_kv_heads=8, head_size=128, width=1024, vocab_size=16_384)
    graph = contract_graphs.ContractGraph(spec).save(tmp_path / "native.onnx")
    two = rtx.job(graph, spec, tmp_path / "plan", ("12.0",)).profiles
    assert rtx.compiled(graph, spec, tmp_path / "plan", ("12.0",)).size > 0
    one = {**two, "decode": {**two["decode"], "S": (1, 1, 1), "R": (1, 1, 1)}}
    with pytest.raises(BackendError, match=r"stored the weights of .* wider than they are, or twice"):
        compile_graph(rtx.library(), rtx.job(graph, spec, tmp_path / "again", ("12.0",), profiles=one))


@pytest.mark.slow
@pytest.mark.parametrize("graph", ["native", "primitive"])
def test_fresh_builds_are_alike(tmp_path: Path, graph: str) -> None:
    """As far as the system lets us: unaided builds may differ each time, aided hardly; a thread that is preempted at
    the wrong moment still changes the order in which things are stored. What is promised is in test_build.py."""
    case = engine_case(tmp_path, "qwen2-yarn-untied", graph, "int4", **WIDE)
    hashes = []
    while len(hashes) < 4 and len(set(hashes)) == len(hashes):
        hashes.append(compile_apart(rtx.job(case.graph.path, case.graph.spec, tmp_path / "plan")).sha256)
        (tmp_path / "plan").unlink()
    assert len(set(hashes)) < len(hashes)


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
