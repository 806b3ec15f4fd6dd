"""De-quantization, bit by bit against gguf-py's."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from semspec.export.blocks import STORAGES

HALVES = {
    "F16": [0],
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}


@pytest.mark.parametrize("name", STORAGES)
def test_decode_gives_the_bits_of_gguf(name: str) -> None:
    """Every later comparison on GGUF models rests on these numbers; random bytes reach all codes."""
    storage, rng, n = STORAGES[name], np.random.default_rng(5), 4096
    blocks = rng.integers(0, 256, (n, storage.n_bytes), dtype=np.uint8)
    for at in HALVES.get(name, []):
        scales = rng.normal(0, 0.5, n).astype("<f2")
        scales[:4] = [0.0, -0.0, 6e-8, -65504.0]  # zero of both signs, a subnormal, the largest
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(n, 2)
    if name in ("F32", "BF16"):
        blocks[:, -1] &= 0x3F  # keeps the exponent finite
    out = np.empty((n, storage.n_values), np.float32)
    storage.decode(blocks, out)
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(out.view(np.uint32), np.ascontiguousarray(expected).view(np.uint32))


@pytest.mark.parametrize("name", STORAGES)
def test_block_sizes_are_those_of_gguf(name: str) -> None:
    """Offsets of rows are computed from these two numbers."""
    sizes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    assert (STORAGES[name].n_values, STORAGES[name].n_bytes) == sizes
