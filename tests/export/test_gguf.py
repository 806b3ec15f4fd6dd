"""The GGUF container: what gguf-py writes is read back, and what nobody should write is refused."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from semspec.export.blocks import STORAGES
from semspec.export.gguf import read_header, read_tensor
from semspec.runtime.errors import SourceError


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(*, version: int = 3, n_tensors: int = 0, n_keys: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_keys)


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str = "w", dims: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def array(kind: int, length: int, items: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, length) + items


U32, STRING, ARRAY = 4, 8, 9
HUGE = 1 << 63
DATA = bytes(64)

CRAFTED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "magic: wants 4 bytes"),
    "wrong magic": (b"GGML" + bytes(40), "magic"),
    "version 99": (header(version=99), "version: is 99; supported: 2, 3"),
    "big-endian": (header(version=3 << 24), "big-endian"),
    "version 1": (header(version=1), "version: is 1"),
    "no counts": (b"GGUF" + struct.pack("<I", 3), "tensor count: wants 8 bytes"),
    "tensor count": (header(n_tensors=HUGE) + DATA, f"tensor count: is {HUGE}"),
    "key count": (header(n_keys=HUGE) + DATA, f"key count: is {HUGE}"),
    "key name": (header(n_keys=1) + struct.pack("<Q", HUGE) + DATA, f"name of key 0: wants {HUGE} bytes"),
    "string": (header(n_keys=1) + key("k", STRING, struct.pack("<Q", 999)), "key 'k': wants 999 bytes"),
    "not utf-8": (
        header(n_keys=1) + key("k", STRING, struct.pack("<Q", 1) + b"\xff"),
        "key 'k': is not UTF-8",
    ),
    "array": (
        header(n_keys=1) + key("k", ARRAY, array(U32, HUGE)),
        f"length of key 'k': is {HUGE}, more than",
    ),
    "array of strings": (
        header(n_keys=1) + key("k", ARRAY, array(STRING, HUGE)),
        f"length of key 'k': is {HUGE}",
    ),
    "nested": (
        header(n_keys=1) + key("k", ARRAY, array(ARRAY, 1, array(ARRAY, 1, array(ARRAY, HUGE)))),
        "key 'k': is an array of arrays",
    ),
    "value type": (header(n_keys=1) + key("k", 77, DATA), "key 'k': has value type 77"),
    "array type": (header(n_keys=1) + key("k", ARRAY, array(77, 1, DATA)), "key 'k': has array type 77"),
    "key twice": (header(n_keys=2) + key("k", U32, bytes(4)) * 2 + DATA, "key 'k': appears twice"),
    "alignment 0": (header(n_keys=1) + key("general.alignment", U32, bytes(4)), "'general.alignment': is 0"),
    "alignment 2^30": (
        header(n_keys=1) + key("general.alignment", U32, struct.pack("<I", 1 << 30)),
        f"'general.alignment': is {1 << 30}",
    ),
    "alignment text": (header(n_keys=1) + key("general.alignment", STRING, text("32")), "is '32'; allowed"),
    "dimensions": (
        header(n_tensors=1) + text("w") + struct.pack("<I", 1_000_000) + DATA,
        "number of dimensions of tensor 'w': is 1000000; allowed: 1..4",
    ),
    "no dimension": (
        header(n_tensors=1) + tensor(dims=()) + DATA,
        "number of dimensions of tensor 'w': is 0",
    ),
    "wrapping product": (
        header(n_tensors=1) + tensor(dims=(1 << 32, 1 << 32, 1 << 32)) + DATA,
        "shape of tensor 'w'",
    ),
    "wrapping to small": (
        header(n_tensors=1) + tensor(dims=(1 << 33, 1 << 31)) + DATA,
        "shape of tensor 'w'",
    ),
    "size 0": (header(n_tensors=1) + tensor(dims=(4, 0)) + DATA, "shape of tensor 'w': is [4, 0]"),
    "part of a block": (header(n_tensors=1) + tensor(dims=(33,), kind=8) + DATA, "in 32s"),
    "type 255": (header(n_tensors=1) + tensor(kind=255) + DATA, "type of tensor 'w': is 255, which is not"),
    "type Q3_K": (
        header(n_tensors=1) + tensor(kind=11) + DATA,
        "is Q3_K, which is not supported; supported: F32",
    ),
    "tensor twice": (header(n_tensors=2) + tensor() * 2 + DATA, "tensor 'w': appears twice"),
    "offset past the end": (header(n_tensors=1) + tensor(offset=1 << 40) + DATA, "offset of tensor 'w'"),
    "offset not aligned": (header(n_tensors=1) + tensor(offset=1) + DATA, "offset of tensor 'w': is 1;"),
    "data past the end": (header(n_tensors=1) + tensor(offset=96) + DATA, "tensor 'w': ends at byte"),
    "hostile name": (
        header(n_tensors=1) + tensor(name="a\n\x1b[31m" * 9, dims=()) + DATA,
        "number of dimensions",
    ),
}


@pytest.mark.parametrize("case", CRAFTED)
def test_crafted_headers_are_one_line(tmp_path: Path, case: str) -> None:
    """D52: the file and the field are named, whatever the header claims."""
    raw, message = CRAFTED[case]
    path = tmp_path / "crafted.gguf"
    path.write_bytes(raw)
    assert len(raw) < 300
    with pytest.raises(SourceError, match=re.escape(message)) as caught:
        read_header(path)
    line = str(caught.value)
    assert line.startswith(str(path))
    assert line.isprintable()


def test_crafted_headers_are_cheap(tmp_path: Path) -> None:
    """D52: all of them together in 4 GiB of address space; one that believed its counts would hang."""
    for number, (raw, _) in enumerate(CRAFTED.values()):
        (tmp_path / f"{number}.gguf").write_bytes(raw)
    script = (
        "import pathlib, resource, sys\n"
        "from semspec.export.gguf import read_header\n"
        "from semspec.runtime.errors import SourceError\n"
        "resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for path in pathlib.Path(sys.argv[1]).iterdir():\n"
        "    try:\n"
        "        read_header(path)\n"
        "    except SourceError:\n"
        "        continue\n"
        "    sys.exit(f'{path} was accepted')\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 50_000  # kB beyond what importing took


def test_a_large_array_that_is_really_there_is_bounded(tmp_path: Path) -> None:
    """A file may hold what its header claims and still be made to fill the memory: 8 bytes a list element."""
    path = tmp_path / "large.gguf"
    length = (1 << 22) + 1
    path.write_bytes(header(n_keys=1) + key("k", ARRAY, array(0, length)) + bytes(length))
    with pytest.raises(SourceError, match="array elements in all"):
        read_header(path)


def test_overlapping_tensors_are_fine(tmp_path: Path) -> None:
    """They are how a writer may store shared weights; reading them harms nobody."""
    path = tmp_path / "shared.gguf"
    path.write_bytes(header(n_tensors=2) + tensor("a") + tensor("b") + bytes(96))
    assert set(read_header(path).tensors) == {"a", "b"}


@pytest.mark.parametrize("n_bytes", [1_000, 100_000, 50_000_000])
def test_a_truncated_real_file_is_refused(smollm2_gguf: Path, tmp_path: Path, n_bytes: int) -> None:
    """An interrupted download, cut in the keys, in the vocabulary and in the weights."""
    path = tmp_path / "cut.gguf"
    with smollm2_gguf.open("rb") as source:
        path.write_bytes(source.read(n_bytes))
    with pytest.raises(SourceError, match=rf"\b{n_bytes}\b.*; the file is damaged"):
        read_header(path)


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    """A folder or a missing file is said to be so."""
    with pytest.raises(SourceError, match="no such file"):
        read_header(tmp_path / "x.gguf")
    with pytest.raises(SourceError, match="not a regular file"):
        read_header(tmp_path)


def test_metadata_round_trip(tmp_path: Path) -> None:
    """Every value type that gguf-py writes comes back with its value and kind."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    expected: dict[str, Any] = {"general.architecture": "llama"}
    for kind, value in {
        "uint8": 200, "int8": -3, "uint16": 60000, "int16": -300, "uint32": 4_000_000_000, "int32": -5,
        "uint64": 1 << 63, "int64": -(1 << 62), "float32": 0.5, "float64": 0.1, "bool": True,
        "string": "naïve ☕",
    }.items():  # fmt: skip
        getattr(writer, f"add_{kind}")(f"x.{kind}", value)
        expected[f"x.{kind}"] = value
    lists = {"ints": [1, 2], "floats": [0.5, -2.0], "words": ["a", "", "ö"], "flags": [True, False]}
    for name, values in lists.items():
        writer.add_array(f"x.{name}", values)
        expected[f"x.{name}"] = values
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = dict(read_header(tmp_path / "m.gguf").metadata)
    assert found == expected
    assert found["x.bool"] is True


