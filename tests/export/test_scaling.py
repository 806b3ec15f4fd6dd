"""Channel scales: exact in fp32 for every family, chosen where they pay, and made of ranges that are the model's."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
from numpy.testing import assert_allclose

from semspec.calibration.ranges import take_ranges
from semspec.calibration.texts import CalibrationText
from semspec.export.checkpoint import Checkpoint, open_checkpoint
from semspec.export.quantize import MOMENT_SPAN, Scheme, scheme
from semspec.export.ranges import Ranges
from semspec.export.scaling import FoldedWeights, choose_folding, folded_moments
from semspec.models.decoder import EMBEDDING, HEAD, layer_linears
from semspec.models.ops import Linear
from semspec.models.reference import run_reference

SHAPES = {
    "llama": {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16},
    "llama, biases": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen2, tied": {"tie_word_embeddings": True},
}
IDS = tuple(np.random.default_rng(3).integers(0, 60, 60).tolist())


def int4(linear: Linear) -> Scheme:
    """The same for all."""
    return scheme("int4", 32)


@pytest.fixture(scope="module", params=SHAPES)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Checkpoint, Ranges]:
    """A checkpoint and its ranges over 180 tokens."""
    folder = tmp_path_factory.mktemp("scaling")
    # at larger weights fp32 itself is 1e-4 from fp64
    tiny.save_tiny(
        folder / "model", request.param.partition(",")[0], initializer_range=0.2, **SHAPES[request.param]
    )
    checkpoint = open_checkpoint(folder / "model")
    rng = np.random.default_rng(4)
    windows = tuple(tuple(rng.integers(0, checkpoint.spec.vocab_size, 90).tolist()) for _ in range(2))
    text = CalibrationText(windows=windows, sha256="0" * 64)
    return checkpoint, take_ranges(checkpoint, text, folder / "ranges", name="tiny")


def test_folding_is_exact_in_fp32(model: tuple[Checkpoint, Ranges]) -> None:
    """D36: norms, value rows of grouped heads, up rows, biases: the folded model is the model within 1e-4."""
    checkpoint, ranges = model
    folding = choose_folding(checkpoint.spec, checkpoint, ranges, int4)
    plain = run_reference(checkpoint.spec, checkpoint, IDS).logits
    folded = run_reference(checkpoint.spec, FoldedWeights(checkpoint, folding), IDS).logits
    assert_allclose(folded, plain, rtol=0, atol=1e-4)
    moved = [name for name, scale in folding.inputs.items() if scale.max() / scale.min() > 1.05]
    assert {name.split(".")[-1] for name in moved} == {"qkv", "attention_output", "gate_up", "down"}


def test_every_linear_and_what_writes_its_channels_are_scaled_once(model: tuple[Checkpoint, Ranges]) -> None:
    """Folding into a norm that another linear reads too would change that one: head and final norm stay."""
    checkpoint, ranges = model
    spec = checkpoint.spec
    folding = choose_folding(spec, checkpoint, ranges, int4)
    assert folding.inputs.keys() == {linear.name for linear in layer_linears(spec)}
    assert folding.columns.keys() == {name for linear in layer_linears(spec) for name in linear.weights}
    untouched = {EMBEDDING, HEAD, "model.norm.weight"}
    assert not untouched & (folding.columns.keys() | folding.rows.keys())
    n_biases = spec.n_layers * (int(spec.qkv_bias) + int(spec.mlp_bias))
    assert len(folding.rows) == 4 * spec.n_layers + n_biases


def test_heads_of_a_group_share_their_scale(model: tuple[Checkpoint, Ranges]) -> None:
    """They read the same value row."""
    checkpoint, ranges = model
    spec = checkpoint.spec
    folding = choose_folding(spec, checkpoint, ranges, int4)
    scale = folding.inputs["layers.0.attention_output"].reshape(spec.n_kv_heads, -1, spec.head_size)
    assert_allclose(scale, np.broadcast_to(scale[:, :1], scale.shape))
    assert_allclose(folding.rows["model.layers.0.self_attn.v_proj.weight"], scale[:, 0].reshape(-1))


def test_rows_read_in_pieces_are_scaled_alike(model: tuple[Checkpoint, Ranges]) -> None:
    """The exporter streams matrices by rows."""
    checkpoint, ranges = model
    folded = FoldedWeights(checkpoint, choose_folding(checkpoint.spec, checkpoint, ranges, int4))
    for name in ("self_attn.v_proj", "mlp.up_proj", "mlp.down_proj"):
        whole = folded.read(f"model.layers.1.{name}.weight")
        pieces = [
            folded.read(f"model.layers.1.{name}.weight", slice(at, at + 5)) for at in range(0, len(whole), 5)
        ]
        assert_allclose(np.concatenate(pieces), whole, rtol=0, atol=0)


def test_moments_follow_the_folding(model: tuple[Checkpoint, Ranges]) -> None:
    """E[(x/s) (x/s)'] of what a linear then reads; the head's are as measured, an embedding has none."""
    checkpoint, ranges = model
    spec = checkpoint.spec
    folding = choose_folding(spec, checkpoint, ranges, int4)
    moments = folded_moments(spec, ranges, folding)
    measured, scale = ranges.linears["layers.0.down"].moments, folding.inputs["layers.0.down"]
    found = moments("model.layers.0.mlp.down_proj.weight")
    assert found is not None and found.shape == measured.shape
    for channel in (0, 1, scale.size - 1):
        span, place = divmod(channel, MOMENT_SPAN)
        first = scale[span * MOMENT_SPAN]
        expected = measured[span, place, 0] / (scale[channel] * first)
        assert found[span, place, 0] == pytest.approx(expected, rel=1e-5)
    head = moments(EMBEDDING if spec.tied else HEAD)
    assert head is not None and np.array_equal(head, ranges.linears["head"].moments)
    assert spec.tied or moments(EMBEDDING) is None
