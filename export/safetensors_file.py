"""Folders of safetensors: which files hold the weights, and where each tensor lies in them.

Knows the container and its index. Does not know models. A model folder is untrusted input: headers are
bounded by the bytes that are there, no file outside the folder is opened, and nothing in it is ever executed
or unpickled.
"""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from semspec.export.blocks import STORAGES
from semspec.export.rows import StoredTensor, quoted, reading
from semspec.runtime.errors import SourceError

__all__ = [
    "INDEX",
    "SINGLE",
    "file_inside",
    "find_weights",
    "read_folder_json",
    "read_safetensors_header",
    "read_safetensors_metadata",
]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_DTYPES = ("F32", "F16", "BF16")
_MAX_JSON = 1 << 25  # bytes; the header of the largest shards takes about 100 kB, a config a few
_METADATA = "__metadata__"
_PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_PICKLE_STARTS = (b"\x80", b"PK\x03\x04")  # a bare pickle, and the archive that torch.save writes


def find_weights(folder: Path) -> tuple[dict[str, StoredTensor], tuple[Path, ...]]:
    """Every tensor by name, and the files they are in, from the index or from the single file.

    Raises SourceError: no weights or only pickled ones, a missing shard, an index that does not agree with
    its files tensor by tensor, a name that leads out of the folder, a broken header, an unsupported dtype.
    """
    with reading(folder):
        names = frozenset(entry.name for entry in folder.iterdir())
    if INDEX in names:
        return _read_sharded(folder, names)
    if SINGLE not in names:
        raise SourceError(f"{folder}: {_why_no_weights(names)}")
    path = file_inside(folder, SINGLE)
    return read_safetensors_header(path), (path,)


