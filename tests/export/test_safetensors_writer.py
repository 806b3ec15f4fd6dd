"""The writer: files that the library of safetensors reads, the same bytes each time, whole or not at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from safetensors import safe_open
from safetensors.numpy import load_file

from semspec.export.safetensors_file import read_safetensors_header, read_safetensors_metadata
from semspec.export.safetensors_writer import write_safetensors
from semspec.runtime.records import Floats

ARRAYS: dict[str, Floats] = {
    "b": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a.ä": np.float32([1.5]),
    "c": np.zeros((0,), np.float32),
    "d": np.arange(12, dtype=np.float32).reshape(3, 4).T,  # not contiguous
}


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    """Values, shapes and metadata; and our own reader finds the same."""
    write_safetensors(tmp_path / "x", ARRAYS, {"z": "1", "a": "ü"})
    found = load_file(tmp_path / "x")
    assert found.keys() == ARRAYS.keys()
    for name, values in ARRAYS.items():
        assert_array_equal(found[name], values)
    with safe_open(tmp_path / "x", "numpy") as file:
        assert file.metadata() == {"z": "1", "a": "ü"} == read_safetensors_metadata(tmp_path / "x")
    header = read_safetensors_header(tmp_path / "x")
    assert {name: tensor.shape for name, tensor in header.items()} == {
        name: values.shape for name, values in ARRAYS.items()
    }
    assert min(tensor.offset for tensor in header.values()) % 8 == 0


def test_order_does_not_matter(tmp_path: Path) -> None:
    """The same arrays give the same bytes."""
    write_safetensors(tmp_path / "x", ARRAYS, {"z": "1", "a": "2"})
    write_safetensors(tmp_path / "y", dict(reversed(ARRAYS.items())), {"a": "2", "z": "1"})
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()


def test_a_failure_leaves_the_former_file(tmp_path: Path) -> None:
    """And nothing beside it."""
    write_safetensors(tmp_path / "x", ARRAYS, {})
    before = (tmp_path / "x").read_bytes()
    broken = {**ARRAYS, "z": np.array(["no number"])}
    with pytest.raises(ValueError):
        write_safetensors(tmp_path / "x", broken, {})  # type: ignore[arg-type]
    assert (tmp_path / "x").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
