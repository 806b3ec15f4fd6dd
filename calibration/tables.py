"""Findings as tables of words, for the report's page and for a terminal: no HTML, no file, and nothing is reckoned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from semspec.calibration.findings import Candidate, Findings
from semspec.calibration.metrics import Interval

__all__ = [
    "SHUFFLED",
    "Table",
    "candidate_table",
    "format_findings",
    "gain_table",
    "headline",
    "layer_table",
    "percent",
    "ranged",
    "refusals",
    "risk_table",
    "signed",
    "subset_table",
    "table_lines",
]

OVERSHOOT = 0.1
"""More than this above what exact scores would accept, the published rule accepts too much."""

FEW_QUESTIONS = 20
"""Fewer than these with a label of one kind, and ranking rests on few, whatever its interval says."""

NOTHING = "-"

SHUFFLED = "shuffled labels"
"""The control: the same learning from labels of other questions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """heads: of the columns. rows: as many cells each, ` [low, high]` after a value being its interval. words: how many
    of the first columns are words."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1


def headline(found: Findings) -> list[str]:
    """What a hurried reader takes away: which predictor, how good, what it may be used for, and what to beware of."""
    shipped = _named(found, found.winner)
    quality = f"AUROC {ranged(shipped.auroc)}" + "".join(f", ECE {ranged(one)}" for one in shipped.ece)
    reads = (
        f"reads states {', '.join(map(str, found.probe_layers))}"
        if found.has_probe
        else "reads no hidden states"
    )
    said = [f"Shipped: {found.winner}, which {reads}; {quality}, on unseen questions.", found.why]
    rarer, n = found.counts.rarer, found.counts.draft_rows
    if rarer is not None and rarer.questions < FEW_QUESTIONS:
        said.append(
            f"Ranking rests on few: {rarer.rows} of {n} segments, in {rarer.questions} questions, "
            f"have a label {rarer.label}; AUROC and its intervals are rough."
        )
    if found.risks:
        best = max(found.risks, key=lambda line: line.coverage)
        said.append(
            f"Up to {percent(best.coverage)} of drafted tokens are kept where a risk of {percent(best.risk)} is "
            f"allowed; thresholds for {', '.join(percent(line.risk) for line in found.risks)}."
        )
    else:
        said.append(
            "No risk that was asked for can be vouched for, so there is no threshold to judge meaning by."
        )
    ratio = found.ratio
    if ratio.mean_acceptance > ratio.overlap + OVERSHOOT:
        said.append(
            f"Preset paper would accept {percent(ratio.mean_acceptance)} where exact scores would accept about "
            f"{percent(ratio.overlap)}: it accepts too much with this pair."
        )
    return [words if words.endswith((".", "!")) else f"{words}." for words in said]


def candidate_table(found: Findings) -> Table:
    """Each way to score a segment, alone."""
    rows = []
    for one in found.candidates:
        ece, brier = ((ranged(found[0]) if found else "-") for found in (one.ece, one.brier))
        within = ranged(one.within[0]) if one.within else "-"
        gain = "base" if one.name == found.base else signed(one.gain)
        marks = " *" if one.name == found.winner else ""
        rows.append((f"{one.name}{marks}", ranged(one.auroc), gain, within, ece, brier))
    rows.append((SHUFFLED, ranged(found.shuffled), *"----"))
    heads = ("predictor", "AUROC", "AUROC less the base's", "within contexts", "ECE", "Brier")
    return Table(heads=heads, rows=tuple(rows))


def subset_table(found: Findings) -> Table:
    """AUROC of each predictor on parts of the rows."""
    return _parts(found, [(one, [ranged(part.auroc) for part in one.subsets]) for one in found.candidates])


def gain_table(found: Findings) -> Table:
    """AUROC less the base's on parts of the rows, of fitted predictors."""
    fitted = [one for one in found.candidates if one.kind == "fitted" and one.name != found.base]
    return _parts(found, [(one, [signed(part.gain) for part in one.subsets]) for one in fitted])


def layer_table(found: Findings) -> Table:
    """What states are worth, by pooled layer."""
    rows = tuple(
        (
            " + ".join(map(str, one.layers)),
            ranged(one.alone),
            signed(one.on_signals),
            signed(one.on_base),
        )
        for one in found.layers
    )
    heads = ("target's states", "AUROC alone", "gain on signals", "gain on signals and text")
    return Table(heads=heads, rows=rows)


def risk_table(found: Findings) -> Table:
    """From a risk to a threshold: risks that the collection vouches for."""
    rows = (
        (
            percent(line.risk),
            f"{line.threshold:.3f}",
            percent(line.coverage),
            percent(line.observed),
            percent(line.upper),
            f"{line.kept} ({line.kept_questions})",
            f"{line.mean_label:.3f}",
            _of_some(line.changed, line.kept_changed),
            percent(line.greedy_coverage) if found.counts.greedy_rows else NOTHING,
            percent(line.greedy) if line.greedy_coverage else NOTHING,
        )
        for line in found.risks
    )
    heads = (
        "risk",
        "threshold",
        "kept",
        "observed",
        "bound",
        "segments (questions)",
        "mean label",
        "changed (segments)",
        "greedy kept",
        "greedy",
    )
    return Table(heads=heads, rows=tuple(rows))


def _of_some(share: float, n: int | None) -> str:
    """A share of n segments; of none it is nought, and says nothing."""
    if n is None:
        return percent(share)
    return f"{percent(share)} ({n})" if n else NOTHING


def refusals(found: Findings) -> list[str]:
    """A sentence for each risk that has no threshold."""
    return [f"{one.says[:1].upper()}{one.says[1:]}." for one in found.refused]


def format_findings(found: Findings) -> str:
    """The tables for a terminal, in ASCII."""
    parts = [*headline(found), ""]
    for title, table in (
        ("Predictors on unseen questions (* shipped)", candidate_table(found)),
        ("Risk and thresholds", risk_table(found)),
    ):
        parts += [title, *table_lines(table), ""] if table.rows else []
    parts += refusals(found)
    return "\n".join(parts).rstrip("\n")


def _parts(found: Findings, rows: Sequence[tuple[Candidate, Sequence[str]]]) -> Table:
    """rows: a candidate, and a cell for each of its subsets."""
    sizes = {part.name: part.rows for one in found.candidates for part in one.subsets}
    cells = []
    for one, words in rows:
        by_name = dict(zip((part.name for part in one.subsets), words, strict=True))
        title = f"{one.name} *" if one.name == found.winner else one.name
        cells.append((title, *(by_name.get(name, "-") for name in sizes)))
    heads = ("predictor", *(f"{name} ({n})" for name, n in sizes.items()))
    return Table(heads=heads, rows=tuple(cells))


def table_lines(table: Table) -> list[str]:
    """Columns beside each other, for a terminal."""
    widths = [max(len(row[place]) for row in (table.heads, *table.rows)) for place in range(len(table.heads))]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.ljust(width) if place < table.words else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return [line(row) for row in (table.heads, *table.rows)]


def _named(found: Findings, name: str) -> Candidate:
    return next(one for one in found.candidates if one.name == name)


def ranged(one: Interval) -> str:
    """A value and its interval."""
    return f"{one.value:.3f} [{one.low:.3f}, {one.high:.3f}]"


def signed(one: Interval) -> str:
    """A difference and its interval."""
    return f"{one.value:+.3f} [{one.low:+.3f}, {one.high:+.3f}]"


def percent(share: float) -> str:
    """A share as it is written everywhere."""
    return f"{100 * share:.3g} %"
