"""The reference over many windows of text, layer by layer: every weight is read once, whatever the text's length.

Windows are independent texts: positions start at 0 in each and none sees another. Whoever wants to know what the
linears read passes a `visit`; what it makes of it is its own business. The head's product is left out: nobody needs
it to know its input, and it is a fifth of the work of a small model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from semspec.models.decoder import enter, head_linear, run_layer
from semspec.models.ops import Linear, Weights
from semspec.models.reference import NumpyOps
from semspec.models.spec import ModelSpec

__all__ = ["HeldWeights", "Streams", "Visit", "Window", "advance", "begin", "run_layerwise"]

Floats = npt.NDArray[np.float32]

Window: TypeAlias = Sequence[int]
"""Ids of one text, (S,), S at least 1."""

Visit: TypeAlias = Callable[[str, Floats], None]
"""visit(name, x): x, (S, columns), is what the linear `name` reads for one window. Read it, or copy it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Streams:
    """Where every window stands after `done` layers; (S, E) each.

    stream: the residual stream. normed: what comes next reads: layer `done`, or the head after the last layer.
    """

    done: int
    normed: tuple[Floats, ...]
    stream: tuple[Floats, ...]


def run_layerwise(
    spec: ModelSpec,
    weights: Weights,
    windows: Sequence[Window],
    visit: Visit,
    *,
    start: Streams | None = None,
    on_window: Callable[[int, int], None] | None = None,
) -> Iterator[Streams]:
    """Yield the streams after each layer, from `start` on; the same bits wherever it starts.

    Within a layer window after window goes through it, so `visit` gets qkv, attention_output, gate_up and down of a
    window, then those of the next; and `head`, for every window, after the last layer. on_window(layer, window):
    called after each.

    Memory: one layer's weights in fp32, one window's values, and four (S, E) for each window.
    """
    streams = begin(spec, weights, windows) if start is None else start
    while streams.done < spec.n_layers:
        streams = advance(spec, weights, windows, streams, visit, on_window=on_window)
        if streams.done == spec.n_layers:
            for normed in streams.normed:
                visit(head_linear(spec).name, normed)
        yield streams


def begin(spec: ModelSpec, weights: Weights, windows: Sequence[Window]) -> Streams:
    """The streams before layer 0."""
    held = HeldWeights(weights)
    entered = [enter(spec, NumpyOps(spec, held, np.asarray(window, np.int64), ())) for window in windows]
    return Streams(
        done=0, normed=tuple(normed for normed, _ in entered), stream=tuple(stream for _, stream in entered)
    )


def advance(
    spec: ModelSpec,
    weights: Weights,
    windows: Sequence[Window],
    streams: Streams,
    visit: Visit,
    *,
    on_window: Callable[[int, int], None] | None = None,
) -> Streams:
    """Take every window through layer `streams.done`. weights: may differ from those of the layers before."""
    layer, held = streams.done, HeldWeights(weights)
    normed, stream = list(streams.normed), list(streams.stream)
    for at, window in enumerate(windows):
        ops = _WatchedOps(spec, held, np.asarray(window, np.int64), visit)
        normed[at], stream[at] = run_layer(spec, ops, layer, normed[at], stream[at])
        if on_window is not None:
            on_window(layer, at)
    return Streams(done=layer + 1, normed=tuple(normed), stream=tuple(stream))


class _WatchedOps(NumpyOps):
    """NumpyOps that show what each linear reads."""

    def __init__(self, spec: ModelSpec, weights: Weights, ids: npt.NDArray[np.int64], visit: Visit) -> None:
        super().__init__(spec, weights, ids, ())
        self.visit = visit

    def linear(self, x: Floats, linear: Linear) -> Floats:
        self.visit(linear.name, x)
        return super().linear(x, linear)


class HeldWeights:
    """Weights that are read once and kept, for as long as a layer takes; of the embedding the rows wanted."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.kept: dict[tuple[str, int | None], Floats] = {}

    def shape(self, name: str) -> tuple[int, ...]:
        return self.weights.shape(name)

    def read(self, name: str, rows: slice | None = None) -> Floats:
        key = (name, None if rows is None else rows.start)  # blocks of rows are always cut alike
        if key not in self.kept:
            self.kept[key] = self.weights.read(name, rows)
        return self.kept[key]
