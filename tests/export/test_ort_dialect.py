"""The fp32 graph against transformers: logits, states and pooled sums of every row, however the text is cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from graphs import VARIANTS, ArrayWeights, build_graph, cut, read_in_pieces, tiny_variant, truth
from numpy.testing import assert_allclose, assert_array_equal

from semspec.export.packing import Schemes
from semspec.runtime.errors import ConfigError, SourceError
from semspec.runtime.model import CachedModel
from semspec.runtime.records import Floats

TEXT = np.random.default_rng(0).integers(0, 99, 97).tolist()
STATES = (0, 1, 2, 3)
LLAMA, QWEN2 = "llama-llama3-tied", "qwen2-default-untied"
TINY = pytest.mark.parametrize("name", [LLAMA, QWEN2])


@contextmanager
def opened(
    folder: Path, name: str, layers: str = "fp32", *, head: str | None = None, block_size: int = 32
) -> Iterator[CachedModel]:
    """The graph of one variant with every state as an output and every state pooled."""
    _, spec, weights = tiny_variant(name)
    embedding = "int8" if head is not None else None
    schemes = Schemes.choose(layers, head=head, embedding=embedding, block_size=block_size)
    graph = build_graph(
        folder / "graph", weights, spec, schemes=schemes, hidden_layers=STATES, pooled_layers=STATES
    )
    with graph.open() as model:
        yield model


def assert_states(found: dict[int, Floats], states: Floats) -> None:
    for index, state in found.items():
        atol = 1e-5 * np.abs(states[index]).max()
        assert_allclose(state, states[index], rtol=0, atol=atol, err_msg=f"state {index}")


@pytest.mark.parametrize("name", VARIANTS)
def test_rows_and_states_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """D28, D42: every switch, positions 0..96, the prompt at once, one by one and in chunks on a cache."""
    logits, states = truth(tiny_variant(name)[0], TEXT)
    with opened(tmp_path, name) as model:
        for size in (97, 1, 2, 3, 4, 5, 6, 7):
            model.rewind(0)
            found, hidden = read_in_pieces(model, TEXT, cut(97, [size]), STATES)
            assert_allclose(found, logits, rtol=0, atol=1e-4, err_msg=f"pieces of {size}")
            assert_states(hidden, states)


@pytest.mark.parametrize("name", [name for name in VARIANTS if "default" not in name and "untied" in name])
def test_scaled_positions_on_a_cache(tmp_path: Path, name: str) -> None:
    """D27: positions around the original context of 32 and far beyond it, with a cache, in chunks."""
    ids = np.random.default_rng(1).integers(0, 99, 201).tolist()
    logits, _ = truth(tiny_variant(name)[0], ids)
    with opened(tmp_path, name) as model:
        for sizes in ([201], [30, 1, 1, 1, 7]):
            model.rewind(0)
            found, _ = read_in_pieces(model, ids, cut(201, sizes))
            for position in (0, 31, 33, 200):
                assert_allclose(found[position], logits[position], rtol=0, atol=1e-4, err_msg=str(position))


@TINY
@pytest.mark.parametrize("past", [0, 1, 63, 64, 65])
def test_several_tokens_on_a_cache(tmp_path: Path, name: str, past: int) -> None:
    """D31: what verification does. All rows of 12 tokens, in every cut, after caches around 64."""
    ids = TEXT[: past + 12]
    logits, _ = truth(tiny_variant(name)[0], ids)
    with opened(tmp_path, name) as model:
        if past:
            model.forward(ids[:past])
        for sizes in ([12], [1], [5, 4, 3], [7, 1, 1, 3], [1, 11]):
            model.rewind(past)
            found, _ = read_in_pieces(model, ids[past:], cut(12, sizes))
            assert_allclose(found, logits[past:], rtol=0, atol=1e-4, err_msg=str(sizes))


@TINY
@pytest.mark.parametrize(
    ("layers", "block_size"),
    [("fp32", 32), ("int8", 32), ("int8", 128), ("int4", 32), ("int4", 64), ("int4", 128)],
)
@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_later_id_never_changes_an_earlier_row(
    tmp_path: Path, name: str, layers: str, block_size: int, size: int
) -> None:
    """D06, D31: to the bit, logits and states, with and without a cache: no activation scale spans rows."""
    with opened(tmp_path, name, layers, block_size=block_size) as model:
        for past in (0, 1, 20):
            runs = []
            for last in (3, 71):
                model.rewind(0)
                if past:
                    model.forward(TEXT[:past])
                ids = [*TEXT[past : past + size - 1], last]
                runs.append(read_in_pieces(model, ids, [slice(0, size)], STATES))
            (one, one_states), (other, other_states) = runs
            assert_array_equal(one[:-1], other[:-1])
            assert not np.array_equal(one[-1], other[-1])
            for index in STATES:
                assert_array_equal(one_states[index][:-1], other_states[index][:-1])


@pytest.mark.parametrize("name", ["llama-llama3-untied", QWEN2])
@pytest.mark.parametrize("head", ["fp32", "int8", "int8/64", "int4", "int4/128"])
def test_wanted_rows_are_those_rows(tmp_path: Path, name: str, head: str) -> None:
    """D43: one, several, odd and even counts, the last of a chunk and none, to the bit of all rows at once."""
    with opened(tmp_path, name, head=head) as model:
        whole, _ = read_in_pieces(model, TEXT[:12], cut(12, [12]))
        for rows in ([0], [11], [-1], [2, 5], [0, 1, 11], [1, 4, 4, 9], list(range(11)), []):
            model.rewind(0)
            assert_array_equal(model.forward(TEXT[:12], rows=rows).logits, whole[rows].reshape(-1, 99))
        model.rewind(4)
        assert_array_equal(model.forward(TEXT[4:9], rows=[0, 3]).logits, whole[[4, 7]])
        assert_array_equal(model.forward(TEXT[9:12]).logits, whole[[11]])


def mean_of_rows(model: CachedModel, pieces: Sequence[slice], weights: Floats) -> Floats:
    """The pooled states after pieces of TEXT, handed on from one to the next."""
    pooled: Floats | None = None
    for piece in pieces:
        found = model.forward(TEXT[piece], rows=(), pool=weights[piece], pooled=pooled).pooled
        assert found is not None
        pooled = found.copy()
    assert pooled is not None
    return pooled


@TINY
@pytest.mark.parametrize("layers", ["fp32", "int8"])
@pytest.mark.parametrize(
    "weigh",
    [
        lambda n: np.full(n, 1 / n),
        lambda n: np.ones(n),
        lambda n: (np.arange(n) >= n // 3) / 7,
    ],
    ids=["mean", "sum", "a segment"],
)
def test_pooled_is_the_weighted_sum_of_states(
    tmp_path: Path, name: str, layers: str, weigh: Callable[[int], Floats]
) -> None:
    """D43: transformers' rows, summed over one pass, single steps and chunks with the sum handed on."""
    weights = weigh(97).astype(np.float32)
    _, states = truth(tiny_variant(name)[0], TEXT)
    with opened(tmp_path, name, layers) as model:
        _, own = read_in_pieces(model, TEXT, cut(97, [97]), STATES)
        if layers == "fp32":
            assert_states(own, states)
        expected = np.stack([weights.astype(np.float64) @ own[index] for index in STATES])
        atol = 1e-6 * np.abs(np.stack([own[index] for index in STATES])).max() * weights.sum()
        for sizes in ([97], [1], [5, 4, 3, 1], [7, 2, 90]):
            model.rewind(0)
            found = mean_of_rows(model, cut(97, sizes), weights)
            assert_allclose(found, expected, rtol=0, atol=atol, err_msg=str(sizes))


