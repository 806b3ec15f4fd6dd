"""The story of a build: graphs of a bundle in, plans beside them out; a folder of plans appears whole or not at all.

    request -> aim: engine, release, devices -> works of the bundle, refused where anything can be told beforehand
    -> a folder for each model and for the probes: plans that are there by content, the others compiled, then renamed

The manifest is not touched: plans list themselves (runtime/plans.py), and what was calibrated on a model stays valid.
Building again costs nothing where nothing changed, and after a calibration only the new probes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from semspec.export.cache import cache_root
from semspec.export.engines.capability import allowed_precisions, check_precisions
from semspec.export.engines.compiler import Compiled, CompileJob
from semspec.export.engines.device import Device, find_device
from semspec.export.engines.library import Library, open_library
from semspec.export.engines.memory import MemoryNeed, check_memory, free_bytes
from semspec.export.engines.profiles import BuildSizes
from semspec.export.engines.shelf import Shelf, plan_key
from semspec.export.engines.worker import compile_apart
from semspec.export.engines.works import Work, list_works
from semspec.export.staging import require_space, staged
from semspec.runtime.bundle import Bundle
from semspec.runtime.errors import BackendError, BundleError, ConfigError
from semspec.runtime.plans import FORMAT, PLANS, PLANS_FILE, PlanFile, PlanSet, plan_folder_name
from semspec.runtime.records import Progress

__all__ = ["Aim", "BuildReport", "BuildRequest", "BuiltPlan", "build_plans", "take_aim"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest:
    """engine: `tensorrt` or `tensorrt-rtx`. capabilities: such as 8.6, () for the GPU at hand. graph: `native` or
    `primitive`, None for the better one of those there are. ignore_memory: build although it may not fit."""

    engine: str
    capabilities: tuple[str, ...] = ()
    graph: str | None = None
    sizes: BuildSizes = field(default_factory=BuildSizes)
    ignore_memory: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """What to compile with, and for what. device: the GPU it is compiled on, None where on none."""

    library: Library
    capabilities: tuple[str, ...]
    device: Device | None

    def key(self, work: Work) -> str:
        """See plan_key."""
        device = self.device.name if self.device else ""
        return plan_key(work, self.library.engine, self.library.version, self.capabilities, device)

    @property
    def folder_name(self) -> str:
        """Of its plans."""
        return plan_folder_name(self.library.engine, self.library.version, self.capabilities)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltPlan:
    """One plan. home: what it belongs to, `target` or `probes/1`. compiled: None where it was there already."""

    home: str
    graph: str
    precision: str
    path: Path
    size: int
    need: MemoryNeed
    compiled: Compiled | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildReport:
    """All plans of one build."""

    engine: str
    version: str
    capabilities: tuple[str, ...]
    plans: tuple[BuiltPlan, ...]


def take_aim(request: BuildRequest) -> Aim:
    """All that can be said without a bundle: engine, release and devices. Raises ConfigError, and BackendError where
    the engine, or a GPU that it needs, is missing."""
    library = open_library(request.engine)
    if not library.compiles_for:
        return _aim_at_hand(library, request.capabilities)
    capabilities = request.capabilities
    if not capabilities:
        device = find_device()
        if device is None:
            raise ConfigError(
                f"there is no NVIDIA driver here to ask for a GPU: say with --sm what to build for, of "
                f"{', '.join(library.compiles_for)} (such as --sm 86,89)"
            )
        capabilities = (device.capability,)
    if unknown := [text for text in capabilities if text not in library.compiles_for]:
        raise ConfigError(
            f"{library.engine} {library.version} builds for compute capability {', '.join(library.compiles_for)}, not "
            f"{unknown[0]}; use --backend tensorrt on such a device"
        )
    return Aim(library=library, capabilities=capabilities, device=None)


def build_plans(path: Path, request: BuildRequest, on_progress: Progress | None = None) -> BuildReport:
    """Plans of the target, the draft and the probes of the bundle at `path`.

    Raises ConfigError for what the engine or the capabilities do not allow, BackendError where the engine is missing or
    refuses a graph or memory is short, BundleError for a bundle that is damaged or cannot be written, CalibrationError
    for probes that do not belong to it.
    """
    aim = take_aim(request)
    library = aim.library
    bundle = Bundle.open(path)
    works = list_works(bundle, library.engine, library.version, request.graph, request.sizes)
    for work in works:
        what = f"{work.home} {work.name}"
        check_precisions(what, work.precisions, library.engine, library.version, aim.capabilities)
    shelf = Shelf.of(bundle)
    if not request.ignore_memory:
        _check_memory([work for work in works if not shelf.has(aim.key(work))], aim)
    built: list[BuiltPlan] = []
    for home in dict.fromkeys(work.home for work in works):
        own = [work for work in works if work.home == home]
        built += _build_home(bundle.path / home, own, aim, shelf, on_progress)
    return BuildReport(
        engine=library.engine, version=library.version, capabilities=aim.capabilities, plans=tuple(built)
    )


def _aim_at_hand(library: Library, wanted: Sequence[str]) -> Aim:
    """An engine that compiles for the GPU it runs on."""
    device = find_device()
    if device is None:
        raise BackendError(
            "backend 'tensorrt' builds on the GPU that will run the plan, and there is no NVIDIA driver here; build on "
            "the device, or with --backend tensorrt-rtx --sm, which needs no GPU"
        )
    if tuple(wanted) not in ((), (device.capability,)):
        raise ConfigError(
            f"backend 'tensorrt' builds for the GPU at hand, {device.name} of compute capability {device.capability}, "
            f"and --sm asks for {', '.join(wanted)}; leave out --sm"
        )
    return Aim(library=library, capabilities=(device.capability,), device=device)


def _check_memory(works: Sequence[Work], aim: Aim) -> None:
    allowed = allowed_precisions(aim.library.engine, aim.library.version, aim.capabilities)
    for work in works:
        check_memory(
            f"{work.home} {work.name}", work.need, work.precisions[0], allowed, aim.device, free_bytes()
        )


def _build_home(
    home: Path, works: Sequence[Work], aim: Aim, shelf: Shelf, on_progress: Progress | None
) -> list[BuiltPlan]:
    """All plans of one model, or of the probes, in their folder; nothing is written where all are there."""
    out = home / PLANS / aim.folder_name
    there = {work.name: plan for work in works if (plan := shelf.at(aim.key(work), out))}
    if len(there) == len(works):
        return [_built(work, out, there[work.name], None) for work in works]
    plans: dict[str, PlanFile] = {}
    compiled: dict[str, Compiled | None] = {}
    try:
        out.parent.mkdir(exist_ok=True)
        with staged(out, force=True, mark=PLANS_FILE) as folder:
            require_space(out, sum(work.need.run for work in works))
            for work in works:
                plans[work.name], compiled[work.name] = _build(folder, work, aim, shelf, on_progress)
            found = PlanSet(
                format=FORMAT,
                engine=aim.library.engine,
                version=aim.library.version,
                capabilities=aim.capabilities,
                device=aim.device.name if aim.device else "",
                plans=plans,
            )
            (folder / PLANS_FILE).write_text(found.to_json(), encoding="utf-8")
    except OSError as error:
        raise BundleError(
            f"{out} cannot be written: {error.strerror}; repair that and build again"
        ) from error
    for plan in plans.values():
        shelf.put(out, plan)
    return [_built(work, out, plans[work.name], compiled[work.name]) for work in works]


def _build(
    folder: Path, work: Work, aim: Aim, shelf: Shelf, on_progress: Progress | None
) -> tuple[PlanFile, Compiled | None]:
    """One plan in `folder`: found, or compiled."""
    key, file = aim.key(work), f"{work.name}.plan"
    if shelf.has(key):
        known, compiled = shelf.take(key, folder / file), None
        size, sha256 = known.size, known.sha256
    else:
        stage = f"{work.home}: {work.name} plan, in about {work.need.build / 2**30:.1f} GiB of memory"

        def on_step(done: int, total: int) -> None:
            if on_progress:
                on_progress(stage, done, total)

        on_step(0, 1)
        compiled = compile_apart(_job(folder / file, work, aim), on_step)
        on_step(1, 1)
        size, sha256 = compiled.size, compiled.sha256
    plan = PlanFile(
        file=file,
        sources=work.sources,
        precision=work.precisions[0],
        profiles=work.profiles,
        key=key,
        size=size,
        sha256=sha256,
    )
    return plan, compiled


def _job(out: Path, work: Work, aim: Aim) -> CompileJob:
    timing_cache = ""
    if aim.library.engine == "tensorrt":  # TensorRT-RTX times nothing: it has no device
        timing_cache = str(cache_root() / "timing" / f"{aim.folder_name}.cache")
    return CompileJob(
        engine=aim.library.engine,
        graph=str(work.file),
        out=str(out),
        capabilities=aim.capabilities,
        spec=work.spec,
        probe=work.probe,
        profiles=work.profiles,
        timing_cache=timing_cache,
    )


def _built(work: Work, folder: Path, plan: PlanFile, compiled: Compiled | None) -> BuiltPlan:
    return BuiltPlan(
        home=work.home,
        graph=work.name,
        precision=work.precisions[0],
        path=folder / plan.file,
        size=plan.size,
        need=work.need,
        compiled=compiled,
    )
