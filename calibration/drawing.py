"""What the plots of all reports have in common: figures, colours, arms of intervals, and PNG bytes.

Colours are those that colour-blind eyes tell apart (Okabe and Ito). Text is drawn as it is written, never as a
formula; letters beyond ASCII become `?`. pyplot is not touched: a report can be drawn inside an application. The same
drawing gives the same bytes.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from semspec.runtime.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "COLOURS",
    "DPI",
    "MARKERS",
    "Ranged",
    "ascii_only",
    "interval_arms",
    "name_rows",
    "new_figure",
    "to_png",
]

DPI = 200  # twice what a page shows: sharp on dense screens, legible on others
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "sD^vPX*"  # seven beside six colours: a pair returns after forty-two


class Ranged(Protocol):
    """A number and its interval."""

    @property
    def value(self) -> float: ...
    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...


def new_figure(*, height: float, n_axes: int = 1) -> tuple[Figure, tuple[Axes, ...]]:
    """An empty figure with its axes side by side. height: inches. Raises ConfigError where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"the report needs matplotlib, which cannot be imported ({error}); "
            "install it with: pip install 'semspec[bench]'"
        ) from error
    figure = Figure(figsize=(9.2, height), layout="constrained")
    axes = tuple(figure.add_subplot(1, n_axes, place + 1) for place in range(n_axes))
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.tick_params(labelsize=10)
    return figure, axes


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """One labelled row each, the first on top."""
    axes.set_yticks(range(len(names)), [ascii_only(name) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def interval_arms(found: Ranged, scale: float = 1) -> list[list[float]]:
    """Lengths of an interval's two arms; never negative, even where the value lies outside its own interval."""
    below, above = found.value - found.low, found.high - found.value
    return [[scale * max(below, 0.0)], [scale * max(above, 0.0)]]


def ascii_only(text: str) -> str:
    """ASCII, and no `$`: that would start a formula."""
    return "".join(char if " " <= char <= "~" else "?" for char in text).replace("$", r"\$")


def to_png(figure: Figure) -> bytes:
    """The figure as a PNG of DPI dots an inch."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()
