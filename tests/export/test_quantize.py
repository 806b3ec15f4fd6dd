"""Packed weights mean to ONNX Runtime's kernels what they mean to us, at every shape a model may have."""

from __future__ import annotations

import doctest
from typing import Any

import numpy as np
import onnxruntime
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from onnx import TensorProto, helper

from semspec.export import quantize
from semspec.export.quantize import (
    BLOCK_SIZES,
    INFORMED,
    MOMENT_SPAN,
    QUANTIZERS,
    Packed,
    Scheme,
    pack,
    scheme,
    unpack,
)
from semspec.runtime.errors import ConfigError
from semspec.runtime.records import Array, Floats

QUANTIZED = [
    Scheme(name=f"int{bits}", bits=bits, block_size=block) for bits in (4, 8) for block in BLOCK_SIZES
]
EVERY = pytest.mark.parametrize("scheme", QUANTIZED, ids=str)
SHAPES = pytest.mark.parametrize(
    ("n", "k"), [(1, 32), (5, 128), (7, 48), (3, 160), (33, 100), (2, 1), (16, 129)], ids=str
)
OPTIMIZATION = pytest.mark.parametrize("level", ["DISABLE_ALL", "ENABLE_ALL"])


def random_weights(n: int, k: int, seed: int = 0) -> Floats:
    """Rows of different size and bias, so that a mixed-up scale or zero point is seen."""
    rng = np.random.default_rng(seed)
    weights = rng.normal(size=(n, k)) * rng.uniform(0.1, 3, (n, 1)) + rng.normal(size=(n, 1))
    return weights.astype(np.float32)


def moments_of(k: int, seed: int = 0) -> Floats:
    """Second moments of inputs whose channels differ in size and go together, in spans, 0 behind the last."""
    rng = np.random.default_rng(seed)
    n_spans = -(-k // MOMENT_SPAN)
    x = np.zeros((400, n_spans * MOMENT_SPAN))
    x[:, :k] = rng.normal(size=(400, 8)) @ rng.normal(size=(8, k)) + rng.normal(size=(400, k))
    x[:, :k] *= rng.lognormal(size=k)
    spans = x.reshape(400, n_spans, MOMENT_SPAN)
    return (np.einsum("nsi,nsj->sij", spans, spans) / 400).astype(np.float32)


def run_node(
    op: str, constants: dict[str, Array], feed: Array, output: Array, level: str, **attributes: Any
) -> Array:
    """One node of com.microsoft: `feed` is its input x, which has the place of None among the constants."""
    inputs = [name for name, value in constants.items() if value is not None]
    kinds = {"float32": TensorProto.FLOAT, "uint8": TensorProto.UINT8, "int64": TensorProto.INT64}
    tensors = [
        helper.make_tensor(name, kinds[value.dtype.name], value.shape, value.tobytes(), raw=True)
        for name, value in constants.items()
        if name != "x" and value is not None
    ]
    node = helper.make_node(op, inputs, ["y"], domain="com.microsoft", **attributes)
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info("x", kinds[feed.dtype.name], feed.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, output.shape)],
        tensors,
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_{level}")
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    found: Array = session.run(["y"], {"x": feed})[0]
    return found


def constants_of(packed: Packed, data: Array, x: Array, x_first: bool) -> dict[str, Any]:
    named: dict[str, Any] = {"x": x, "data": data} if x_first else {"data": data, "x": x}
    return {**named, "scales": packed.scales, "zero_points": packed.zero_points}


@EVERY
@SHAPES
@OPTIMIZATION
@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_products_use_the_weights_that_were_meant(
    scheme: Scheme, n: int, k: int, level: str, quantizer: str
) -> None:
    """D36: MatMulNBits in fp32 against the unpacked weights; K that is no multiple, odd block counts, one row."""
    packed = pack(random_weights(n, k), scheme, quantizer, moments_of(k))
    x = np.random.default_rng(1).normal(size=(3, k)).astype(np.float32)
    expected = x @ unpack(packed, scheme.bits)[:, :k].T
    found = run_node(
        "MatMulNBits",
        constants_of(packed, packed.data, x, x_first=True),
        x,
        expected,
        level,
        N=n,
        K=k,
        bits=scheme.bits,
        block_size=scheme.block_size,
    )
    assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@EVERY
