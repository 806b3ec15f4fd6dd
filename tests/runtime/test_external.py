"""Where a graph may keep its weights: beside it and nowhere else, whatever its bytes say (D51, D35)."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from audit import files_opened
from google.protobuf.message import DecodeError
from onnx import AttributeProto, ModelProto, TensorProto, helper, numpy_helper
from onnx.external_data_helper import uses_external_data

from semspec.runtime.backends import open_backend
from semspec.runtime.errors import BundleError
from semspec.runtime.external import check_external_data

DATA = "weights.data"
VALUES = np.arange(64, dtype=np.float32)
GOOD = {"location": DATA, "offset": "0", "length": "256"}


def external(name: str = "w", entries: dict[str, str] | None = None) -> TensorProto:
    """64 floats that lie elsewhere."""
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[64])
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (GOOD if entries is None else entries).items():
        tensor.external_data.add(key=key, value=value)
    return tensor


def attribute(name: str, **fields: Any) -> AttributeProto:
    kinds = {"t": "TENSOR", "tensors": "TENSORS", "g": "GRAPH", "graphs": "GRAPHS"}
    kinds |= {"sparse_tensor": "SPARSE_TENSOR", "sparse_tensors": "SPARSE_TENSORS"}
    (kind,) = fields
    return AttributeProto(name=name, type=AttributeProto.AttributeType.Value(kinds[kind]), **fields)


def model_with(place: str, tensor: TensorProto) -> ModelProto:
    """y = x + w, with `tensor` put into one of the places a model can keep tensors in."""
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [64]) for name in ("x", "y")]
    inner = helper.make_graph([], "inner", [], [], [tensor])
    deeper = helper.make_graph(
        [onnx.NodeProto(op_type="If", attribute=[attribute("b", g=inner)])], "g", [], []
    )
    sparse = onnx.SparseTensorProto(values=tensor, dims=[64])
    attributes = {
        "attribute": attribute("value", t=tensor),
        "attribute list": attribute("value", tensors=[external("other"), tensor]),
        "sub-graph": attribute("body", g=inner),
        "sub-graph of a sub-graph": attribute("body", g=deeper),
        "list of sub-graphs": attribute("bodies", graphs=[inner]),
        "sparse attribute": attribute("value", sparse_tensor=sparse),
        "sparse attribute list": attribute("value", sparse_tensors=[sparse]),
    }
    add = helper.make_node("Add", ["x", "w"], ["y"])
    if place in attributes:
        add.attribute.append(attributes[place])
    model = helper.make_model(
        helper.make_graph([add], "g", ports[:1], ports[1:], [tensor] if place == "initializer" else []),
        opset_imports=[helper.make_opsetid("", 21)],
        ir_version=10,
    )
    if place == "sparse initializer":
        model.graph.sparse_initializer.append(sparse)
    if place == "sparse indices":
        model.graph.sparse_initializer.append(onnx.SparseTensorProto(indices=tensor, dims=[64]))
    if place == "function":
        node = onnx.NodeProto(op_type="Constant", output=["c"], attribute=[attribute("value", t=tensor)])
        model.functions.add(name="f", domain="d", output=["c"], node=[node])
    if place == "function default":
        model.functions.add(name="f", domain="d", attribute_proto=[attribute("value", t=tensor)])
    if place.startswith("training"):
        graph = "initialization" if place.endswith("start") else "algorithm"
        getattr(model.training_info.add(), graph).CopyFrom(inner)
    return model


PLACES = (
    "initializer",
    "attribute",
    "attribute list",
    "sub-graph",
    "sub-graph of a sub-graph",
    "list of sub-graphs",
    "sparse initializer",
    "sparse indices",
    "sparse attribute",
    "sparse attribute list",
    "function",
    "function default",
    "training start",
    "training step",
)


def write(folder: Path, model: ModelProto | bytes) -> Path:
    """The graph file, its weights beside it, and a secret outside the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    VALUES.tofile(folder / DATA)
    VALUES.tofile(folder.parent / "secret")
    graph = folder / "cpu.onnx"
    graph.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
    return graph


def refusal(graph: Path) -> str:
    with pytest.raises(BundleError) as caught:
        check_external_data(graph)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400 + 3 * len(str(graph)) and "cpu.onnx" in message
    return message


