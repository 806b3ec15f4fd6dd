"""Reading rows: which, from where, how much memory."""

from __future__ import annotations

import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from semspec.export.rows import StoredTensor, read_rows
from semspec.runtime.errors import SourceError


def store(
    path: Path, values: np.ndarray[tuple[int, ...], np.dtype[np.float32]], *, skip: int = 5
) -> StoredTensor:
    """`values` as F32, `skip` bytes into a file."""
    path.write_bytes(b"x" * skip + values.astype("<f4").tobytes())
    return StoredTensor(
        path=path, name="w", shape=values.shape, type="F32", offset=skip, n_bytes=4 * values.size
    )


def matrix(n_rows: int, n_columns: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.random.default_rng(0).normal(size=(n_rows, n_columns)).astype(np.float32)


@pytest.mark.parametrize(
    "rows",
    [
        None,
        slice(None),
        slice(0, 1),
        slice(699, 900),
        slice(5, 5),
        slice(-3, None),
        slice(690, 10, -7),
        np.array([3, 3, 0, 699]),
        np.array([], np.int64),
    ],
    ids=str,
)
def test_rows_are_numpys_rows(tmp_path: Path, rows: slice | np.ndarray | None) -> None:
    """A caller may think of a tensor as an array; 700 rows of 512 span two chunks."""
    values = matrix(700, 512)
    expected = values if rows is None else values[rows]
    np.testing.assert_array_equal(read_rows(store(tmp_path / "f", values), rows), expected)


def test_rows_of_a_vector_are_its_elements(tmp_path: Path) -> None:
    """Biases of permuted query heads are gathered like matrix rows."""
    values = matrix(1, 50)[0]
    tensor = store(tmp_path / "f", values)
    np.testing.assert_array_equal(read_rows(tensor), values)
    np.testing.assert_array_equal(read_rows(tensor, np.array([4, 1])), values[[4, 1]])


@pytest.mark.parametrize("rows", [[-1], [0, 10]])
def test_row_numbers_out_of_range_are_refused(tmp_path: Path, rows: list[int]) -> None:
    """They would read a neighbouring tensor."""
    with pytest.raises(IndexError, match=r"0\.\.9"):
        read_rows(store(tmp_path / "f", matrix(10, 4)), np.array(rows))


def test_only_wanted_rows_are_read_and_broken_values_are_named(tmp_path: Path) -> None:
    """A NaN beside the wanted rows is never seen; among them it is an error, not a silent weight."""
    values = matrix(10, 4)
    values[7, 2] = np.nan
    tensor = store(tmp_path / "f", values)
    np.testing.assert_array_equal(read_rows(tensor, slice(0, 7)), values[:7])
    with pytest.raises(SourceError, match="'w' holds NaN or infinity"):
        read_rows(tensor, slice(7, 8))


def test_memory_is_the_result_and_a_few_chunks(tmp_path: Path) -> None:
    """Export packs by blocks of rows so that its peak is a few blocks, which reading must not undo."""
    values = matrix(8192, 1024)
    tensor = store(tmp_path / "f", values)
    for rows, n_bytes in ((None, values.nbytes), (slice(100, 200), 100 * 4096)):
        tracemalloc.start()
        read_rows(tensor, rows)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < n_bytes + (4 << 20)


def test_threads_may_read_at_once(tmp_path: Path) -> None:
    """Packing uses one thread a core on one tensor."""
    values = matrix(2000, 300)
    tensor = store(tmp_path / "f", values)
    parts = [slice(first, first + 37) for first in range(0, 2000, 37)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda rows: read_rows(tensor, rows), parts))
    np.testing.assert_array_equal(np.concatenate(found), values)


def test_a_file_that_shrinks_or_goes_is_one_line(tmp_path: Path) -> None:
    """Files are opened anew for every read, so they can change in between."""
    tensor = store(tmp_path / "f", matrix(10, 4))
    tensor.path.write_bytes(tensor.path.read_bytes()[:60])
    with pytest.raises(SourceError, match="ends inside tensor 'w'"):
        read_rows(tensor)
    tensor.path.unlink()
    with pytest.raises(SourceError, match="cannot be read: No such file"):
        read_rows(tensor)


def test_shapes_that_have_no_rows_are_refused(tmp_path: Path) -> None:
    """A decoder has matrices and vectors only."""
    with pytest.raises(SourceError, match=r"'w' has shape \[2, 2, 3\] in F32"):
        read_rows(store(tmp_path / "f", matrix(4, 3).reshape(2, 2, 3)))
