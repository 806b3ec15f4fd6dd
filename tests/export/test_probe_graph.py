"""Probe graphs: what numpy says, the engine says; what comes from elsewhere is plain data that fits, or is refused."""

from __future__ import annotations

import doctest
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from tiny_probes import branch, plain_mlp, probe, rows

from semspec.export import probe_graph
from semspec.export.probe_graph import (
    CLIP,
    Dense,
    ProbeWeights,
    Scaling,
    StateBranch,
    add_probe_graph,
    check_probe_graph,
    read_probe_file,
    run_probe,
    write_probe_graph,
)
from semspec.runtime.backends import open_backend
from semspec.runtime.bundle import sha256_of
from semspec.runtime.contract import UNREADABLE
from semspec.runtime.errors import BundleError, SourceError
from semspec.runtime.external import check_external_data
from semspec.runtime.records import Floats

WIDTH = 12
KNOTS = Scaling(temperature=1.5, knots=(-2.0, -0.5, -0.25, 1.0, 2.0), values=(0.0, 0.1, 0.4, 0.4, 1.0))
BACKEND = open_backend("cpu", threads=1)


def test_docstring_example_holds() -> None:
    """The worked example is executed, so it cannot drift from the code."""
    result = doctest.testmod(probe_graph)
    assert result.attempted and not result.failed


@pytest.mark.parametrize(
    "scaling", [Scaling(), Scaling(temperature=0.4), KNOTS], ids=["plain", "hot", "knots"]
)
@pytest.mark.parametrize(
    ("n_layers", "hidden", "n_features"),
    [(0, (), 3), (1, (), 0), (2, (8,), 0), (2, (8,), 3), (3, (16, 8, 4), 1)],
)
def test_the_graph_computes_what_numpy_does(
    n_layers: int, hidden: tuple[int, ...], n_features: int, scaling: Scaling, tmp_path: Path
) -> None:
    """Linear probes, MLPs, features alone and all stacked; row by row and as a batch."""
    weights = probe(WIDTH, n_layers, n_features, hidden=hidden, scaling=scaling)
    write_probe_graph(tmp_path / "p.onnx", weights)
    pooled = rows(9, n_layers, WIDTH) if n_layers else None
    signals = rows(9, n_features) if n_features else None
    assert check_probe_graph(BACKEND, tmp_path / "p.onnx", weights, pooled, signals) < 1e-6
    assert check_external_data(tmp_path / "p.onnx") == frozenset()


def test_the_formula_written_out() -> None:
    """One state through a hidden layer and one feature, by hand: relu(2 - 1) * 3 + (5 - 4) * 0.5 - 3 = 0.5."""
    layers = (
        Dense(weight=np.float32([[1.0], [-1.0]]), bias=np.float32([0, 0])),
        Dense(weight=np.float32([[3.0, 7.0]]), bias=np.float32([0])),
    )
    weights = ProbeWeights(
        states=(StateBranch(center=np.float32([1]), layers=layers),),
        weights=np.float32([0.5]),
        centers=np.float32([4]),
        bias=-3.0,
        scaling=Scaling(temperature=0.25),
    )
    found = run_probe(weights, np.float32([[[2]]]), np.float32([[5]]))
    np.testing.assert_allclose(found, [1 / (1 + np.exp(-0.5 / 0.25))], rtol=1e-6)


def test_scores_never_reach_certainty(tmp_path: Path) -> None:
    """A ratio is taken and a logarithm may be: 0 and 1 are clipped, also where a sigmoid overflows."""
    for scaling in (Scaling(), Scaling(knots=(-1.0, 1.0), values=(0.0, 1.0))):
        path = tmp_path / f"{len(scaling.knots)}.onnx"
        weights = ProbeWeights(
            weights=np.ones(1, np.float32), centers=np.zeros(1, np.float32), scaling=scaling
        )
        signals = np.float32([[-1e4], [-100], [0], [100], [1e4]])
        found = run_probe(weights, signals=signals)
        np.testing.assert_allclose(found, [CLIP, CLIP, 0.5, 1 - CLIP, 1 - CLIP], atol=1e-7)
        write_probe_graph(path, weights)
        check_probe_graph(BACKEND, path, weights, signals=signals)


