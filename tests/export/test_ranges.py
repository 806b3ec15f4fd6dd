"""Ranges files are untrusted: of this checkpoint, whole and possible, or refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_pairs
from numpy.testing import assert_array_equal
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from semspec.export.checkpoint import Checkpoint, open_checkpoint
from semspec.export.quantize import MOMENT_SPAN
from semspec.export.ranges import (
    LinearRanges,
    Ranges,
    describe_ranges,
    input_widths,
    pack_ranges,
    read_ranges,
    write_ranges,
)
from semspec.runtime.errors import SourceError
from semspec.runtime.records import Floats

Tensors = dict[str, Floats]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(tiny_pairs.save_checkpoint(tmp_path_factory.mktemp("ranges") / "tiny"))


def moments(width: int) -> Floats:
    """Second moments of a few rows, span by span."""
    n_spans = -(-width // MOMENT_SPAN)
    x = np.zeros((4, n_spans * MOMENT_SPAN), np.float32)
    x[:, :width] = np.random.default_rng(width + 1).standard_normal((4, width))
    spans = x.reshape(4, n_spans, MOMENT_SPAN)
    found: Floats = np.einsum("nsi,nsj->sij", spans, spans)
    return found + np.swapaxes(found, 1, 2)


def linear(width: int) -> LinearRanges:
    """Numbers of a linear that could be."""
    x = np.abs(np.random.default_rng(width).standard_normal((4, width))).astype(np.float32)
    return LinearRanges(
        abs_max=x[0] + 9,
        mean_abs=x[1],
        mean=-x[1],
        moments=moments(width),
        channel_percentiles=x[:3],
        percentiles=x[3, :3],
    )


@pytest.fixture(scope="module")
def ranges(tiny: Checkpoint) -> Ranges:
    return Ranges(
        checkpoint_sha256=tiny.sha256(),
        model="tiny",
        text_sha256="1" * 64,
        semspec="0.1.0",
        windows=((5, 6, 269), (0,)),
        linears={name: linear(width) for name, width in input_widths(tiny.spec, tiny).items()},
    )


def test_what_is_written_is_read(tiny: Checkpoint, ranges: Ranges, tmp_path: Path) -> None:
    """All of it."""
    write_ranges(tmp_path / "r", ranges)
    found = read_ranges(tmp_path / "r", tiny)
    assert replace(found, linears={}) != ranges  # arrays have no equality: compared below
    assert (found.model, found.text_sha256, found.semspec) == ("tiny", "1" * 64, "0.1.0")
    assert (found.windows, found.tokens, found.checkpoint_sha256) == (ranges.windows, 4, tiny.sha256())
    assert pack_ranges(found).keys() == pack_ranges(ranges).keys()
    for name, values in pack_ranges(ranges).items():
        assert_array_equal(pack_ranges(found)[name], values, err_msg=name)


def test_every_linear_of_the_decoder_has_its_width(tiny: Checkpoint) -> None:
    """By name: where a quantizer looks."""
    widths = input_widths(tiny.spec, tiny)
    assert widths["layers.0.qkv"] == widths["layers.2.gate_up"] == widths["head"] == 48
    assert widths["layers.1.attention_output"] == 96 and widths["layers.2.down"] == 80
    assert len(widths) == 13


def test_other_libraries_read_the_file(ranges: Ranges, tmp_path: Path) -> None:
    """It is plain safetensors, with its origin inside."""
    write_ranges(tmp_path / "r", ranges)
    arrays = load_file(tmp_path / "r")
    assert_array_equal(arrays["layers.0.down.abs_max"], ranges.linears["layers.0.down"].abs_max)
    with safe_open(tmp_path / "r", "numpy") as file:
        assert file.metadata() == describe_ranges(ranges)


def test_another_checkpoint_is_refused(ranges: Ranges, tmp_path: Path) -> None:
    """Scales of another model, even of the same shapes, would spoil this one in silence."""
    write_ranges(tmp_path / "r", ranges)
    other = open_checkpoint(tiny_pairs.save_checkpoint(tmp_path / "other", seed=1))
    with pytest.raises(SourceError) as caught:
        read_ranges(tmp_path / "r", other)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'r'}: is of another checkpoint: 'tiny' with sha256 '")
    assert "\n" not in message and "make it again with `semspec calibrate --ranges`" in message


def rewritten(path: Path, ranges: Ranges, change: Callable[[Tensors], object], **metadata: str) -> Path:
    """The file with its tensors changed, written by another library."""
    tensors = {name: np.array(values) for name, values in pack_ranges(ranges).items()}
    change(tensors)
    save_file(tensors, path, metadata={**describe_ranges(ranges), **metadata})
    return path


def change_first(name: str, value: float) -> Callable[[Tensors], object]:
    return lambda tensors: tensors[name].reshape(-1).__setitem__(0, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("layers.1.down.mean"), r"lacks 'layers\.1\.down\.mean' \(1 in all\)"),
        (lambda t: t.pop("text.ids"), r"lacks 'text\.ids'"),
        (lambda t: t.update(extra=np.zeros(1, np.float32)), "has an unknown 'extra'"),
        (
            lambda t: t.update({"head.mean": np.zeros(47, np.float32)}),
            r"'head\.mean' is F32 \[47\], .* \[48\]",
        ),
        (lambda t: t.update({"head.mean": np.zeros((1, 48), np.float32)}), r"is F32 \[1, 48\]"),
        (lambda t: t.update({"head.mean": np.zeros(48, np.float16)}), r"is F16 \[48\]"),
        (lambda t: t.update({"head.mean": np.zeros(48, np.int64)}), "has dtype 'I64'"),
        (lambda t: t.update({"text.ids": np.zeros((2, 2), np.float32)}), r"'text\.ids' is F32 \[2, 2\]"),
        (change_first("head.abs_max", np.nan), r"'head\.abs_max' holds NaN or infinity"),
        (change_first("head.moments", np.inf), r"'head\.moments' holds NaN or infinity"),
        (change_first("head.mean_abs", -1), r"'head\.mean_abs' is below 0 somewhere"),
        (change_first("head.abs_max", 0), r"'head\.channel_percentiles' is above the maximum somewhere"),
        (change_first("text.ids", 270), r"'text\.ids' must be whole numbers in 0\.\.269, found 270"),
        (change_first("text.ids", -1), r"whole numbers in 0\.\.269, found -1"),
        (change_first("text.ids", 0.5), r"whole numbers in 0\.\.269, found 0\.5"),
        (change_first("text.lengths", 2), r"'text\.lengths' adds up to 3 and there are 4 ids"),
        (change_first("text.lengths", 0), r"whole numbers in 1\.\.256"),
        (
            lambda t: t.update(
                {"text.ids": np.zeros(0, np.float32), "text.lengths": np.zeros(0, np.float32)}
            ),
            r"adds up to 0",
        ),
    ],
)
def test_a_file_that_cannot_be_is_refused(
    tiny: Checkpoint, ranges: Ranges, tmp_path: Path, change: Callable[[Tensors], object], message: str
) -> None:
    """One line with the file's path."""
    path = rewritten(tmp_path / "r", ranges, change)
    with pytest.raises(SourceError, match=message) as caught:
        read_ranges(path, tiny)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("said", ["semspec ranges 3", "", "pt"])
