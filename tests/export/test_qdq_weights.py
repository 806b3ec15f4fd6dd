"""Codes and scales of the TensorRT graphs: near the weights, symmetric, within what its Q/DQ can read, stored once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from graphs import ArrayWeights
from numpy.testing import assert_allclose, assert_array_equal

from semspec.export.qdq_weights import (
    FP4_BLOCK,
    LARGEST,
    QdqEncoder,
    QdqWeights,
    decode,
    fit_block_size,
    round_input,
)
from semspec.export.writer import GraphBuilder, WeightFile
from semspec.runtime.errors import ConfigError, SourceError
from semspec.runtime.records import Floats

# share of the largest number of a row, or of a block, that its rounding may move a weight by
STEPS = {"int8": 0.5 / 127, "fp8": 1 / 16, "int4": 0.75 / 7, "fp4": 1 / 6 + 1 / 16}
STORAGES = pytest.mark.parametrize("storage", STEPS)
W = "layer.weight"


def matrix(n_rows: int = 12, width: int = 256, seed: int = 0) -> Floats:
    rows = np.random.default_rng(seed).standard_t(4, size=(n_rows, width)).astype(np.float32)
    rows[3] = 0  # a row, and a block, of zeros
    rows[5, :128] = 0
    rows[7] *= 1e-7  # steps below what fp16 can hold
    return rows


def encoder(rows: Floats, **changes: Any) -> QdqEncoder:
    return QdqEncoder(
        weights=ArrayWeights({W: rows}), **{"activation": "float16", "block_size": 64, **changes}
    )


def restored(made: QdqEncoder, storage: str) -> Floats:
    scale = made.matrix_scale((W,)) if storage == "fp4" else None
    parts = [
        decode(*made.encode(name, rows, storage, scale), storage, scale) for name, rows in made.rows((W,))
    ]
    return np.concatenate(parts)


@STORAGES
def test_weights_come_back_within_a_step(storage: str) -> None:
    """Of the row's largest number, or of the block's."""
    rows = matrix()
    size = {"int4": 64, "fp4": FP4_BLOCK}.get(storage, 256)
    peaks = np.repeat(np.abs(rows).reshape(12, -1, size).max(axis=2), size, axis=1)
    error = np.abs(restored(encoder(rows, quantizer="rtn"), storage) - rows)
    assert (error <= STEPS[storage] * peaks + 1e-6).all()
    assert (restored(encoder(rows), storage)[3] == 0).all()


@STORAGES
@pytest.mark.parametrize("activation", ["float16", "bfloat16", "float32"])
def test_scales_are_above_zero(storage: str, activation: str) -> None:
    """TensorRT refuses others; rows of zeros have one too."""
    made = encoder(matrix(), activation=activation)
    scale = made.matrix_scale((W,)) if storage == "fp4" else None
    for name, rows in made.rows((W,)):
        codes, scales = made.encode(name, rows, storage, scale)
        assert codes.dtype == np.uint8
        wide = scales.view(ml_dtypes.float8_e4m3fn) if storage == "fp4" else scales
        assert wide.dtype == ("float8_e4m3fn" if storage == "fp4" else activation)
        assert (wide.astype(np.float32) > 0).all()


@STORAGES
def test_signs_are_treated_alike(storage: str) -> None:
    """Symmetric: there is no zero point; in int4 one side has a step more, which only the search may use."""
    rows = matrix()
    if storage == "int4":
        rows = np.clip(rows, -1, 1)
        rows[:, ::64], rows[:, 1::64] = 1, -1
    one, other = (restored(encoder(values, quantizer="rtn"), storage) for values in (rows, -rows))
    assert_allclose(other, -one, rtol=0, atol=STEPS[storage] if storage == "int4" else 0)


@pytest.mark.parametrize("quantizer", ["rtn", "mse"])
def test_int4_never_leaves_its_range(quantizer: str) -> None:
    """-8 .. 7, the mean in the middle: a block of one sign uses half of the codes and no zero point."""
    made = encoder(np.abs(matrix()) + np.float32(1), quantizer=quantizer)
    [(_, rows)] = made.rows((W,))
    codes, scales = made.encode(W, rows, "int4", None)
    steps = decode(codes, scales, "int4") / np.repeat(scales.astype(np.float32), 64, axis=1)
    assert steps.min() >= 0 and steps.max() <= 7.01


@pytest.mark.parametrize("storage", ["int8", "fp8", "int4", "fp4"])
def test_stored_codes_are_what_onnx_reads(tmp_path: Path, storage: str) -> None:
    """D36: nibbles in order, two's complement: onnx's own reader finds the weights that were meant."""
    rows = matrix()
    made = encoder(rows)
    with WeightFile(tmp_path / "data") as file:
        stored = QdqWeights(made, file).matrix((W,), storage)
    builder = GraphBuilder("g", 23)
    builder.weight("w", stored.codes, stored.shape, stored.dtype)
    builder.node("Identity", ["w"], "y")
    builder.save(tmp_path / "g.onnx", {})
    [tensor] = onnx.load(tmp_path / "g.onnx").graph.initializer
    codes = onnx.numpy_helper.to_array(tensor).astype(np.float32)
    scale = made.matrix_scale((W,)) if storage == "fp4" else None
    assert stored.scales is not None
    raw = (tmp_path / "data").read_bytes()[stored.scales.offset :][: stored.scales.length]
    scales = np.frombuffer(raw, ml_dtypes.float8_e4m3fn if storage == "fp4" else np.float16).astype(
        np.float32
    )
    wide = codes.reshape(12, len(scales) // 12, -1) * scales.reshape(12, -1, 1) * np.float32(scale or 1)
    assert_allclose(wide.reshape(12, -1), restored(made, storage), rtol=1e-6, atol=0)


def test_two_graphs_store_a_matrix_once(tmp_path: Path) -> None:
    """Whichever asks first; the same weights give the same bytes."""
    for name in ("one", "other"):
        with WeightFile(tmp_path / name) as file:
            weights = QdqWeights(encoder(matrix()), file)
            for storage in ("plain", *STEPS):
                assert weights.matrix((W,), storage) == weights.matrix((W,), storage)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


@pytest.mark.parametrize(("activation", "refused"), [("float16", True), ("bfloat16", False)])
def test_weights_that_fp16_cannot_hold_are_named(tmp_path: Path, activation: str, refused: bool) -> None:
    """D40: by tensor, with the repair; bfloat16 reaches as far as fp32."""
    rows = matrix()
    rows[1, 1] = 7e4
    with WeightFile(tmp_path / "data") as file:
        weights = QdqWeights(encoder(rows, activation=activation), file)
        if not refused:
            assert weights.matrix((W,), "plain").scales is None
            return
        with pytest.raises(
            SourceError, match=f"tensor {W}: weights reach 7e\\+04 and float16 ends at 65504; use .* bf16"
        ):
            weights.matrix((W,), "plain")


@STORAGES
def test_weights_that_are_not_numbers_are_named(storage: str) -> None:
    """D36: a NaN is a line with the tensor's name."""
    rows = matrix()
    rows[2, 9] = np.nan
    with pytest.raises(SourceError, match=f"tensor {W}: weights contain NaN or infinity"):
        restored(encoder(rows), storage)


