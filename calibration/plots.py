"""The plots of a calibration's report, as PNG bytes: findings in, pictures out. It reckons nothing and knows no HTML.

None where there is nothing to show. Shares are drawn in per cent; what is told by colour is told by a marker or a line
as well. See drawing.py for what all plots have in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from semspec.calibration.drawing import (
    COLOURS,
    MARKERS,
    ascii_only,
    interval_arms,
    name_rows,
    new_figure,
    to_png,
)
from semspec.calibration.findings import (
    Bin,
    Candidate,
    Curve,
    Findings,
    Histogram,
    LayerGain,
    LengthBin,
    RiskLine,
)
from semspec.calibration.tables import SHUFFLED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "draw_candidates",
    "draw_histograms",
    "draw_layers",
    "draw_lengths",
    "draw_reliability",
    "draw_risk",
]

BLACK, GREY = "#000000", "#777777"
LINES = ("-", "--", "-.", ":")
KINDS = {"signal": ("o", COLOURS[0]), "fitted": ("s", COLOURS[2]), "ratio": ("^", COLOURS[1])}
LEAST_DOT, MOST_DOT = 20.0, 260.0  # square points


def draw_candidates(found: Findings) -> bytes | None:
    """How well each way to score ranks segments, with its interval; the one shipped is filled, the line is the base."""
    if not found.candidates:
        return None
    rows = [(_title(one, found), one.kind, one.name == found.winner, one.auroc) for one in found.candidates]
    rows.append((SHUFFLED, "control", False, found.shuffled))
    figure, (axes,) = new_figure(height=1.3 + 0.34 * len(rows))
    for place, (_, kind, shipped, auroc) in enumerate(rows):
        marker, colour = KINDS.get(kind, ("x", BLACK))
        look: dict[str, Any] = {"color": colour, "capsize": 3, "elinewidth": 1.5, "markersize": 7}
        look["markerfacecolor"] = colour if shipped else "white"
        axes.errorbar(auroc.value, place, xerr=interval_arms(auroc), fmt=marker, **look)
        says = f"{auroc.value:.3f}"
        axes.annotate(says, (1.01, place), xycoords=("axes fraction", "data"), va="center", fontsize=10)
    for value in [one.auroc.value for one in found.candidates if one.name == found.base]:
        axes.axvline(value, color=GREY, linewidth=1, linestyle="--", zorder=0)
    axes.axvline(0.5, color=GREY, linewidth=1, linestyle=":", zorder=0)
    name_rows(axes, [title for title, *_ in rows])
    axes.set_xlabel("AUROC on unseen questions (dashed: the base that a probe must beat; dotted: chance)")
    return to_png(figure)


def draw_reliability(bins: Sequence[Bin]) -> bytes | None:
    """Mean label against mean score of neighbouring scores; on the diagonal a score means what it says."""
    if not bins:
        return None
    figure, (axes,) = new_figure(height=4.6)
    most = max(one.rows for one in bins)
    axes.plot([0, 100], [0, 100], color=GREY, linewidth=1, linestyle="--", zorder=0)
    axes.plot(
        [100 * one.score for one in bins], [100 * one.label for one in bins], color=COLOURS[0], linewidth=1
    )
    axes.scatter(
        [100 * one.score for one in bins],
        [100 * one.label for one in bins],
        s=[LEAST_DOT + (MOST_DOT - LEAST_DOT) * one.rows / most for one in bins],
        color=COLOURS[0],
        alpha=0.75,
        linewidths=0,
        clip_on=False,
    )
    _per_cent(axes, x=True, y=True)
    axes.set_aspect("equal")
    axes.set_xlabel("mean score, % (a larger dot: more segments)")
    axes.set_ylabel("mean label, %")
    return to_png(figure)


def draw_risk(curves: Sequence[Curve], risks: Sequence[RiskLine]) -> bytes | None:
    """Risk against coverage of each curve; crosses are the lines of the risk table, with their bounds."""
    shown = [curve for curve in curves if curve.points]
    if not shown:
        return None
    figure, (axes,) = new_figure(height=4.4)
    for i, curve in enumerate(shown):
        by_chance = curve.name == "random"
        axes.plot(
            [100 * point.coverage for point in curve.points],
            [100 * point.zero for point in curve.points],
            color=GREY if by_chance else COLOURS[i % len(COLOURS)],
            linestyle=":" if by_chance else LINES[i % len(LINES)],
            linewidth=1.8,
            label=ascii_only(curve.name),
        )
    for i, line in enumerate(risks):
        arm = [[0.0], [100 * max(line.upper - line.observed, 0.0)]]
        label = "thresholds of the risk table,\nup to their bounds" if i == 0 else None
        axes.errorbar(
            100 * line.coverage,
            100 * line.observed,
            arm,
            fmt="x",
            color=BLACK,
            capsize=4,
            label=label,
            zorder=3,
        )
    axes.set_xlim(-2, 102)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("drafted tokens kept, %")
    axes.set_ylabel("risk among the kept segments, %")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    return to_png(figure)


def draw_histograms(histograms: Sequence[Histogram]) -> bytes | None:
    """Where the scores of the segments with each kind of label lie: shares within a kind, bins of equal width."""
    shown = [one for one in histograms if sum(one.counts)]
    if not shown:
        return None
    figure, panels = new_figure(height=2.9, n_axes=len(shown))
    most = max(100 * max(one.counts) / sum(one.counts) for one in shown)
    for place, (axes, one) in enumerate(zip(panels, shown, strict=True)):
        total, n_bins = sum(one.counts), len(one.counts)
        lefts = [100 * number / n_bins for number in range(n_bins)]
        shares = [100 * count / total for count in one.counts]
        axes.bar(lefts, shares, width=92 / n_bins, align="edge", color=COLOURS[0])
        axes.set_title(ascii_only(f"label {one.label} ({total})"), fontsize=10)
        axes.set_xlim(-3, 103)
        axes.set_ylim(0, 1.05 * most)
        axes.set_xlabel("score, %")
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        if place:
            axes.tick_params(axis="y", labelleft=False)
        else:
            axes.set_ylabel("share of these segments, %")
    return to_png(figure)


def draw_lengths(lengths: Sequence[LengthBin]) -> bytes | None:
    """By the length of a segment: mean score, mean label and share of zero labels; and how well scores rank."""
    if not lengths:
        return None
    figure, (left, right) = new_figure(height=3.6, n_axes=2)
    places = list(range(len(lengths)))
    rows = (
        ("mean label", [one.label for one in lengths]),
        ("mean score", [one.score for one in lengths]),
        ("label 0", [one.zero for one in lengths]),
    )
    for i, (name, values) in enumerate(rows):
        percent = [100 * value for value in values]
        left.plot(places, percent, LINES[i], marker=MARKERS[i], color=COLOURS[i], label=name, markersize=6)
    _per_cent(left, y=True)
    left.set_ylabel("%")
    left.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False)
    ranked = [(place, one.auroc[0]) for place, one in enumerate(lengths) if one.auroc]
    right.plot([place for place, _ in ranked], [value for _, value in ranked], "-o", color=COLOURS[3])
    right.axhline(0.5, color=GREY, linewidth=1, linestyle=":", zorder=0)
    right.set_ylim(0.3, 1.02)
    right.set_ylabel("AUROC (dotted: chance)")
    for axes in (left, right):
        axes.set_xticks(places, [_tokens(one) for one in lengths])
        axes.set_xlim(-0.5, len(lengths) - 0.5)
        axes.set_xlabel("tokens of the segment (segments)")
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    return to_png(figure)


def draw_layers(layers: Sequence[LayerGain]) -> bytes | None:
    """By pooled layer: a probe of its states alone, and what it adds to what costs nothing."""
    if not layers:
        return None
    figure, (left, right) = new_figure(height=1.5 + 0.5 * len(layers), n_axes=2)
    for place, one in enumerate(layers):
        look: dict[str, Any] = {"capsize": 3, "elinewidth": 1.5, "markersize": 7}
        left.errorbar(
            one.alone.value, place, xerr=interval_arms(one.alone), fmt="o", color=COLOURS[0], **look
        )
        for i, (name, gain) in enumerate((("signals", one.on_signals), ("signals and text", one.on_base)), 1):
            right.errorbar(
                gain.value,
                place + 0.24 * (i - 1.5),
                xerr=interval_arms(gain),
                fmt=MARKERS[i],
                color=COLOURS[i],
                label=f"beside {name}" if place == 0 else None,
                **look,
            )
    left.axvline(0.5, color=GREY, linewidth=1, linestyle=":", zorder=0)
    right.axvline(0.0, color=GREY, linewidth=1, linestyle="--", zorder=0)
    for axes in (left, right):
        name_rows(axes, [_layers(one) for one in layers])
    right.tick_params(axis="y", labelleft=False)
    left.set_xlabel("AUROC of a probe alone (dotted: chance)")
    right.set_xlabel("AUROC gained by the probe (dashed: nothing)")
    right.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)
    return to_png(figure)


def _title(one: Candidate, found: Findings) -> str:
    marks = [word for word, name in (("shipped", found.winner), ("base", found.base)) if name == one.name]
    return f"{one.name} ({', '.join(marks)})" if marks else one.name


def _layers(one: LayerGain) -> str:
    return f"state {' + '.join(map(str, one.layers))}"


def _tokens(one: LengthBin) -> str:
    span = f"{one.low}-{one.high}" if one.low < one.high else str(one.low)
    return f"{span}\n({one.rows})"


def _per_cent(axes: Axes, *, x: bool = False, y: bool = False) -> None:
    """The whole range, a little more so that dots at its ends are seen."""
    if x:
        axes.set_xlim(-2, 102)
    if y:
        axes.set_ylim(-2, 102)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
