"""The command that shows what semspec does: demo. The answers go to stdout, everything else to stderr."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from semspec.runtime.config import SpecConfig
    from semspec.runtime.probe_set import ProbeSet
    from semspec.runtime.stats import Summary

__all__ = ["demo"]

DEMO_RECIPE = "qwen2.5-coder"
DEMO_QUESTION = (
    "A theatre has 12 rows of 18 seats. On Friday two thirds of the seats were taken at 15 crowns each, and on "
    "Saturday all but 30 were taken at 20 crowns each. How many crowns did the theatre take on both days? Think it "
    "through step by step, each step on a line of its own."
)
MINUTES = 5.0


@click.command(short_help="Fetch a small open pair, export, calibrate, and answer a question.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("demo-bundle"),
    show_default=True,
    help="Folder of the bundle; one that is there is used as it is.",
)
@click.option("--recipe", default=DEMO_RECIPE, show_default=True, help="The pair to show.")
@click.option("--question", default=DEMO_QUESTION, help="What to ask.")
@click.option("--max-tokens", type=int, default=400, show_default=True, help="Longest answer in tokens.")
@click.option("--calibrate/--no-calibrate", default=True, help="Whether to answer by meaning as well.")
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    default=MINUTES,
    show_default=True,
    help="Most to collect for the calibration.",
)
@click.pass_context
def demo(
    context: click.Context,
    out: Path,
    recipe: str,
    question: str,
    max_tokens: int,
    calibrate: bool,
    minutes: float,
) -> None:
    """Fetch a small open pair of models, export it into one bundle, and answer a question from it, three times.

    First the target writes alone; then the draft writes ahead and the target judges: the same answer, exactly. Then the
    pair is calibrated, quickly, and steps of the draft stay where they are likely to mean what the target would say:
    another answer. Interrupted, the same command goes on; what is there already is used as it is.
    """
    from semspec.export.recipes import load_recipe

    chosen = load_recipe(recipe)
    names = [model.name for model in (chosen.target, chosen.draft) if model is not None]
    if calibrate and chosen.draft is not None:
        _check_library(out)
    _provide_bundle(context, out, recipe, names)
    click.echo(f"\n2. asking, greedy: {question}", err=True)
    _answer_exactly(out, question, max_tokens)
    if not calibrate:
        return
    if chosen.draft is None:
        click.echo(f"\n3. {recipe} has no draft model: there is nothing to calibrate", err=True)
        return
    _answer_by_meaning(out, _provide_probes(out, minutes), question, max_tokens)


def _check_library(out: Path) -> None:
    """Missed before gigabytes are fetched, and only where it is needed."""
    from importlib.util import find_spec

    from semspec.calibration.demo.quick import known_probes
    from semspec.runtime.bundle import MANIFEST
    from semspec.runtime.errors import CalibrationError

    if find_spec("matplotlib") is None and not ((out / MANIFEST).is_file() and known_probes(out)):
        raise CalibrationError(
            "the report of a calibration needs matplotlib; install it with: pip install 'semspec[demo]', or add "
            "--no-calibrate"
        )


def _provide_bundle(context: click.Context, out: Path, recipe: str, names: list[str]) -> None:
    from semspec.export.cli import export
    from semspec.runtime.bundle import MANIFEST, ROLES, Bundle

    if (out / MANIFEST).is_file():
        models = Bundle.open(out).manifest.models
        found = [models[role].name for role in ROLES if role in models]
        if found != names:
            raise click.UsageError(f"{out} holds {' and '.join(found)}; give another --out")
        click.echo(f"1. {out} is there already: used as it is (delete it to export again)", err=True)
    else:
        click.echo(f"1. fetching and exporting {' and '.join(names)} into {out}", err=True)
        context.invoke(export, recipe=recipe, out=out, **_export_defaults())


def _export_defaults() -> dict[str, Any]:
    """What `semspec export` would take for every option but --recipe and --out."""
    from semspec.export.cli import export

    with export.make_context("export", ["--recipe", "x", "--out", "x"]) as context:
        return {name: value for name, value in context.params.items() if name not in ("recipe", "out")}


def _provide_probes(out: Path, minutes: float) -> ProbeSet:
    """Those of the bundle, or new ones."""
    from semspec.calibration.cli import show_progress
    from semspec.calibration.demo.quick import QUESTIONS, calibrate_quickly, known_probes
    from semspec.calibration.tables import refusals
    from semspec.runtime.bundle import Bundle
    from semspec.runtime.probe_set import read_probes

    found = known_probes(out)
    if found is not None:
        click.echo(f"\n3. {out} is calibrated already: its probes are used as they are", err=True)
        return found
    click.echo(
        f"\n3. calibrating on {QUESTIONS} contexts of built-in problems, for at most {minutes:g} minutes: a quick "
        "calibration, whose bounds are wide",
        err=True,
    )
    with show_progress() as on_progress:
        made = calibrate_quickly(out, budget=minutes, on_progress=on_progress)
    if made.missing:
        click.echo(f"{made.missing} of {QUESTIONS} contexts were not collected in time", err=True)
    click.echo(f"{made.folder}: {made.findings.winner} judges segments, see report.html there", err=True)
    if not made.findings.risks:
        click.echo(refusals(made.findings)[-1], err=True)
    return read_probes(Bundle.open(out), made.folder)


def _answer_exactly(bundle: Path, question: str, max_tokens: int) -> None:
    """The target alone, then the same answer drafted by the small model and judged by the target."""
    from semspec.runtime.config import SpecConfig

    # each way opens the bundle for itself: engines that share cores are set up differently from one alone
    plain, speed = _answer(bundle, SpecConfig(mode="autoregressive"), question, max_tokens)
    drafted, other_speed = _answer(bundle, SpecConfig(), question, max_tokens)
    same = (
        "identical, token for token" if plain == drafted else "DIFFERENT: this is a fault, please report it"
    )
    ratio = f"{other_speed / speed:.2f}x" if speed and other_speed else "not measured"
    click.echo(f"\nThe two answers are {same}. Speed of the second over the first: {ratio}")
    click.echo("(one answer each, on this machine's CPU: a look, not a benchmark)")


def _answer_by_meaning(bundle: Path, probes: ProbeSet, question: str, max_tokens: int) -> None:
    """The same question, lossily, and what it is worth."""
    from semspec.calibration.demo.quick import choose_mode

    shown = choose_mode(probes)
    click.echo(f"\n4. asking the same by meaning: {shown.says}", err=True)
    _answer(bundle, shown.spec, question, max_tokens)
    click.echo(
        "\nThis answer is lossy: it need not be the target's own. The risk is that of all kept segments, and those"
    )
    click.echo(
        "that the exact rule refuses are the worse ones; `semspec calibrate` vouches for smaller risks, in longer."
    )


def _answer(bundle: Path, spec: SpecConfig, question: str, max_tokens: int) -> tuple[list[int], float]:
    """Print one answer as it is written; its ids, and tokens/s after the first step (0 if there was no other)."""
    from semspec.runtime.authors import Authors
    from semspec.runtime.cli import COLOURS
    from semspec.runtime.config import SamplingParams
    from semspec.runtime.llm import LLM

    messages = [{"role": "user", "content": question}]
    written: list[int] = []
    with LLM(bundle, spec=spec) as llm:
        click.echo(f"\n-- {_title(spec, llm.draft is not None)} --", err=True)
        llm.chat(messages, SamplingParams(max_tokens=8))  # the first passes read the weights from disk
        authors = Authors(llm.tokenizer.stream(llm.tokenizer.encode_chat(messages)))
        for delta in llm.stream_chat(messages, SamplingParams(max_tokens=max_tokens)):
            counts = {"n_from_draft": delta.n_from_draft, "n_lossy": delta.n_lossy}
            for author, characters in authors.split(delta.text, delta.token_ids, **counts):
                click.echo(click.style(characters, fg=COLOURS[author]), nl=False)
            written += delta.token_ids
    click.echo(f"\n{_count(delta.stats)}")
    return written, 1000 / delta.stats.tpot_ms if delta.stats.tpot_ms else 0.0


def _title(spec: SpecConfig, drafted: bool) -> str:
    if spec.mode == "autoregressive":
        return "the target alone"
    drafter = "a draft model" if drafted else "n-grams"
    if not spec.semantic:
        return f"{spec.mode}, drafted by {drafter} (green)"
    exact = "green: the draft's, as the target would write it; " if spec.mode == "combined" else ""
    return f"{spec.mode}, {exact}yellow: the draft's, kept by its meaning"


def _count(stats: Summary) -> str:
    """Counters of an answer."""
    speed = f"{1000 / stats.tpot_ms:.1f} tokens/s while writing" if stats.tpot_ms else "one step only"
    parts = [f"{stats.generated_tokens} token{'s' * (stats.generated_tokens != 1)}, {speed}"]
    if stats.draft_acceptance_rate is not None:
        parts.append(
            f"{stats.draft_acceptance_rate:.0%} of {stats.num_draft_tokens} drafted tokens accepted, "
            f"{stats.mean_acceptance_length:.2f} tokens a target pass"
        )
    if stats.num_segments:
        parts.append(
            f"{stats.num_accepted_segments} of {stats.num_segments} judged segments kept whole, "
            f"{stats.num_lossy_tokens} tokens ({stats.lossy_token_fraction:.0%}) lossy"
        )
    return f"[{'; '.join(parts)}]"
