"""The `cuda` graph (fp16), run on ONNX Runtime's CPU provider: its mathematics, not its speed nor a GPU's rounding."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from graphs import ArrayWeights, Graph, build_graph, cut, read_in_pieces, tiny_variant, truth
from numpy.testing import assert_allclose

from semspec.export.packing import PackedWeights, Schemes
from semspec.export.writer import WeightFile
from semspec.models.decoder import EMBEDDING
from semspec.runtime.backends import open_backend
from semspec.runtime.contract import TOP_IDS, kv_pairs
from semspec.runtime.records import Array

TEXT = np.random.default_rng(0).integers(0, 99, 40).tolist()
NAMES = ["llama-llama3-tied", "qwen2-yarn-untied"]
STATES = (0, 1, 2, 3)
SIGNALS = ("logits", "lse", "entropy", "next_logits", "top_logits", "top_ids")
QUIET = 0.1  # initializer range at which logits stay near 3, so that fp16's steps stay below 0.01


def cuda_graph(folder: Path, name: str, layers: str = "fp32") -> Graph:
    _, spec, weights = tiny_variant(name, initializer_range=QUIET)
    return build_graph(
        folder, weights, spec, graph="cuda", schemes=Schemes.choose(layers), hidden_layers=STATES
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sizes", [[40], [1], [5, 4, 3]], ids=str)
def test_on_the_cpu_provider_logits_and_states_are_near_transformers(
    tmp_path: Path, name: str, sizes: list[int]
) -> None:
    """fp16 throughout: close, on a cache too, and never promised to the bit."""
    logits, states = truth(tiny_variant(name, initializer_range=QUIET)[0], TEXT)
    with cuda_graph(tmp_path, name).open() as model:
        found, hidden = read_in_pieces(model, TEXT, cut(40, sizes), STATES)
    assert found.dtype == np.float32  # whatever the graph computes in
    assert_allclose(found, logits, rtol=0, atol=1e-2)
    for index in STATES:
        atol = 5e-3 * np.abs(states[index]).max()
        assert_allclose(hidden[index], states[index], rtol=0, atol=atol, err_msg=f"state {index}")


@pytest.mark.parametrize("layers", ["int8", "int4", "int4/128"])
def test_on_the_cpu_provider_quantized_weights_are_those_of_the_cpu_graph(
    tmp_path: Path, layers: str
) -> None:
    """Same codes, other scales' dtype: the two graphs differ by fp16 and by the CPU's int8 activations."""
    name = NAMES[0]
    _, spec, weights = tiny_variant(name, initializer_range=QUIET)
    one = build_graph(tmp_path / "cpu", weights, spec, schemes=Schemes.choose(layers))
    other = cuda_graph(tmp_path / "cuda", name, layers)
    with one.open() as on_cpu, other.open() as on_cuda:
        exact, _ = read_in_pieces(on_cpu, TEXT, [slice(0, 40)])
        found, _ = read_in_pieces(on_cuda, TEXT, [slice(0, 40)])
    assert_allclose(found, exact, rtol=0, atol=0.05 * np.abs(exact).max())


def run_signals(graph: Graph, ids: list[int], rows: list[int], next_ids: list[int]) -> Mapping[str, Array]:
    """Every output of one pass over one text."""
    backend = open_backend("cpu", threads=1)
    session = backend.open(graph.path)
    spec = graph.spec
    for past, present in kv_pairs(spec):
        session.bind(
            past, present, backend.zeros((1, spec.n_kv_heads, spec.capacity, spec.head_size), spec.cache)
        )
    feeds = {
        "input_ids": np.array([ids]),
        "past_len": np.zeros(1, np.int64),
        "logit_rows": np.array(rows),
        "pool": np.ones((1, len(ids)), np.float32),
        "pooled_in": np.ones((1, len(spec.pooled_layers), spec.width), np.float32),
        "next_ids": np.array([next_ids]),
    }
    names = [*SIGNALS, "pooled", *(f"hidden.{index}" for index in STATES)]
    found = {name: tensor.numpy().copy() for name, tensor in session.run(feeds, names).items()}
    session.close()
    return found


@pytest.mark.parametrize("name", NAMES)
def test_on_the_cpu_provider_signals_are_what_numpy_makes_of_the_logits(tmp_path: Path, name: str) -> None:
    """lse, entropy, the drafted token's logit and 64 candidates of each wanted row.

    Within an fp16 step: the CPU provider computes in fp32 and may skip the rounding between logits and signals.
    """
    rows, next_ids = [0, 3, 38, 39], [5, 0, 98, 17]
    found = run_signals(cuda_graph(tmp_path, name), TEXT, rows, next_ids)
    assert found["logits"].dtype == np.float16
    logits = found["logits"][0].astype(np.float64)
    lse = np.log(np.exp(logits).sum(axis=-1))
    entropy = -(np.exp(logits - lse[:, None]) * (logits - lse[:, None])).sum(axis=-1)
    ids = found["top_ids"][0]
    for signal, expected in {
        "lse": lse,
        "entropy": entropy,
        "next_logits": logits[np.arange(4), next_ids],
        "top_logits": np.sort(logits, axis=-1)[:, ::-1][:, :TOP_IDS],
    }.items():
        assert found[signal].dtype == np.float32
        assert_allclose(found[signal][0], expected, rtol=0, atol=2e-3, err_msg=signal)
    assert_allclose(np.take_along_axis(logits, ids, axis=-1), found["top_logits"][0], rtol=0, atol=2e-3)
    assert all(len(set(row)) == TOP_IDS for row in ids.tolist())
    assert (np.diff(found["top_logits"][0], axis=-1) <= 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_on_the_cpu_provider_pooling_is_in_fp32(tmp_path: Path, name: str) -> None:
    """A sum over a long segment in fp16 would lose its last states."""
    found = run_signals(cuda_graph(tmp_path, name), TEXT, [0], [0])
    assert found["pooled"].dtype == np.float32
    for k, index in enumerate((2, 3)):
        expected = 1 + found[f"hidden.{index}"][0].astype(np.float64).sum(axis=0)
        assert_allclose(found["pooled"][0, k], expected, rtol=1e-5, atol=1e-4)


def test_on_the_cpu_provider_small_embeddings_are_normed_in_fp32(tmp_path: Path) -> None:
    """Squares of numbers near 0.001 vanish in fp16, and epsilon with them: the first norm would be noise."""
    model, spec, weights = tiny_variant("llama-default-untied", initializer_range=QUIET)
    small = weights.arrays[EMBEDDING] * np.float32(0.01)
    model.get_input_embeddings().weight.data.mul_(0.01)
    graph = build_graph(tmp_path, ArrayWeights({**weights.arrays, EMBEDDING: small}), spec, graph="cuda")
    with graph.open() as opened:
        found, _ = read_in_pieces(opened, TEXT, [slice(0, 40)])
    assert_allclose(found, truth(model, TEXT)[0], rtol=0, atol=1e-2)


def test_two_graphs_share_what_they_can(tmp_path: Path) -> None:
    """One data file for `cpu` and `cuda`: codes and zero points once, scales and vectors in both dtypes."""
    _, _, weights = tiny_variant("qwen2-default-tied")
    sizes: dict[tuple[str, ...], int] = {}
    for dtypes in (("float32",), ("float16",), ("float32", "float16")):
        path = tmp_path / "-".join(dtypes)
        with WeightFile(path) as file:
            packed = PackedWeights(weights, file, "mse", dtypes)
            matrix = {
                dtype: packed.matrix(
                    (EMBEDDING,), Schemes.choose("int4", embedding="int4", head="int4").head, dtype
                )
                for dtype in dtypes
            }
        sizes[dtypes] = path.stat().st_size
        assert len({stored.data for stored in matrix.values()}) == 1
        assert len({stored.zero_points for stored in matrix.values()}) == 1
        assert [stored.scales.dtype for stored in matrix.values() if stored.scales] == list(dtypes)
    assert sizes["float32", "float16"] < sizes[("float32",)] + sizes[("float16",)]
