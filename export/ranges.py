"""Ranges: what the inputs of a checkpoint's linears look like over a text, read from a safetensors file and checked.

`semspec calibrate --ranges` makes the file; quantizers read it. It belongs to one checkpoint, by sha256, and holds
the token ids it was made from, so whoever needs more than these numbers can run the same windows again.

In the file, for every linear of the decoder (`layers.0.qkv`, .., `head`), a tensor `<linear>.<statistic>`; and
`text.ids`, `text.lengths`: the windows one behind the other, and their lengths. All fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from semspec.export.checkpoint import Checkpoint
from semspec.export.quantize import MOMENT_SPAN
from semspec.export.rows import StoredTensor, quoted, read_rows
from semspec.export.safetensors_file import read_safetensors_header, read_safetensors_metadata
from semspec.export.safetensors_writer import write_safetensors
from semspec.models.decoder import head_linear, layer_linears
from semspec.models.ops import Weights
from semspec.models.spec import ModelSpec
from semspec.runtime.errors import SourceError
from semspec.runtime.records import Floats

__all__ = [
    "PERCENTILES",
    "LinearRanges",
    "Ranges",
    "describe_ranges",
    "input_widths",
    "match_ranges",
    "pack_ranges",
    "pack_windows",
    "read_linear",
    "read_ranges",
    "read_windows",
    "write_ranges",
]

FORMAT = "semspec ranges 2"
PERCENTILES = (99.0, 99.9, 99.99)
MOMENT_ROUNDING = 1e-5  # of fp32 sums: how far below 0 an eigenvalue of true moments may come
_REPAIR = "make it again with `semspec calibrate --ranges`"
_IDS, _LENGTHS = "text.ids", "text.lengths"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinearRanges:
    """Over all rows x, (E,), that one linear has read; E its input width.

    abs_max, mean_abs, mean: (E,), of |x|, |x| and x per channel. moments: (E / MOMENT_SPAN rounded up, MOMENT_SPAN,
    MOMENT_SPAN), mean of x x' within each span of channels, 0 behind the last. channel_percentiles: (P, E), of
    |x| per channel; percentiles: (P,), of |x| over all rows and channels; P as in PERCENTILES. A percentile q is
    exact: the least of the values that is not below q % of them; of few rows the last ones are the maximum.
    """

    abs_max: Floats
    mean_abs: Floats
    mean: Floats
    moments: Floats
    channel_percentiles: Floats
    percentiles: Floats

    @property
    def second_moment(self) -> Floats:
        """(E,): mean of x^2 per channel."""
        return np.diagonal(self.moments, axis1=1, axis2=2).reshape(-1)[: self.mean.size]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ranges:
    """The ranges of every linear of one checkpoint, by Linear.name.

    windows: ids of the texts read, each from position 0; every linear has read every token of them. text_sha256: of
    the text they are from. semspec: the version that made them.
    """

    checkpoint_sha256: str
    model: str
    text_sha256: str
    semspec: str
    windows: tuple[tuple[int, ...], ...]
    linears: Mapping[str, LinearRanges]

    @property
    def tokens(self) -> int:
        """Rows that every linear has read."""
        return sum(map(len, self.windows))


def read_ranges(path: Path, checkpoint: Checkpoint) -> Ranges:
    """Read and check the whole file. It is untrusted input: nothing outside it is opened, sizes are known before.

    Raises SourceError: not such a file, another format, another checkpoint, a linear that is missing or unknown, a
    shape that is not the model's, a value that cannot be.
    """
    said = read_safetensors_metadata(path)
    tensors = read_safetensors_header(path)
    if said.get("format") != FORMAT:
        raise SourceError(
            f"{path}: is {quoted(said.get('format'))}, and {FORMAT!r} is what can be read; {_REPAIR}"
        )
    if (sha256 := said.get("checkpoint_sha256")) != checkpoint.sha256():
        raise SourceError(
            f"{path}: is of another checkpoint: {quoted(said.get('model'))} with sha256 {quoted(sha256)[:14]}.., not "
            f"{checkpoint.path} with {checkpoint.sha256()[:13]}..; {_REPAIR} for this one"
        )
    widths = input_widths(checkpoint.spec, checkpoint)
    expected = {f"{name}.{statistic}" for name in widths for statistic in _STATISTICS} | {_IDS, _LENGTHS}
    if strange := sorted(expected.symmetric_difference(tensors)):
        problem = "lacks" if strange[0] in expected else "has an unknown"
        raise SourceError(f"{path}: {problem} {quoted(strange[0])} ({len(strange)} in all); {_REPAIR}")
    return Ranges(
        checkpoint_sha256=sha256,
        model=said.get("model", ""),
        text_sha256=said.get("text_sha256", ""),
        semspec=said.get("semspec", ""),
        windows=read_windows(tensors, checkpoint.spec),
        linears={name: read_linear(tensors, name, width) for name, width in widths.items()},
    )


def match_ranges(paths: Sequence[Path], checkpoints: Mapping[str, Checkpoint]) -> dict[str, Ranges]:
    """Role -> the ranges that are of its checkpoint; roles without any are left out.

    Raises SourceError for a file that is of none of the checkpoints, and for two of the same; see read_ranges.
    """
    found: dict[str, Ranges] = {}
    for path in paths:
        sha256 = read_safetensors_metadata(path).get("checkpoint_sha256")
        roles = [role for role, checkpoint in checkpoints.items() if checkpoint.sha256() == sha256]
        if not roles:
            read_ranges(path, next(iter(checkpoints.values())))  # says what is wrong with it
        for role in roles:
            if role in found:
                raise SourceError(
                    f"{path}: the {role} has its ranges from another file already; give one of them"
                )
            found[role] = read_ranges(path, checkpoints[role])
    return found


def write_ranges(path: Path, ranges: Ranges) -> None:
    """Write the file, whole or not at all; the same ranges give the same bytes. Raises OSError."""
    write_safetensors(path, pack_ranges(ranges), describe_ranges(ranges))


def describe_ranges(ranges: Ranges) -> dict[str, str]:
    """The file's metadata: what the numbers are of."""
    return {
        "format": FORMAT,
        "checkpoint_sha256": ranges.checkpoint_sha256,
        "model": ranges.model,
        "text_sha256": ranges.text_sha256,
        "tokens": str(ranges.tokens),
        "percentiles": ",".join(map(str, PERCENTILES)),
        "semspec": ranges.semspec,
    }


