"""report.html: what a person reads of a benchmark.

It knows what the page says; it computes no statistic (summary.py), draws nothing (plots.py), words no column
(columns.py), and what all pages have in common is page.py's. What comes from models, data or file names is escaped.
Same results and origin, same page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from semspec.calibration.bench.columns import list_duels, list_notes, select_columns
from semspec.calibration.bench.divergences import Divergence
from semspec.calibration.bench.estimates import Estimate
from semspec.calibration.bench.plots import draw_accuracy, draw_drafts, draw_phases, draw_speed
from semspec.calibration.bench.records import PLAIN, Result
from semspec.calibration.bench.summary import ModeRow, Table
from semspec.calibration.page import facts, figure, head, split_interval, write_page

__all__ = ["write_report"]

MOST_SHOWN = 30  # divergences on the page; the file has all
ENGINES = ("onnxruntime", "onnxruntime-gpu", "semspec")  # versions shown beside the machine


def write_report(
    out: Path,
    results: Sequence[Result],
    table: Table,
    origin: Mapping[str, Any],
    divergences: Sequence[Divergence],
) -> None:
    """Write report.html into the folder `out`.

    results: those the table was made of. origin: what was measured, how and on what machine: JSON values under
    names of your choice, shown as given. divergences: of the results, with their margins. An earlier report is
    replaced at once. Raises ConfigError where matplotlib is missing, before anything is written; OSError where `out`
    cannot be written.
    """
    write_page(out / "report.html", list(_page(results, table, origin, divergences)))


def _page(
    results: Sequence[Result], table: Table, origin: Mapping[str, Any], divergences: Sequence[Divergence]
) -> Iterator[str]:
    yield head("semspec bench")
    yield "<h1>semspec bench</h1>"
    yield f"<p class='size'>{escape(_size(results))}</p>"
    yield from (f"<p class='size'>{escape(words)}</p>" for words in _machines(origin))
    yield f"<p class='finding'>{escape(_finding(table))}</p>"
    yield from _table(table)
    yield from (f"<p class='note'>{escape(note)}</p>" for note in list_notes(table))
    yield from _duels(table)
    yield from _plots(results, table)
    yield from _divergences(table, divergences)
    yield "<h2>What was measured, on what</h2>"
    yield from facts(origin, drop="settings")
    yield from _meanings(table)
    yield "</body></html>"


def _size(results: Sequence[Result]) -> str:
    """How much was measured, in words."""
    counts = {
        "problem": len({one.cell.problem for one in results}),
        "mode": len({one.cell.mode for one in results}),
        "seed": len({one.cell.seed for one in results}),
        "repeat": len({one.cell.repeat for one in results}),
    }
    parts = [f"{n} {word}{'' if n == 1 else 's'}" for word, n in counts.items()]
    return f"{', '.join(parts)}: {len(results)} answers, the modes interleaved problem by problem."


def _machines(origin: Mapping[str, Any]) -> Iterator[str]:
    """A line a machine, as far as the origin tells (run.py writes it; the whole origin is shown below)."""
    for machine in origin.get("machines", ()):
        facts = [machine.get("processor"), f"{machine.get('cores', '?')} cores", machine.get("system")]
        versions = [f"{name} {machine[name]}" for name in ("python", *ENGINES) if name in machine]
        yield "On " + ", ".join(str(fact) for fact in (*facts, *versions) if fact)


def _finding(table: Table) -> str:
    """The sentence a hurried reader takes away: a mode is faster where its whole interval lies above 1."""
    everyone = [(row.speed_ratio, row) for row in table.rows if row.speed_ratio is not None and not row.peer]
    exact = [rival for rival in everyone if rival[1].exact]  # a lossy mode can be as fast as it likes
    rivals = exact or everyone
    kind = "exact modes" if len(rivals) < len(everyone) else "modes"
    if not rivals:
        return f"No speed-up can be told: that takes {PLAIN} and another mode in one run."
    faster = [rival for rival in rivals if rival[0].low > 1]
    ratio, best = max(faster or rivals, key=lambda rival: rival[0].value)
    says = f"{best.mode} ({best.promise}), {_times(ratio)}"
    if ratio.low == ratio.high:
        return f"Measured on too little for an interval; highest: {says}."
    if faster:
        return f"{len(faster)} of {len(rivals)} {kind} faster than {PLAIN}; fastest: {says}."
    if all(other.high < 1 for other, _ in rivals):
        return f"No mode faster than {PLAIN}; least slow: {says}."
    return f"No mode shown to be faster than {PLAIN}, for no interval lies above 1; highest: {says}."


def _times(ratio: Estimate) -> str:
    interval = (
        "" if ratio.low == ratio.high else f" (95\u00a0%\u00a0interval {ratio.low:.2f} to {ratio.high:.2f})"
    )
    return f"{ratio.value:.2f} times as fast{interval}"


def _table(table: Table) -> Iterator[str]:
    columns = select_columns(table)
    yield "<div class='wide'><table class='modes'><thead><tr>"
    yield "".join(f"<th title='{escape(column.means)}'>{escape(column.head)}</th>" for column in columns)
    yield "</tr></thead><tbody>"
    for row in table.rows:
        cells = [(column.cell(row), " class='words'" if column.words else "") for column in columns]
        yield "<tr>" + "".join(f"<td{look}>{split_interval(cell)}</td>" for cell, look in cells) + "</tr>"
    yield "</tbody></table></div>"


def _duels(table: Table) -> Iterator[str]:
    if table.duels:
        yield "<h2>Semantic modes against what they have to beat</h2><ul>"
        yield from (f"<li>{escape(line)}</li>" for line in list_duels(table))
        yield (
            "</ul><p class='note'>On the same problems, with 95 % intervals. Right answers compare fairly only at "
            "about equal shares of lossy tokens. To be seen: an 80 % chance that the interval excludes 0.</p>"
        )


def _plots(results: Sequence[Result], table: Table) -> Iterator[str]:
    rows: Sequence[ModeRow] = table.rows
    drawn = (
        (
            "Speed",
            draw_speed(rows),
            "Median over problems, with its 95 % interval. Right of the dashed line is faster than "
            "autoregressive decoding; an interval that crosses the line shows no difference.",
        ),
        (
            "Right answers and speed",
            draw_accuracy(rows),
            "Bars are 95 % intervals. Exact modes differ in accuracy by chance only.",
        ),
        (
            "Drafts",
            draw_drafts(rows, results),
            "A dot is an answer, a bar the median answer. The more tokens a pass, the more speculation can pay.",
        ),
        (
            "Where the time goes",
            draw_phases(rows, results),
            "All time over all tokens of a mode, the reading of the prompt included. draft: proposing; target: "
            "its passes; sampling: laws, rule and stops; rest: everything else.",
        ),
    )
    for title, png, caption in drawn:
        if png is not None:
            yield figure(title, png, caption)


def _divergences(table: Table, divergences: Sequence[Divergence]) -> Iterator[str]:
    yield "<h2>Divergences of exact modes</h2>"
    if not table.greedy:
        yield "<p>Not counted: the run was sampled, so tokens may differ by chance.</p>"
        return
    if all(row.divergences is None for row in table.rows):
        yield f"<p>Not counted: the run has no pair of an exact mode and {PLAIN}.</p>"
        return
    if not divergences:
        yield f"<p>None: every answer of an exact mode has the very tokens of {PLAIN}.</p>"
        return
    yield (
        f"<p>{len(divergences)} answers are not the tokens of {PLAIN}. On one engine this is a fault to report; "
        "all are in divergences.jsonl. Margin: how much higher the target itself, asked once more, puts the token of "
        f"{PLAIN} (logits); none where one answer only ends earlier.</p>"
    )
    ids_of = (f"ids of {PLAIN} around it", "ids of the mode")
    heads = ("problem", "mode", "seed", "repeat", "token", "margin", *ids_of)
    yield "<div class='wide'><table class='words'><thead><tr>" + "".join(f"<th>{head}</th>" for head in heads)
    yield "</tr></thead><tbody>"
    for one in divergences[:MOST_SHOWN]:
        ids = (_marked(one.plain_ids, one.position - one.start), _marked(one.ids, one.position - one.start))
        margin = "-" if one.margin is None else f"{one.margin:.3g}"
        where = (one.problem, one.mode, one.seed, one.repeat, one.position, margin)
        cells = [escape(str(cell)) for cell in where]
        yield "<tr>" + "".join(f"<td class='words'>{cell}</td>" for cell in (*cells, *ids)) + "</tr>"
    yield "</tbody></table></div>"
    if len(divergences) > MOST_SHOWN:
        yield f"<p>{len(divergences) - MOST_SHOWN} more are in the file only.</p>"


def _marked(ids: Sequence[int], place: int) -> str:
    """Ids with the first one that differs in bold; an answer that ended there says so."""
    words = [f"<b>{token}</b>" if i == place else str(token) for i, token in enumerate(ids)]
    return " ".join(words if place < len(ids) else [*words, "<b>(end)</b>"])


def _meanings(table: Table) -> Iterator[str]:
    yield "<h2>What the columns mean</h2><dl>"
    for column in select_columns(table):
        if column.means:
            yield f"<dt>{escape(column.head)}</dt><dd>{escape(column.means)}</dd>"
    yield "</dl>"
    yield (
        "<p class='note'>Medians, means and intervals go by problem: more seeds or repeats of a problem are not more "
        "problems. Of several modes the best looks a little better than it is. Modes that draft with the draft model "
        "have engines of their own, which give up the cores while they wait; those of all other modes do not, as a "
        "user would run them. So the target is in memory twice where a run has both.</p>"
    )