def test_another_format_is_refused(tiny: Checkpoint, ranges: Ranges, tmp_path: Path, said: str) -> None:
    """Such as a model, or a file of a later version."""
    path = rewritten(tmp_path / "r", ranges, lambda tensors: None, format=said)
    with pytest.raises(SourceError, match=f"is '{said}', and 'semspec ranges 2' is what can be read"):
        read_ranges(path, tiny)


def test_files_that_are_no_safetensors_are_refused(tiny: Checkpoint, ranges: Ranges, tmp_path: Path) -> None:
    """Missing, a folder, empty, cut, with a header that lies about its data or itself."""
    write_ranges(tmp_path / "r", ranges)
    whole = (tmp_path / "r").read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])
    lies = {"outside": dict(header["head.mean"], data_offsets=[1 << 40, (1 << 40) + 192]), "metadata": None}
    files = {
        "empty": b"",
        "cut": whole[:-1],
        "short": whole[:99],
        "huge": (1 << 62).to_bytes(8, "little") + whole[8:],
    }
    for name, entry in lies.items():
        changed = {**header, "head.mean": entry} if entry else {**header, "__metadata__": [1]}
        text = json.dumps(changed).encode()
        files[name] = len(text).to_bytes(8, "little") + text + whole[8 + size :]
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    for name in (*files, "none", "."):
        with pytest.raises(SourceError) as caught:
            read_ranges(tmp_path / name, tiny)
        assert str(caught.value).startswith(f"{tmp_path / name}: ") and "\n" not in str(caught.value)
