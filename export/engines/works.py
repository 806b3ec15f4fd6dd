"""What of a bundle is to be compiled: a graph of each model and all graphs of the probes that count."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from semspec.export.engines.capability import GRAPHS, graphs_for
from semspec.export.engines.memory import MemoryNeed, memory_need
from semspec.export.engines.profiles import PROBE_PROFILES, BuildSizes, Profiles, make_profiles
from semspec.runtime.bundle import ROLES, Bundle, BundleModel, graph_path, sha256_of
from semspec.runtime.contract import GraphSpec
from semspec.runtime.errors import BundleError, ConfigError
from semspec.runtime.external import check_external_data, external_bytes
from semspec.runtime.probe_set import PROBES, latest_probes, read_probes

__all__ = ["Work", "list_works"]

ACTIVATIONS: Mapping[str, str] = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One graph to compile.

    home: `target`, `draft` or `probes/<n>`. name: of the graph, and of its plan. spec: of a model's graph, None for a
    probe's, whose (K, E, F) is `probe`. precisions: its own, then that of what is not quantized. sources: path in the
    bundle -> sha256 of what is there now.
    """

    home: str
    name: str
    file: Path
    spec: GraphSpec | None
    probe: tuple[int, ...]
    precisions: tuple[str, ...]
    profiles: Profiles
    sources: Mapping[str, str]
    need: MemoryNeed


def list_works(bundle: Bundle, engine: str, version: str, graph: str | None, sizes: BuildSizes) -> list[Work]:
    """Works of the target, the draft and the latest probes. graph: see BuildRequest.

    Raises ConfigError where the engine cannot read any graph that the bundle has; BundleError for a file that was
    changed since it was written; CalibrationError for probes that do not belong to the bundle's models.
    """
    works = [
        _model_work(bundle, role, _choose_graph(bundle, role, engine, version, graph), sizes)
        for role in ROLES
        if role in bundle.manifest.models
    ]
    return works + _probe_works(bundle)


def _choose_graph(bundle: Bundle, role: str, engine: str, version: str, wanted: str | None) -> str:
    readable = graphs_for(engine, version)
    there = [name for name in GRAPHS if name in bundle.model(role).graphs]
    if wanted is not None and wanted not in GRAPHS:
        raise ConfigError(f"graph of plans must be one of {', '.join(GRAPHS)}, got {wanted!r}")
    if wanted is not None and wanted not in readable:
        least = ".".join(map(str, GRAPHS[wanted]))
        raise ConfigError(
            f"graph {wanted!r} needs TensorRT {least} or above, and {version} is installed; use --graph {readable[0]}"
        )
    fitting = [name for name in readable if name in there and wanted in (None, name)]
    if not fitting:
        raise ConfigError(
            f"{bundle.path} has no graph of its {role} that {engine} {version} reads: it has "
            f"{', '.join(bundle.model(role).graphs)}, needed: {wanted or ' or '.join(readable)}; export again with "
            f"--graphs cpu,{wanted or readable[0]}"
        )
    return fitting[0]


def _model_work(bundle: Bundle, role: str, graph: str, sizes: BuildSizes) -> Work:
    model, file = bundle.model(role), bundle.graph_file(role, graph)
    spec, profiles = model.graphs[graph], make_profiles(model.graphs[graph], sizes)
    names = [graph_path(role, graph), *sorted(f"{role}/onnx/{name}" for name in check_external_data(file))]
    sources = {name: sha256_of(bundle.path / name) for name in names}
    for name, found in sources.items():
        if found != bundle.manifest.files[name].sha256:
            raise BundleError(
                f"{bundle.path / name} was changed: sha256 {found}, expected {bundle.manifest.files[name].sha256}; "
                f"export the bundle again"
            )
    return Work(
        home=role,
        name=graph,
        file=file,
        spec=spec,
        probe=(),
        precisions=(_precision(bundle, model, graph), ACTIVATIONS[spec.activation]),
        profiles=profiles,
        sources=sources,
        need=memory_need(spec, external_bytes(file), profiles),
    )


def _precision(bundle: Bundle, model: BundleModel, graph: str) -> str:
    """The bare name of a graph's precision: `int4` of `int4/64+bf16`."""
    text = model.precision.get(graph)
    if text is None:
        raise BundleError(
            f"{bundle.path}: the manifest does not say the precision of {model.name}'s graph {graph!r}; export again"
        )
    return re.split(r"[ /+]", text, maxsplit=1)[0]


def _probe_works(bundle: Bundle) -> list[Work]:
    folder = latest_probes(bundle)
    if folder is None:
        return []
    home = f"{PROBES}/{folder.name}"
    works = []
    found = read_probes(bundle, folder)
    for name in found.names:
        graph = found.graphs[name]
        width = bundle.model(graph.role).graphs["cpu"].width
        works.append(
            Work(
                home=home,
                name=name,
                file=folder / graph.file,
                spec=None,
                probe=(len(graph.layers), width if graph.layers else 0, len(graph.features)),
                precisions=("fp32",),
                profiles=PROBE_PROFILES,
                sources={f"{home}/{graph.file}": graph.sha256},
                need=memory_need(None, graph.size, PROBE_PROFILES),
            )
        )
    return works
