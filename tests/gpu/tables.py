"""A summary as tables for people."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from gpu.summary import BROKEN, Summary, milliseconds

__all__ = ["write_tables"]

WIDTH = 110


def write_tables(summary: Summary) -> str:
    """Text of several lines, without the last one's end."""
    parts = (_machine, _backends, _agreement, _timings, _predictions, _steps)
    return "\n\n".join(text for part in parts if (text := part(summary)))


def _machine(summary: Summary) -> str:
    gpu, step = summary["gpu"], summary["steps"].get("machine", {})
    if gpu is not None:
        shared = ", shared with the processor" if gpu["shared"] else ""
        first = f"GPU: {gpu['name']}, {gpu['capability']}, {gpu['n_bytes'] / 2**30:.1f} GiB{shared}"
    elif step.get("state") == "refused":
        first = f"no GPU: {step['why']}"
    else:
        first = f"what GPU is here is not known: {step.get('why', 'nobody looked')}"
    says = [f"{name}: {said}" for name, said in summary["says"].items()]
    rest = "; ".join(f"{name} {value}" for name, value in summary["machine"].items())
    return "\n".join([first, *says, *textwrap.wrap(rest, WIDTH)])


def _backends(summary: Summary) -> str:
    rows = [["backend", "opens", ""]]
    for name, one in summary["backends"].items():
        about = " ".join(str(one[key]) for key in ("version", "capability") if key in one)
        rows.append([name, "yes" if one["opens"] else "no", about if one["opens"] else one["why"]])
    return _table(rows)


def _agreement(summary: Summary) -> str:
    """A line for each graph: the largest figures of all ways of reading."""
    titles = [
        "",
        "precision",
        "agrees",
        "KL to the CPU",
        "KL of cuts",
        "tokens apart",
        "margin",
        "answers apart",
    ]
    rows = []
    for one in summary["agreement"]:
        cpu, cuts = (list(one["models"][against].values()) for against in ("cpu", "itself"))
        apart = [answer["margin"] for answer in one["answers"] if "margin" in answer]
        ways = cpu + cuts
        rows.append(
            [
                f"{one['backend']} {one['graph']}",
                one["precision"],
                "NO" if one["wrong"] else "yes",
                f"{max(way['kl'] for way in cpu):.2g}",
                f"{max(way['kl'] for way in cuts):.2g}",
                f"{sum(way['different'] for way in ways)} of {sum(way['rows'] for way in ways)}",
                f"{max(way['margin'] for way in ways):.2g}",
                f"{len(apart)} of {len(one['answers'])}" + (f", by {max(apart):.2g}" if apart else ""),
            ]
        )
    wrong = [
        f"{one['backend']} {one['graph']}: {one['wrong']}" for one in summary["agreement"] if one["wrong"]
    ]
    return "\n".join([_table([titles, *rows]), *wrong]) if rows else ""


def _timings(summary: Summary) -> str:
    """Milliseconds by tokens in a pass."""
    timings = summary["timings"]
    if not timings:
        return ""
    from gpu.prediction import slope

    sizes = sorted({size for one in timings for size in milliseconds(one)})
    rows = [["milliseconds", "precision", "shape", *map(str, sizes), "a row", "drafted"]]
    for one in timings:
        passes = milliseconds(one)
        rows.append(
            [
                f"{one['backend']} {one['graph']}",
                one["precision"],
                one["shape"],
                *(f"{passes[size]:.2f}" if size in passes else "" for size in sizes),
                f"{slope(passes):.3f}" if {1, 2} <= passes.keys() else "",
                f"{one['drafted']['ms']:.2f}" if "drafted" in one else "",
            ]
        )
    lines = [
        _table(rows),
        f"medians of passes over so many tokens behind {timings[0]['past']}, logits of all rows wanted; random weights",
        "a row: what a further one costs, in passes over one; drafted: a token of the drafter",
    ]
    if any(one["backend"] == "cpu" for one in timings):
        lines.append("backend cpu is this machine's processor: it says nothing of a GPU")
    return "\n".join(lines)


def _predictions(summary: Summary) -> str:
    predictions = summary["predictions"]
    if not predictions:
        return ""
    shares = list(predictions[0]["exact"])
    titles = [*(f"exact {share}" for share in shares), *(f"kept {share}" for share in shares)]
    rows = [["predicted", "pair", "c", "k", *titles]]
    for one in predictions:
        exact = (f"{best['speed']:.2f} ({best['drafted']})" for best in one["exact"].values())
        kept = (f"{speed:.2f}" for speed in one["segments"].values())
        pair = f"{one['target']}/{one['draft']}"
        rows.append(
            [f"{one['backend']} {one['asked']}", pair, f"{one['c']:.3f}", f"{one['k']:.3f}", *exact, *kept]
        )
    return "\n".join(
        [
            _table(rows),
            "speeds in those of plain decoding, by the cost model at the times above: nothing of it was run",
            "exact: each drafted token is kept with this chance, in brackets the best number of them; kept: this share",
            "of tokens, in segments of 31 whose rest the target writes alone",
        ]
    )


def _steps(summary: Summary) -> str:
    """Those that were not done, but for backends that are not here, which stand above."""
    rows = [["step", "was", ""]]
    for name, step in summary["steps"].items():
        shown = step["state"] in BROKEN or not name.startswith(("machine", "opens/"))
        if step["state"] != "done" and shown:
            rows.append([name, step["state"], step.get("why", "")])
    return _table(rows) if len(rows) > 1 else ""


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need be."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
