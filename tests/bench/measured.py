"""What the README's tables of the semantic modes rest on: every answer of a run of `semspec bench`, without its text.

    python tests/bench/measured.py keep RUN tests/bench/runs/NAME    NAME.csv, NAME.json, NAME.png
    python tests/bench/measured.py show tests/bench/runs/NAME        the README's table, and who beats whom

A run takes hours, so `keep` takes what is there: of a run, or of a shard of it, the problems that every mode answered.
Asked again, it takes more; another shard of the same run is added. NAME.json has the run.json and the number of
problems of each shard, NAME.csv a line for each answer, NAME.png right answers against speed. Texts and ids are left
out: questions and answers of a benchmark belong to it. tests/test_measured.py holds the README against the files.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

from semspec.calibration.bench.columns import COLUMNS, list_duels
from semspec.calibration.bench.journal import CELLS, RUN, read_cells
from semspec.calibration.bench.plots import draw_accuracy
from semspec.calibration.bench.records import Cell, Result
from semspec.calibration.bench.settings import Origin, check_same, plan_cells
from semspec.calibration.bench.summary import Table, summarize

PHASES = ("prefill", "draft", "target")  # what the cost model reads, and the prompt's
COUNTS = (
    "prompt_tokens",
    "generated_tokens",
    "num_rounds",
    "num_draft_tokens",
    "num_accepted_draft_tokens",
    "n_from_draft",
    "n_lossy",
)
SHOWN = (
    *("mode", "right %", "gain", "speed", "model", "s/answer", "tokens/s"),
    *("tokens", "cut %", "kept %", "draft %", "lossy %"),
)


@dataclass(frozen=True, slots=True)
class Part:
    """Of a run, or of a shard of it: its first n_problems, each answered by every mode."""

    origin: Origin
    n_problems: int

    def cells(self) -> list[Cell]:
        """Its answers, in the order they were measured."""
        settings = self.origin.settings
        each = len(settings.every_mode()) * settings.seeds * settings.repeats
        return list(islice(plan_cells(settings, self.origin.shard), self.n_problems * each))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    keeping = commands.add_parser("keep")
    keeping.add_argument("run", type=Path)
    showing = commands.add_parser("show")
    for command in (keeping, showing):
        command.add_argument("name", type=Path)
    options = parser.parse_args()
    if options.command == "keep":
        keep(options.run, options.name)
    table = summarize_kept(options.name)
    print(markdown(table))
    print("\n".join(["", *list_duels(table)]))


def keep(run: Path, name: Path) -> None:
    """Put what a run or a shard has so far into NAME.json and NAME.csv, and draw NAME.png.

    Raises ConfigError for another run than the one that is there.
    """
    parts, results = read_kept(name) if name.with_suffix(".json").exists() else ([], [])
    new, measured = read_part(run)
    for part in parts:
        check_same(f"{name}.json has another run", replace(part.origin, shard=new.origin.shard), new.origin)
    others = [part for part in parts if part.origin.shard != new.origin.shard]
    parts = sorted([*others, new], key=lambda part: part.origin.shard)
    by_cell = {one.cell: one for one in [*results, *measured]}
    write_kept(name, parts, [by_cell[cell] for part in parts for cell in part.cells()])
    picture = draw_accuracy(summarize_kept(name).rows)
    if picture is not None:
        name.with_suffix(".png").write_bytes(picture)


def read_part(run: Path) -> tuple[Part, list[Result]]:
    """The problems that every mode answered, and those answers."""
    origin = Origin.from_json((run / RUN).read_text("utf-8"))
    by_cell = {one.cell: one for one in read_cells(run / CELLS)}
    n_problems = 0
    while n_problems < len(origin.settings.problems[origin.shard[0] - 1 :: origin.shard[1]]) and all(
        cell in by_cell for cell in Part(origin, n_problems + 1).cells()
    ):
        n_problems += 1
    part = Part(origin, n_problems)
    return part, [by_cell[cell] for cell in part.cells()]


def write_kept(name: Path, parts: Sequence[Part], results: Sequence[Result]) -> None:
    """Write NAME.json and NAME.csv; times to a tenth of a millisecond."""
    content = json.dumps([asdict(part) for part in parts], indent=1)
    name.with_suffix(".json").write_text(content + "\n", "utf-8")
    with name.with_suffix(".csv").open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(["problem", "mode", "end", "right", "seconds", "peak_mib", *COUNTS, *PHASES])
        for one in results:
            told = [one.cell.problem, one.cell.mode, one.finish_reason, int(bool(one.correct))]
            told += [f"{one.seconds:.4f}", f"{one.peak_mib:.0f}", *(getattr(one, count) for count in COUNTS)]
            lines.writerow([*told, *(f"{one.phase_ms.get(phase, 0):.1f}" for phase in PHASES)])


def read_kept(name: Path) -> tuple[list[Part], list[Result]]:
    """The shards that were kept, and their answers without texts and ids. Raises ValueError where they do not fit."""
    found = json.loads(name.with_suffix(".json").read_text("utf-8"))
    parts = [Part(Origin.from_json(json.dumps(part["origin"])), part["n_problems"]) for part in found]
    with name.with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        results = [read_line(line) for line in csv.DictReader(file)]
    if [one.cell for one in results] != [cell for part in parts for cell in part.cells()]:
        raise ValueError(f"{name}.csv does not hold the answers that {name}.json tells of, each once")
    return parts, results


def read_line(line: dict[str, str]) -> Result:
    """An answer; of one seed, measured once."""
    return Result(
        cell=Cell(problem=line["problem"], mode=line["mode"], seed=0, repeat=0),
        text="",
        token_ids=(),
        finish_reason=line["end"],
        correct=line["right"] == "1",
        seconds=float(line["seconds"]),
        ttft_ms=None,
        tpot_ms=None,
        phase_ms={phase: float(line[phase]) for phase in PHASES},
        peak_mib=float(line["peak_mib"]),
        **{count: int(line[count]) for count in COUNTS},
    )


def summarize_kept(name: Path) -> Table:
    """The table of the run, as `semspec bench` makes it, but for what it tells of texts (`differ`)."""
    parts, results = read_kept(name)
    settings = parts[0].origin.settings
    return summarize(results, settings.every_mode(), greedy=settings.greedy)


def markdown(table: Table) -> str:
    """The README's columns of it."""
    columns = [column for head in SHOWN for column in COLUMNS if column.head == head]
    lines = [[column.head for column in columns], ["---"] * len(columns)]
    for row in table.rows:
        cells = [shorten(column.cell(row), terse=column.terse) for column in columns]
        lines.append([f"`{cells[0]}`", *cells[1:]])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def shorten(cell: str, *, terse: bool) -> str:
    """No interval where a terminal has none, and nothing for nothing."""
    return "" if cell == "-" else cell.partition(" [")[0] if terse else cell


def kept(folder: Path) -> Sequence[Path]:
    """Names of the runs in a folder."""
    return sorted(path.with_suffix("") for path in folder.glob("*.csv"))


if __name__ == "__main__":
    main()
