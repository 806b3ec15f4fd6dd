"""Ranges of linear inputs: a checkpoint reads a text in fp32, layer by layer, and what its linears read is summed up.

    checkpoint, windows of text  ->  embed  ->  for each layer: statistics, streams to the disk  ->  one file

Needs neither torch nor an engine. What a kill leaves is taken up by the next run; see ranges_state.py.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from semspec.calibration.channels import ChannelStatistics
from semspec.calibration.ranges_state import RangesState
from semspec.calibration.texts import CalibrationText
from semspec.export.checkpoint import Checkpoint
from semspec.export.ranges import LinearRanges, Ranges, input_widths
from semspec.models.layerwise import run_layerwise
from semspec.runtime.records import Floats, Progress

__all__ = ["take_ranges"]


def take_ranges(
    checkpoint: Checkpoint,
    text: CalibrationText,
    out: Path,
    *,
    name: str,
    force: bool = False,
    on_progress: Progress | None = None,
) -> Ranges:
    """Write the ranges of `checkpoint` over `text` to the file `out`, whole or not at all.

    name: what to call the model. force: replace an existing file, and begin anew where another run was left.
    Interrupted after any layer, the same call goes on there and gives the bytes it would have given (on the same
    machine: the last bits of a product depend on the processor and on the number of threads). on_progress counts
    windows times layers.

    Memory: one layer in fp32, one window's values, two states for each token. Raises ConfigError for an `out` that
    exists or that another run was left at; CalibrationError: see RangesState; SourceError for a damaged checkpoint.
    """
    described = Ranges(
        checkpoint_sha256=checkpoint.sha256(),
        model=name,
        text_sha256=text.sha256,
        semspec=metadata.version("semspec"),
        windows=text.windows,
        linears={},
    )
    with RangesState(out, described, checkpoint, force=force) as state:
        _run_layers(checkpoint, text, state, on_progress)
        state.finish()
        return state.ranges


def _run_layers(
    checkpoint: Checkpoint, text: CalibrationText, state: RangesState, on_progress: Progress | None
) -> None:
    """All layers that `state` lacks."""
    spec, n_windows = checkpoint.spec, len(text.windows)
    gathered = _Gathered(input_widths(spec, checkpoint), n_rows=state.ranges.tokens)

    def on_window(layer: int, window: int) -> None:
        if on_progress is not None:
            on_progress("reading", layer * n_windows + window + 1, spec.n_layers * n_windows)

    passes = run_layerwise(
        spec, checkpoint, text.windows, gathered.visit, start=state.streams, on_window=on_window
    )
    for streams in passes:
        state.save(streams, gathered.take())


class _Gathered:
    """Statistics of the linears that are being read."""

    def __init__(self, widths: dict[str, int], n_rows: int) -> None:
        self.widths, self.n_rows = widths, n_rows
        self.open: dict[str, ChannelStatistics] = {}

    def visit(self, name: str, x: Floats) -> None:
        if name not in self.open:
            self.open[name] = ChannelStatistics(self.n_rows, self.widths[name])
        self.open[name].add(x)

    def take(self) -> dict[str, LinearRanges]:
        """Of all linears since the last time."""
        done = {name: statistics.finish() for name, statistics in self.open.items()}
        self.open.clear()
        return done
