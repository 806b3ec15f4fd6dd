"""The promise exact decoding rests on: on the CPU a text gives the same bits however it is cut."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from graphs import (
    build_graph,
    cut,
    export_graph,
    read_in_pieces,
    rebuild,
    tiny_variant,
    truth,
)
from numpy.testing import assert_array_equal

from semspec.export.checkpoint import open_checkpoint
from semspec.export.packing import Schemes
from semspec.export.vocabulary import write_tokenizer
from semspec.runtime.model import CachedModel
from semspec.runtime.records import Floats
from semspec.runtime.tokenizer import Tokenizer

N = 300
RNG = np.random.default_rng(7)
CUTS = {
    "single": [1],
    "pairs": [2],
    "odd": [3, 5, 7],
    "small": RNG.integers(1, 9, N).tolist(),
    "large": RNG.integers(1, 100, N).tolist(),
}
SCHEMES = [("fp32", 32), *((layers, block) for layers in ("int8", "int4") for block in (32, 64, 128))]
BY_SCHEME = pytest.mark.parametrize(("layers", "block_size"), SCHEMES, ids=lambda value: str(value))


def assert_any_cut(model: CachedModel, ids: list[int], cuts: list[str], states: list[int]) -> Floats:
    """Logits and states of every cut against one pass, to the bit; returns the logits."""
    model.rewind(0)
    whole, whole_states = read_in_pieces(model, ids, [slice(0, len(ids))], states)
    for name in cuts:
        model.rewind(0)
        found, found_states = read_in_pieces(model, ids, cut(len(ids), CUTS[name]), states)
        assert_array_equal(found, whole, err_msg=name)
        for index in states:
            assert_array_equal(found_states[index], whole_states[index], err_msg=f"{name}, state {index}")
    return whole


def assert_rewinding(model: CachedModel, ids: list[int], whole: Floats, counts: range) -> None:
    """After wrong tokens and a rewind, the right ones give what they gave before."""
    half = len(ids) // 2
    model.rewind(half)
    for count in counts:
        at = half + count
        model.forward(ids[:count])  # wrong: the text's start instead of its second half
        model.rewind(half)
        found, _ = read_in_pieces(model, ids[half:at], [slice(0, count)])
        assert_array_equal(found, whole[half:at], err_msg=f"{count} wrong tokens")
        model.rewind(half)


@BY_SCHEME
@pytest.mark.parametrize("name", ["llama-llama3-tied", "qwen2-default-untied"])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"hidden_size": 96, "intermediate_size": 160, "vocab_size": 101},
        {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 128, "head_dim": 32},
    ],
    ids=["48", "96", "128"],
)
def test_tiny_models_have_the_same_bits_at_every_cut(
    tmp_path: Path, name: str, layers: str, block_size: int, sizes: dict[str, int]
) -> None:
    """Widths below, between and at whole blocks; biases; rows of a vocabulary that no kernel's tile divides."""
    _, spec, weights = tiny_variant(name, max_position_embeddings=512, **sizes)
    schemes = Schemes.choose(layers, block_size=block_size)
    states = [0, 1, 2, 3]
    graph = build_graph(tmp_path, weights, spec, schemes=schemes, max_context=N, hidden_layers=tuple(states))
    ids = np.random.default_rng(3).integers(0, 99, N).tolist()
    with graph.open() as model:
        whole = assert_any_cut(model, ids, list(CUTS), states)
        assert_rewinding(model, ids, whole, range(1, 17))


@pytest.mark.parametrize(
    ("layers", "head"),
    [
        ("fp32", "int8"),
        ("fp32", "int4/64"),
        ("int4", "fp32"),
        ("int4/64", "fp32"),
        ("int8", "int8/64"),
        ("int8/128", "int4/128"),
        ("int4/128", "int4"),
    ],
)
def test_mixed_precisions_have_the_same_bits_at_every_cut(tmp_path: Path, layers: str, head: str) -> None:
    """Rows are repeated for the layers, for the head, or for both, as each needs it."""
    _, spec, weights = tiny_variant("qwen2-linear-untied", max_position_embeddings=512)
    graph = build_graph(
        tmp_path,
        weights,
        spec,
        schemes=Schemes.choose(layers, head=head, embedding="int8"),
        max_context=N,
        hidden_layers=(0, 3),
    )
    ids = np.random.default_rng(4).integers(0, 99, N).tolist()
    with graph.open() as model:
        assert_any_cut(model, ids, list(CUTS), [0, 3])


@BY_SCHEME
def test_the_real_model_has_the_same_bits_at_every_cut(
    smollm2_gguf: Path, tmp_path: Path, layers: str, block_size: int
) -> None:
    """D06: 300 tokens of SmolLM2 at every precision have the same bits at every cut, and after 1 to 16 wrong ones."""
    schemes = Schemes.choose(layers, block_size=block_size, quantizer="rtn")
    graph = export_graph(tmp_path, smollm2_gguf, schemes=schemes, max_context=N, hidden_layers=(0, 21, 30))
    ids = np.random.default_rng(5).integers(0, 49_000, N).tolist()
    with graph.open() as model:
        whole = assert_any_cut(model, ids, ["single", "small", "large"], [0, 21, 30])
        assert_rewinding(model, ids, whole, range(1, 17))
        model.rewind(0)
        assert_array_equal(model.forward(ids).logits[0], whole[-1])  # a lone row of the head


@pytest.mark.filterwarnings("default:near-tie")
def test_the_real_model_writes_what_transformers_writes(smollm2_gguf: Path, tmp_path: Path) -> None:
    """32 greedy ids after two prompts, on the same de-quantized weights; only a near-tie may differ, with a warning.

    transformers reads our text in one pass: its arg-max at every position is what it would have written there.
    """
    checkpoint = open_checkpoint(smollm2_gguf)
    write_tokenizer(smollm2_gguf, tmp_path / "tokenizer", config=checkpoint.config)
    tokenizer = Tokenizer.open(tmp_path / "tokenizer")
    theirs = rebuild(checkpoint)
    graph = export_graph(tmp_path / "graph", smollm2_gguf, max_context=128)
    with graph.open() as model:
        for prompt in ("The capital of France is", "def fibonacci(n):\n    "):
            ids = tokenizer.encode(prompt)
            written = write_greedily(model, ids, 32)
            logits, _ = truth(theirs, [*ids, *written])
            for step, token in enumerate(written):
                row = logits[len(ids) - 1 + step]
                gap = float(row.max() - row[token])
                assert gap < 1e-3, f"{prompt!r}, step {step}: {token} instead of {row.argmax()}"
                if gap:
                    warnings.warn(
                        f"near-tie: {prompt!r}, step {step}: {token}, {gap:.1e} below {row.argmax()}",
                        stacklevel=1,
                    )


def write_greedily(model: CachedModel, ids: list[int], n: int) -> list[int]:
    """The n likeliest ids after `ids`, each read before the next."""
    model.rewind(0)
    written = [int(model.forward(ids).logits[0].argmax())]
    while len(written) < n:
        written.append(int(model.forward(written[-1:]).logits[0].argmax()))
    return written
