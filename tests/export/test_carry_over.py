"""GGUF blocks whose numbers an int8 or int4 block can hold are carried over: nothing is rounded a second time."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.testing import assert_array_equal
from tiny import tiny_model
from tiny_gguf import gguf_name, write_gguf

from semspec.export.checkpoint import Checkpoint, expected_tensors, open_checkpoint
from semspec.export.packing import PackedWeights
from semspec.export.quantize import pack, scheme, unpack
from semspec.export.scaling import Folding, unfolded_steps
from semspec.export.writer import WeightFile

EXACT = [("Q8_0", "int8"), ("Q5_0", "int8"), ("Q4_0", "int8"), ("Q4_0", "int4")]
QUERY = "model.layers.0.self_attn.q_proj.weight"


def stored_as(path: Path, kind: str) -> Checkpoint:
    """A llama, so query rows are reordered, all of whose matrices are stored as `kind`."""
    model = tiny_model("llama", hidden_size=64, intermediate_size=96)
    matrices = [name for name, tensor in model.state_dict().items() if tensor.ndim == 2]
    kinds = {gguf_name(name): gguf.GGMLQuantizationType[kind] for name in matrices}
    return open_checkpoint(write_gguf(path / "m.gguf", model, types=kinds))


@pytest.mark.parametrize(("kind", "precision"), EXACT)
@pytest.mark.parametrize("quantizer", ["rtn", "mse"])
def test_blocks_are_carried_over(tmp_path: Path, kind: str, precision: str, quantizer: str) -> None:
    """The very numbers of the file, steps below zero included, whatever the quantizer; rows in any piece."""
    checkpoint, chosen = stored_as(tmp_path, kind), scheme(precision, 32)
    for name, shape in expected_tensors(checkpoint.spec).items():
        if len(shape) == 2:
            rows = slice(3, shape[0] - 2)
            weight, steps = checkpoint.read(name, rows), checkpoint.steps(name, chosen.bits, rows)
            assert_array_equal(unpack(pack(weight, chosen, quantizer, None, steps), chosen.bits), weight)
    values = checkpoint.read(QUERY)
    lowest, highest = (function(values.reshape(-1, 32), axis=1) for function in (np.min, np.max))
    assert (lowest < 0).any() and (highest > -lowest).any()  # Q4_0 stores such blocks with a negative step


def test_without_their_steps_they_are_rounded_again(tmp_path: Path) -> None:
    """What carrying over is for: Q4_0 has 16 even steps, and a block's range is not always all of them."""
    checkpoint, chosen = stored_as(tmp_path, "Q4_0"), scheme("int4", 32)
    weight = checkpoint.read(QUERY)
    assert np.abs(unpack(pack(weight, chosen, "rtn"), 4) - weight).max() > 0


@pytest.mark.parametrize(("kind", "bits"), [("Q8_0", 4), ("Q5_0", 4), ("Q4_1", 8), ("F16", 8)])
def test_what_does_not_fit_is_not_carried_over(tmp_path: Path, kind: str, bits: int) -> None:
    """More steps than codes, an offset of its own, or no steps at all."""
    assert stored_as(tmp_path, kind).steps(QUERY, bits) is None


@pytest.mark.parametrize("block_size", [32, 64])
def test_an_export_counts_no_error(tmp_path: Path, block_size: int) -> None:
    """In blocks of 32; larger ones have one step for two of the file's."""
    checkpoint = stored_as(tmp_path, "Q8_0")
    with WeightFile(tmp_path / "weights.data") as file:
        packed = PackedWeights(checkpoint, file, "mse", steps=checkpoint.steps)
        packed.matrix((QUERY,), scheme("int8", block_size), "float32")
    assert (packed.roundings[QUERY].squared_errors == 0) == (block_size == 32)


def test_scaled_channels_leave_the_grid(tmp_path: Path) -> None:
    """Folding multiplies columns, each by another number."""
    checkpoint = stored_as(tmp_path, "Q8_0")
    folding = Folding(inputs={}, columns={QUERY: np.full(64, 2, np.float32)}, rows={})
    steps = unfolded_steps(checkpoint.steps, folding)
    assert steps(QUERY, 8, slice(0, 4)) is None
    other = QUERY.replace("q_proj", "o_proj")
    assert_array_equal(steps(other, 8, slice(0, 4)), checkpoint.steps(other, 8, slice(0, 4)))