def read_folder_json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object of the folder. Raises SourceError: missing, outside, too large, not an object."""
    path = file_inside(folder, name)
    with reading(path):
        if (size := path.stat().st_size) > _MAX_JSON:
            raise SourceError(f"{path}: is {size} bytes; at most {_MAX_JSON} are read")
        return _parse_object(path, path.read_bytes())


def read_safetensors_header(path: Path) -> dict[str, StoredTensor]:
    """Tensors of one file by name.

    Raises SourceError: not safetensors (a pickle is named as such), cut, or a tensor that reaches past the
    end, disagrees with its shape, or has a dtype other than F32, F16, BF16.
    """
    header, data_start, size = _read_header(path)
    header.pop(_METADATA, None)
    return {name: _locate(path, name, entry, data_start, size) for name, entry in header.items()}


def read_safetensors_metadata(path: Path) -> dict[str, str]:
    """What a file says about itself, nothing where it does not. Raises SourceError: as read_safetensors_header."""
    metadata = _read_header(path)[0].get(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise SourceError(f"{path}: {_METADATA} must map names to texts; the file is damaged, get it again")
    return metadata


def _read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """The header, where the data starts, and the size of the file."""
    with reading(path), path.open("rb") as file:
        size = path.stat().st_size
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if start.startswith(_PICKLE_STARTS) and length > _MAX_JSON:
            raise SourceError(f"{path}: is a pickle, not safetensors; {_CONVERT}")
        if len(start) < 8 or length > size - 8:
            raise SourceError(
                f"{path}: header wants {length} bytes, but the file has {size}: cut or not safetensors"
            )
        if length > _MAX_JSON:
            raise SourceError(f"{path}: header is {length} bytes; at most {_MAX_JSON} are read")
        return _parse_object(path, file.read(length)), 8 + length, size


_CONVERT = (
    "pickled weights can run code when loaded and are refused; where the source is trusted, load them with "
    "transformers and write safetensors with save_pretrained"
)


def _read_sharded(folder: Path, names: frozenset[str]) -> tuple[dict[str, StoredTensor], tuple[Path, ...]]:
    """The index says which file holds which tensor; the files must say the same."""
    placed = read_folder_json(folder, INDEX).get("weight_map")
    if (
        not isinstance(placed, dict)
        or not placed
        or not all(isinstance(file, str) for file in placed.values())
    ):
        raise SourceError(f"{folder / INDEX}: 'weight_map' must map tensor names to file names")
    files = sorted(set(placed.values()))
    if SINGLE in names and SINGLE not in files:
        raise SourceError(f"{folder}: holds both {SINGLE} and {INDEX} for other files; remove the stale one")
    tensors: dict[str, StoredTensor] = {}
    paths = tuple(file_inside(folder, file) for file in files)
    for file, path in zip(files, paths, strict=True):
        found = read_safetensors_header(path)
        listed = {name for name, where in placed.items() if where == file}
        if listed != found.keys():
            stale = sorted(listed.symmetric_difference(found))
            where = "only in the file" if stale[0] in found else "only in the index"
            raise SourceError(
                f"{path}: does not agree with {INDEX} on {len(stale)} tensors, first {quoted(stale[0])} "
                f"({where}); get index and shards from one source"
            )
        tensors.update(found)
    return tensors, paths


def _why_no_weights(names: frozenset[str]) -> str:
    def having(*suffixes: str) -> list[str]:
        return sorted(name for name in names if name.lower().endswith(suffixes))

    if shards := having(".safetensors"):
        return f"has {shards[0]!r} but neither {SINGLE} nor {INDEX}; get the missing file"
    if gguf := having(".gguf"):
        return f"has no safetensors; to read GGUF give the file itself, such as {gguf[0]!r}"
    if pickled := having(*_PICKLED):
        return f"has only pickled weights ({pickled[0]!r}): {_CONVERT}"
    if not names:
        return f"is an empty folder; expected config.json with {SINGLE} or {INDEX}"
    return f"has no weights; expected {SINGLE}, or {INDEX} with its shards"


def file_inside(folder: Path, name: str) -> Path:
    """The regular file `name` of `folder`, links followed.

    Links may lead anywhere inside the folder. In a hub cache (snapshots/<revision> beside blobs/) they may
    also lead to the blobs of the same model, which is how the hub's client stores what it downloads.
    """
    shown = folder / name
    parts = PurePosixPath(name).parts
    if not parts or "\0" in name or "\\" in name or PurePosixPath(name).is_absolute() or ".." in parts:
        raise SourceError(
            f"{folder}: file name {quoted(name)} leads out of the folder; only files inside it are read"
        )
    try:
        root, path = folder.resolve(), shown.resolve(strict=True)
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise SourceError(
            f"{shown}: is missing; get it from where the rest of the folder came from"
        ) from None
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        raise SourceError(f"{shown}: cannot be read: {error}") from error
    blobs = root.parent.parent / "blobs"
    in_hub_cache = root.parent.name == "snapshots" and path.parent == blobs
    if not path.is_relative_to(root) and not in_hub_cache:
        raise SourceError(
            f"{shown}: is a link that leads out of the folder, to {path}; put the file itself there"
        )
    if not stat.S_ISREG(mode):
        raise SourceError(f"{shown}: is not a regular file")
    return path


def _parse_object(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path}: is not valid JSON ({error}); the file is damaged, get it again") from None
    if not isinstance(value, dict):
        raise SourceError(f"{path}: must hold a JSON object, found {type(value).__name__}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name appears twice")
    return result


def _locate(path: Path, name: str, entry: Any, data_start: int, size: int) -> StoredTensor:
    """Check one entry of a header against the file."""
    tensor = f"{path}: tensor {quoted(name)}"
    if not isinstance(entry, Mapping):
        raise SourceError(f"{tensor}: entry must be an object")
    dtype, shape, span = entry.get("dtype"), _sizes(entry.get("shape")), _sizes(entry.get("data_offsets"))
    if dtype not in _DTYPES:
        raise SourceError(f"{tensor} has dtype {quoted(dtype)}; supported: {', '.join(_DTYPES)}")
    if shape is None or span is None or len(span) != 2:
        raise SourceError(f"{tensor}: shape and data_offsets must be short lists of whole numbers")
    n_values = math.prod(shape)
    begin, end = span
    n_bytes = n_values * STORAGES[dtype].n_bytes
    if end - begin != n_bytes:
        raise SourceError(f"{tensor} of shape {shape} in {dtype} takes {n_bytes} bytes, its span is {span}")
    if data_start + end > size:
        raise SourceError(
            f"{tensor} ends at byte {data_start + end}, but the file ends at {size}; "
            "the file was cut, get it again"
        )
    return StoredTensor(
        path=path, name=name, shape=tuple(shape), type=dtype, offset=data_start + begin, n_bytes=n_bytes
    )


def _sizes(value: Any) -> list[int] | None:
    if not isinstance(value, list) or len(value) > 8:
        return None
    return value if all(type(n) is int and 0 <= n < 1 << 63 for n in value) else None
