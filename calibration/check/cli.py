"""The command `semspec calibrate check`. The table goes to stdout, progress and places to stderr."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

__all__ = ["check"]

QUESTIONS = 45  # of three contexts with eight drawn segments: more than a thousand


@click.command(short_help="Check the thresholds of a bundle on questions that calibration did not see.")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--contexts",
    type=click.Path(path_type=Path),
    help="Questions, a JSON object a line: id, question, answer.  [default: built-in problems]",
)
@click.option(
    "--questions", type=click.IntRange(min=2), default=QUESTIONS, show_default=True, help="How many to ask."
)
@click.option(
    "--skip",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Leave out the first so many of the file: those that were calibrated on.",
)
@click.option("--encoder", default="", help="Of a calibration with embed or nli: the encoder it read with.")
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of built-in problems."
)
@click.option("--work", type=click.Path(path_type=Path), help="Folder of the steps.  [default: BUNDLE.check]")
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="Questions worked on at once, each on a core.  [default: one a core]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line on stdout instead of the table.")
def check(
    bundle: Path,
    contexts: Path | None,
    questions: int,
    skip: int,
    encoder: str,
    seed: int,
    work: Path | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Check what the newest probes of BUNDLE promise, on questions that they were not calibrated on.

    Segments are collected as for the calibration; then, at each threshold: how much is kept, which share of that no
    sample of the target is equivalent to, and the same of random acceptance and of each free signal at an equal share
    of tokens, with differences on the same resamples of questions. The record stays in the work folder. Interrupted,
    the same command goes on where it stopped.
    """
    from semspec.calibration.check.run import check as check_bundle
    from semspec.calibration.check.run import default_check_work
    from semspec.calibration.check.tables import format_check
    from semspec.calibration.cli import read_questions, show_progress
    from semspec.runtime.typed import plain

    started = time.monotonic()
    problems, source = read_questions(contexts, skip + questions, seed)
    place = work or default_check_work(bundle)
    with show_progress() as on_progress:
        found = check_bundle(
            bundle,
            problems[skip:],
            place,
            skipped=problems[:skip],
            encoder=encoder,
            source=f"{source}, {questions} behind the first {skip}",
            threads=threads,
            on_progress=on_progress,
        )
    click.echo(f"{place} holds what was checked, {time.monotonic() - started:.1f} s", err=True)
    click.echo(json.dumps(plain(found)) if as_json else format_check(found))