@pytest.mark.parametrize("scaling", [Scaling(), KNOTS], ids=["plain", "knots"])
def test_states_that_are_no_numbers_have_no_score(scaling: Scaling, tmp_path: Path) -> None:
    """Whatever an engine makes of NaN on its way through ReLU, knots and clips; other rows keep their scores."""
    weights = probe(WIDTH, 2, 1, hidden=(8, 4), scaling=scaling)
    write_probe_graph(tmp_path / "p.onnx", weights)
    pooled, signals = rows(6, 2, WIDTH), rows(6, 1)
    expected = run_probe(weights, pooled, signals)
    bad = {1: np.nan, 2: np.inf, 4: -np.inf}
    for row, value in bad.items():
        pooled[row, row % 2, 3] = value
    session = BACKEND.open(tmp_path / "p.onnx")
    found = session.run({"pooled": pooled, "signals": signals}, ["score"])["score"].numpy().copy()
    session.close()
    expected[list(bad)] = UNREADABLE
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_level_piece_has_one_value(tmp_path: Path) -> None:
    """A threshold may be the very value of a step that many segments share: no rounding may take them below it."""
    weights = ProbeWeights(
        weights=np.float32([0.1]),
        centers=np.float32([0.3]),
        bias=1 / 3,
        scaling=Scaling(temperature=0.7, knots=(-1.0, -0.2, 0.9, 2.0), values=(0.1, 0.7, 0.7, 0.9)),
    )
    write_probe_graph(tmp_path / "p.onnx", weights)
    signals = np.linspace(-4, 3, 64, dtype=np.float32)[:, None]
    with_numpy = run_probe(weights, signals=signals)
    session = BACKEND.open(tmp_path / "p.onnx")
    in_graph = session.run({"signals": signals}, ["score"])["score"].numpy().copy()
    session.close()
    assert np.count_nonzero(with_numpy == np.float32(0.7)) > 30
    np.testing.assert_array_equal(in_graph == np.float32(0.7), with_numpy == np.float32(0.7))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-6, 6, width=32), min_size=1, max_size=20))
def test_scores_keep_the_order_of_logits(logits: list[float]) -> None:
    """Scaling changes what a score means, never which segment is likelier."""
    for scaling in (Scaling(temperature=2.0), KNOTS):
        weights = ProbeWeights(
            weights=np.ones(1, np.float32), centers=np.zeros(1, np.float32), scaling=scaling
        )
        found = run_probe(weights, signals=np.float32(sorted(logits))[:, None])
        assert (np.diff(found) >= 0).all()


def test_knots_are_interpolated() -> None:
    """The line of numpy's own interpolation, level beyond both ends."""
    weights = ProbeWeights(weights=np.ones(1, np.float32), centers=np.zeros(1, np.float32), scaling=KNOTS)
    logits = np.linspace(-5, 5, 101, dtype=np.float32)
    expected = np.interp(logits.astype(np.float64) / 1.5, KNOTS.knots, KNOTS.values)
    np.testing.assert_allclose(
        run_probe(weights, signals=logits[:, None]), np.clip(expected, CLIP, 1 - CLIP), atol=1e-6
    )


def test_large_common_parts_cancel(tmp_path: Path) -> None:
    """A few dimensions of real states are thousands with a small spread: the center goes before any product."""
    center = np.full(WIDTH, 3.0, np.float32)
    center[0] = 8000.0
    layer = branch(WIDTH).layers
    weights = ProbeWeights(states=(StateBranch(center=center, layers=layer),))
    write_probe_graph(tmp_path / "p.onnx", weights)
    assert check_probe_graph(BACKEND, tmp_path / "p.onnx", weights, rows(32, 1, WIDTH) + center) < 1e-6


def test_the_gate_refuses_another_graph(tmp_path: Path) -> None:
    """Other numbers, other inputs: both are told apart from rounding."""
    weights, other = probe(WIDTH, 1, 2), probe(WIDTH, 1, 2, seed=1)
    write_probe_graph(tmp_path / "p.onnx", other)
    with pytest.raises(
        BundleError, match=r"p\.onnx differs from the probe it was made of by 0\.\d+, at most 1e-05"
    ):
        check_probe_graph(BACKEND, tmp_path / "p.onnx", weights, rows(3, 1, WIDTH), rows(3, 2))
    with pytest.raises(BundleError, match="does not follow the graph contract: signals is"):
        check_probe_graph(BACKEND, tmp_path / "p.onnx", probe(WIDTH, 1, 3), rows(3, 1, WIDTH), rows(3, 3))


def test_the_same_weights_give_the_same_bytes(tmp_path: Path) -> None:
    """Calibration that was killed and run again must end with the same bundle."""
    found = [
        add_probe_graph(
            folder, "predictor", probe(WIDTH, 2, 1), role="target", layers=(1, 3), features=("text.stop",)
        )
        for folder in (tmp_path / "a", tmp_path / "b")
        if folder.mkdir() is None
    ]
    assert found[0] == found[1]
    assert found[0].sha256 == sha256_of(tmp_path / "a" / "predictor.onnx")
    with pytest.raises(FileExistsError):
        write_probe_graph(tmp_path / "a" / "predictor.onnx", probe(WIDTH))


