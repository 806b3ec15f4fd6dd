"""What a check found, in words and as a table for a terminal. No file, and nothing is reckoned."""

from __future__ import annotations

from semspec.calibration.check.measure import PREDICTOR, RANDOM, Kept, RiskMeasured
from semspec.calibration.check.run import Checked
from semspec.calibration.tables import Table, percent, ranged, signed, table_lines

__all__ = ["check_table", "conclusions", "format_check"]

NOTHING = "-"


def check_table(found: Checked) -> Table:
    """A row for each way to keep, at each risk."""
    rows = []
    for line in found.measured.risks:
        for one in line.ways:
            head = (percent(line.risk), f"{line.threshold:.3f}") if one.way == PREDICTOR else ("", "")
            name = f"{one.way} *" if one.way == found.best_signal else one.way
            gain = signed(one.gain[0]) if one.gain else NOTHING
            bad = ranged(one.bad[0]) if one.bad else NOTHING
            rows.append((*head, name, ranged(one.segments), ranged(one.tokens), bad, gain))
    heads = ("risk", "threshold", "kept by", "segments", "tokens", "bad of the kept", "predictor's less this")
    return Table(heads=heads, rows=tuple(rows), words=3)


def conclusions(found: Checked) -> list[str]:
    """A sentence for each risk: whether it held, and how the predictor did beside chance, beside the signal that ranked
    best in the calibration, and beside the one that is best here where that is another."""
    return [_conclude(line, found.best_signal) for line in found.measured.risks]


def format_check(found: Checked) -> str:
    """All of it, in ASCII."""
    all_of_it = found.measured
    seen = (
        "none of which was calibrated on"
        if found.unseen
        else "of which nobody knows whether they were calibrated on: the probes do not say which were"
    )
    return "\n".join(
        [
            f"{all_of_it.segments} drafted segments in {found.contexts} contexts of {all_of_it.questions} questions, "
            f"{seen}.",
            f"Bad: no equivalent one ({found.equivalence.get('name')}) among {found.n_target} samples of the target; "
            f"of all segments {ranged(all_of_it.bad)}.",
            "",
            f"What is kept at the thresholds of probes/{found.probes}",
            *table_lines(check_table(found)),
            "",
            "random keeps each segment with the same chance, a signal keeps its highest up to as many tokens; * ranked "
            "best of the signals in the calibration.",
            *conclusions(found),
        ]
    )


def _conclude(line: RiskMeasured, best_signal: str) -> str:
    head = f"Risk {percent(line.risk)}: "
    if not line.predictor.bad:
        return f"{head}too little is kept here to tell."
    (bad,) = line.predictor.bad
    held = (
        "held" if bad.value <= line.risk else "NOT held" if bad.low > line.risk else "exceeded, within chance"
    )
    others = [RANDOM, best_signal, *([line.best_signal] if line.best_signal not in (best_signal, "") else [])]
    beside = "; ".join(_beside(line.way(name)) for name in others)
    return f"{head}{held}, {ranged(bad)} of the kept are bad; {beside}."


def _beside(other: Kept) -> str:
    if not other.gain:
        return f"beside {other.way} nothing can be told"
    (gain,) = other.gain
    word = "fewer than" if gain.high < 0 else "more than" if gain.low > 0 else "not shown to differ from"
    return f"{word} {other.way}"
