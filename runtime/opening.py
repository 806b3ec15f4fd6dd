"""Which backend opens a bundle, and which file of it: a graph, or the plan that was compiled from one for this GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from semspec.runtime.backends import AUTO, open_backend
from semspec.runtime.backends.base import Backend
from semspec.runtime.bundle import Bundle
from semspec.runtime.contract import GraphSpec
from semspec.runtime.errors import BackendError
from semspec.runtime.plans import ENGINES, build_command, find_plan, read_plan_sets

__all__ = ["check_openable", "model_file", "open_engine", "probe_file"]

PLAN_GRAPHS = ("native", "primitive")  # the better one first
BEST_FIRST = (*ENGINES, "cuda")  # before the CPU


def open_engine(
    bundle: Bundle, roles: Sequence[str], name: str, *, threads: int | None, spin: bool
) -> tuple[Backend, str]:
    """The backend called `name` for the models in `roles`, and why it was chosen: "" where it was asked for.

    `auto`: the first that has a plan for this very GPU and release, else ONNX Runtime's CUDA where the bundle has its
    graph, else the CPU. A damaged plan is an error for all that. Raises what check_openable and open_backend raise.
    """
    if name != AUTO:
        for role in roles:
            check_openable(bundle, role, name)
        return open_backend(name, threads=threads, spin=spin), ""
    passed: list[str] = []
    for candidate in BEST_FIRST:
        try:
            return _fitting(bundle, roles, candidate, threads, spin), "; ".join(
                [f"{candidate} fits", *passed]
            )
        except BackendError as error:
            passed.append(f"not {candidate}: {error}")
    return open_backend("cpu", threads=threads, spin=spin), "; ".join(passed)


def _fitting(bundle: Bundle, roles: Sequence[str], name: str, threads: int | None, spin: bool) -> Backend:
    """Raises BackendError where the bundle or this machine lacks something."""
    for role in roles:
        if name not in ENGINES and name not in bundle.model(role).graphs:
            raise BackendError(f"{bundle.path} has no such graph of its {role}")
        check_openable(bundle, role, name)
    engine = open_backend(name, threads=threads, spin=spin)
    for role in roles:
        model_file(bundle, role, engine)
    return engine


def check_openable(bundle: Bundle, role: str, backend: str) -> None:
    """Refuse a bundle without anything that this backend could open, before an engine is asked for.

    Raises ConfigError for a model that is not there, BundleError for a graph that is not, BackendError for plans.
    """
    if backend not in ENGINES:
        bundle.graph_file(role, backend)
        return
    sets = read_plan_sets(bundle, role).values()
    if not any(found.engine == backend for found in sets):
        there = "; ".join(map(str, sets))
        raise BackendError(
            f"{bundle.path} has no plan of its {role} for {backend}: it has {there or 'none'}; build it with: "
            f"{build_command(bundle.path, backend)}"
        )


def model_file(bundle: Bundle, role: str, backend: Backend) -> tuple[Path, GraphSpec]:
    """What to open for a model, and the sizes of its graph. Raises as find_plan does where the backend runs plans."""
    graphs, device = bundle.model(role).graphs, backend.plans
    if device is None:
        return bundle.graph_file(role, backend.name), graphs[backend.name]
    there = {name for found in read_plan_sets(bundle, role).values() for name in found.plans}
    names = [name for name in PLAN_GRAPHS if name in graphs and name in there] or [PLAN_GRAPHS[0]]
    refused: list[BackendError] = []
    for name in names:
        try:
            return _plan(bundle, role, name, backend), graphs[name]
        except BackendError as error:  # the other graph may have been built for this GPU
            refused.append(error)
    raise refused[0]


def probe_file(bundle: Bundle, folder: Path, name: str, file: str, backend: Backend) -> Path:
    """What to open for one graph of the probes in `folder`. Raises as model_file."""
    if backend.plans is None:
        return folder / file
    return _plan(bundle, f"{folder.parent.name}/{folder.name}", name, backend)


def _plan(bundle: Bundle, home: str, name: str, backend: Backend) -> Path:
    device = backend.plans
    assert device is not None
    path, _ = find_plan(
        bundle, home, name, engine=device.engine, version=device.version, capability=device.capability
    )
    return path
