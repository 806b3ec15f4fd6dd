"""A rig: a model of some shape with noise for weights, written as the graph that a backend runs, compiled where the
backend wants plans, and opened as the runtime opens models."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from gpu.noise import Noise, NoiseEncoder, NoisePacked

from semspec.export.dialects.native import build_native_graph
from semspec.export.dialects.ort import build_ort_graph
from semspec.export.dialects.primitive import build_primitive_graph
from semspec.export.engine_graphs import ENGINE_DATA
from semspec.export.engine_plan import engine_bytes, plan_engine
from semspec.export.engines.build import BuildRequest, take_aim
from semspec.export.engines.capability import allowed_precisions, graphs_for
from semspec.export.engines.compiler import Compiled, CompileJob
from semspec.export.engines.device import find_device
from semspec.export.engines.memory import check_memory, free_bytes, memory_need
from semspec.export.engines.profiles import BuildSizes, Profiles, make_profiles
from semspec.export.engines.worker import compile_apart
from semspec.export.packing import Schemes
from semspec.export.qdq_weights import QdqWeights
from semspec.export.staging import require_space
from semspec.export.writer import WeightFile
from semspec.models.spec import ModelSpec
from semspec.runtime.backends.base import Backend
from semspec.runtime.contract import GraphSpec
from semspec.runtime.errors import BackendError, ConfigError
from semspec.runtime.model import CachedModel

__all__ = [
    "Rig",
    "build_rig",
    "check_precision",
    "check_room",
    "compile_plan",
    "graph_spec",
    "write_graph",
]

# (backend, precision) -> scheme of its graph's layers, where ONNX Runtime runs it
ORT_SCHEMES = {
    ("cpu", "fp32"): "fp32",
    ("cpu", "int4"): "int4",
    ("cuda", "fp16"): "fp32",  # plain, in the graph's own dtype
    ("cuda", "int4"): "int4",
}
PLAN_PRECISIONS = ("fp16", "int4", "int8")
ENGINE_BUILDERS = {"native": build_native_graph, "primitive": build_primitive_graph}
EXTRA = 1 << 30  # bytes that ONNX Runtime takes beside the weights: cache, logits, its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    """file: a graph, or its plan. precision: as the exporter describes it. n_bytes: of graph and weights on disk.
    write_s, compile_s: seconds that making them took; compile_s is 0 where nothing is compiled."""

    backend: Backend
    graph: GraphSpec
    file: Path
    precision: str
    n_bytes: int
    write_s: float
    compile_s: float

    def open(self) -> CachedModel:
        """Raises BackendError where the backend refuses it."""
        return CachedModel(self.backend, self.file, self.graph)


def check_precision(backend: str, precision: str) -> None:
    """Raises ConfigError where no graph for this backend has such weights."""
    known = [name for own, name in ORT_SCHEMES if own == backend] or list(PLAN_PRECISIONS)
    if precision not in known:
        raise ConfigError(f"backend {backend!r} has no graph in {precision}; it has {', '.join(known)}")


def check_room(backend: Backend, shape: ModelSpec, precision: str, folder: Path, max_context: int) -> None:
    """On the disk of `folder`, in this machine's memory and in the GPU's. Raises BundleError for the disk, BackendError
    for memory; both name what is needed and what is there."""
    graph, plans = graph_spec(_best_graph(backend), shape, max_context), backend.plans
    plan = plan_engine(shape, Noise(shape), precision, Schemes.choose("int4"), None)
    n_bytes = engine_bytes(plan, shape)
    require_space(folder / "graph", n_bytes if plans is None else 2 * n_bytes)
    device, free = find_device(), free_bytes()
    if plans is not None:
        need = memory_need(graph, n_bytes, make_profiles(graph, BuildSizes()))
        allowed = allowed_precisions(plans.engine, plans.version, [plans.capability])
        check_memory(f"a {graph.graph} graph of this shape", need, precision, allowed, device, free)
        return
    place, have = "this machine", free
    if backend.name != "cpu" and device is not None:
        place, have = device.name, device.n_bytes
    if have is not None and have < n_bytes + EXTRA:
        raise BackendError(
            f"a {graph.graph} graph of this shape in {precision} needs about {_gib(n_bytes + EXTRA)} and {place} has "
            f"{_gib(have)}; leave the shape out, or ask for fewer bits"
        )


def build_rig(backend: Backend, shape: ModelSpec, precision: str, folder: Path, max_context: int) -> Rig:
    """In `folder`, which holds nothing else. precision, room: as checked before.

    Raises OSError where the disk is full, BackendError where the graph does not compile.
    """
    graph = graph_spec(_best_graph(backend), shape, max_context)
    started = time.perf_counter()
    file, described = write_graph(folder, shape, graph, precision)
    written = time.perf_counter()
    n_bytes = sum(path.stat().st_size for path in folder.iterdir())
    if backend.plans is not None:
        plan = folder / f"{graph.graph}.plan"
        compile_plan(backend.name, file, plan, graph, make_profiles(graph, BuildSizes()))
        file = plan
    return Rig(
        backend=backend,
        graph=graph,
        file=file,
        precision=described,
        n_bytes=n_bytes,
        write_s=written - started,
        compile_s=time.perf_counter() - written if backend.plans else 0.0,
    )


def compile_plan(
    engine: str,
    graph: Path,
    out: Path,
    spec: GraphSpec | None,
    profiles: Profiles,
    probe: tuple[int, ...] = (),
) -> Compiled:
    """As `semspec build` compiles one graph of a bundle, for the GPU here, without a bundle. spec, probe: see
    CompileJob. Raises what take_aim and compile_apart raise."""
    aim = take_aim(BuildRequest(engine=engine))
    job = CompileJob(
        engine=engine,
        graph=str(graph),
        out=str(out),
        capabilities=aim.capabilities,
        spec=spec,
        probe=probe,
        profiles=profiles,
    )
    return compile_apart(job)


def graph_spec(name: str, shape: ModelSpec, max_context: int) -> GraphSpec:
    """Sizes of the graph called `name`."""
    activation = "float32" if name == "cpu" else "float16"
    return GraphSpec(
        graph=name,
        n_layers=shape.n_layers,
        n_kv_heads=shape.n_kv_heads,
        head_size=shape.head_size,
        width=shape.width,
        vocab_size=shape.vocab_size,
        max_context=max_context,
        pooled_layers=shape.default_pooled_layers(),
        activation=activation,
        cache=activation,
    )


def write_graph(folder: Path, shape: ModelSpec, graph: GraphSpec, precision: str) -> tuple[Path, str]:
    """The exporter's graph with noise for its weights; returns it, and what its precision is called."""
    noise, path = Noise(shape), folder / f"{graph.graph}.onnx"
    scheme = ORT_SCHEMES.get((graph.graph, precision))
    with WeightFile(folder / (ENGINE_DATA if scheme is None else "weights.data")) as file:
        if scheme is not None:
            schemes = Schemes.choose(scheme)
            packed = NoisePacked(noise, file, "rtn", (graph.activation,))
            build_ort_graph(shape, graph, schemes, packed).save(path, {})
            described = str(schemes.layers) if schemes.layers.block_size else precision
        else:
            plan = plan_engine(shape, noise, precision, Schemes.choose("int4"), None)
            encoder = NoiseEncoder(weights=noise, activation=graph.activation, block_size=plan.block_size)
            build = ENGINE_BUILDERS[graph.graph]
            build(shape, graph, plan.precision, QdqWeights(encoder, file), {}).save(path, {})
            described = plan.describe([graph.graph])[graph.graph]
    return path, described


def _best_graph(backend: Backend) -> str:
    """Of those that the backend runs."""
    plans = backend.plans
    return backend.name if plans is None else graphs_for(plans.engine, plans.version)[0]


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.1f} GiB"
