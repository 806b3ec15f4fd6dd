"""The contract as a table, and real graphs held against it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import onnx
import pytest
from graphs import build_graph, tiny_variant

from semspec.export.packing import Schemes
from semspec.runtime.backends import open_backend
from semspec.runtime.contract import (
    GRAPHS,
    PORTS,
    GraphSpec,
    check_ports,
    kv_pairs,
    probe_ports,
)
from semspec.runtime.errors import BundleError, ConfigError
from semspec.runtime.records import TensorSpec

SPEC = GraphSpec(
    graph="cpu",
    n_layers=2,
    n_kv_heads=3,
    head_size=16,
    width=48,
    vocab_size=99,
    max_context=31,
    pooled_layers=(1, 2),
    hidden_layers=(0, 2),
)


def names(specs: tuple[TensorSpec, ...]) -> list[str]:
    return [spec.name for spec in specs]


def test_cpu_graph_written_out() -> None:
    """Every port of the embedded default, by name, type and shape: what exporters and backends agree on."""
    cache = ("B", 3, 32, 16)  # C = max_context + 1
    assert SPEC.inputs() == (
        TensorSpec("input_ids", "int64", ("B", "S")),
        TensorSpec("past_len", "int64", ("B",)),
        TensorSpec("logit_rows", "int64", ("R",)),
        TensorSpec("pool", "float32", ("B", "S")),
        TensorSpec("pooled_in", "float32", ("B", 2, 48)),
        TensorSpec("spare", "int64", (1,)),
        TensorSpec("kv.0.key", "float32", cache),
        TensorSpec("kv.1.key", "float32", cache),
        TensorSpec("kv.0.value", "float32", cache),
        TensorSpec("kv.1.value", "float32", cache),
    )
    assert SPEC.outputs() == (
        TensorSpec("logits", "float32", ("B", "R", 99)),
        TensorSpec("pooled", "float32", ("B", 2, 48)),
        TensorSpec("hidden.0", "float32", ("B", "S", 48)),
        TensorSpec("hidden.2", "float32", ("B", "S", 48)),
        TensorSpec("kv_out.0.key", "float32", cache),
        TensorSpec("kv_out.1.key", "float32", cache),
        TensorSpec("kv_out.0.value", "float32", cache),
        TensorSpec("kv_out.1.value", "float32", cache),
    )


def test_graphs_differ_as_the_design_says() -> None:
    """spare is the CPU's, span TensorRT's; the signals are the devices'; primitive leaves the cache to the runtime."""
    signals = {"lse", "entropy", "next_logits", "top_logits", "top_ids"}
    only = {"cpu": {"spare"}, "cuda": set(), "native": {"span"}, "primitive": set()}
    for graph in GRAPHS:
        spec = dataclasses.replace(SPEC, graph=graph, activation="float16", cache="float16")
        inputs, outputs = set(names(spec.inputs())), set(names(spec.outputs()))
        assert {"spare", "span"} & inputs == only[graph]
        assert ("next_ids" in inputs) is (graph != "cpu")
        assert signals & outputs == (set() if graph == "cpu" else signals)
        in_place = {name for _, name in kv_pairs(spec)}
        assert (in_place <= outputs) is (graph != "primitive")
        assert ("kv_new" in outputs) is (graph == "primitive")
        indices = {
            spec.dtype for spec in spec.inputs() if spec.name in ("input_ids", "past_len", "logit_rows")
        }
        assert indices == {"int32" if graph == "primitive" else "int64"}
        assert {
            spec.dtype for spec in spec.outputs() if spec.name.startswith(("kv", "hidden", "logits"))
        } == {"float16"}


def test_every_port_is_explained() -> None:
    """The table is the documentation: names are unique for each graph, and none is without a note."""
    assert all(port.note for port in PORTS)
    for graph in GRAPHS:
        found = [(port.name, port.output) for port in PORTS if graph in port.graphs]
        assert len(set(found)) == len(found)


