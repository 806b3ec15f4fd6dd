"""The command that compiles plans: build. Progress goes to stderr, results to stdout."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from semspec.export.engines.build import BuildReport, BuiltPlan

__all__ = ["build", "plans_json", "print_plans"]


@click.command(short_help="Compile the graphs of a bundle for an NVIDIA GPU.")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--backend",
    type=click.Choice(["tensorrt", "tensorrt-rtx"]),
    required=True,
    help="tensorrt compiles on the GPU that will run the plan; tensorrt-rtx anywhere, without a GPU.",
)
@click.option(
    "--sm", help="Compute capabilities to compile for, such as 86,89,120.  [default: that of the GPU here]"
)
@click.option(
    "--graph", type=click.Choice(["native", "primitive"]), help="[default: native, where the engine reads it]"
)
@click.option("--chunk", type=int, default=512, show_default=True, help="Most tokens of one pass.")
@click.option("--rows", type=int, default=128, show_default=True, help="Most rows of logits of one pass.")
@click.option("--batch", type=int, default=1, show_default=True, help="Most texts of one pass.")
@click.option("--ignore-memory", is_flag=True, help="Build although the memory may not be enough.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line on stdout at the end.")
def build(
    bundle: Path,
    backend: str,
    sm: str | None,
    graph: str | None,
    ignore_memory: bool,
    as_json: bool,
    **sizes: int,
) -> None:
    """Compile the target, the draft and the probes of BUNDLE into plans beside their graphs.

    Plans that are there already, of the same graphs and for the same devices, are used as they are. Needs the engine
    and nothing of the exporter.
    """
    from semspec.export.cli import progress
    from semspec.export.engines.build import BuildRequest, build_plans
    from semspec.export.engines.capability import parse_capabilities
    from semspec.export.engines.profiles import BuildSizes

    started = time.perf_counter()
    request = BuildRequest(
        engine=backend,
        capabilities=() if sm is None else parse_capabilities(sm),
        graph=graph,
        sizes=BuildSizes(**sizes),
        ignore_memory=ignore_memory,
    )
    with progress() as on_progress:
        report = build_plans(bundle, request, on_progress)
    print_plans(report)
    click.echo(f"{bundle}: ready in {time.perf_counter() - started:.1f} s", err=True)
    if as_json:
        click.echo(json.dumps(plans_json(report)))


def print_plans(report: BuildReport) -> None:
    """What they are for, and a line for each plan, on stderr."""
    click.echo(f"plans of {report.engine} {report.version} for {', '.join(report.capabilities)}:", err=True)
    for plan in report.plans:
        click.echo(
            f"{plan.home}: {plan.graph} plan in {plan.precision}, {_mib(plan.size)}, {_taken(plan)}", err=True
        )


def plans_json(report: BuildReport) -> dict[str, Any]:
    """The report as JSON holds it; sizes in bytes."""
    from dataclasses import asdict

    plans = [{**asdict(plan), "path": str(plan.path)} for plan in report.plans]
    return {**asdict(report), "plans": plans}


def _taken(plan: BuiltPlan) -> str:
    running = f"runs in about {_mib(plan.need.run)}"
    if plan.compiled is None:
        return f"there already; {running}"
    return f"{plan.compiled.seconds:.1f} s, {_mib(plan.compiled.peak_bytes)} peak memory; {running}"


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:.1f} MiB"