def test_a_pass_that_pools_nothing_adds_nothing(tmp_path: Path) -> None:
    """Zero weights hand the sum on unchanged, to the bit."""
    with opened(tmp_path, QWEN2) as model:
        start = np.random.default_rng(2).normal(size=(len(STATES), 48)).astype(np.float32)
        found = model.forward(TEXT[:5], pool=np.zeros(5, np.float32), pooled=start)
        assert found.pooled is not None
        assert_array_equal(found.pooled, start)


@pytest.mark.parametrize("layers", ["fp32", "int4"])
def test_the_whole_context_can_be_used(tmp_path: Path, layers: str) -> None:
    """The last row of a full cache is right, and the throw-away row behind it has its place."""
    _, spec, weights = tiny_variant(LLAMA)
    graph = build_graph(tmp_path, weights, spec, schemes=Schemes.choose(layers, block_size=64), max_context=9)
    with graph.open() as model:
        whole, _ = read_in_pieces(model, TEXT[:9], cut(9, [9]))
        model.rewind(0)
        single, _ = read_in_pieces(model, TEXT[:9], cut(9, [1]))
        assert_array_equal(single, whole)
        if layers == "fp32":
            assert_allclose(whole, truth(tiny_variant(LLAMA)[0], TEXT[:9])[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("head_size", [8, 20, 24, 40])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_head_sizes_without_a_kernel_are_refused(tmp_path: Path, head_size: int, kind: str) -> None:
    """onnxruntime loads such a graph and fails in its first pass; export says so before it writes weights."""
    _, spec, weights = tiny_variant(LLAMA)
    odd = dataclasses.replace(spec, head_size=head_size)
    message = f"attention heads of size {head_size} are not supported: .* a multiple of 16"
    with pytest.raises(SourceError, match=message):
        build_graph(tmp_path, weights, odd, graph=kind)
    assert (tmp_path / "weights.data").stat().st_size == 0


@pytest.mark.parametrize(("width", "embedding"), [(48, "int4/64"), (96, "int4/32"), (288, "int4/128")])
@pytest.mark.parametrize("head", ["fp32", None])
def test_embeddings_that_engines_read_differently_are_refused(
    tmp_path: Path, width: int, embedding: str, head: str | None
) -> None:
    """onnxruntime 1.23 and 1.32 find different zero points where int4 rows have an odd number of blocks."""
    _, spec, weights = tiny_variant(QWEN2, hidden_size=width)
    schemes = Schemes.choose("int4", head=head or embedding, embedding=embedding)
    with pytest.raises(ConfigError, match=r"an odd number, .* use another block size .* or int8$"):
        build_graph(tmp_path, weights, spec, schemes=schemes)


@pytest.mark.parametrize("head_size", [16, 32, 48, 80])
def test_head_sizes_with_a_kernel(tmp_path: Path, head_size: int) -> None:
    """D28: any multiple of 16, whatever width / heads may be."""
    model, spec, weights = tiny_variant(LLAMA, head_dim=head_size)
    with build_graph(tmp_path, weights, spec).open() as opened_model:
        found, _ = read_in_pieces(opened_model, TEXT[:40], cut(40, [11]))
    assert_allclose(found, truth(model, TEXT[:40])[0], rtol=0, atol=1e-4)


def test_weights_are_stored_as_given(tmp_path: Path) -> None:
    """A stacked product reads its parts in order: one wrong row would be seen here first."""
    _, spec, weights = tiny_variant(QWEN2)
    build_graph(tmp_path, weights, spec)
    stored = (tmp_path / "weights.data").read_bytes()
    layer = "model.layers.1.self_attn"
    stacked = [weights.arrays[f"{layer}.{part}_proj.weight"].tobytes() for part in "qkv"]
    assert stored.count(b"".join(stacked)) == 1


def test_tensors_that_are_not_numbers_are_named(tmp_path: Path) -> None:
    """D36: a NaN in a checkpoint is a line with the tensor's name, not a graph that says NaN."""
    _, spec, weights = tiny_variant(LLAMA)
    name = "model.layers.2.mlp.down_proj.weight"
    broken = weights.arrays[name].copy()
    broken[5, 7] = np.nan
    with pytest.raises(SourceError, match=f"^tensor {name}: weights contain NaN or infinity$"):
        build_graph(
            tmp_path, ArrayWeights({**weights.arrays, name: broken}), spec, schemes=Schemes.choose("int8")
        )
