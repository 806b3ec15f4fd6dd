"""Calibrations of one pair on the same questions beside each other: what another boundary rule changes.

It knows records and tables of words; it knows no command and decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from semspec.calibration.findings import Candidate, Findings
from semspec.calibration.outcomes import MISSING_OUTCOMES
from semspec.calibration.probe_folder import Calibration, read_calibration
from semspec.calibration.tables import Table, percent, ranged, signed, table_lines
from semspec.runtime.errors import ConfigError

__all__ = ["Compared", "compare_tables", "format_comparison", "read_compared"]

SAME = {
    "models": "models",
    "precision": "precision",
    "backend": "backend",
    "questions_sha256": "questions",
    "samples": "samples",
    "equivalence": "equivalence",
    "label": "label",
}
"""Of what was calibrated, and what it is called: where these differ, a boundary is not what made the difference."""

LABEL_0 = {"cross": "none alike", "outcome": "spoiled"}
"""What a label of 0 says of a segment; of the other labels nothing that two words would tell."""


class Compared(NamedTuple):
    """A folder of probes and what its calibration.json says. name: that tells it from the others."""

    folder: Path
    calibration: Calibration
    name: str

    @property
    def title(self) -> tuple[str, str]:
        """The name, and the boundary."""
        return self.name, str(self.calibration.origin.get("boundary", "-"))


def read_compared(folders: Sequence[Path]) -> list[Compared]:
    """Raises ConfigError for fewer than two folders and for calibrations that cannot be compared, CalibrationError for
    a folder without calibration.json."""
    if len(folders) < 2:
        raise ConfigError(f"at least two folders are compared, got {len(folders)}; give one of each boundary")
    short = [folder.name for folder in folders]
    names = short if len(set(short)) == len(short) else [str(folder) for folder in folders]
    found = [
        Compared(folder, read_calibration(folder), name) for folder, name in zip(folders, names, strict=True)
    ]
    first = found[0]
    for other in found[1:]:
        for name, words in SAME.items():
            if other.calibration.origin.get(name) != first.calibration.origin.get(name):
                raise ConfigError(
                    f"{other.folder} and {first.folder} differ in {words}, so neither is better for its boundary; "
                    "compare calibrations that differ in the boundary alone"
                )
    return found


def compare_tables(found: Sequence[Compared]) -> dict[str, Table]:
    """Title -> table, each calibration on rows of its own."""
    return {
        "Segments of the draft": _segment_table(found),
        "Predictors on unseen questions": _predictor_table(found),
        "The target's states alone, by pooled layer": _layer_table(found),
        "Drafted tokens kept, by risk": _risk_table(found),
    }


def format_comparison(found: Sequence[Compared]) -> str:
    """The tables for a terminal, in ASCII."""
    parts = [
        "\n".join([title, *table_lines(table)])
        for title, table in compare_tables(found).items()
        if len(table.heads) > table.words
    ]
    return "\n\n".join([*parts, *_cautions(found)])


def _cautions(found: Sequence[Compared]) -> list[str]:
    """What no table shows: what was cut short, what was learned in another way, and that no risk has a threshold."""
    said = []
    for one in found:
        if missing := _missing(one.calibration.origin):
            said.append(f"{one.name} was cut short: {missing} contexts less, and so perhaps other questions.")
        if one.calibration.origin.get("learning") != found[0].calibration.origin.get("learning"):
            said.append(
                f"{one.name} was learned with other settings than {found[0].name}: see calibration.json."
            )
    if not any(one.calibration.findings.risks for one in found):
        said.append("No risk that was asked for can be vouched for by any of them.")
    return said


def _missing(origin: Mapping[str, Any]) -> int:
    """Contexts that were not collected, or not gone on from, in time."""
    outcomes = origin.get("outcomes")
    rolled = outcomes.get(MISSING_OUTCOMES) if isinstance(outcomes, Mapping) else None
    return sum(count for count in (origin.get("contexts not collected"), rolled) if isinstance(count, int))


def _segment_table(found: Sequence[Compared]) -> Table:
    none = LABEL_0.get(found[0].calibration.findings.label, "label 0")
    heads = ("questions", "contexts", "segments", "mean label", none, "with numbers", "changed")
    rows = []
    for one in found:
        findings = one.calibration.findings
        counts = findings.counts
        sizes = (str(counts.questions), str(counts.contexts), str(counts.draft_rows))
        shares = (findings.zero_labels, counts.with_number, counts.changed)
        rows.append((*one.title, *sizes, f"{findings.mean_label:.3f}", *map(percent, shares)))
    return _table(heads, rows)


def _predictor_table(found: Sequence[Compared]) -> Table:
    rows = []
    for one in found:
        findings = one.calibration.findings
        signal, shipped = (_named(findings, name) for name in (findings.best_signal, findings.winner))
        ece = ranged(shipped.ece[0]) if shipped.ece else "-"
        cells = (signal.name, ranged(signal.auroc), shipped.name, ranged(shipped.auroc), ece)
        rows.append((*one.title, *cells))
    return _table(("best signal", "AUROC", "shipped", "AUROC", "ECE"), rows)


def _layer_table(found: Sequence[Compared]) -> Table:
    rows = [
        (*one.title, " + ".join(map(str, gain.layers)), ranged(gain.alone), signed(gain.on_base))
        for one in found
        for gain in one.calibration.findings.layers
    ]
    return _table(("layers", "AUROC", "gain on the base"), rows, words=3)


def _risk_table(found: Sequence[Compared]) -> Table:
    risks = sorted({line.risk for one in found for line in one.calibration.findings.risks})
    rows = []
    for one in found:
        kept = {line.risk: percent(line.coverage) for line in one.calibration.findings.risks}
        rows.append((*one.title, *(kept.get(risk, "-") for risk in risks)))
    return _table(tuple(map(percent, risks)), rows)


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]], words: int = 2) -> Table:
    return Table(heads=("probes", "boundary", *heads), rows=tuple(rows), words=words)


def _named(found: Findings, name: str) -> Candidate:
    return next(one for one in found.candidates if one.name == name)
