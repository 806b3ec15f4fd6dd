"""What is done of a ranges file so far, on the disk after every layer, so that a killed run goes on.

    .<name>.partial/layer-<i>.safetensors    the ranges of one layer
    .<name>.partial/streams.safetensors      how many layers are done, and where the text stands behind the last

The streams are replaced as a whole after their layer is written, so they say what counts. One process works on a
file at a time; the lock is flock's (Linux and macOS) and goes with the process, however it ends.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import numpy as np

from semspec.export.checkpoint import Checkpoint
from semspec.export.ranges import (
    LinearRanges,
    Ranges,
    describe_ranges,
    input_widths,
    pack_windows,
    read_linear,
    read_windows,
    write_ranges,
)
from semspec.export.rows import read_rows
from semspec.export.safetensors_file import read_safetensors_header, read_safetensors_metadata
from semspec.export.safetensors_writer import write_safetensors
from semspec.models.layerwise import Streams
from semspec.runtime.errors import CalibrationError, ConfigError, SourceError
from semspec.runtime.records import Floats

__all__ = ["RangesState", "check_free"]

logger = logging.getLogger(__name__)

STREAMS = "streams.safetensors"
_NORMED, _STREAM, _DONE = "streams.normed", "streams.stream", "layers_done"


def check_free(out: Path, force: bool) -> None:
    """`out` can take a file: there is none, or one that may be replaced, in a folder. Raises ConfigError."""
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent} is not a folder; make it first, or give another file")
    if os.path.lexists(out) and not (force and out.is_file()):
        repair = "give another file" if force or not out.is_file() else "give another file, or --force"
        raise ConfigError(f"{out} exists; {repair}")


class RangesState:
    """`ranges` of the linears that are done, and `streams` where the text stands (None before layer 0).

    A context manager: holds the folder's lock. What was saved stays until `finish`.

    described: what the ranges are of, without linears. Raises ConfigError: `out` exists or another run was left
    there, and not `force`; CalibrationError: no folder to write in, another process is at it, a damaged state.
    """

    def __init__(self, out: Path, described: Ranges, checkpoint: Checkpoint, *, force: bool) -> None:
        self.out, self.ranges = out, described
        self.streams: Streams | None = None
        check_free(out, force)
        self.folder = out.with_name(f".{out.name}.partial")
        self._lock = _claim(self.folder)
        try:
            check_free(out, force)  # another run may have finished it meanwhile
            if (self.folder / STREAMS).exists() and not self._resume(checkpoint):
                if not force:
                    raise ConfigError(
                        f"{self.folder} holds an unfinished run of another model, text or version; finish that one, "
                        f"give another file, or begin anew with --force"
                    )
                (self.folder / STREAMS).unlink()
        except BaseException:
            self._release()
            raise

    def __enter__(self) -> RangesState:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    def save(self, streams: Streams, linears: Mapping[str, LinearRanges]) -> None:
        """One more layer is done; on the disk when this returns. Raises CalibrationError: it cannot be written."""
        layer = replace(self.ranges, linears=linears)
        tensors = {
            _NORMED: np.concatenate(streams.normed),
            _STREAM: np.concatenate(streams.stream),
            **pack_windows(self.ranges.windows),
        }
        said = {**describe_ranges(self.ranges), _DONE: str(streams.done)}
        with _writing(self.folder):
            write_ranges(self._layer_file(streams.done - 1), layer)
            write_safetensors(self.folder / STREAMS, tensors, said)
        self.ranges = replace(self.ranges, linears={**self.ranges.linears, **linears})
        self.streams = streams

    def finish(self) -> None:
        """Write the file itself and remove the state. Raises CalibrationError: it cannot be written."""
        with _writing(self.out):
            write_ranges(self.out, self.ranges)
        (self.folder / STREAMS).unlink()

    def _release(self) -> None:
        """Let the next one in; a folder without streams is nobody's."""
        if not (self.folder / STREAMS).exists():
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    def _layer_file(self, layer: int) -> Path:
        return self.folder / f"layer-{layer}.safetensors"

    def _resume(self, checkpoint: Checkpoint) -> bool:
        """Take up what was left, if it is of this run."""
        path = self.folder / STREAMS
        try:
            said, tensors = read_safetensors_metadata(path), read_safetensors_header(path)
            done = int(said.pop(_DONE))
            if said != describe_ranges(self.ranges):
                return False
            if read_windows(tensors, checkpoint.spec) != self.ranges.windows:
                return False
            linears = self._read_layers(checkpoint, done)
            shape = (self.ranges.tokens, checkpoint.spec.width)
            normed, stream = (read_rows(tensors[name]) for name in (_NORMED, _STREAM))
            if not normed.shape == stream.shape == shape:
                raise ValueError(f"streams of shape {normed.shape} and {stream.shape}, not {shape}")
        except (SourceError, KeyError, ValueError) as error:
            raise CalibrationError(f"{self.folder} is damaged ({error}); remove it") from None
        self.ranges = replace(self.ranges, linears=linears)
        self.streams = Streams(done=done, normed=self._split(normed), stream=self._split(stream))
        logger.info("%s: going on after layer %d", self.out, done - 1)
        return True

    def _read_layers(self, checkpoint: Checkpoint, done: int) -> dict[str, LinearRanges]:
        """Of the layers that are done, and of the head once all are."""
        spec, widths = checkpoint.spec, input_widths(checkpoint.spec, checkpoint)
        if not 1 <= done <= spec.n_layers:
            raise ValueError(f"{done} layers done of {spec.n_layers}")
        names, n_of_layer = list(widths), (len(widths) - 1) // spec.n_layers
        linears = {}
        for layer in range(done):
            tensors = read_safetensors_header(self._layer_file(layer))
            end = None if layer + 1 == spec.n_layers else (layer + 1) * n_of_layer
            for name in names[layer * n_of_layer : end]:
                linears[name] = read_linear(tensors, name, widths[name])
        return linears

    def _split(self, rows: Floats) -> tuple[Floats, ...]:
        """(T, E) into the windows' shares."""
        ends = np.cumsum([len(window) for window in self.ranges.windows])
        return tuple(np.split(rows, ends[:-1]))


def _claim(folder: Path) -> int:
    """Make the folder and lock it; the lock is the returned descriptor."""
    with _writing(folder):
        folder.mkdir(exist_ok=True)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise CalibrationError(
            f"another run is writing {folder}; wait for it, or give another file"
        ) from None
    return lock


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CalibrationError(f"{path}: cannot be written: {error.strerror or error}") from None
