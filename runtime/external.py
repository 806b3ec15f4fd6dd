"""Where an ONNX file keeps its weights, read from its bytes without the onnx package.

A graph file may name any path as the home of its tensors, and engines have followed such paths out of the
folder. Before an engine sees a graph, every location in it is held against the files beside it. Only the
fields on the way to tensors are decoded; the rest is skipped over.

    ModelProto.{graph, functions, training_info} -> GraphProto.{node, initializer, sparse_initializer}
        -> TensorProto.external_data        NodeProto.attribute -> {t, g, tensors, graphs, sparse_tensor(s)}

Not guaranteed: a hard link is a plain file like any other, whoever else has a name for its bytes.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

from semspec.runtime.errors import BundleError
from semspec.runtime.typed import shown

__all__ = ["check_external_data", "external_bytes"]

# message -> field number -> message of that field
_CHILDREN: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "entry"},
}
_KEYS = {"location", "offset", "length", "checksum"}
_MAX_DEPTH = 32
_MAX_DIGITS = 19  # of an offset or a length: below 2^63
_MAX_TAG = (1 << 32) - 1  # engines cut a larger one to 32 bits, and so read another field than we would


class _Malformed(Exception):
    """These bytes are not the message they should be."""


def check_external_data(graph: Path) -> frozenset[str]:
    """Names of the files a graph keeps its weights in: plain files of its own folder, used within their size.

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
            except (_Malformed, UnicodeDecodeError):
                raise BundleError(f"{graph} is not a readable ONNX file; export the bundle again") from None
    return frozenset(sizes)


def external_bytes(graph: Path) -> int:
    """How much of the files beside it a graph reads, what several tensors share counted once. Raises as
    check_external_data."""
    check_external_data(graph)
    ranges: dict[tuple[str, str], int] = {}
    with graph.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for entries in _tensors(data, 0, len(data), "model", 0):
            location, offset = entries["location"], entries.get("offset", "0")
            length = entries.get("length") or str(_plain_size(graph, location) - int(offset))
            ranges[location, offset] = max(int(length), ranges.get((location, offset), 0))
    return sum(ranges.values())


def _check(graph: Path, entries: dict[str, str], sizes: dict[str, int]) -> None:
    unknown = sorted(entries.keys() - _KEYS)
    location = entries.get("location", "")
    if unknown:
        raise BundleError(
            f"{graph} describes a tensor's data by unknown keys ({shown(unknown[0])}); refuse this bundle"
        )
    if not location or location in (".", "..") or any(character in location for character in "/\\:\0"):
        raise BundleError(
            f"{graph} keeps weights in {shown(location)}, which is not a file beside it; refuse this bundle"
        )
    if location not in sizes:
        sizes[location] = _plain_size(graph, location)
    offset, length = entries.get("offset", "0"), entries.get("length", str(sizes[location]))
    if not (_is_number(offset) and _is_number(length)) or int(offset) + int(length) > sizes[location]:
        raise BundleError(
            f"{graph} reads {shown(length)} bytes at {shown(offset)} of {shown(location)}, which has "
            f"{sizes[location]}; copy the whole bundle or export it again"
        )


def _plain_size(graph: Path, location: str) -> int:
    path = graph.parent / location
    try:
        if path.is_file() and not path.is_symlink():
            return path.stat().st_size
    except OSError:  # a name that no file can have
        pass
    raise BundleError(
        f"{graph} needs {shown(location)} beside it, which is missing or not a plain file; copy the whole bundle"
    )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS


def _tensors(data: mmap.mmap, start: int, end: int, message: str, depth: int) -> Iterator[dict[str, str]]:
    """external_data of every tensor below a message that lies at start..end: key -> value."""
    if depth > _MAX_DEPTH:
        raise _Malformed
    entries: dict[str, str] = {}
    for number, first, last in _fields(data, start, end):
        child = _CHILDREN[message].get(number)
        if child == "entry":
            pair = {field: data[low:high].decode("utf-8") for field, low, high in _fields(data, first, last)}
            if pair.get(1, "") in entries:
                raise _Malformed  # which of two counts is a reader's choice
            entries[pair.get(1, "")] = pair.get(2, "")
        elif child:
            yield from _tensors(data, first, last, child, depth + 1)
    if entries:
        yield entries


def _fields(data: mmap.mmap, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(field number, start, end) of the length-delimited fields of one message; others are skipped."""
    at = start
    while at < end:
        tag, at = _varint(data, at, end)
        number, kind = tag >> 3, tag & 7
        if not number or tag > _MAX_TAG:
            raise _Malformed
        if kind == 2:
            length, at = _varint(data, at, end)
            if length > end - at:
                raise _Malformed
            yield number, at, at + length
            at += length
        elif kind == 0:
            _, at = _varint(data, at, end)
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise _Malformed
    if at != end:
        raise _Malformed


def _varint(data: mmap.mmap, at: int, end: int) -> tuple[int, int]:
    """(value, where the next thing starts)."""
    value = shift = 0
    while True:
        if at >= end or shift > 63:
            raise _Malformed
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
