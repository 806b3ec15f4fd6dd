"""Two heads or one: files that carry a tied model's matrix twice, rounded differently."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import gguf
import numpy as np
import pytest
from graphs import ArrayWeights, build_graph, read_in_pieces, tiny_variant
from numpy.testing import assert_allclose, assert_array_equal
from tiny import tiny_model
from tiny_gguf import write_gguf

from semspec.export.checkpoint import open_checkpoint
from semspec.export.tying import SAME_MATRIX, SharedHead, head_difference
from semspec.models.decoder import EMBEDDING, FINAL_NORM, HEAD
from semspec.models.reference import run_reference
from semspec.runtime.records import Floats

Kind = gguf.GGMLQuantizationType


def pair(embedding: Floats, head: Floats) -> ArrayWeights:
    return ArrayWeights({EMBEDDING: embedding, HEAD: head})


def random_matrix(seed: int, shape: tuple[int, int] = (99, 64)) -> Floats:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(
    ("embedding", "head"),
    [(Kind.Q5_0, Kind.Q8_0), (Kind.Q8_0, Kind.F32), (Kind.F16, Kind.F32), (Kind.Q8_0, Kind.Q5_0)],
)
def test_two_roundings_are_one_matrix(tmp_path: Path, embedding: Kind, head: Kind) -> None:
    """GGUF files of tied models: the same numbers, rounded more finely in the head."""
    model = tiny_model("llama", tie_word_embeddings=False, hidden_size=64, initializer_range=0.3)
    model.lm_head.weight.data.copy_(model.get_input_embeddings().weight.data)
    types = {"token_embd.weight": embedding, "output.weight": head}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", model, types=types))
    assert not checkpoint.spec.tied
    assert 0 < head_difference(checkpoint) < SAME_MATRIX


def test_matrices_that_were_trained_apart_are_two(tmp_path: Path) -> None:
    """Real untied models: independent matrices differ by about the root of two."""
    model = tiny_model("llama", tie_word_embeddings=False, hidden_size=64)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", model))
    assert head_difference(checkpoint) > 1


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.05, 0.2, 0.9])
def test_difference_is_relative(noise: float) -> None:
    """|embedding - head| / |head|, whatever the scale."""
    head = random_matrix(0)
    off = random_matrix(1)
    off *= noise * np.linalg.norm(head) / np.linalg.norm(off)
    for scale in (1e-3, 1.0, 1e3):
        found = head_difference(pair((head + off) * np.float32(scale), head * np.float32(scale)))
        assert found == pytest.approx(noise, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(
    ("embedding", "head"),
    [
        (random_matrix(0, (99, 64)), random_matrix(0, (98, 64))),
        (random_matrix(0), np.zeros((99, 64), np.float32)),
        (np.zeros((99, 64), np.float32), np.zeros((99, 64), np.float32)),
    ],
    ids=["shapes", "zero head", "both zero"],
)
def test_what_cannot_be_compared_is_infinitely_apart(embedding: Floats, head: Floats) -> None:
    """Never a division by zero, never a match by accident."""
    assert head_difference(pair(embedding, head)) == float("inf")


def test_comparison_is_by_blocks_and_stops_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A 150k-row vocabulary of another model is recognized by its first rows."""
    monkeypatch.setattr("semspec.export.tying.BLOCK_BYTES", 10 * 64 * 4)
    rows: list[slice | None] = []

    class Watched(ArrayWeights):
        def read(self, name: str, rows_: slice | None = None) -> Floats:
            rows.append(rows_)
            return super().read(name, rows_)

    same = random_matrix(0)
    assert head_difference(Watched({EMBEDDING: same, HEAD: same})) == 0
    assert len(rows) == 2 * 10
    rows.clear()
    assert head_difference(Watched({EMBEDDING: -same, HEAD: same})) > 1
    assert len(rows) == 2


def test_shared_head_takes_the_place_of_the_embedding(tmp_path: Path) -> None:
    """Embedding and head are the head's matrix, everything else is untouched, and the graph is that tied model."""
    _, spec, weights = tiny_variant("llama-default-untied")
    shared = SharedHead(weights)
    tied = SharedHead.spec(spec)
    assert tied == dataclasses.replace(spec, tied=True)
    assert shared.shape(EMBEDDING) == weights.shape(HEAD)
    assert_array_equal(shared.read(EMBEDDING), weights.read(HEAD))
    assert_array_equal(shared.read(EMBEDDING, slice(3, 9)), weights.read(HEAD, slice(3, 9)))
    assert_array_equal(shared.read(FINAL_NORM), weights.read(FINAL_NORM))
    ids = list(range(20))
    reference = run_reference(spec, pair_of_heads(weights), ids)
    with build_graph(tmp_path, shared, tied).open() as model:
        logits, _ = read_in_pieces(model, ids, [slice(0, 20)])
    assert_allclose(logits, reference.logits, rtol=0, atol=1e-4)


def pair_of_heads(weights: ArrayWeights) -> ArrayWeights:
    """The same weights with the head copied over the embedding."""
    return ArrayWeights({**weights.arrays, EMBEDDING: weights.arrays[HEAD]})
