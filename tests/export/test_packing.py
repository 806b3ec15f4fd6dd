"""Which class of weights gets which scheme, and how matrices reach their file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from graphs import ArrayWeights
from numpy.testing import assert_array_equal

from semspec.export.packing import PackedWeights, Schemes
from semspec.export.quantize import pack, scheme
from semspec.export.writer import Stored, WeightFile
from semspec.runtime.errors import ConfigError
from semspec.runtime.records import Array, Floats

RNG = np.random.default_rng(0)
PARTS: dict[str, Floats] = {
    "q": RNG.normal(size=(70, 48)).astype(np.float32),
    "k": RNG.normal(size=(33, 48)).astype(np.float32),
    "v": RNG.normal(size=(1, 48)).astype(np.float32),
}
NAMES = tuple(PARTS)


class Watched(ArrayWeights):
    """Weights that remember the largest read."""

    largest = 0

    def read(self, name: str, rows: slice | None = None) -> Floats:
        values = super().read(name, rows)
        Watched.largest = max(Watched.largest, values.nbytes)
        return values


def stored(path: Path, tensor: Stored) -> Array:
    flat = np.fromfile(path, tensor.dtype, np.prod(tensor.shape), offset=tensor.offset)
    return flat.reshape(tensor.shape)


@pytest.mark.parametrize("text", ["fp32", "int8", "int4", "int4/64"])
@pytest.mark.parametrize("block_bytes", [32 << 20, 48 * 4 * 8, 1])
def test_matrices_in_pieces_are_the_matrix_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, block_bytes: int
) -> None:
    """Stacked parts read by blocks of rows, down to a row at a time: the bytes of one pack of all."""
    monkeypatch.setattr("semspec.export.packing.BLOCK_BYTES", block_bytes)
    Watched.largest = 0
    chosen = scheme(text, 32)
    path = tmp_path / "weights.data"
    with WeightFile(path) as file:
        matrix = PackedWeights(Watched(PARTS), file, "mse").matrix(NAMES, chosen, "float32")
    whole = np.concatenate(list(PARTS.values()))
    assert matrix.shape == whole.shape
    assert Watched.largest <= max(block_bytes, 48 * 4)
    if text == "fp32":
        assert_array_equal(stored(path, matrix.data), whole)
        assert matrix.scales is None
        return
    expected = pack(whole, chosen, "mse")
    assert matrix.scales is not None
    assert_array_equal(stored(path, matrix.data), expected.data)
    assert_array_equal(stored(path, matrix.scales), expected.scales)
    if expected.zero_points is None:
        assert matrix.zero_points is None
    else:
        assert matrix.zero_points is not None
        assert_array_equal(stored(path, matrix.zero_points), expected.zero_points)


@pytest.mark.parametrize("text", ["fp32", "int8", "int4"])
def test_what_is_stored_is_not_stored_again(tmp_path: Path, text: str) -> None:
    """D30: the second to ask (a tied head, a second graph) gets the first's bytes."""
    with WeightFile(tmp_path / "weights.data") as file:
        packed = PackedWeights(ArrayWeights(PARTS), file, "rtn")
        first = packed.matrix(("q",), scheme(text, 32), "float32")
        size = file.path.stat().st_size
        assert packed.matrix(("q",), scheme(text, 32), "float32") == first
        assert packed.vector(("v",), "float32") == packed.vector(("v",), "float32")
    assert (tmp_path / "weights.data").stat().st_size < size + (1 << 14)


