"""What a graph is told of a lone row is what this processor does, and both answers keep the promise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from graphs import Graph, build_graph, cut, read_in_pieces, tiny_variant
from numpy.testing import assert_array_equal

from semspec.export.dialects.lone_row import INT8_ACTIVATIONS, LoneRow
from semspec.export.packing import Schemes
from semspec.export.quantize import Scheme
from semspec.export.writer import MICROSOFT, GraphBuilder
from semspec.runtime.backends import open_backend
from semspec.runtime.records import TensorSpec

KINDS = pytest.mark.parametrize(
    "scheme",
    [
        Scheme(name="int4", bits=4, block_size=32),
        Scheme(name="int4", bits=4, block_size=32, symmetric=True),
        Scheme(name="int8", bits=8, block_size=32),
    ],
    ids=["int4", "int4 symmetric", "int8"],
)
TEXT = np.random.default_rng(3).integers(0, 99, 60).tolist()


def ask(path: Path, scheme: Scheme, n_read: int, n_written: int) -> Path:
    """A graph of the question and of a product of a real model's size."""
    chance, builder, n_blocks = np.random.default_rng(5), GraphBuilder("asked"), n_read // scheme.block_size
    builder.inputs([TensorSpec("spare", "int64", (1,)), TensorSpec("x", "float32", ("S", n_read))])
    LoneRow(builder).differs([scheme], "differs")
    width = scheme.block_size * scheme.bits // 8
    codes = chance.integers(256, size=(n_written, n_blocks, width), dtype=np.uint8)
    weights = [
        builder.constant("codes", codes),
        builder.constant("scales", chance.random(n_written * n_blocks, np.float32)),
    ]
    sizes = {"N": n_written, "K": n_read, "bits": scheme.bits, "block_size": scheme.block_size}
    builder.node(
        "MatMulNBits", ["x", *weights], "y", domain=MICROSOFT, accuracy_level=INT8_ACTIVATIONS, **sizes
    )
    builder.outputs([TensorSpec("differs", "int64", (1,)), TensorSpec("y", "float32", ("S", n_written))])
    builder.save(path, {})
    return path


@KINDS
@pytest.mark.parametrize(("n_read", "n_written"), [(576, 192), (576, 1536), (1536, 576), (896, 4864)])
def test_the_answer_is_what_a_models_products_do(
    tmp_path: Path, scheme: Scheme, n_read: int, n_written: int
) -> None:
    """Its product is small, theirs are large and shared out among threads: one kernel, one answer."""
    session = open_backend("cpu").open(ask(tmp_path / "asked.onnx", scheme, n_read, n_written))
    rows = np.random.default_rng(6).standard_normal((8, n_read), np.float32)

    def product(x: np.ndarray) -> tuple[int, np.ndarray]:
        found = session.run({"spare": np.ones(1, np.int64), "x": x}, ["differs", "y"])
        return int(found["differs"].numpy()[0]), found["y"].numpy().copy()

    differs, together = product(rows)
    alone = np.concatenate([product(row[None])[1] for row in rows])
    pairs = np.concatenate([product(rows[i : i + 2])[1] for i in range(0, 8, 2)])
    assert_array_equal(pairs, together)
    assert differs == int(not np.array_equal(alone, together))
    session.close()


def test_the_answer_is_not_settled_before_the_first_pass(tmp_path: Path) -> None:
    """The engine computes what hangs on no input when it opens a graph, and by kernels that no pass uses."""
    path, kept = tmp_path / "asked.onnx", tmp_path / "optimized.onnx"
    ask(path, Scheme(name="int4", bits=4, block_size=32), 64, 32)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(kept), 4
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    nodes = [node.op_type for node in onnx.load(kept).graph.node]
    assert nodes.count("MatMulNBits") == 3


@pytest.mark.parametrize("name", ["llama-llama3-tied", "qwen2-default-untied"])
@pytest.mark.parametrize("head", ["int4", "int8"])
def test_bits_are_equal_where_a_lone_row_is_said_to_differ(tmp_path: Path, name: str, head: str) -> None:
    """So that the way of a processor without AVX-512 is gone on every processor: all rows in pairs, states and all."""
    graph = said_to_differ(tmp_path, name, head)
    with graph.open() as model:
        whole, states = read_in_pieces(model, TEXT, [slice(0, len(TEXT))], (0, 1, 2, 3))
        for pieces in ([1], [2], [3, 5], [1, 4]):
            model.rewind(0)
            found, found_states = read_in_pieces(model, TEXT, cut(len(TEXT), pieces), (0, 1, 2, 3))
            assert_array_equal(found, whole, err_msg=str(pieces))
            for index, state in states.items():
                assert_array_equal(found_states[index], state, err_msg=f"{pieces}, state {index}")


def said_to_differ(folder: Path, name: str, head: str) -> Graph:
    """A tiny graph in int4 with blocks of 32 whose questions are all answered by 1."""
    _, spec, weights = tiny_variant(name)
    schemes = Schemes.choose("int4", head=head, embedding=head, block_size=32)
    graph = build_graph(folder / "graph", weights, spec, schemes=schemes, hidden_layers=(0, 1, 2, 3))
    model = onnx.load(graph.path, load_external_data=False)
    answers = {"lone_row_differs", "lone_head_differs"}
    readers = [node for node in model.graph.node if answers & set(node.input)]
    assert len(readers) == (2 if head == "int4" else 1)
    for node in readers:
        node.input[:] = ["1" if name in answers else name for name in node.input]
    graph.path.write_bytes(model.SerializeToString())
    return graph
