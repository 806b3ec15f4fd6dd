"""One safetensors file of fp32 arrays, whole or not at all; the same arrays give the same bytes.

Knows the container. Reading is safetensors_file.py's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from semspec.runtime.records import Floats

__all__ = ["write_safetensors"]


def write_safetensors(path: Path, tensors: Mapping[str, Floats], metadata: Mapping[str, str]) -> None:
    """Write `path`, replacing what is there only when the new file is complete and on the disk.

    Order does not matter: names are sorted. Raises OSError; what was half-written is removed, except by a kill,
    which leaves `.<name>.writing` beside `path` for the next call to overwrite.
    """
    header = _header(tensors, metadata)
    partial = path.with_name(f".{path.name}.writing")
    try:
        with partial.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for name in sorted(tensors):
                file.write(np.ascontiguousarray(tensors[name], "<f4").data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _header(tensors: Mapping[str, Floats], metadata: Mapping[str, str]) -> bytes:
    """JSON padded with spaces to a multiple of 8, so that the data is aligned."""
    entries: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    end = 0
    for name in sorted(tensors):
        begin, end = end, end + 4 * tensors[name].size
        entries[name] = {
            "dtype": "F32",
            "shape": list(tensors[name].shape),
            "data_offsets": [begin, end],
        }
    content = json.dumps(entries, separators=(",", ":")).encode("ascii")
    return content + b" " * (-len(content) % 8)