@pytest.mark.parametrize("place", PLACES)
def test_tensors_are_found_wherever_a_model_keeps_them(tmp_path: Path, place: str) -> None:
    """A check that overlooks one place is no check; onnx itself loads external data from fewer places."""
    assert check_external_data(write(tmp_path / "m", model_with(place, external()))) == {DATA}
    bad = external(entries={"location": "../secret"})
    assert "'../secret', which is not a file beside it" in refusal(
        write(tmp_path / "m", model_with(place, bad))
    )


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"location": "../secret"}, "not a file beside it"),
        ({"location": "a/../../secret"}, "not a file beside it"),
        ({"location": "..\\secret"}, "not a file beside it"),
        ({"location": "/etc/passwd"}, "not a file beside it"),
        ({"location": "C:secret"}, "not a file beside it"),
        ({"location": "sub/w"}, "not a file beside it"),
        ({"location": "*/_ORT_MEM_ADDR_/*", "offset": "4096"}, "not a file beside it"),
        ({"location": ".."}, "not a file beside it"),
        ({"location": "."}, "not a file beside it"),
        ({"location": ""}, "not a file beside it"),
        ({"offset": "0"}, "not a file beside it"),
        ({"location": f"{DATA}\0"}, "not a file beside it"),
        ({"location": "gone\nTraceback"}, r"'gone\nTraceback' beside it, which is missing"),
        ({"location": "w" * 5000}, "missing or not a plain file"),
        ({"location": "link"}, "missing or not a plain file"),
        ({"location": "inner-link"}, "missing or not a plain file"),
        ({"location": "fifo"}, "missing or not a plain file"),
        ({"location": "folder"}, "missing or not a plain file"),
        ({**GOOD, "basepath": "/etc"}, "unknown keys ('basepath')"),
        ({**GOOD, "": "x"}, "unknown keys ('')"),
        ({**GOOD, "x" * 5000: "x"}, "unknown keys"),
        ({**GOOD, "length": "257"}, "reads '257' bytes at '0' of 'weights.data', which has 256"),
        ({**GOOD, "offset": "1"}, "reads '256' bytes at '1'"),
        ({**GOOD, "offset": str(2**63)}, f"at '{2**63}'"),
        ({**GOOD, "offset": str(2**64)}, f"at '{2**64}'"),
        ({**GOOD, "length": "9" * 5000}, "reads '999"),
        ({**GOOD, "offset": "-1"}, "at '-1'"),
        ({**GOOD, "length": "-256"}, "reads '-256'"),
        ({**GOOD, "length": "0x10"}, "reads '0x10'"),
        ({**GOOD, "length": " 256"}, "reads ' 256'"),
        ({**GOOD, "length": "٢"}, "reads '٢'"),
        ({**GOOD, "length": ""}, "reads ''"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_locations_that_lead_elsewhere_are_refused(
    tmp_path: Path, entries: dict[str, str], message: str
) -> None:
    """D51: one line, and nothing but the graph was opened on the way to it."""
    graph = write(tmp_path / "m", model_with("initializer", external(entries=entries)))
    (graph.parent / "link").symlink_to(tmp_path / "secret")
    (graph.parent / "inner-link").symlink_to(DATA)
    os.mkfifo(graph.parent / "fifo")
    (graph.parent / "folder").mkdir()
    with files_opened() as opened:
        assert message in refusal(graph)
    assert opened == [graph]


def test_a_hard_link_is_a_file(tmp_path: Path) -> None:
    """Decided: it has no other content than its name says, backups are made of them, and no archive carries one
    to a file outside. Whoever can make one here could copy the bytes as well."""
    graph = write(tmp_path / "m", model_with("initializer", external()))
    (graph.parent / DATA).unlink()
    os.link(tmp_path / "secret", graph.parent / DATA)
    assert check_external_data(graph) == {DATA}


def test_a_location_given_twice_is_refused(tmp_path: Path) -> None:
    """Readers differ in which of two counts."""
    tensor = external()
    tensor.external_data.add(key="location", value=DATA)
    assert "not a readable ONNX file" in refusal(write(tmp_path / "m", model_with("initializer", tensor)))


def varint(value: int) -> bytes:
    low, rest = value & 127, value >> 7
    return bytes([low | 128]) + varint(rest) if rest else bytes([low])


def test_a_tag_that_engines_cut_to_32_bits_hides_nothing(tmp_path: Path) -> None:
    """Measured on onnxruntime 1.32: 0x10000006a is read as field 13, external_data, so a reader that takes it
    for a field of another number would let any location pass."""
    bad = external(entries={"location": "../secret"}).external_data[0].SerializeToString()
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[64])
    tensor.data_location = TensorProto.EXTERNAL
    model = model_with("none", tensor)
    for tag in (b"\x6a", b"\xea\x00", b"\xea\x80\x80\x80\x00", b"\xea\x80\x80\x80\x10"):
        hidden = tensor.SerializeToString() + tag + varint(len(bad)) + bad
        initializer = b"\x2a" + varint(len(hidden)) + hidden
        graph = model.graph.SerializeToString() + initializer
        rest = ModelProto()
        rest.CopyFrom(model)
        rest.ClearField("graph")
        refusal(write(tmp_path / "m", rest.SerializeToString() + b"\x3a" + varint(len(graph)) + graph))