@SHAPES
@OPTIMIZATION
def test_int8_activations_cost_a_percent(scheme: Scheme, n: int, k: int, level: str) -> None:
    """D36: accuracy level 4 rounds activations to int8 by blocks: that far and no further, never zero, never NaN."""
    packed = pack(random_weights(n, k), scheme)
    x = np.random.default_rng(1).normal(size=(3, k)).astype(np.float32)
    weights = unpack(packed, scheme.bits)[:, :k]
    expected = x @ weights.T
    found = run_node(
        "MatMulNBits",
        constants_of(packed, packed.data, x, x_first=True),
        x,
        expected,
        level,
        N=n,
        K=k,
        bits=scheme.bits,
        block_size=scheme.block_size,
        accuracy_level=4,
    )
    bound = 0.01 * np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(weights, axis=1)[None]
    assert (np.abs(found - expected) <= bound).all()
    assert found.any()


@pytest.mark.parametrize(
    ("scheme", "n", "k"),
    [
        (scheme, n, k)
        for scheme in QUANTIZED
        for n, k in ((1, 256), (5, 225), (33, 250), (7, 512), (3, 160), (2, 1))
        if scheme.bits == 8 or -(-k // scheme.block_size) % 2 == 0
    ],
    ids=str,
)
@OPTIMIZATION
def test_embeddings_are_the_same_weights(scheme: Scheme, n: int, k: int, level: str) -> None:
    """D30, D36: GatherBlockQuantized reads the very bytes of the tied head, as rows of bytes.

    int4 rows of an odd number of blocks are refused by the dialect: onnxruntime 1.23 misreads their zero points.
    """
    packed = pack(random_weights(n, k), scheme)
    ids = np.array([[0, n - 1, n // 2]])
    expected = unpack(packed, scheme.bits)[ids]
    found = run_node(
        "GatherBlockQuantized",
        constants_of(packed, packed.data.reshape(n, -1), ids, x_first=False),
        ids,
        expected,
        level,
        bits=scheme.bits,
        block_size=scheme.block_size,
        gather_axis=0,
        quantize_axis=1,
    )
    assert_allclose(found, expected, rtol=1e-6, atol=0)


@EVERY
@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_every_weight_is_within_half_a_step(scheme: Scheme, quantizer: str) -> None:
    """The definition: w ~ scale * (q - zero). Only the clip search may cut a block's largest, and it must pay."""
    weights = random_weights(40, 257)
    packed = pack(weights, scheme, quantizer, moments_of(257))
    found = unpack(packed, scheme.bits)
    assert found.shape == (40, -(-257 // scheme.block_size) * scheme.block_size)
    assert not found[:, 257:].any()
    steps = np.repeat(packed.scales, scheme.block_size, axis=1)[:, :257]
    error = np.abs(found[:, :257] - weights)
    if quantizer == "rtn" or scheme.bits == 8:
        # int4 rounds its zero point too, which moves a block's ends by up to half a step
        assert (error <= (1.001 if scheme.bits == 4 else 0.501) * steps).all()
    assert (
        error.mean() < (0.6 if quantizer == "gptq" else 0.3) * steps.mean()
    )  # it takes more of them on purpose


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_clip_search_is_never_worse_in_any_block(block_size: int) -> None:
    """The full range is among the ranges it tries."""
    chosen = scheme("int4", block_size)
    rng = np.random.default_rng(5)
    weights = rng.standard_t(3, size=(64, 512)).astype(np.float32)
    blocks = weights.reshape(64, -1, block_size)

    def errors(quantizer: str) -> Floats:
        found = unpack(pack(weights, chosen, quantizer), 4).reshape(blocks.shape)
        squared: Floats = ((found.astype(np.float64) - blocks) ** 2).sum(axis=-1)
        return squared

    rtn, mse = errors("rtn"), errors("mse")
    assert (mse <= rtn * (1 + 1e-5)).all()
    assert mse.sum() < 0.98 * rtn.sum()


@EVERY
def test_rows_in_pieces_are_the_rows_at_once(scheme: Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streaming may not change a bit, nor may the number of threads or their share of the work."""
    weights = random_weights(70, 100)
    whole = pack(weights, scheme)
    pieces = [pack(weights[rows], scheme) for rows in (slice(0, 1), slice(1, 33), slice(33, 70))]
    assert_array_equal(np.concatenate([piece.data for piece in pieces]), whole.data)
    assert_array_equal(np.concatenate([piece.scales for piece in pieces]), whole.scales)
    if whole.zero_points is not None:
        zero_points = [piece.zero_points for piece in pieces if piece.zero_points is not None]
        assert_array_equal(np.concatenate(zero_points), whole.zero_points)
    monkeypatch.setattr("semspec.export.quantize.CHUNK_WEIGHTS", scheme.block_size)  # a block at a time
    assert_array_equal(pack(weights, scheme).data, whole.data)


@EVERY
@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("value", [0.0, 1e-30, 1e-42, 3e38, -3e38])
def test_blocks_of_one_value(scheme: Scheme, quantizer: str, value: float) -> None:
    """All zero, all tiny, all huge: what is stored is a number, and near the value or below fp32's normal range."""
    weights = np.full((2, 64), value, np.float32)
    weights[1, :] = 0
    with np.errstate(all="raise", under="ignore"):
        found = unpack(pack(weights, scheme, quantizer, moments_of(64)), scheme.bits)[:, :64]
    assert_allclose(found, weights, rtol=0.01, atol=1e-37)


@EVERY
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused(scheme: Scheme, value: float) -> None:
    """D36: one NaN would silently empty its block."""
    weights = random_weights(3, 64)
    weights[1, 40] = value
    with pytest.raises(ConfigError, match="weights contain NaN or infinity"):
        pack(weights, scheme)


def test_example_of_the_docstring() -> None:
    """The worked example is run, so it stays true."""
    result = doctest.testmod(quantize)
    assert (result.failed, result.attempted > 0) == (0, True)


def test_schemes_are_read_from_text() -> None:
    """`int4`, or `int4/64` with a block size of its own; plain weights have no blocks."""
    assert scheme("int4", 128) == Scheme(name="int4", bits=4, block_size=128)
    assert scheme("int8/64", 32) == Scheme(name="int8", bits=8, block_size=64)
    assert scheme("fp32", 32) == Scheme(name="fp32", bits=32, block_size=0)
    assert str(scheme("int4/64", 32)) == "int4 block 64"
    assert str(scheme("fp32", 32)) == "fp32"


@pytest.mark.parametrize(
    ("text", "block_size", "message"),
    [
        ("int3", 32, "precision must be one of fp32, int8, int4, .*got 'int3'"),
        ("", 32, "precision must be one of .*got ''"),
        ("int4", 16, "block size must be one of 32, 64, 128, got 16"),
        ("int4/48", 32, "block size must be one of 32, 64, 128, got 48"),
        ("int4/x", 32, "block size must be one of 32, 64, 128, got x"),
    ],
)
def test_unknown_schemes_are_refused(text: str, block_size: int, message: str) -> None:
    """A block size without a kernel would be slow at best and zeros at worst."""
    with pytest.raises(ConfigError, match=message):
        scheme(text, block_size)


def test_unknown_quantizers_are_refused() -> None:
    """The known are listed."""
    with pytest.raises(ConfigError, match="quantizer must be one of rtn, mse, awq, gptq, got 'q4_k'"):
        pack(random_weights(1, 32), QUANTIZED[0], "q4_k")


@pytest.mark.parametrize("quantizer", INFORMED)
def test_quantizers_that_lack_their_ranges_are_refused(quantizer: str) -> None:
    """Never another quantizer in silence."""
    with pytest.raises(ConfigError, match=f"quantizer {quantizer} needs .*semspec calibrate --ranges"):
        pack(random_weights(1, 32), QUANTIZED[0], quantizer)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_each_quantizer_adds_less_to_the_output_than_the_one_before(block_size: int) -> None:
    """What they are for: the mean square of the output's error, by the very moments they were given."""
    k, chosen = 320, scheme("int4", block_size)
    weights, spans = random_weights(96, k), moments_of(k)

    def harm(quantizer: str) -> float:
        error = unpack(pack(weights, chosen, quantizer, spans), 4)[:, :k] - weights
        padded = np.zeros((96, spans.shape[0] * MOMENT_SPAN))
        padded[:, :k] = error
        parts = padded.reshape(96, -1, MOMENT_SPAN)
        return float(np.einsum("nsi,sij,nsj->", parts, spans.astype(np.float64), parts))

    rtn, mse, awq, gptq = map(harm, ("rtn", "mse", "awq", "gptq"))
    assert awq < 0.9 * min(rtn, mse)
    assert gptq < 0.6 * awq


@EVERY
def test_bits_per_weight_is_what_is_stored(scheme: Scheme) -> None:
    """The size estimate and its unit."""
    packed = pack(random_weights(64, 512), scheme)
    parts = [packed.data, packed.scales, packed.zero_points]
    n_bytes = sum(part.nbytes for part in parts if part is not None)
    assert n_bytes * 8 / (64 * 512) == pytest.approx(scheme.bits_per_weight)