def test_names_and_weights_must_agree(tmp_path: Path) -> None:
    """A layer that is named but not read would be read at run time in another's place."""
    with pytest.raises(ValueError, match="reads 2 layers and 1 features, named 1, 1"):
        add_probe_graph(
            tmp_path, "p", probe(WIDTH, 2, 1), role="target", layers=(1,), features=("text.stop",)
        )


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ProbeWeights(), "reads states or features"),
        (lambda: probe(WIDTH, 0, 2, scaling=Scaling(knots=(1.0, 1.0), values=(0.0, 1.0))), "must ascend"),
        (lambda: Scaling(knots=(1.0, 1.0 + 1e-12), values=(0.0, 1.0)), "single precision too"),
        (lambda: Scaling(knots=(0.0, 1.0), values=(0.5, 0.2)), "not descend"),
        (lambda: Scaling(knots=(0.0, 1.0), values=(0.5, 1.2)), r"lie in 0\.\.1"),
        (lambda: Scaling(knots=(0.0, 1.0), values=(0.5,)), "a value each"),
        (lambda: Scaling(knots=(0.0,), values=(0.5,)), "two of them"),
        (lambda: Scaling(temperature=0.0), "above 0, got 0"),
        (lambda: Scaling(temperature=float("nan")), "above 0, got nan"),
        (lambda: Dense(weight=np.float32([[np.inf]]), bias=np.float32([0])), "finite"),
        (
            lambda: Dense(weight=np.zeros((2, 3), np.float32), bias=np.zeros(3, np.float32)),
            r"\(2, 3\), \(3,\)",
        ),
        (lambda: ProbeWeights(states=(branch(4), branch(5))), "one width"),
        (lambda: StateBranch(center=np.zeros(4, np.float32), layers=branch(5).layers), r"\[5\] -> \[1\]"),
        (lambda: StateBranch(center=np.zeros(4, np.float32), layers=()), "end in 1"),
        (lambda: run_probe(probe(4, 1), np.zeros((2, 2, 4), np.float32)), r"pooled must be \(B, 1, 4\)"),
        (
            lambda: run_probe(probe(4, 1, 2), np.zeros((2, 1, 4), np.float32)),
            "signals must be .*, got nothing",
        ),
    ],
)
def test_parts_that_do_not_fit_are_named(build: Any, message: str) -> None:
    """Found where they are made, not in an engine's words later."""
    with pytest.raises(ValueError, match=message):
        build()


# probes from elsewhere


def test_a_plain_mlp_comes_in(tmp_path: Path) -> None:
    """The published probe's shape, as torch computes it: Linear, ReLU between, a sigmoid."""
    tensors = plain_mlp(WIDTH, 8, 6, 1)
    save_file(tensors, tmp_path / "p.safetensors", metadata={"layer": "-1"})
    found = read_probe_file(tmp_path / "p.safetensors")
    states = rows(5, 1, WIDTH)
    x = states[:, 0]
    for i in range(3):
        x = (np.maximum(x, 0) if i else x) @ tensors[f"fc.{i}.weight"].T + tensors[f"fc.{i}.bias"]
    np.testing.assert_allclose(run_probe(found.weights, states), 1 / (1 + np.exp(-x[:, 0])), atol=1e-6)
    assert found.layer == -1
    save_file(tensors, tmp_path / "q.safetensors")
    assert read_probe_file(tmp_path / "q.safetensors").layer is None


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({}, {}, "found 0 tensors"),
        ({"net.0.weight": rows(1, 4), "net.0.bias": rows(1)}, {}, "with 'net.0.bias'; rename them"),
        ({**plain_mlp(4, 1), "mean": rows(4)}, {}, "found 3 tensors, with 'mean'"),
        (
            {name: value for name, value in plain_mlp(4, 3, 1).items() if name != "fc.1.bias"},
            {},
            "found 3 tensors",
        ),
        ({**plain_mlp(4, 3, 1), "fc.1.weight": rows(1, 5)}, {}, "must fit on each other"),
        (plain_mlp(4, 2), {}, "end in 1"),
        ({"fc.0.weight": rows(4), "fc.0.bias": rows(1)}, {}, "must have 2 dimensions"),
        ({"fc.0.weight": np.float32([[np.nan]]), "fc.0.bias": rows(1)}, {}, "NaN|finite"),
        (plain_mlp(4, 1), {"layer": "last"}, "must be a state index, found 'last'"),
    ],
)
def test_other_files_are_refused(
    tensors: dict[str, Floats], metadata: dict[str, str], message: str, tmp_path: Path
) -> None:
    """D44: a stranger's file is held against the one form that is known."""
    save_file(tensors, tmp_path / "p.safetensors", metadata=metadata or None)
    with pytest.raises(SourceError, match=message) as caught:
        read_probe_file(tmp_path / "p.safetensors")
    assert "\n" not in str(caught.value) and "p.safetensors" in str(caught.value)


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    """Probe files are plain data."""
    (tmp_path / "p.pt").write_bytes(b"PK\x03\x04" + bytes(range(1, 200)))
    with pytest.raises(SourceError, match="pickle"):
        read_probe_file(tmp_path / "p.pt")
    shutil.rmtree(tmp_path)
    with pytest.raises(SourceError):
        read_probe_file(tmp_path / "gone.safetensors")
