"""Files: the same bytes each time, every byte referenced, nothing twice, no limit at 2 GB."""

from __future__ import annotations

import dataclasses
import hashlib
import resource
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from graphs import build_graph, export_graph, tiny_variant
from numpy.testing import assert_allclose

from semspec.export.checkpoint import expected_tensors
from semspec.export.packing import Schemes
from semspec.export.writer import ALIGNMENT, GraphBuilder, WeightFile
from semspec.models.decoder import EMBEDDING
from semspec.runtime.records import Floats, TensorSpec

EVERY_SCHEME = pytest.mark.parametrize("layers", ["fp32", "int8", "int4", "int4/64"])


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes of the data file that an initializer refers to."""

    offset: int
    length: int


def load(path: Path) -> onnx.ModelProto:
    return onnx.load(path, load_external_data=False)


def regions(path: Path) -> set[Region]:
    """What a graph refers to in its data file; equal regions are one."""
    found = set()
    for tensor in load(path).graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            assert entries["location"] == "weights.data"  # relative, beside the graph
            found.add(Region(int(entries["offset"]), int(entries["length"])))
    return found


def constant_bytes(path: Path) -> int:
    return sum(len(tensor.raw_data) for tensor in load(path).graph.initializer)


@EVERY_SCHEME
def test_exporting_again_gives_the_same_bytes(tmp_path: Path, layers: str) -> None:
    """D33: three exports into three folders; nothing of a date, a path, a set's order or a thread is left in."""
    digests = []
    for name in ("one", "two", "three with ä space"):
        _, spec, weights = tiny_variant("llama-yarn-tied")
        graph = build_graph(
            tmp_path / name, weights, spec, schemes=Schemes.choose(layers), hidden_layers=(0, 2)
        )
        files = sorted(graph.path.parent.iterdir())
        assert [file.name for file in files] == ["cpu.onnx", "weights.data"]
        digests.append([hashlib.sha256(file.read_bytes()).hexdigest() for file in files])
    assert digests[0] == digests[1] == digests[2]


