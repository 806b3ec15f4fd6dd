"""The command `semspec bench`. Tables go to stdout, progress to stderr."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from semspec.calibration.cli import parse_shard, show_progress

if TYPE_CHECKING:
    from semspec.calibration.bench.run import Run

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
@click.option(
    "--shard", callback=parse_shard, default="1/1", show_default=True, help="Measure part i of n only."
)
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
    lossless-block and ngram-block (judged as a block); `:8` sets the most tokens of a draft. All are exact. Lossy, with
    the probes that semspec calibrate makes: semantic:0.1 and combined:0.1 (at this risk), semantic-paper and
    semantic-strict; combined-whole:0.1 does not stop where the draft is unsure. Controls, which a better lossy rule has
    to beat: random:0.7 (segments of the draft kept by chance), logprob:-0.15 (by the target's mean log-probability),
    specreason:7 (by its grade, 0-9), topk:2:4 (tokens among its 2 likeliest, drafts of 4), draft-alone;
    combined-random:0.5 and combined-logprob:-0.4 ask the exact rule first, as combined does. Modes take turns within
    each problem, so what slows the machine slows all. Speed is told as the ratio to autoregressive in the same run.
    Sampling is the same for all modes; the model's own defaults do not enter.

    Peers get the weights that the bundle was exported from, the same prompts and limits: genai, genai-draft,
    genai-ngram, llama, llama-lookup, transformers, transformers-assisted, transformers-lookup. What a peer needs is
    installed by the user; what it reads is made once and kept in the cache. Each is a process of its own that keeps
    its models in memory until the end.

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
    with show_progress() as on_progress:
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
