"""Commands that measure: bench. Tables go to stdout, progress to stderr."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from semspec.calibration.bench.run import Run
    from semspec.runtime.records import Progress

__all__ = ["bench"]


class _Bench(click.Group):
    """A group whose own command is to measure: `bench join ...` joins, `bench BUNDLE ...` measures BUNDLE."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for line in ("BUNDLE --data FILE --out DIR [OPTIONS]", "join DIR DIR.. --out DIR"):
            formatter.write_usage(ctx.command_path, line)


def _shard(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, int]:
    """`2/5` as numbers."""
    index, slash, count = value.partition("/")
    if not (slash and index.isascii() and index.isdigit() and count.isascii() and count.isdigit()):
        raise click.BadParameter(f"expected i/n as in 1/4, got {value!r}")
    return int(index), int(count)


@click.group(cls=_Bench, short_help="Measure accuracy and speed of every way to decode.")
def bench() -> None:
    """Measure accuracy and speed of every way to decode, in one run.

    `semspec bench run --help` lists the options; the word `run` may be left out. `join` puts the shards of a run
    together.
    """


@bench.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--data", type=click.Path(path_type=Path), required=True, help="JSONL: id, question, answer.")
@click.option("--problems", type=click.IntRange(min=1), help="The first so many.  [default: all]")
@click.option(
    "--seeds", type=click.IntRange(min=1), default=1, show_default=True, help="Answers to a problem."
)
@click.option("--repeats", type=click.IntRange(min=1), default=1, show_default=True, help="Timings of each.")
@click.option(
    "--modes",
    help="Such as autoregressive,lossless:8,ngram-block.  [default: all but -block, 4 draft tokens]",
)
@click.option("--max-tokens", type=int, default=1024, show_default=True, help="Longest answer in tokens.")
@click.option("--temperature", type=float, default=0.6, show_default=True, help="0 is greedy.")
@click.option("--top-p", type=float, default=0.95, show_default=True, help="1 is off.")
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="Folder of the run; resumed if there."
)
@click.option("--shard", callback=_shard, default="1/1", show_default=True, help="Measure part i of n only.")
@click.option("--backend", default="cpu", show_default=True, help="cpu or cuda.")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: one a core]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line on stdout instead of the table.")
def run(
    bundle: Path,
    data: Path,
    problems: int | None,
    modes: str | None,
    max_tokens: int,
    temperature: float,
    top_p: float,
    out: Path,
    as_json: bool,
    **limits: Any,
) -> None:
    """Answer the problems of --data with the models of BUNDLE in every mode, and compare.

    Modes: autoregressive (the target alone), lossless (drafts of the draft model), ngram (drafts from the text),
    lossless-block and ngram-block (judged as a block); `:8` sets the most tokens of a draft. All are exact. They
    take turns within each problem, so what slows the machine slows all. Speed is told as the ratio to
    autoregressive in the same run. Sampling is the same for all modes; the model's own defaults do not enter.

    Interrupted, the same command goes on where it stopped. Written to --out: run.json, cells.jsonl, results.json,
    divergences.jsonl, report.html.
    """
    from semspec.calibration.bench.data import read_problems
    from semspec.calibration.bench.modes import default_modes, parse_modes
    from semspec.calibration.bench.run import run as measure
    from semspec.runtime.bundle import Bundle
    from semspec.runtime.config import SamplingParams

    _need_plots()
    sampling = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=max_tokens)
    names = modes.split(",") if modes else default_modes("draft" in Bundle.open(bundle).manifest.models)
    asked, chosen = read_problems(data, problems), parse_modes(names)
    with _progress() as on_progress:
        finished = measure(bundle, asked, chosen, out, sampling, on_progress=on_progress, **limits)
    _finish(finished, as_json)


@bench.command()
@click.argument("folders", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="Folder to write; must not exist."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line on stdout instead of the table.")
def join(folders: tuple[Path, ...], out: Path, as_json: bool) -> None:
    """Put FOLDERS, all the shards of one run, together in --out, as if it had never been split."""
    from semspec.calibration.bench.join import join as join_shards

    _need_plots()
    _finish(join_shards(folders, out), as_json)


def _need_plots() -> None:
    """A missing library is said before hours of measuring, not after."""
    import matplotlib  # noqa: F401


def _finish(finished: Run, as_json: bool) -> None:
    """Write the report and print the table."""
    from dataclasses import asdict

    from semspec.calibration.bench.columns import format_table
    from semspec.calibration.bench.report import write_report

    origin = asdict(finished.origin)
    write_report(finished.folder, finished.results, finished.table, origin)
    if as_json:
        click.echo(json.dumps({"out": str(finished.folder), **asdict(finished.table)}))
        return
    click.echo(format_table(finished.table))
    click.echo(f"{finished.folder / 'report.html'} has the plots", err=True)


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar on a terminal, a line for each tenth elsewhere; both on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
    )
    task = bar.add_task("measuring", total=None)
    tenths: set[int] = set()

    def on_progress(stage: str, done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        tenth = done * 10 // total
        if not console.is_terminal and tenth not in tenths:
            tenths.add(tenth)
            click.echo(f"{stage}: {done} of {total}", err=True)

    if not console.is_terminal:
        yield on_progress
        return
    with bar:
        yield on_progress