@EVERY_SCHEME
@pytest.mark.parametrize("name", ["llama-yarn-tied", "qwen2-default-untied"])
def test_every_stored_byte_is_referenced(tmp_path: Path, layers: str, name: str) -> None:
    """D33: the data file is what the graph refers to, in order, with nothing between but alignment."""
    _, spec, weights = tiny_variant(name)
    graph = build_graph(tmp_path, weights, spec, schemes=Schemes.choose(layers))
    end = 0
    for region in sorted(regions(graph.path), key=lambda region: region.offset):
        assert region.offset == -(-end // ALIGNMENT) * ALIGNMENT
        end = region.offset + region.length
    assert (tmp_path / "weights.data").stat().st_size == end


def test_files_that_exist_are_never_written_to(tmp_path: Path) -> None:
    """D33: no appending to a former export, by any path."""
    _, spec, weights = tiny_variant("llama-yarn-tied")
    graph = build_graph(tmp_path, weights, spec)
    before = graph.path.read_bytes(), (tmp_path / "weights.data").read_bytes()
    with pytest.raises(FileExistsError):
        build_graph(tmp_path, weights, spec)
    builder = GraphBuilder("other")
    with pytest.raises(FileExistsError):
        builder.save(graph.path, {})
    assert before == (graph.path.read_bytes(), (tmp_path / "weights.data").read_bytes())


@pytest.mark.parametrize(
    ("layers", "head"), [("fp32", "fp32"), ("int8", "int8"), ("int4", "int8"), ("int4/64", "int4/64")]
)
def test_a_tied_head_is_stored_once(tmp_path: Path, layers: str, head: str) -> None:
    """D30: a vocabulary that outweighs the layers; at most 1.05 of each parameter once, and a head more if untied."""
    sizes = {"vocab_size": 4096, "hidden_size": 128, "intermediate_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    schemes = Schemes.choose(layers, head=head)
    stored = {}
    for tying in ("tied", "untied"):
        _, spec, weights = tiny_variant(f"llama-default-{tying}", **sizes, **heads)
        graph = build_graph(tmp_path / tying, weights, spec, schemes=schemes, max_context=15)
        stored[tying] = sum(region.length for region in regions(graph.path)) + constant_bytes(graph.path)
        if tying == "tied":
            bits = sum(bits_of(name, values, schemes) for name, values in weights.arrays.items())
            embedding = bits_of(EMBEDDING, weights.arrays[EMBEDDING], schemes)
    assert embedding > 0.5 * bits
    assert stored["tied"] <= 1.05 * bits / 8
    assert stored["untied"] > stored["tied"] + 0.9 * embedding / 8


def bits_of(name: str, values: Floats, schemes: Schemes) -> float:
    """What a tensor of a tied model should take."""
    if values.ndim == 1:
        return 32.0 * values.size
    chosen = schemes.embedding if name == EMBEDDING else schemes.layers
    return chosen.bits_per_weight * values.size


def test_the_real_tied_head_is_stored_once(smollm2_gguf: Path, tmp_path: Path) -> None:
    """D30: 134.5 M parameters, 28.3 M of them the embedding; int8 with a scale for 32 is 9 bits each."""
    graph = export_graph(tmp_path, smollm2_gguf, schemes=Schemes.choose("int8"), max_context=64)
    stored = sum(region.length for region in regions(graph.path)) + constant_bytes(graph.path)
    assert stored <= 1.05 * 134_515_008 * 9 / 8


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@EVERY_SCHEME
def test_the_checker_passes(tmp_path: Path, layers: str, kind: str) -> None:
    """By path, never in memory, with types inferred as far as the standard's operators reach."""
    _, spec, weights = tiny_variant("qwen2-llama3-tied")
    graph = build_graph(
        tmp_path, weights, spec, graph=kind, schemes=Schemes.choose(layers), hidden_layers=(1,)
    )
    onnx.checker.check_model(str(graph.path), full_check=True)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_every_constant_is_read(tmp_path: Path, kind: str) -> None:
    """onnxruntime warns of initializers that no node reads, once for each, at every start."""
    _, spec, weights = tiny_variant("llama-default-tied")
    graph = load(build_graph(tmp_path, weights, spec, graph=kind).path).graph
    read = {name for node in graph.node for name in node.input}
    assert {tensor.name for tensor in graph.initializer} <= read


def test_metadata_is_kept(tmp_path: Path) -> None:
    """Every artefact tells its origin; keys are sorted, so their order cannot differ."""
    builder = GraphBuilder("empty")
    builder.inputs([TensorSpec("x", "float32", ("B", 2))])
    builder.outputs([TensorSpec("y", "float32", ("B", 2))])
    builder.node("Identity", ["x"], "y")
    builder.save(tmp_path / "one.onnx", {"b": "2", "a": "1"})
    builder.save(tmp_path / "two.onnx", {"a": "1", "b": "2"})
    assert (tmp_path / "one.onnx").read_bytes() == (tmp_path / "two.onnx").read_bytes()
    model = load(tmp_path / "one.onnx")
    assert [(entry.key, entry.value) for entry in model.metadata_props] == [("a", "1"), ("b", "2")]
    assert model.producer_name == "semspec"


def test_tensors_may_come_in_blocks(tmp_path: Path) -> None:
    """Blocks of rows of any size, converted on the way, and read back through a graph under another shape."""
    rows = np.arange(60, dtype=np.float64).reshape(10, 6)
    with WeightFile(tmp_path / "weights.data") as file:
        file.put("before", [np.ones(3)], "float32", (3,))
        stored = file.put("rows", (rows[:1], rows[1:7], rows[7:]), "float32", (10, 6))
        assert file.get("rows") == stored
        assert file.get("else") is None
    builder = GraphBuilder("read")
    builder.outputs([TensorSpec("y", "float32", (5, 12))])
    builder.node("Identity", [builder.weight("rows", stored, (5, 12))], "y")
    builder.save(tmp_path / "read.onnx", {})
    session = onnxruntime.InferenceSession(tmp_path / "read.onnx", providers=["CPUExecutionProvider"])
    assert_allclose(session.run(["y"], {})[0], rows.reshape(5, 12))


def test_blocks_that_do_not_add_up_are_a_fault(tmp_path: Path) -> None:
    """A reader that stops early must not become a graph that reads its neighbour's bytes."""
    with WeightFile(tmp_path / "weights.data") as file:
        with pytest.raises(ValueError, match="short: 16 bytes were written"):
            file.put("short", [np.zeros((2, 2))], "float32", (3, 2))
        file.put("once", [np.zeros(2)], "float32", (2,))
        with pytest.raises(ValueError, match="once is already stored"):
            file.put("once", [np.zeros(2)], "float32", (2,))


def test_a_name_stands_for_one_tensor(tmp_path: Path) -> None:
    """Two meanings of one name would be one tensor in the graph, and the other silently lost."""
    builder = GraphBuilder("names")
    with WeightFile(tmp_path / "weights.data") as file:
        one, other = (file.put(key, [np.zeros(4)], "float32", (4,)) for key in "ab")
    assert builder.weight("w", one) == builder.weight("w", one) == "w"
    assert builder.constant("c", np.array([1])) == builder.constant("c", np.array([1])) == "c"
    for again in (
        lambda: builder.weight("w", other),
        lambda: builder.weight("w", one, (2, 2)),
        lambda: builder.constant("c", np.array([2])),
        lambda: builder.constant("w", np.array([2])),
    ):
        with pytest.raises(ValueError, match="is there already, with other contents"):
            again()


@dataclass(frozen=True, slots=True)
class Patterned:
    """Weights of any size that take no memory: row r of a matrix is sin(r + column) / 8."""

    shapes: dict[str, tuple[int, ...]]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def read(self, name: str, rows: slice | None = None) -> Floats:
        shape = self.shapes[name]
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        chosen = np.arange(shape[0])[slice(None) if rows is None else rows]
        column = np.arange(shape[1], dtype=np.float32)
        return (np.sin(chosen[:, None] % 1013 + column) / 8).astype(np.float32)


@pytest.mark.slow
def test_a_model_over_two_gigabytes(tmp_path: Path) -> None:
    """D34: one layer under a vocabulary of 260k by 2048 in fp32; written, checked and run from its path.

    2.3 GB on disk, and no more than a few blocks of it in this process's memory while it is written.
    """
    spec = dataclasses.replace(
        tiny_variant("llama-default-tied")[1],
        vocab_size=260_000,
        width=2048,
        n_layers=1,
        n_heads=8,
        n_kv_heads=2,
        head_size=64,
        ffn_width=4096,
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    graph = build_graph(tmp_path, Patterned(expected_tensors(spec)), spec, max_context=16, pooled_layers=(1,))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert (tmp_path / "weights.data").stat().st_size > 2**31
    assert graph.path.stat().st_size < 1 << 20
    assert grown < 600 << 10  # KiB
    onnx.checker.check_model(str(graph.path))
    with graph.open() as model:
        first = model.forward([1, 259_999]).logits.copy()
        model.rewind(1)
        assert (model.forward([259_999]).logits == first).all()
    assert np.isfinite(first).all()
    assert first.any()