def test_block_sizes_divide_every_row() -> None:
    """The largest that does is taken; another is refused with those that do."""
    weights = ArrayWeights({"a": matrix(width=576), "b": matrix(width=1536), "c": matrix(width=80)})
    assert fit_block_size(weights, ("a", "b"), None) == 64
    assert fit_block_size(weights, ("b",), None) == 128
    assert fit_block_size(weights, ("a", "b"), 32) == 32
    with pytest.raises(ConfigError, match=r"int4/128 .* of 576, 1536 weights they can be 64, 32"):
        fit_block_size(weights, ("a", "b"), 128)
    with pytest.raises(ConfigError, match=r"no block size divides 80; use int8"):
        fit_block_size(weights, ("c",), None)


@pytest.mark.parametrize("kind", ["int8", "fp8", "fp4"])
def test_inputs_are_cut_off_at_their_range(kind: str) -> None:
    """What was never measured becomes the largest that was; rows do not influence each other."""
    rows = matrix()
    most = LARGEST["fp4"] * LARGEST["fp8"] if kind == "fp4" else LARGEST[kind]
    step = float(np.abs(rows).max()) / 2 / most
    found = round_input(rows, kind, step)
    assert np.abs(found).max() <= 1.008 * np.abs(rows).max() / 2  # -128 of int8 is one step more
    assert_array_equal(round_input(rows[4:5], kind, step), found[4:5])
    inside = np.abs(rows) < np.abs(rows).max() / 2
    assert np.abs(found - rows)[inside].max() <= np.abs(rows).max() / 2 * STEPS[kind]
