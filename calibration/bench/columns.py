"""The columns of a benchmark's table, and the table as text. Knows words and digits; computes no statistic.

The report's page is made of the same columns, so page and terminal cannot disagree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from semspec.calibration.bench.duels import Duel
from semspec.calibration.bench.estimates import Estimate
from semspec.calibration.bench.records import PLAIN
from semspec.calibration.bench.summary import ModeRow, Table

__all__ = ["Column", "format_table", "list_duels", "list_notes", "select_columns"]

NOTHING = "-"  # not measured, or nothing to divide by
MANY_CUT = 0.1  # share of answers; accuracy is then also a matter of the limit
FEW = 10  # problems; with fewer, bootstrap intervals are clearly too narrow


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column. head: its name; means: what its numbers are; cell: a mode's entry.

    words: entries are text, not numbers. terse: a terminal has no room for its intervals.
    """

    head: str
    means: str
    cell: Callable[[ModeRow], str]
    words: bool = False
    terse: bool = False


def select_columns(table: Table) -> list[Column]:
    """The columns that say something of at least one mode, in order."""
    return [column for column in COLUMNS if any(column.cell(row) != NOTHING for row in table.rows)]


def format_table(table: Table) -> str:
    """The table for a terminal: a line a mode, then what must be known to read it. No line end at its end."""
    columns = select_columns(table)
    lines = [[column.head for column in columns]]
    lines += [[_narrow(column, row) for column in columns] for row in table.rows]
    widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]
    text = [
        "  ".join(
            cell.ljust(width) if column.words else cell.rjust(width)
            for cell, column, width in zip(line, columns, widths, strict=True)
        ).rstrip()
        for line in lines
    ]
    text.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([*text, "", *list_notes(table), *([""] if table.duels else []), *list_duels(table)])


def list_duels(table: Table) -> list[str]:
    """What each semantic mode is worth beside what it has to beat, a line for each rival."""
    return [f"{duel.mode} against {duel.rival}: {_duel(duel)}" for duel in table.duels]


def _duel(duel: Duel) -> str:
    words = [f"speed {_estimate(duel.speed, 2)}"]
    if duel.gain is not None:
        words += [
            f"right answers {_estimate(duel.gain, 0, 100)} points more (of {duel.n_problems} problems {duel.only_mode} "
            f"better, {duel.only_rival} worse)",
            f"lossy tokens {100 * duel.lossy:.0f} % against {100 * duel.rival_lossy:.0f} %",
        ]
    if duel.to_decide is not None and duel.to_decide > duel.n_problems:
        words.append(
            f"a difference this large would take some {_rounded(duel.to_decide)} problems to be seen"
        )
    return "; ".join(words)


