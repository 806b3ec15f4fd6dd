"""What is timed is the exporter's own graph, with every weight there, and its numbers stay finite."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from gpu.noise import Noise
from gpu.rig import build_rig, check_precision, check_room, graph_spec, write_graph
from gpu.shapes import SHAPES, shape_of

from semspec.export.checkpoint import expected_tensors
from semspec.export.dialects.ort import build_ort_graph
from semspec.export.engine_graphs import RUNS_NATIVE, write_engine_graphs
from semspec.export.engine_plan import plan_engine
from semspec.export.packing import PackedWeights, Schemes
from semspec.export.writer import WeightFile
from semspec.models.spec import ModelSpec
from semspec.runtime.backends import open_backend
from semspec.runtime.contract import GraphSpec
from semspec.runtime.errors import BackendError, BundleError, ConfigError
from semspec.runtime.model import CachedModel

TINY = SHAPES["tiny"]
CASES = [("cpu", "fp32"), ("cpu", "int4"), ("cuda", "fp16"), ("cuda", "int4")]
CASES += [(graph, precision) for graph in ("native", "primitive") for precision in ("fp16", "int4")]


def export(folder: Path, shape: ModelSpec, graph: GraphSpec, precision: str) -> None:
    """The same as an exporter writes it, the noise being some model's weights."""
    folder.mkdir()
    if graph.graph in ("native", "primitive"):
        plan = plan_engine(shape, Noise(shape), precision, Schemes.choose("int4"), None)
        write_engine_graphs(folder, shape, plan, {graph.graph: graph}, lambda name: {})
        return
    schemes = Schemes.choose("int4" if precision == "int4" else "fp32")
    with WeightFile(folder / "weights.data") as file:
        packed = PackedWeights(Noise(shape), file, "rtn", (graph.activation,))
        build_ort_graph(shape, graph, schemes, packed).save(folder / f"{graph.graph}.onnx", {})


@pytest.mark.parametrize("shape", ["tiny", "tiny-draft"])
@pytest.mark.parametrize(("graph", "precision"), CASES)
def test_graph_is_the_exporters(tmp_path: Path, graph: str, precision: str, shape: str) -> None:
    """A faster graph, or one with fewer bytes to read, would time a model that nobody has."""
    spec = graph_spec(graph, SHAPES[shape], 255)
    export(tmp_path / "right", SHAPES[shape], spec, precision)
    (tmp_path / "noise").mkdir()
    write_graph(tmp_path / "noise", SHAPES[shape], spec, precision)
    right, noise = ({path.name: path for path in (tmp_path / name).iterdir()} for name in ("right", "noise"))
    assert right.keys() == noise.keys() and len(right) == 2
    for name, path in right.items():
        if name.endswith(".onnx"):
            assert path.read_bytes() == noise[name].read_bytes()
        else:
            assert path.stat().st_size == noise[name].stat().st_size


@pytest.mark.parametrize(("graph", "precision"), CASES)
def test_logits_are_finite(tmp_path: Path, graph: str, precision: str) -> None:
    """NaN would be timed as well, and some engines are quicker or slower with it."""
    version = tuple(map(int, onnxruntime.__version__.split(".")[:2]))
    if graph == "native" and version < tuple(map(int, RUNS_NATIVE.split("."))):
        pytest.skip(f"onnxruntime {onnxruntime.__version__} cannot run native graphs")
    spec = graph_spec(graph, TINY, 255)
    path, _ = write_graph(tmp_path, TINY, spec, precision)
    with CachedModel(open_backend("cpu", threads=1), path, spec) as model:
        logits = model.forward(range(40), rows=range(40)).logits
    assert np.isfinite(logits).all() and 0.1 < logits.std() < 10


def test_no_two_matrices_are_alike() -> None:
    """An engine may store equal ones once, and read less than the model has."""
    noise = Noise(SHAPES["32B"])
    names = expected_tensors(SHAPES["32B"])
    assert len({noise.codes(name, 1, 64).tobytes() for name in names}) == len(names)
    assert len({noise.plain(name, slice(0, 8), "float32").tobytes()[:32] for name in names}) == len(names)


def test_rig_on_the_cpu_decodes(tmp_path: Path) -> None:
    """The whole way from a shape to an opened model, as the script goes it."""
    rig = build_rig(open_backend("cpu", threads=1), TINY, "int4", tmp_path, 255)
    assert (rig.graph.graph, rig.precision, rig.compile_s) == ("cpu", "int4 block 32", 0.0)
    assert rig.n_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    with rig.open() as model:
        assert model.forward([1, 2, 3]).logits.shape == (1, TINY.vocab_size)


def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """Both numbers: a person can do something about one of them."""
    huge = replace(SHAPES["32B"], n_layers=4096)
    with pytest.raises((BackendError, BundleError), match="needs about") as caught:
        check_room(open_backend("cpu"), huge, "fp32", tmp_path, 1023)
    assert str(caught.value).count("iB") >= 2 and not list(tmp_path.iterdir())


def test_unknown_shapes_and_precisions_are_named() -> None:
    """With what there is."""
    with pytest.raises(ConfigError, match=r"one of tiny, tiny-draft, 0\.5B, 1\.5B, 7B, 32B, got '3B'"):
        shape_of("3B")
    with pytest.raises(ConfigError, match="backend 'cpu' has no graph in fp16; it has fp32, int4"):
        check_precision("cpu", "fp16")


def test_shapes_have_the_sizes_they_are_named_after() -> None:
    """A slip in a table of numbers would be measured and believed."""
    billions = {
        name: sum(int(np.prod(shape)) for shape in expected_tensors(spec).values()) / 1e9
        for name, spec in SHAPES.items()
    }
    found = {name: round(billions[name], 2) for name in ("0.5B", "1.5B", "7B", "32B")}
    assert found == {"0.5B": 0.49, "1.5B": 1.54, "7B": 7.62, "32B": 32.76}