def test_vectors_are_joined_in_order(tmp_path: Path) -> None:
    """Biases of a stacked product follow its rows."""
    biases: dict[str, Floats] = {"a": np.arange(3, dtype=np.float32), "b": np.arange(5, 7, dtype=np.float32)}
    path = tmp_path / "weights.data"
    with WeightFile(path) as file:
        packed = PackedWeights(ArrayWeights(biases), file, "rtn")
        joined = packed.vector(("a", "b"), "float16")
        table = packed.table("t", np.ones((2, 2), np.float32))
        assert packed.table("t", np.zeros((2, 2), np.float32)) == table
    assert_array_equal(stored(path, joined), np.array([0, 1, 2, 5, 6], np.float16))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ("int4 block 32", "int8 block 32", "int8 block 32")),
        ({"layers": "int4/128"}, ("int4 block 128", "int8 block 32", "int8 block 32")),
        ({"layers": "int8", "block_size": 64}, ("int8 block 64", "int8 block 32", "int8 block 32")),
        ({"layers": "fp32"}, ("fp32", "fp32", "fp32")),
        ({"head": "int4"}, ("int4 block 32", "int4 block 32", "int4 block 32")),
        ({"head": "fp32", "embedding": "int8/64"}, ("int4 block 32", "fp32", "int8 block 64")),
    ],
    ids=str,
)
def test_schemes_default_to_what_measured_best(
    options: dict[str, str], expected: tuple[str, str, str]
) -> None:
    """int4 layers keep head and embedding at 8 bit; an embedding follows its head."""
    described = Schemes.choose(**options).describe()  # type: ignore[arg-type]
    assert (described["layers"], described["head"], described["embedding"]) == expected
    assert described["quantizer"] == "mse"


def test_schemes_that_do_not_exist_are_refused() -> None:
    """Before a checkpoint is opened, let alone downloaded."""
    with pytest.raises(ConfigError, match="quantizer must be auto or one of rtn, mse, awq, gptq, got 'q4_k'"):
        Schemes.choose("fp32", quantizer="q4_k")
    with pytest.raises(ConfigError, match="precision must be one of"):
        Schemes.choose("int4", head="q8")


def test_a_tied_head_has_one_precision() -> None:
    """D30: two would need two copies, or silently be one."""
    Schemes.choose("int4", head="int8").check_tied()
    for embedding, described in (("int4", "int4 block 32"), ("int8/64", "int8 block 64")):
        message = f"head precision int8 block 32 and embedding precision {described} must be equal"
        with pytest.raises(ConfigError, match=message):
            Schemes.choose("int4", head="int8", embedding=embedding).check_tied()


def test_auto_is_the_best_that_the_data_allows() -> None:
    """What was measured best with ranges and without; a choice of the user's stands."""
    auto = Schemes.choose("int4", quantizer="auto")
    assert (auto.informed(True).quantizer, auto.informed(False).quantizer) == ("gptq", "mse")
    assert Schemes.choose("int8", quantizer="auto").informed(False).quantizer == "mse"
    assert Schemes.choose("int4", quantizer="awq").informed(True).quantizer == "awq"
    assert Schemes.choose("int4", quantizer="rtn").informed(False).quantizer == "rtn"


@pytest.mark.parametrize(
    ("layers", "quantizer", "has_ranges", "message"),
    [
        ("int4", "awq", False, "quantizer awq needs the activation ranges .*semspec calibrate --ranges"),
        ("int4", "mse", True, "--ranges are for int4 layers with awq or gptq, got int4 block 32 with mse"),
        ("int8", "auto", True, "--ranges are for int4 layers .*got int8 block 32"),
    ],
)
def test_ranges_and_quantizer_must_fit(layers: str, quantizer: str, has_ranges: bool, message: str) -> None:
    """Neither is silently ignored."""
    with pytest.raises(ConfigError, match=message):
        Schemes.choose(layers, quantizer=quantizer).informed(has_ranges)


def test_an_embedding_of_its_own_falls_to_mse() -> None:
    """It reads ids, so there is nothing to be informed of; the manifest says so. A tied one is the head."""
    schemes = Schemes.choose("int4", head="int4", quantizer="auto").informed(True)
    assert schemes.describe(tied=False)["embedding_quantizer"] == "mse"
    assert "embedding_quantizer" not in schemes.describe(tied=True)
