"""The report's plots, as PNG bytes. Knows colours and axes; knows no model, no file and no HTML.

Every mode keeps its colour and its marker from plot to plot, and never has colour alone. A filled marker is an exact
mode, a hollow one a lossy mode, a grey one a peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from semspec.calibration.bench.estimates import Estimate
from semspec.calibration.bench.records import PLAIN, Result
from semspec.calibration.bench.summary import ModeRow
from semspec.calibration.drawing import (
    COLOURS,
    MARKERS,
    ascii_only,
    interval_arms,
    name_rows,
    new_figure,
    to_png,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_accuracy", "draw_drafts", "draw_phases", "draw_speed"]

PLAIN_LOOK = ("#000000", "o")
FILLS = (("#0072B2", ""), ("#D55E00", ".."), ("#E69F00", ""), ("#009E73", "//"), ("#CC79A7", ""))
EQUAL = Estimate(value=1.0, low=1.0, high=1.0)  # plain decoding over itself
REST = "rest"  # of the whole time: encoding, decoding of text, the loop


def draw_speed(rows: Sequence[ModeRow]) -> bytes | None:
    """Speed of each mode as a ratio to autoregressive decoding, which is the line at 1, with its interval.

    None where no mode has a ratio. Modes are drawn in the order given, the first on top; so in every plot.
    """
    shown = [(i, row, row.speed_ratio) for i, row in enumerate(rows) if row.speed_ratio is not None]
    if not shown:
        return None
    figure, (axes,) = new_figure(height=1.1 + 0.42 * len(shown))
    for place, (i, row, ratio) in enumerate(shown):
        axes.errorbar(ratio.value, place, xerr=interval_arms(ratio), **_look(i, row))
        says = f"{ratio.value:.2f}x"
        axes.annotate(says, (1.01, place), xycoords=("axes fraction", "data"), va="center", fontsize=10)
    name_rows(axes, [_title(row) for _, row, _ in shown])
    _draw_equal_speed(axes)
    axes.set_xlabel("times the tokens per second of autoregressive decoding (dashed: equal speed)")
    return to_png(figure)


def draw_accuracy(rows: Sequence[ModeRow]) -> bytes | None:
    """Share of right answers against speed; up and to the right is better.

    None where all modes have the same share: then there is nothing to weigh against speed.
    """
    found = [
        (i, row, EQUAL if row.mode == PLAIN else row.speed_ratio, row.accuracy) for i, row in enumerate(rows)
    ]
    shown = [
        (i, row, ratio, right) for i, row, ratio, right in found if ratio is not None and right is not None
    ]
    if len({right.value for *_, right in shown}) < 2:
        return None
    figure, (axes,) = new_figure(height=4.2)
    for i, row, ratio, right in shown:
        across, along = interval_arms(ratio), interval_arms(right, 100)
        axes.errorbar(
            ratio.value, 100 * right.value, along, across, label=ascii_only(_title(row)), **_look(i, row)
        )
    _draw_equal_speed(axes)
    axes.set_ylim(-3, 103)
    axes.set_xlabel("times the tokens per second of autoregressive decoding (dashed: equal speed)")
    axes.set_ylabel("right answers, %")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    return to_png(figure)


def draw_drafts(rows: Sequence[ModeRow], results: Sequence[Result]) -> bytes | None:
    """How drafts fared, a dot an answer and a bar at the median: drafted tokens kept, tokens a target pass.

    None where nothing was drafted.
    """
    by_mode = {row.mode: [one for one in results if one.cell.mode == row.mode] for row in rows}
    shown = [(i, row) for i, row in enumerate(rows) if any(one.num_draft_tokens for one in by_mode[row.mode])]
    if not shown:
        return None
    figure, (left, right) = new_figure(height=1.1 + 0.5 * len(shown), n_axes=2)
    for place, (i, row) in enumerate(shown):
        mine = by_mode[row.mode]
        kept = [
            100 * (one.num_accepted_draft_tokens or 0) / one.num_draft_tokens
            for one in mine
            if one.num_draft_tokens
        ]
        passes = [one.generated_tokens / one.num_rounds for one in mine if one.num_rounds]
        _draw_dots(left, place, kept, _colour(i, row))
        _draw_dots(right, place, passes, _colour(i, row))
    name_rows(left, [_title(row) for _, row in shown])
    name_rows(right, [_title(row) for _, row in shown])
    right.tick_params(axis="y", labelleft=False)
    left.set_xlim(-3, 103)
    left.set_xlabel("drafted tokens kept, %")
    right.set_xlim(left=0)
    _draw_equal_speed(right)
    right.set_xlabel("tokens per target pass (dashed: plain decoding)")
    return to_png(figure)


def draw_phases(rows: Sequence[ModeRow], results: Sequence[Result]) -> bytes | None:
    """Where the time of a token goes: milliseconds by phase and the rest, one bar a mode. None without results. Peers
    tell no phases and are left out."""
    rows = [row for row in rows if not row.peer]
    costs = [_token_ms([one for one in results if one.cell.mode == row.mode]) for row in rows]
    if not any(costs):
        return None
    richest_first = sorted(costs, key=len, reverse=True)  # so that phases keep the order they happen in
    phases = list(dict.fromkeys(phase for cost in richest_first for phase in cost if phase != REST))
    figure, (axes,) = new_figure(height=1.5 + 0.45 * len(rows))
    starts = [0.0] * len(rows)
    for i, phase in enumerate([*phases, REST]):
        widths = [cost.get(phase, 0.0) for cost in costs]
        fill, hatch = FILLS[i % len(FILLS)] if phase != REST else ("#999999", "")
        axes.barh(
            range(len(rows)),
            widths,
            left=starts,
            height=0.62,
            label=ascii_only(phase),
            color=fill,
            hatch=hatch,
            edgecolor="white",
        )
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    for place, total in enumerate(starts):
        axes.annotate(f" {total:.1f}", (total, place), va="center", fontsize=10)
    name_rows(axes, [_title(row) for row in rows])
    axes.set_xlim(0, 1.1 * max([*starts, 1e-9]))
    axes.set_xlabel("milliseconds per token of the answer")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=6, frameon=False)
    return to_png(figure)


def _token_ms(results: Sequence[Result]) -> dict[str, float]:
    """Milliseconds a generated token by phase, and the rest of the whole time; empty without tokens."""
    n_tokens = sum(one.generated_tokens for one in results)
    if not n_tokens:
        return {}
    spent: dict[str, float] = {}
    for one in results:
        for phase, ms in one.phase_ms.items():
            spent[phase] = spent.get(phase, 0.0) + ms
    rest = 1000 * sum(one.seconds for one in results) - sum(spent.values())
    return {phase: ms / n_tokens for phase, ms in {**spent, REST: max(rest, 0.0)}.items()}


def _draw_equal_speed(axes: Axes) -> None:
    axes.axvline(1.0, color="#555555", linewidth=1, linestyle="--", zorder=0)


def _draw_dots(axes: Axes, place: int, values: Sequence[float], colour: str) -> None:
    """Dots that overlap are spread by a fixed pattern, so that the same results give the same picture."""
    if not values:
        return
    spread = [place + 0.52 * ((i * 0.618034) % 1 - 0.5) for i in range(len(values))]
    axes.plot(values, spread, "o", color=colour, alpha=0.5, markersize=4.5, markeredgewidth=0)
    axes.plot([median(values)] * 2, [place - 0.36, place + 0.36], color=colour, linewidth=2.5)


def _colour(i: int, row: ModeRow) -> str:
    return PLAIN_LOOK[0] if row.mode == PLAIN else COLOURS[i % len(COLOURS)]


def _look(i: int, row: ModeRow) -> dict[str, Any]:
    """Colour and marker of the i-th mode."""
    colour = _colour(i, row)
    return {
        "fmt": PLAIN_LOOK[1] if row.mode == PLAIN else MARKERS[i % len(MARKERS)],
        "color": colour,
        "markerfacecolor": {"exact": colour, "lossy": "white"}.get(row.promise, "#bbbbbb"),
        "markersize": 7,
        "capsize": 4,
        "elinewidth": 1.6,
    }


def _title(row: ModeRow) -> str:
    return f"{row.mode} ({row.promise})"
