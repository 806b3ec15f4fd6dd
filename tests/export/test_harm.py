"""Harm of a linear, measured side by side with all others, is what rounding that one alone does to the model."""

from __future__ import annotations

import numpy as np
import pytest
import tiny

from semspec.export.checkpoint import Checkpoint, open_checkpoint
from semspec.export.harm import RoundedWeights, measure_harm
from semspec.export.quantize import scheme
from semspec.export.verify import closeness
from semspec.models.decoder import EMBEDDING, head_linear, layer_linears
from semspec.models.reference import run_reference

INT4 = scheme("int4", 32)
IDS = np.random.default_rng(5).integers(0, 60, 40).tolist()


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A small qwen2."""
    folder = tmp_path_factory.mktemp("harm") / "model"
    tiny.save_tiny(folder, "qwen2", initializer_range=0.2, tie_word_embeddings=request.param)
    return open_checkpoint(folder)


def test_each_linear_is_rounded_alone(checkpoint: Checkpoint) -> None:
    """The streams that travel side by side do not touch each other; a tied head is rounded as embedding too."""
    spec = checkpoint.spec
    linears = (*layer_linears(spec), head_linear(spec))
    harm = measure_harm(spec, checkpoint, IDS, {linear.name: INT4 for linear in linears})
    assert list(harm) and harm.keys() == {linear.name for linear in linears}
    exact = run_reference(spec, checkpoint, IDS).logits
    for linear in linears:
        assert spec.tied == (linear.weights == (EMBEDDING,)) or linear.name != "head"
        alone = run_reference(spec, RoundedWeights(checkpoint, linear.weights, INT4), IDS).logits
        assert harm[linear.name] == pytest.approx(closeness(exact, alone)[0], rel=2e-3, abs=1e-8)
        assert harm[linear.name] > 0


def test_only_what_is_asked_for_is_rounded(checkpoint: Checkpoint) -> None:
    """Finer rounding does less; layers are counted one by one."""
    seen: list[tuple[int, int]] = []
    name = "layers.0.down"
    coarse = measure_harm(checkpoint.spec, checkpoint, IDS, {name: INT4}, lambda *at: seen.append(at))
    fine = measure_harm(checkpoint.spec, checkpoint, IDS, {name: scheme("int8", 32)})
    assert coarse.keys() == fine.keys() == {name}
    assert 0 <= fine[name] < 0.05 * coarse[name]
    n_layers = checkpoint.spec.n_layers
    assert seen == [(done, n_layers) for done in range(1, n_layers + 1)]