def _rounded(number: int) -> int:
    """Two figures of a rough number."""
    unit = int(f"1{'0' * (len(str(number)) - 2)}") if number > 99 else 1
    return -(-number // unit) * unit


def list_notes(table: Table) -> list[str]:
    """What a reader must know before believing the table, a sentence or two each."""
    notes = []
    n_problems = min(row.n_problems for row in table.rows)
    if any(row.mode == PLAIN for row in table.rows):
        notes.append(
            f"speed: tokens/s over those of {PLAIN} on the same problem in the same run, median over problems."
        )
    else:
        notes.append(f"Without {PLAIN} in the run there is nothing to hold the speeds against.")
    if n_problems == 1:
        notes.append("One problem only: numbers without intervals, and no base for a claim.")
    else:
        notes.append(f"[low, high]: 95 % bootstrap interval over {n_problems} problems.")
    if 1 < n_problems < FEW:
        notes.append(f"{n_problems} problems are few: the intervals are rough, and likely too narrow.")
    if n_problems > 1 and any(
        row.accuracy is not None and row.accuracy.value in (0, 1) for row in table.rows
    ):
        notes.append(
            f"right % of 0 or 100 has no bootstrap interval; after {n_problems} problems the truth may be "
            f"{100 * (1 - 0.05 ** (1 / n_problems)):.0f} points away (one-sided, 95 %)."
        )
    most_cut = max(row.truncated for row in table.rows)
    if most_cut >= MANY_CUT and any(row.accuracy is not None for row in table.rows):
        notes.append(
            f"{100 * most_cut:.0f} % of a mode's answers were cut off: raise --max-tokens to judge what is right."
        )
    n = sum(row.n for row in table.rows)
    notes.append(f"{n} answers measured; peak memory {table.peak_mib:.0f} MiB, all our models open.")
    if any(row.promise == "lossy" for row in table.rows):
        notes.append(
            "A lossy mode does not promise the target's answers: its speed counts for as much as its right % says."
        )
    if any(row.divergences for row in table.rows):
        notes.append(f"An exact mode left the tokens of {PLAIN}: see divergences.jsonl.")
    if not table.greedy:
        notes.append(
            f"Sampled: an exact mode follows the target's law, so its tokens may differ from those of {PLAIN}."
        )
    return notes


def _estimate(found: Estimate | None, digits: int, scale: float = 1) -> str:
    """`1.42 [1.31, 1.53]`; without brackets where there is no interval."""
    if found is None:
        return NOTHING
    value, low, high = (f"{scale * number:.{digits}f}" for number in (found.value, found.low, found.high))
    return value if found.low == found.high else f"{value} [{low}, {high}]"


def _number(value: float | None, digits: int, scale: float = 1) -> str:
    return NOTHING if value is None else f"{scale * value:.{digits}f}"


def _speed(row: ModeRow) -> str:
    """Plain decoding over itself is 1 by definition, not by measurement."""
    return "1" if row.mode == PLAIN else _estimate(row.speed_ratio, 2)


def _differ(row: ModeRow) -> str:
    return NOTHING if row.divergences is None else str(row.divergences)


def _narrow(column: Column, row: ModeRow) -> str:
    """An entry for a terminal. A name from a file must not steer it."""
    cell = column.cell(row)
    shown = cell.partition(" [")[0] if column.terse else cell
    return "".join(char if char.isprintable() else "?" for char in shown)


def _gain(row: ModeRow) -> str:
    """Nothing where all problems came out as in plain decoding."""
    gain = row.accuracy_gain
    return NOTHING if gain == Estimate(value=0.0, low=0.0, high=0.0) else _estimate(gain, 0, 100)


COLUMNS = (
    Column(head="mode", means="", cell=lambda row: row.mode, words=True),
    Column(
        head="promise",
        means="exact follows the target's own law (greedy: its very tokens); lossy does not; a peer is another engine, "
        "with its own rounding of the same weights",
        cell=lambda row: row.promise,
        words=True,
    ),
    Column(
        head="speed",
        means=f"tokens/s over those of {PLAIN} on the same problem in the same run, median over problems",
        cell=_speed,
    ),
    Column(
        head="model",
        means="speed that the mode's counts of drafted tokens and passes predict, at what those cost in plain "
        "decoding, the draft alone and the first exact mode with the draft model; reading the prompt is not in it",
        cell=lambda row: _number(row.model_speed, 2),
    ),
    Column(
        head="tokens/s",
        means="of the answer, over the whole time, prompt included, median over problems",
        cell=lambda row: _estimate(row.tokens_per_second, 1),
        terse=True,
    ),
    Column(
        head="s/answer",
        means="seconds from the question to the last token, median over problems",
        cell=lambda row: _estimate(row.seconds, 2),
        terse=True,
    ),
    Column(
        head="right %",
        means="share of right answers, mean over problems",
        cell=lambda row: _estimate(row.accuracy, 0, 100),
    ),
    Column(
        head="gain",
        means=f"right answers more than {PLAIN} on the same problems, in percentage points, mean over problems",
        cell=_gain,
    ),
    Column(head="tokens", means="mean length of an answer", cell=lambda row: _number(row.mean_tokens, 0)),
    Column(
        head="cut %",
        means="answers that --max-tokens or the context cut off",
        cell=lambda row: _number(row.truncated, 0, 100),
    ),
    Column(
        head="kept %",
        means="drafted tokens that were kept; a long segment counts for more than a short one",
        cell=lambda row: _number(row.acceptance, 0, 100),
    ),
    Column(
        head="per pass",
        means="tokens of the answer per pass of the target",
        cell=lambda row: _number(row.tokens_per_pass, 2),
    ),
    Column(
        head="draft %",
        means="tokens of the answer that the draft wrote; the target wrote the others",
        cell=lambda row: _number(row.draft_share, 0, 100),
    ),
    Column(
        head="lossy %",
        means="tokens of the answer that a lossy rule kept, or the draft alone wrote: the target might have said other",
        cell=lambda row: _number(row.lossy_share, 0, 100),
    ),
    Column(
        head="MiB",
        means="most memory of a peer's own process",
        cell=lambda row: _number(row.peak_mib, 0),
    ),
    Column(
        head="differ",
        means=f"answers whose tokens are not those of {PLAIN}; 0 is the promise of an exact mode",
        cell=_differ,
    ),
)
