"""GGUF files: a bounded reader of the header, and rows of tensors as fp32.

Knows the container. Does not know models: names and keys are returned as they stand in the file
(gguf_weights.py translates them). A GGUF file is untrusted input: every count, length, type and offset is
checked against the bytes that are there before anything is read or allocated by it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np

from semspec.export.blocks import STORAGES
from semspec.export.rows import Rows, StoredTensor, quoted, read_rows, reading
from semspec.runtime.errors import SourceError
from semspec.runtime.records import Floats

__all__ = ["GgufFile", "GgufTensor", "read_header", "read_tensor"]

GgufTensor = StoredTensor

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4
_MAX_ALIGNMENT = 1 << 16
_MAX_ITEMS = (
    1 << 22
)  # array elements of one header: three times the largest vocabulary known, with its merges
_MAX_HEADER = 1 << 27  # bytes; a header of 300,000 tokens takes 12 MB

_TYPE_IDS: Mapping[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K",
    11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32",
    27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip

_NUMBERS: Mapping[int, str] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8",
    12: "<f8",
}  # fmt: skip
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """The header of one file. metadata: key -> string, number, bool, or a list of one of them."""

    path: Path
    version: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_header(path: Path) -> GgufFile:
    """Read and check everything but the weights.

    Raises SourceError, naming the file and the field: not a GGUF file, an unknown version or type, anything
    that reaches past the end of the file, a name given twice, arrays of arrays, a tensor type that is not in
    STORAGES.
    """
    with reading(path):
        if not path.is_file():
            raise SourceError(f"{path}: is not a regular file" if path.exists() else f"{path}: no such file")
        with path.open("rb") as file:
            return _read(_Cursor(path=path, file=file, size=path.stat().st_size))


def read_tensor(file: GgufFile, name: str, rows: Rows = None) -> Floats:
    """Rows of tensor `name` as fp32: (n, columns), or (n,) for a vector. See rows.read_rows.

    Raises SourceError: no such tensor, or what read_rows raises.
    """
    if name not in file.tensors:
        raise SourceError(f"{file.path}: has no tensor {quoted(name)}")
    return read_rows(file.tensors[name], rows)


@dataclass(slots=True, kw_only=True)
class _Cursor:
    """Reads forward; refuses to pass the end or the budget of a header. `where` names what is being read."""

    path: Path
    file: BinaryIO
    size: int
    at: int = 0
    n_items: int = 0
    where: str = "magic"

    def fail(self, problem: str) -> SourceError:
        return SourceError(
            f"{self.path}: {self.where}: {problem}; the file is damaged or not usable, get it again"
        )

    def take(self, n_bytes: int) -> bytes:
        if n_bytes > self.size - self.at:
            raise self.fail(f"wants {n_bytes} bytes at byte {self.at}, but the file ends at {self.size}")
        if self.at + n_bytes > _MAX_HEADER:
            raise self.fail(f"makes the header longer than {_MAX_HEADER} bytes")
        raw = self.file.read(n_bytes)
        if len(raw) != n_bytes:
            raise self.fail("the file was cut while it was read")
        self.at += n_bytes
        return raw

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def count(self, smallest: int) -> int:
        """A u64 count of things of at least `smallest` bytes each."""
        value = self.u64()
        if value > (self.size - self.at) // smallest:
            raise self.fail(f"is {value}, more than the file's {self.size} bytes can hold")
        return value

    def text(self) -> str:
        try:
            return self.take(self.u64()).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"is not UTF-8 ({error.reason} at byte {error.start})") from None


def _read(cursor: _Cursor) -> GgufFile:
    """The parts in file order: magic, version, counts, keys, tensors."""
    if cursor.take(4) != _MAGIC:
        raise SourceError(f"{cursor.path}: not a GGUF file: magic: the first four bytes are not 'GGUF'")
    cursor.where = "version"
    version = cursor.u32()
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
        hint = " (a big-endian file)" if swapped else ""
        known = ", ".join(map(str, _VERSIONS))
        raise SourceError(f"{cursor.path}: version: is {version}{hint}; supported: {known}, little-endian")
    cursor.where = "tensor count"
    n_tensors = cursor.count(8 + 4 + 8 + 4 + 8)  # name length, dims, one dim, type, offset
    cursor.where = "key count"
    n_keys = cursor.count(8 + 4 + 1)  # key length, type, a value
    metadata = _read_metadata(cursor, n_keys)
    alignment = _alignment(cursor, metadata)
    tensors = _read_tensors(cursor, n_tensors, alignment)
    return GgufFile(
        path=cursor.path,
        version=version,
        metadata=MappingProxyType(metadata),
        tensors=MappingProxyType(tensors),
    )


def _read_metadata(cursor: _Cursor, n_keys: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for number in range(n_keys):
        cursor.where = f"name of key {number}"
        key = cursor.text()
        cursor.where = f"key {quoted(key)}"
        if key in metadata:
            raise cursor.fail("appears twice")
        metadata[key] = _read_value(cursor)
    return metadata


def _read_value(cursor: _Cursor) -> Any:
    kind = cursor.u32()
    if kind == _STRING:
        return cursor.text()
    if kind == _ARRAY:
        return _read_array(cursor)
    if kind in _NUMBERS:
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(cursor.take(dtype.itemsize), dtype)[0].item()
    raise cursor.fail(f"has value type {kind}; known: 0..12")


def _read_array(cursor: _Cursor) -> list[Any]:
    kind = cursor.u32()
    if kind == _ARRAY:
        raise cursor.fail("is an array of arrays, which is not supported")
    if kind != _STRING and kind not in _NUMBERS:
        raise cursor.fail(f"has array type {kind}; known: 0..8 and 10..12")
    dtype = np.dtype(_NUMBERS.get(kind, "<u8"))  # a string takes at least its 8 bytes of length
    cursor.where = f"length of {cursor.where}"
    length = cursor.count(dtype.itemsize)
    cursor.n_items += length
    if cursor.n_items > _MAX_ITEMS:
        raise cursor.fail(f"is {length}; a header may hold {_MAX_ITEMS} array elements in all")
    cursor.where = cursor.where.removeprefix("length of ")
    if kind == _STRING:
        return [cursor.text() for _ in range(length)]
    return list(np.frombuffer(cursor.take(length * dtype.itemsize), dtype).tolist())


def _alignment(cursor: _Cursor, metadata: Mapping[str, Any]) -> int:
    value = metadata.get("general.alignment", 32)
    cursor.where = "key 'general.alignment'"
    if type(value) is not int or not 1 <= value <= _MAX_ALIGNMENT or value & (value - 1):
        raise cursor.fail(f"is {quoted(value)}; allowed: powers of two up to {_MAX_ALIGNMENT}")
    return value


def _read_tensors(cursor: _Cursor, n_tensors: int, alignment: int) -> dict[str, GgufTensor]:
    """Read the table, then place it: offsets count from the first aligned byte after the table."""
    table: list[tuple[str, tuple[int, ...], str, int, int]] = []
    for number in range(n_tensors):
        cursor.where = f"name of tensor {number}"
        name = cursor.text()
        table.append((name, *_read_layout(cursor, name, alignment)))
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset, n_bytes in table:
        cursor.where = f"tensor {quoted(name)}"
        if name in tensors:
            raise cursor.fail("appears twice")
        if start + offset + n_bytes > cursor.size:
            raise cursor.fail(f"ends at byte {start + offset + n_bytes}, but the file ends at {cursor.size}")
        tensors[name] = GgufTensor(
            path=cursor.path, name=name, shape=shape, type=kind, offset=start + offset, n_bytes=n_bytes
        )
    return tensors


def _read_layout(cursor: _Cursor, name: str, alignment: int) -> tuple[tuple[int, ...], str, int, int]:
    """(shape, type, offset from the data's start, bytes) of the next tensor of the table."""
    cursor.where = f"number of dimensions of tensor {quoted(name)}"
    n_dims = cursor.u32()
    if not 1 <= n_dims <= _MAX_DIMS:
        raise cursor.fail(f"is {n_dims}; allowed: 1..{_MAX_DIMS}")
    cursor.where = f"shape of tensor {quoted(name)}"
    sizes = struct.unpack(f"<{n_dims}Q", cursor.take(8 * n_dims))
    cursor.where = f"type of tensor {quoted(name)}"
    kind = cursor.u32()
    type_name = _TYPE_IDS.get(kind, str(kind))
    if type_name not in STORAGES:
        raise SourceError(
            f"{cursor.path}: {cursor.where}: is {type_name}, which is not supported; "
            f"supported: {', '.join(STORAGES)}"
        )
    cursor.where = f"shape of tensor {quoted(name)}"
    storage, n_values = STORAGES[type_name], 1
    for size in sizes:
        n_values *= size  # Python integers do not wrap
    if n_values == 0 or sizes[0] % storage.n_values:
        raise cursor.fail(
            f"is {list(sizes)}; {type_name} needs sizes above 0, the first in {storage.n_values}s"
        )
    n_bytes = n_values // storage.n_values * storage.n_bytes
    if n_bytes > cursor.size:
        raise cursor.fail(f"is {list(sizes)}: {n_bytes} bytes, more than the file's {cursor.size}")
    cursor.where = f"offset of tensor {quoted(name)}"
    offset = cursor.u64()
    if offset % alignment or offset > cursor.size:
        raise cursor.fail(
            f"is {offset}; allowed: multiples of {alignment} inside the file's {cursor.size} bytes"
        )
    return tuple(reversed(sizes)), type_name, offset, n_bytes
