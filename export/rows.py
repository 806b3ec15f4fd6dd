"""StoredTensor: where a tensor lies in a file, and how its rows are read as fp32.

Knows bytes and storages. Does not know file formats: gguf.py and safetensors_file.py find the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np

from semspec.export.blocks import STORAGES, Bytes
from semspec.runtime.errors import SourceError
from semspec.runtime.records import Floats, Ints

__all__ = ["Rows", "StoredTensor", "quoted", "read_rows", "read_steps", "reading"]

Rows: TypeAlias = slice | Ints | None
"""Rows wanted: a slice, row numbers in any order, or None for all. A vector's rows are its elements."""

_CHUNK_VALUES = 1 << 18  # 1 MB of fp32: stays in the cache between the steps of de-quantization


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of a file.

    shape: (rows, columns) or (n,); type: a key of STORAGES; offset: in bytes from the file's start. The
    reader that made it has checked that the bytes lie inside the file and fill whole blocks.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    n_bytes: int


def read_rows(tensor: StoredTensor, rows: Rows = None) -> Floats:
    """Rows of a matrix (n, columns), or elements of a vector (n,), as fp32.

    Reads only the bytes of the wanted rows and holds no more than the result and a few MB. Every call opens
    the file anew, so threads may read at once.

    Raises SourceError: the file is gone or was cut, the tensor has more than two dimensions, a value is NaN
    or infinite. Raises IndexError: a row number is out of range.
    """
    n_rows, n_columns = _as_matrix(tensor)
    wanted = _plan(rows, n_rows)
    out = np.empty((len(wanted), n_columns), np.float32)
    if out.size:
        with reading(tensor.path), tensor.path.open("rb", buffering=0) as file:
            _fill(out, file, tensor, wanted, STORAGES[tensor.type].decode)
    return out.reshape(-1) if len(tensor.shape) == 1 else out


def read_steps(tensor: StoredTensor, bits: int, rows: Rows = None) -> Floats | None:
    """The step of each block, (n, columns / 32), where all numbers are whole multiples of theirs, 2^bits at most.

    None for any other tensor. Raises as read_rows.
    """
    storage = STORAGES[tensor.type]
    if storage.grid_bits is None or storage.grid_bits > bits:
        return None
    n_rows, n_columns = _as_matrix(tensor)
    wanted = _plan(rows, n_rows)
    out = np.empty((len(wanted), n_columns // storage.n_values), np.float32)
    if out.size:
        with reading(tensor.path), tensor.path.open("rb", buffering=0) as file:
            _fill(out, file, tensor, wanted, storage.steps)
    return out


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn the operating system's refusals into a SourceError with the path."""
    try:
        yield
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from error


def quoted(value: object) -> str:
    """A value out of a file, quoted, on one line of at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:76]}...'"


def _as_matrix(tensor: StoredTensor) -> tuple[int, int]:
    if len(tensor.shape) == 2:
        return tensor.shape[0], tensor.shape[1]
    if len(tensor.shape) == 1 and STORAGES[tensor.type].n_values == 1:
        return tensor.shape[0], 1
    raise SourceError(
        f"{tensor.path}: tensor {quoted(tensor.name)} has shape {list(tensor.shape)} in {tensor.type}; "
        f"readable are matrices, and vectors in F32, F16 or BF16"
    )


def _plan(rows: Rows, n_rows: int) -> range | Ints:
    if rows is None:
        return range(n_rows)
    if isinstance(rows, slice):
        return range(n_rows)[rows]
    if rows.size and (int(rows.min()) < 0 or int(rows.max()) >= n_rows):
        raise IndexError(f"row numbers must be in 0..{n_rows - 1}, got {int(rows.min())}..{int(rows.max())}")
    return rows


def _fill(
    out: Floats,
    file: BinaryIO,
    tensor: StoredTensor,
    wanted: range | Ints,
    decode: Callable[[Bytes, Floats], None],
) -> None:
    """Read `wanted` and decode each block into its part of `out`, a cache-sized chunk of rows at a time."""
    storage, (_, n_columns) = STORAGES[tensor.type], _as_matrix(tensor)
    row_bytes = storage.row_bytes(n_columns)
    step = max(1, min(_CHUNK_VALUES // n_columns, len(wanted)))
    buffer = np.empty((step, row_bytes), np.uint8)
    for first in range(0, len(wanted), step):
        chunk = wanted[first : first + step]
        raw, values = buffer[: len(chunk)], out[first : first + len(chunk)]
        for at, count, row in _runs(chunk):
            file.seek(tensor.offset + row * row_bytes)
            _read_exactly(file, raw[at : at + count], tensor)
        with np.errstate(all="ignore"):  # a broken scale is reported below, with the tensor's name
            blocks = raw.reshape(-1, storage.n_bytes)
            decode(blocks, values.reshape(len(blocks), -1))
        if not np.isfinite(values).all():
            raise SourceError(
                f"{tensor.path}: tensor {quoted(tensor.name)} holds NaN or infinity; get the file again"
            )


def _runs(chunk: range | Ints) -> Iterator[tuple[int, int, int]]:
    """(position in the chunk, number of rows, first row) of every stretch that can be read at once."""
    if isinstance(chunk, range) and chunk.step == 1:
        yield 0, len(chunk), chunk.start
        return
    for at, row in enumerate(chunk):
        yield at, 1, int(row)


def _read_exactly(file: BinaryIO, into: Bytes, tensor: StoredTensor) -> None:
    view = into.reshape(-1).data
    while view:
        n_read = file.readinto(view)  # type: ignore[attr-defined]
        if not n_read:
            raise SourceError(
                f"{tensor.path}: ends inside tensor {quoted(tensor.name)}; it was cut meanwhile"
            )
        view = view[n_read:]
