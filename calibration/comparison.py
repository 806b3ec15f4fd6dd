"""Calibrations of one pair on the same questions beside each other: what another boundary rule changes.

It knows records and tables of words; it knows no command and decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from semspec.calibration.findings import Candidate, Findings
from semspec.calibration.probe_folder import Calibration, read_calibration
from semspec.calibration.tables import Table, percent, ranged, signed, table_lines
from semspec.runtime.errors import ConfigError

__all__ = ["Compared", "compare_tables", "format_comparison", "read_compared"]

SAME = ("models", "precision", "questions_sha256", "samples", "equivalence", "label")
"""Of what was calibrated: where these differ, a boundary is not what made the difference."""


class Compared(NamedTuple):
    """A folder of probes and what its calibration.json says."""

    folder: Path
    calibration: Calibration

    @property
    def title(self) -> tuple[str, str]:
        """The folder's name, and the boundary."""
        return self.folder.name, str(self.calibration.origin.get("boundary", "-"))


def read_compared(folders: Sequence[Path]) -> list[Compared]:
    """Raises ConfigError for fewer than two folders and for calibrations that cannot be compared, CalibrationError for
    a folder without calibration.json."""
    if len(folders) < 2:
        raise ConfigError(f"at least two folders are compared, got {len(folders)}; give one of each boundary")
    found = [Compared(folder, read_calibration(folder)) for folder in folders]
    first = found[0]
    for other in found[1:]:
        for name in SAME:
            if other.calibration.origin.get(name) != first.calibration.origin.get(name):
                raise ConfigError(
                    f"{other.folder} and {first.folder} differ in {name}, so neither is better for its boundary; "
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
    return "\n\n".join(parts)


def _segment_table(found: Sequence[Compared]) -> Table:
    heads = ("questions", "contexts", "segments", "mean label", "none alike", "with numbers", "changed")
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