def pack_ranges(ranges: Ranges) -> dict[str, Floats]:
    """The file's tensors."""
    tensors: dict[str, Floats] = {}
    for name, linear in ranges.linears.items():
        tensors |= {f"{name}.{statistic}": getattr(linear, statistic) for statistic in _STATISTICS}
        tensors[f"{name}.moments"] = linear.moments.reshape(-1, MOMENT_SPAN)
    return tensors | pack_windows(ranges.windows)


def pack_windows(windows: Sequence[Sequence[int]]) -> dict[str, Floats]:
    """The text's part of the file's tensors. fp32 holds whole numbers up to 2^24, more than any vocabulary."""
    return {
        _IDS: np.concatenate([np.asarray(window, np.float32) for window in windows]),
        _LENGTHS: np.asarray([len(window) for window in windows], np.float32),
    }


def input_widths(spec: ModelSpec, weights: Weights) -> dict[str, int]:
    """Columns of what every linear reads, by name, in the decoder's order."""
    linears = (*layer_linears(spec), head_linear(spec))
    return {linear.name: weights.shape(linear.weights[0])[1] for linear in linears}


def read_linear(tensors: Mapping[str, StoredTensor], name: str, width: int) -> LinearRanges:
    """The statistics of one linear. Raises SourceError: a wrong shape, or a value that cannot be."""
    shapes: dict[str, tuple[int, ...]] = {
        "channel_percentiles": (len(PERCENTILES), width),
        "percentiles": (len(PERCENTILES),),
        "moments": (-(-width // MOMENT_SPAN) * MOMENT_SPAN, MOMENT_SPAN),  # spans one below the other
    }
    found = {
        statistic: _read(tensors[f"{name}.{statistic}"], shapes.get(statistic, (width,)))
        for statistic in _STATISTICS
    }
    found["moments"] = found["moments"].reshape(-1, MOMENT_SPAN, MOMENT_SPAN)
    for statistic, values in found.items():
        if statistic not in ("mean", "moments") and (values < 0).any():
            raise _impossible(tensors[f"{name}.{statistic}"], "is below 0 somewhere")
    if not _are_moments(found["moments"]):
        raise _impossible(tensors[f"{name}.moments"], "is no matrix of second moments")
    if (found["channel_percentiles"] > found["abs_max"]).any():
        raise _impossible(tensors[f"{name}.channel_percentiles"], "is above the maximum somewhere")
    return LinearRanges(**found)


def read_windows(tensors: Mapping[str, StoredTensor], spec: ModelSpec) -> tuple[tuple[int, ...], ...]:
    """The token ids. Raises SourceError: not ids of this model, or lengths that do not add up."""
    ids, lengths = (tensors[name] for name in (_IDS, _LENGTHS))
    flat = list(_whole_numbers(ids, 0, spec.vocab_size - 1))
    cuts = np.cumsum([0, *_whole_numbers(lengths, 1, spec.max_positions)]).tolist()
    if cuts[-1] != len(flat) or not flat:
        raise _impossible(lengths, f"adds up to {cuts[-1]} and there are {len(flat)} ids")
    return tuple(tuple(flat[begin:end]) for begin, end in pairwise(cuts))


def _are_moments(moments: Floats) -> bool:
    """Whether every span is symmetric, with no eigenvalue below 0 but by rounding, in shares of the span's largest
    possible. Told by a factorization, which takes a tenth of the time of the eigenvalues."""
    if not np.array_equal(moments, np.swapaxes(moments, 1, 2)):
        return False
    traces = np.trace(moments, axis1=1, axis2=2).astype(np.float64)
    if (traces < 0).any():
        return False
    scaled = moments / np.where(traces > 0, traces, 1.0)[:, None, None]
    try:
        np.linalg.cholesky(scaled + MOMENT_ROUNDING * np.eye(MOMENT_SPAN))
    except np.linalg.LinAlgError:
        return False
    return True


_STATISTICS = tuple(field.name for field in fields(LinearRanges))


def _read(tensor: StoredTensor, shape: tuple[int, ...]) -> Floats:
    if tensor.shape != shape or tensor.type != "F32":
        raise _impossible(
            tensor, f"is {tensor.type} {list(tensor.shape)}, and the model needs F32 {list(shape)}"
        )
    return read_rows(tensor)


def _whole_numbers(tensor: StoredTensor, least: int, most: int) -> Iterator[int]:
    values: Any = _read(tensor, (tensor.shape[0] if len(tensor.shape) == 1 else -1,))
    wrong = values[(values != np.floor(values)) | (values < least) | (values > most)]
    if wrong.size:
        raise _impossible(tensor, f"must be whole numbers in {least}..{most}, found {wrong[0]}")
    return map(int, values)


def _impossible(tensor: StoredTensor, problem: str) -> SourceError:
    return SourceError(f"{tensor.path}: {quoted(tensor.name)} {problem}; {_REPAIR}")
