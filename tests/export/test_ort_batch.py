"""Batches in the `cpu` graph: single steps of several continuations, and several prompts at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from graphs import Graph, build_graph, tiny_variant
from numpy.testing import assert_allclose

from semspec.export.packing import Schemes
from semspec.runtime.backends import open_backend
from semspec.runtime.backends.base import Session
from semspec.runtime.contract import kv_pairs
from semspec.runtime.records import Array, Floats

PROMPT = [3, 71, 8, 44, 20]
FAMILY = pytest.mark.parametrize("name", ["llama-llama3-tied", "qwen2-default-untied"])


@contextmanager
def batched(graph: Graph, n_batch: int) -> Iterator[tuple[Session, list[Array]]]:
    """The graph with cache buffers for n_batch texts, which are returned as they are bound."""
    backend = open_backend("cpu", threads=1)
    session = backend.open(graph.path)
    spec = graph.spec
    buffers = []
    for past, present in kv_pairs(spec):
        tensor = backend.zeros((n_batch, spec.n_kv_heads, spec.capacity, spec.head_size), spec.cache)
        session.bind(past, present, tensor)
        buffers.append(tensor.numpy())
    yield session, buffers
    session.close()


def run(graph: Graph, session: Session, ids: Array, past: int | Sequence[int]) -> tuple[Floats, Floats]:
    """Logits (B, S, V) and pooled sums (B, K, E) of one pass after `past` tokens, without a spare row."""
    n_batch, n_new = ids.shape
    feeds = {
        "input_ids": ids,
        "past_len": np.full(n_batch, past, np.int64),
        "logit_rows": np.arange(n_new),
        "pool": np.ones((n_batch, n_new), np.float32),
        "pooled_in": np.zeros((n_batch, len(graph.spec.pooled_layers), graph.spec.width), np.float32),
        "spare": np.zeros(1, np.int64),
    }
    found = session.run(feeds, ["logits", "pooled"])
    return found["logits"].numpy().copy(), found["pooled"].numpy().copy()


def continue_prompt(graph: Graph, continuations: Array) -> Floats:
    """Logits (B, n, V) of single steps (B, n) after PROMPT, whose cache is read once and copied for each text."""
    with batched(graph, 1) as (session, single):
        run(graph, session, np.array([PROMPT]), 0)
    with batched(graph, len(continuations)) as (session, buffers):
        for buffer, read in zip(buffers, single, strict=True):
            buffer[:] = read
        steps = [
            run(graph, session, continuations[:, [i]], len(PROMPT) + i)[0]
            for i in range(continuations.shape[1])
        ]
    return np.concatenate(steps, axis=1)


def alone(graph: Graph, ids: list[int]) -> tuple[Floats, Floats]:
    """Logits (S, V) of every row of one text by itself, and its states' sum (K, E)."""
    with graph.open() as model:
        found = model.forward(ids, rows=range(len(ids)), pool=np.ones(len(ids), np.float32))
        assert found.pooled is not None
        return found.logits.copy(), found.pooled.copy()


def tiny_graph(folder: Path, name: str, layers: str) -> Graph:
    _, spec, weights = tiny_variant(name)
    return build_graph(folder, weights, spec, schemes=Schemes.choose(layers), max_context=31)


@FAMILY
@pytest.mark.parametrize("layers", ["fp32", "int8", "int4"])
def test_continuations_of_one_prompt(tmp_path: Path, name: str, layers: str) -> None:
    """Sampling several texts from one prompt: together as each by itself.

    Against the exact path (with a spare row) in fp32 only: without it attention rounds otherwise, and a rounding
    that tips an int8 activation is seen in the logits.
    """
    graph = tiny_graph(tmp_path, name, layers)
    continuations = np.random.default_rng(1).integers(0, 99, (3, 6))
    together = continue_prompt(graph, continuations)
    for row, continuation in enumerate(continuations):
        by_itself = continue_prompt(graph, continuation[None])
        assert_allclose(together[row], by_itself[0], rtol=0, atol=1e-4)
        if layers == "fp32":
            logits, _ = alone(graph, [*PROMPT, *continuation.tolist()])
            assert_allclose(together[row], logits[len(PROMPT) :], rtol=0, atol=1e-4)


@FAMILY
@pytest.mark.parametrize("layers", ["fp32", "int8", "int4", "int4/64"])
def test_prompts_of_one_length_on_an_empty_cache(tmp_path: Path, name: str, layers: str) -> None:
    """Several texts read at once, each as if alone, their pooled sums too."""
    graph = tiny_graph(tmp_path, name, layers)
    prompts = np.random.default_rng(2).integers(0, 99, (3, 8))
    with batched(graph, 3) as (session, _):
        logits, pooled = run(graph, session, prompts, 0)
    for row, prompt in enumerate(prompts):
        expected, expected_pooled = alone(graph, prompt.tolist())
        assert_allclose(logits[row], expected, rtol=0, atol=1e-4)
        assert_allclose(pooled[row], expected_pooled, rtol=0, atol=1e-5 * np.abs(expected_pooled).max())


@FAMILY
def test_texts_of_different_lengths_go_on_together(tmp_path: Path, name: str) -> None:
    """Each row has its own past, so its own positions and mask."""
    graph = tiny_graph(tmp_path, name, "fp32")
    texts = [PROMPT, PROMPT[:3], [*PROMPT, *PROMPT[1:]]]
    with batched(graph, 3) as (session, buffers):
        for row, text in enumerate(texts):
            with batched(graph, 1) as (reader, single):
                run(graph, reader, np.array([text]), 0)
            for buffer, read in zip(buffers, single, strict=True):
                buffer[row] = read[0]
        lengths = [len(text) for text in texts]
        first, _ = run(graph, session, np.array([[7], [70], [33]]), lengths)
        second, _ = run(graph, session, np.array([[1], [2], [3]]), [length + 1 for length in lengths])
    for row, (text, added) in enumerate(zip(texts, ([7, 1], [70, 2], [33, 3]), strict=True)):
        logits, _ = alone(graph, [*text, *added])
        assert_allclose([first[row, 0], second[row, 0]], logits[-2:], rtol=0, atol=1e-4)
