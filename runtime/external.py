"""Where an ONNX file keeps its weights, read from its bytes without the onnx package.

A graph file may name any path as the home of its tensors, and engines have followed such paths out of the
folder. Before an engine sees a graph, every location in it is held against the files beside it. Only the
fields on the way to tensors are decoded; the rest is skipped over.

    ModelProto.graph -> GraphProto.{node, initializer, sparse_initializer} -> TensorProto.external_data
                        NodeProto.attribute -> {t, g, tensors, graphs, sparse_tensor(s)}
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

from semspec.runtime.errors import BundleError

__all__ = ["check_external_data"]

# message -> field number -> message of that field
_CHILDREN: dict[str, dict[int, str]] = {
    "model": {7: "graph", 25: "function"},
    "function": {7: "node"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "entry"},
}
_KEYS = {"location", "offset", "length", "checksum"}
_MAX_DEPTH = 32


def check_external_data(graph: Path) -> None:
    """Refuse a graph whose tensors lie anywhere but in plain files of its own folder, within their size.

    Raises BundleError naming the graph, the location and what is wrong with it.
    """
    sizes: dict[str, int] = {}
    with graph.open("rb") as file:
        if graph.stat().st_size == 0:
            raise BundleError(f"{graph} is empty; export the bundle again")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                for entries in _tensors(data, 0, len(data), "model", 0):
                    _check(graph, entries, sizes)
            except (IndexError, UnicodeDecodeError, RecursionError):
                raise BundleError(f"{graph} is not a readable ONNX file; export the bundle again") from None


def _check(graph: Path, entries: dict[str, str], sizes: dict[str, int]) -> None:
    unknown = entries.keys() - _KEYS
    location = entries.get("location", "")
    if unknown:
        raise BundleError(
            f"{graph} describes a tensor's data by unknown keys {sorted(unknown)}; refuse this bundle"
        )
    if not location or "/" in location or "\\" in location or location in (".", ".."):
        raise BundleError(
            f"{graph} keeps weights in {location!r}, which is not a file beside it; refuse this bundle"
        )
    path = graph.parent / location
    if location not in sizes:
        if path.is_symlink() or not path.is_file():
            raise BundleError(
                f"{graph} needs {path}, which is missing or not a plain file; copy the whole bundle"
            )
        sizes[location] = path.stat().st_size
    offset, length = entries.get("offset", "0"), entries.get("length", str(sizes[location]))
    if not (offset.isdecimal() and length.isdecimal()) or int(offset) + int(length) > sizes[location]:
        raise BundleError(
            f"{graph} reads {length} bytes at {offset} of {path}, which has {sizes[location]}; export the bundle again"
        )


def _tensors(data: mmap.mmap, start: int, end: int, message: str, depth: int) -> Iterator[dict[str, str]]:
    """external_data of every tensor below a message that lies at start..end: key -> value."""
    if depth > _MAX_DEPTH:
        raise RecursionError
    entries: dict[str, str] = {}
    for number, first, last in _fields(data, start, end):
        child = _CHILDREN[message].get(number)
        if child == "entry":
            pair = {field: data[low:high].decode("utf-8") for field, low, high in _fields(data, first, last)}
            entries[pair.get(1, "")] = pair.get(2, "")
        elif child:
            yield from _tensors(data, first, last, child, depth + 1)
    if entries:
        yield entries


def _fields(data: mmap.mmap, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(field number, start, end) of the length-delimited fields of one message; others are skipped."""
    at = start
    while at < end:
        key, at = _varint(data, at, end)
        kind = key & 7
        if kind == 2:
            length, at = _varint(data, at, end)
            if length > end - at:
                raise IndexError
            yield key >> 3, at, at + length
            at += length
        elif kind == 0:
            _, at = _varint(data, at, end)
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise IndexError
    if at != end:
        raise IndexError


def _varint(data: mmap.mmap, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= end or shift > 63:
            raise IndexError
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