@pytest.mark.parametrize("graph", ["cpu", "cuda"])
@pytest.mark.parametrize("layers", ["fp32", "int8", "int4/64"])
@pytest.mark.parametrize("name", ["llama-yarn-tied", "qwen2-default-untied"])
def test_graphs_follow_the_contract(tmp_path: Path, graph: str, layers: str, name: str) -> None:
    """Inputs and outputs as the file declares them and as onnxruntime sees them: the same names, types and shapes."""
    _, spec, weights = tiny_variant(name)
    built = build_graph(
        tmp_path,
        weights,
        spec,
        graph=graph,
        schemes=Schemes.choose(layers),
        pooled_layers=(0, 3),
        hidden_layers=(0, 1, 3),
    )
    session = open_backend("cpu", threads=1).open(built.path)
    assert session.inputs == built.spec.inputs()
    assert session.outputs == built.spec.outputs()
    session.close()
    declared = onnx.load(built.path, load_external_data=False).graph
    assert [value.name for value in declared.input] == names(built.spec.inputs())
    assert [value.name for value in declared.output] == names(built.spec.outputs())


def test_cache_pairs_are_the_graphs_own() -> None:
    """What goes in and comes out as one buffer has one shape and one type."""
    inputs = {spec.name: spec for spec in SPEC.inputs()}
    outputs = {spec.name: spec for spec in SPEC.outputs()}
    pairs = kv_pairs(SPEC)
    assert pairs[:2] == (("kv.0.key", "kv_out.0.key"), ("kv.0.value", "kv_out.0.value"))
    assert len(pairs) == 2 * SPEC.n_layers
    for past, present in pairs:
        assert (inputs[past].dtype, inputs[past].shape) == (outputs[present].dtype, outputs[present].shape)


def test_candidates_are_never_more_than_the_vocabulary() -> None:
    """64 of them, or all."""
    cuda = dataclasses.replace(SPEC, graph="cuda")
    for vocab_size, n_top in ((99, 64), (64, 64), (20, 20)):
        outputs = dataclasses.replace(cuda, vocab_size=vocab_size).outputs()
        assert [spec.shape[-1] for spec in outputs if spec.name.startswith("top_")] == [n_top, n_top]


def test_probe_ports_written_out() -> None:
    """Small graphs of their own, so that recalibration never rebuilds a model."""
    assert probe_ports(2, 48, 7) == (
        (TensorSpec("pooled", "float32", ("B", 2, 48)), TensorSpec("signals", "float32", ("B", 7))),
        (TensorSpec("score", "float32", ("B",)),),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"graph": "webgpu"}, "graph must be one of cpu, cuda, native, primitive, got 'webgpu'"),
        ({"n_layers": 0}, "n_layers must be between 1 and"),
        ({"max_context": 1 << 40}, "max_context must be between 1 and"),
        ({"pooled_layers": ()}, "pooled_layers must name one state at least"),
        ({"pooled_layers": (2, 1)}, r"pooled_layers must be ascending state indices in 0..2, got \[2, 1\]"),
        ({"hidden_layers": (3,)}, r"hidden_layers must be ascending state indices in 0..2, got \[3\]"),
        ({"hidden_layers": (-1,)}, r"hidden_layers must be ascending state indices in 0..2, got \[-1\]"),
        ({"activation": "int8"}, "activation must be one of float32, float16, bfloat16, got 'int8'"),
        ({"cache": "float64"}, "cache must be one of"),
    ],
    ids=str,
)
def test_sizes_no_graph_has_are_refused(changes: dict[str, Any], message: str) -> None:
    """D42: out-of-range states list the valid ones; a manifest's numbers cannot fill the memory."""
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(SPEC, **changes)


def test_a_graph_of_another_contract_is_refused_with_every_difference() -> None:
    """One line, sorted, for who has to find out which of two versions is old."""
    expected = SPEC.outputs()
    found = (
        *expected[1:-1],
        dataclasses.replace(expected[-1], dtype="float16"),
        TensorSpec("extra", "float32", ()),
    )
    with pytest.raises(BundleError) as caught:
        check_ports("target/onnx/cpu.onnx", expected, found)
    assert str(caught.value) == (
        "target/onnx/cpu.onnx does not follow the graph contract: has unknown extra; "
        "kv_out.1.value is float16['B', 3, 32, 16], expected float32['B', 3, 32, 16]; lacks logits; export again"
    )
    check_ports("same", expected, tuple(reversed(expected)))
