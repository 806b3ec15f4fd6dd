"""The reference against transformers: what every graph is judged by must itself be right."""

from __future__ import annotations

import doctest
from typing import Any

import numpy as np
import pytest
import torch
from graphs import VARIANTS, ArrayWeights, tiny_variant, truth
from numpy.testing import assert_allclose, assert_array_equal
from tiny import tiny_model

from semspec.models import reference
from semspec.models.families import read_spec
from semspec.models.reference import ReferenceRun, row_blocks, run_reference
from semspec.runtime.records import Floats

TEXT = np.random.default_rng(0).integers(0, 99, 97).tolist()


def both(name: str, ids: list[int]) -> tuple[ReferenceRun, Floats, Floats]:
    """The reference's run of one text, and transformers' logits and states of it."""
    model, spec, weights = tiny_variant(name)
    states = range(spec.n_layers + 1)
    return run_reference(spec, weights, ids, keep_states=states), *truth(model, ids)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_states_are_those_of_transformers(name: str) -> None:
    """D28, D42: every switch of both families, positions 0..96, states at every index 0..L."""
    found, logits, states = both(name, TEXT)
    assert_allclose(found.logits, logits, rtol=0, atol=1e-4)
    assert sorted(found.states) == [0, 1, 2, 3]
    for index, state in found.states.items():
        peak = np.abs(
            states[index]
        ).max()  # sums of branches that partly cancel: near 60, where fp32 steps by 4e-6
        assert_allclose(state, states[index], rtol=0, atol=1e-5 * peak, err_msg=f"state {index}")
        assert found.state_peaks[index] == np.abs(state).max()


@pytest.mark.parametrize("name", VARIANTS)
def test_tiny_models_say_many_things(name: str) -> None:
    """A model with a near-constant arg-max would agree with anything."""
    model, _, _ = tiny_variant(name)
    with torch.no_grad():
        written = model.generate(torch.tensor([[5]]), max_new_tokens=40, do_sample=False)
    assert len(set(written[0, 1:].tolist())) >= 20


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_scaled_positions_beyond_the_original_context(kind: str) -> None:
    """D27: a scaling that is ignored or misread is exact at position 0 and shows with length only."""
    ids = np.random.default_rng(1).integers(0, 99, 201).tolist()
    found, logits, _ = both(f"llama-{kind}-untied", ids)
    for position in (0, 31, 33, 200):
        assert_allclose(found.logits[position], logits[position], rtol=0, atol=1e-4, err_msg=str(position))
    plain, _, _ = both("llama-default-untied", ids)
    assert np.abs(plain.logits[200] - found.logits[200]).max() > 0.1


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_last_state_is_the_normed_one(family: str) -> None:
    """D42: the head makes the logits of states[L]; a second norm would not, and a probe would not complain."""
    model, spec, weights = tiny_variant(f"{family}-default-untied")
    run = run_reference(spec, weights, TEXT, keep_states=[spec.n_layers])
    state = torch.from_numpy(run.states[spec.n_layers])
    with torch.no_grad():
        assert_allclose(model.lm_head(state).numpy(), run.logits, rtol=0, atol=1e-4)
        again = model.lm_head(model.model.norm(state)).numpy()
    assert np.abs(again - run.logits).max() > 0.1


def test_only_wanted_states_are_kept() -> None:
    """A real model's states of 512 tokens at 29 indices would be half a gigabyte."""
    _, spec, weights = tiny_variant("llama-default-tied")
    run = run_reference(spec, weights, TEXT[:3], keep_states=[1])
    assert run.states.keys() == {1}
    assert len(run.state_peaks) == spec.n_layers + 1


@pytest.mark.parametrize("heads", [(6, 6), (6, 1), (4, 2)], ids=str)
def test_key_heads_are_shared_by_neighbours(heads: tuple[int, int]) -> None:
    """Query head h reads key head h // (heads / H): multi-head, multi-query and grouped."""
    model = tiny_model(
        "llama", num_attention_heads=heads[0], num_key_value_heads=heads[1], initializer_range=0.3
    )
    weights = ArrayWeights({name: values.detach().numpy() for name, values in model.named_parameters()})
    run = run_reference(read_spec(model.config.to_dict()), weights, TEXT)
    assert_allclose(run.logits, truth(model, TEXT)[0], rtol=0, atol=1e-4)


def test_large_matrices_are_read_by_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference of a 1.5B model must not hold its head: no read is larger than a block."""
    _, spec, weights = tiny_variant("qwen2-yarn-untied")
    whole = run_reference(spec, weights, TEXT[:9])
    monkeypatch.setattr("semspec.models.reference.BLOCK_BYTES", 4096)
    reads: list[int] = []

    class Watched(ArrayWeights):
        def read(self, name: str, rows: slice | None = None) -> Any:
            values = super().read(name, rows)
            reads.append(values.nbytes)
            return values

    in_blocks = run_reference(spec, Watched(weights.arrays), TEXT[:9])
    assert max(reads) <= 4096
    # numpy multiplies matrices of other heights in another order, on some processors more so
    assert_allclose(in_blocks.logits, whole.logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "block_bytes"), [((7, 3), 1), ((7, 3), 24), ((1, 9), 4), ((8, 2), 1 << 20)]
)
def test_row_blocks_cover_every_row_once(shape: tuple[int, int], block_bytes: int) -> None:
    """One row at least, however wide, so that no matrix is refused for its width."""
    rows = np.arange(shape[0])
    blocks = [rows[block] for block in row_blocks(shape, block_bytes)]
    assert_array_equal(np.concatenate(blocks), rows)
    assert all(len(block) == 1 or len(block) * shape[1] * 4 <= block_bytes for block in blocks)


def test_example_of_the_docstring() -> None:
    """The worked example is run, so it stays true."""
    result = doctest.testmod(reference)
    assert (result.failed, result.attempted > 0) == (0, True)


def test_extreme_gates_do_not_overflow() -> None:
    """silu(-200) is 0, not NaN, and warns of nothing (warnings are errors here)."""
    _, spec, weights = tiny_variant("llama-default-tied")
    name = "model.layers.0.mlp.gate_proj.weight"
    loud = ArrayWeights({**weights.arrays, name: weights.arrays[name] * 1000})
    run = run_reference(spec, loud, TEXT[:5])
    assert np.isfinite(run.logits).all()
