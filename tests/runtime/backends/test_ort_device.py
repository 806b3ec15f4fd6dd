"""ONNX Runtime with outputs that stay on a device until they are read: the CPU as if it were one, no GPU.

Seen here: what is bound, what is copied, and when. Not seen: CUDA, or any speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from graphs import Graph, build_graph, tiny_variant
from numpy.testing import assert_allclose, assert_array_equal
from sum_graph import feeds, write_graph

from semspec.runtime.backends.ort import OrtBackend, OrtTensor
from semspec.runtime.chooser import Chooser
from semspec.runtime.config import SamplingParams
from semspec.runtime.drafting import ModelDrafter
from semspec.runtime.model import CachedModel
from semspec.runtime.pooled import HeldPooled
from semspec.runtime.records import Array
from semspec.runtime.rows import TopRows

V = 99
TEXT = np.random.default_rng(3).integers(0, V, 20).tolist()


def device() -> OrtBackend:
    return OrtBackend("cpu", 1, False, staying=True)


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_graph(tmp_path_factory.mktemp("graph") / "sums.onnx")


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    """In fp16, with the signals of its logits; weights small enough that its steps are no chaos."""
    _, spec, weights = tiny_variant("llama-default-untied", initializer_range=0.1)
    return build_graph(tmp_path_factory.mktemp("cuda"), weights, spec, graph="cuda", hidden_layers=(3,))


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of all that was copied from the device."""
    shapes: list[tuple[int, ...]] = []
    right = OrtTensor.numpy

    def numpy(self: OrtTensor) -> Array:
        if isinstance(self.value, onnxruntime.OrtValue):
            shapes.append(self.shape)
        return right(self)

    monkeypatch.setattr(OrtTensor, "numpy", numpy)
    return shapes


@pytest.fixture
def model(graph: Graph) -> Iterator[CachedModel]:
    with CachedModel(device(), graph.path, graph.spec) as opened:
        yield opened


def test_outputs_are_copied_when_they_are_read(sums: Path, copied: list[tuple[int, ...]]) -> None:
    """From the device's memory, which the next pass of equal shapes writes over."""
    backend = device()
    session, total = backend.open(sums), backend.zeros((2,), "float32")
    session.bind("total", "total_out", total)
    first = session.run(feeds(factor=2), ["scaled"])["scaled"]
    assert not copied and first.shape == (3, 2)
    assert (first.numpy() == 2).all() and copied == [(3, 2)]
    session.run(feeds(factor=5), ["scaled"])
    assert (first.numpy() == 5).all() and total.numpy().tolist() == [6, 6]
    assert backend.part(first, 1).shape == (2,) and (backend.part(first, slice(0, 2)).numpy() == 5).all()
    session.close()


def test_a_session_is_fed_what_another_left(sums: Path) -> None:
    """An output goes on as an input, its shape and dtype held against the graph as an array's are."""
    backend = device()
    one, two = backend.open(sums), backend.open(sums)
    for session in (one, two):
        session.bind("total", "total_out", backend.zeros((2,), "float32"))
    left = one.run(feeds(factor=3), ["scaled"])["scaled"]
    assert (two.run({**feeds(factor=2), "x": left}, ["scaled"])["scaled"].numpy() == 6).all()
    with pytest.raises(Exception, match=r"factor is float32\[3, 2\], expected float32\[1\]"):
        two.run({"x": left, "factor": left}, ["scaled"])
    one.close()
    two.close()


def test_rows_and_states_are_those_of_copied_outputs(graph: Graph, model: CachedModel) -> None:
    """The same graph with its outputs in memory: every number of a pass over a cache."""
    with CachedModel(OrtBackend("cpu", 1, False), graph.path, graph.spec) as near:
        for each in (near, model):
            each.forward(TEXT[:12], rows=())
        options = {"rows": range(8), "pool": np.ones(8, np.float32), "hidden": (3,)}
        expected, found = near.forward(TEXT[12:], **options), model.forward(TEXT[12:], **options)
        assert isinstance(found.rows, TopRows) and isinstance(found.states, HeldPooled)
        assert [row.best for row in found.rows] == [row.best for row in expected.rows]
        assert found.pooled is not None and expected.pooled is not None
        assert_array_equal(found.pooled, expected.pooled)
        assert_array_equal(found.hidden[3], expected.hidden[3])
        assert_array_equal(found.logits, expected.logits)
        assert_array_equal(found.rows[5].logits, expected.rows[5].logits)
        assert_allclose(found.logits.max(axis=1), [row.logits[row.best] for row in found.rows])


def test_logits_are_copied_only_where_they_are_asked_for(
    model: CachedModel, copied: list[tuple[int, ...]]
) -> None:
    """Greedy drafting and a review's signals take the few numbers of a row; one row brings those of its pass."""
    model.forward(TEXT[:10], rows=())
    drafter = ModelDrafter(model, Chooser(SamplingParams(), V, TEXT[:11]))
    drafter.start(TEXT[:11])
    draft = drafter.propose(4, np.random.default_rng(0))
    model.rewind(10)
    rows = model.forward([TEXT[10], *draft.ids], rows=range(5)).rows
    assert [row.best for row in rows][:4] == list(draft.ids)
    assert all(row.logprob(token) < 0 for token, row in zip(draft.ids, rows, strict=False))
    assert copied and not [shape for shape in copied if shape[-1] == V] and model.n_full_rows == 0
    assert rows[3].logits.shape == rows[4].logits.shape == (V,)
    assert [shape for shape in copied if shape[-1] == V] == [(1, 5, V)]
    assert model.n_full_rows == 2


def test_a_device_is_where_outputs_stay() -> None:
    """By themselves: nobody has to ask for it on a GPU."""
    assert OrtBackend("cuda", 1, False).staying and not OrtBackend("cpu", 1, False).staying