@pytest.mark.parametrize("alignment", [None, 64])
def test_tensors_are_read_by_row(tmp_path: Path, alignment: int | None) -> None:
    """Each supported type, beside others, at any alignment: all rows and some rows give gguf-py's numbers."""
    rng, n_rows = np.random.default_rng(1), 9
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    expected = {}
    for name in STORAGES:
        kind = gguf.GGMLQuantizationType[name]
        raw = np.zeros((n_rows, STORAGES[name].row_bytes(512)), np.uint8)
        if name in ("Q4_K", "Q5_K", "Q6_K"):  # gguf-py cannot quantize to these
            raw[:] = rng.integers(0, 60, raw.shape, dtype=np.uint8)
        else:
            raw[:] = gguf.quants.quantize(rng.normal(size=(n_rows, 512)).astype(np.float32), kind).view(
                np.uint8
            )
        writer.add_tensor(name, raw, raw_dtype=kind)
        expected[name] = gguf.quants.dequantize(raw, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_header(tmp_path / "t.gguf")
    for name, values in expected.items():
        assert (file.tensors[name].shape, file.tensors[name].type) == ((n_rows, 512), name)
        np.testing.assert_array_equal(read_tensor(file, name), values)
        np.testing.assert_array_equal(read_tensor(file, name, slice(2, 5)), values[2:5])
        np.testing.assert_array_equal(read_tensor(file, name, np.array([8, 0])), values[[8, 0]])
    with pytest.raises(SourceError, match="has no tensor 'nothing'"):
        read_tensor(file, "nothing")


def test_a_real_file_is_read_as_gguf_reads_it(smollm2_gguf: Path) -> None:
    """Header and numbers of SmolLM2 against gguf-py's own reader."""
    theirs, ours = gguf.GGUFReader(smollm2_gguf), read_header(smollm2_gguf)
    assert list(ours.tensors) == [entry.name for entry in theirs.tensors]
    assert len(ours.metadata["tokenizer.ggml.merges"]) == 48_900
    for entry in theirs.tensors[:12]:
        found, kind = ours.tensors[entry.name], entry.tensor_type
        assert (found.offset, found.n_bytes, found.type) == (
            entry.data_offset,
            entry.n_bytes,
            kind.name,
        )
        rows = slice(0, 7) if len(found.shape) == 2 else None
        expected = gguf.quants.dequantize(entry.data[rows] if rows else entry.data, entry.tensor_type)
        np.testing.assert_array_equal(read_tensor(ours, entry.name, rows), expected)