def test_what_onnx_writes_is_accepted_and_read_alike(tmp_path: Path) -> None:
    """onnx.save's own external data, in one file and in one a tensor; the engine opens what is accepted."""
    weights = {name: np.full(256, n, np.float32) for n, name in enumerate("abc")}
    nodes = [
        helper.make_node("Add", [{"a": "x"}.get(name, f"{name}_in"), name], [f"{name}_out"])
        for name in weights
    ]
    for node, before in zip(nodes[1:], nodes, strict=False):
        node.input[0] = before.output[0]
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [256]) for name in ("x", "c_out")]
    tensors = [numpy_helper.from_array(values, name) for name, values in weights.items()]
    model = helper.make_model(
        helper.make_graph(nodes, "g", ports[:1], ports[1:], tensors),
        opset_imports=[helper.make_opsetid("", 21)],
        ir_version=10,
    )
    for together in (True, False):
        graph = tmp_path / str(together) / "cpu.onnx"
        graph.parent.mkdir()
        copy = ModelProto()
        copy.CopyFrom(model)
        location = DATA if together else None
        onnx.save(
            copy, graph, save_as_external_data=True, all_tensors_to_one_file=together, location=location
        )
        found = onnx.load(graph, load_external_data=False).graph.initializer
        located = {
            entry.value for tensor in found for entry in tensor.external_data if entry.key == "location"
        }
        assert check_external_data(graph) == located and len(located) == (1 if together else 3)
        open_backend("cpu", threads=1).open(graph).close()


def test_a_graph_without_external_data_needs_no_file(tmp_path: Path) -> None:
    """Weights inside the graph are its own business."""
    graph = write(tmp_path / "m", model_with("initializer", numpy_helper.from_array(VALUES, "w")))
    assert check_external_data(graph) == frozenset()


def locations(model: ModelProto) -> Iterator[dict[str, str]]:
    """external_data of every tensor that onnx reads in the places of the fuzzed graph."""
    tensors = list(model.graph.initializer)
    for node in (*model.graph.node, *(node for function in model.functions for node in function.node)):
        for item in node.attribute:
            tensors += [item.t, *item.tensors, *item.g.initializer]
    return (
        {e.key: e.value for e in tensor.external_data} for tensor in tensors if uses_external_data(tensor)
    )


def test_mutated_graphs_are_refused_or_safe(tmp_path: Path) -> None:
    """2,000 mutations of a real small graph: an error of ours or success, never another exception, never a hang;
    and whatever onnx reads from accepted bytes lies in the file that is there."""
    model = model_with("sub-graph", external())
    model.graph.initializer.append(external("w"))
    model.functions.extend(model_with("function", external()).functions)
    graph, rng = write(tmp_path / "m", model), random.Random(51)
    raw, accepted = graph.read_bytes(), 0
    for _ in range(2000):
        data = bytearray(raw)
        for _ in range(rng.choice((1, 1, 2, 8))):
            at = rng.randrange(len(data))
            kind = rng.randrange(4)
            if kind == 0:
                data[at] = rng.randrange(256)
            elif kind == 1:
                data[at] ^= 1 << rng.randrange(8)
            elif kind == 2:
                del data[at : at + rng.randrange(1, 9)]
            else:
                data[at:at] = rng.randbytes(rng.randrange(1, 9))
        graph.write_bytes(data[: rng.randrange(len(data))] if rng.random() < 0.1 and data else data)
        try:
            check_external_data(graph)
        except BundleError as error:
            assert "\n" not in str(error)
            continue
        accepted += 1
        try:
            read = ModelProto.FromString(graph.read_bytes())
        except DecodeError:  # what an engine refuses anyhow may pass here
            continue
        assert all(entries.get("location") == DATA for entries in locations(read))
    assert accepted > 100, "the mutations never leave a readable graph: the test shows nothing"


@pytest.mark.parametrize("raw", [b"", b"\0", b"\xff" * 100, b"\x3a\xff\xff\xff\xff\x7f", b"not onnx at all"])
def test_bytes_that_are_no_graph_are_one_line(tmp_path: Path, raw: bytes) -> None:
    """Empty files, endless numbers and lengths past the end."""
    refusal(write(tmp_path / "m", raw))


def test_nesting_without_end_is_refused(tmp_path: Path) -> None:
    """Twenty graphs in one another, sixty messages: deeper than any model; a stack must not be what ends it."""
    graph = helper.make_graph([], "g", [], [], [external()])
    for _ in range(20):
        graph = helper.make_graph([onnx.NodeProto(attribute=[attribute("b", g=graph)])], "g", [], [])
    raw = helper.make_model(graph).SerializeToString()
    assert "not a readable ONNX file" in refusal(write(tmp_path / "m", raw))
