"""One graph into one plan: parse, check that the compiler understood all of it, compile, write.

Only calls that releases 10.3 to 11.4 and TensorRT-RTX share, but for those behind `engine` and for layers that older
releases do not make. Three things go wrong in silence and are looked for here: inputs that the parser drops, attention
without its mask, quantized weights that are widened again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from semspec.export.engines.capability import check_precisions
from semspec.export.engines.library import Library
from semspec.export.engines.listening import Messages, make_logger, make_monitor
from semspec.export.engines.profiles import input_shapes
from semspec.runtime.bundle import sha256_of
from semspec.runtime.contract import GraphSpec, check_ports, probe_ports
from semspec.runtime.errors import BackendError
from semspec.runtime.records import TensorSpec
from semspec.runtime.stats import peak_mib

__all__ = ["CompileJob", "Compiled", "compile_graph"]

DTYPES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT32": "int32", "INT64": "int64"}
BITS = {"FLOAT": 32, "HALF": 16, "BF16": 16, "INT32": 32, "INT64": 64, "INT8": 8, "UINT8": 8, "BOOL": 8}
BITS |= {"FP8": 8, "E8M0": 8, "INT4": 4, "FP4": 4}
PRECISIONS = {
    "FP4": "nvfp4",
    "FP8": "fp8",
    "INT4": "int4",
    "INT8": "int8",
    "BF16": "bf16",
}  # most demanding first
# Beside weights a plan holds kernels, measured 18 MiB at 24 layers and two profiles; widened weights are twice or more.
MOST_TIMES_WEIGHTS, MOST_KERNELS, MOST_LAYER = 1.3, 16 << 20, 2 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileJob:
    """What to compile, as text can carry it to another process.

    graph, out: files. spec: of a model's graph, None for a probe's. probe: its (K, E, F), () for a model.
    profiles: as in PlanFile. timing_cache: a file that is read and written, "" for none.
    """

    engine: str
    graph: str
    out: str
    capabilities: tuple[str, ...]
    spec: GraphSpec | None
    probe: tuple[int, ...]
    profiles: Mapping[str, Mapping[str, tuple[int, ...]]]
    timing_cache: str = ""

    def ports(self) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
        """Inputs and outputs that the contract gives the graph."""
        if self.spec is not None:
            return self.spec.inputs(), self.spec.outputs()
        n_pooled, width, n_signals = self.probe
        return probe_ports(n_pooled, width, n_signals)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A plan that was written. weights_bytes: of the graph's constants, at their own width. peak_bytes: most memory of
    the process so far. n_attentions: fused ones."""

    size: int
    sha256: str
    weights_bytes: int
    seconds: float
    peak_bytes: int
    n_layers: int
    n_attentions: int


def compile_graph(
    library: Library, job: CompileJob, on_progress: Callable[[int, int], None] | None = None
) -> Compiled:
    """Raises BackendError: the graph is refused, not understood as it was meant, or holds other ports than the
    contract's; ConfigError: a type in it that a capability lacks."""
    trt: Any = library.trt
    started = time.perf_counter()
    messages = Messages()
    logger = make_logger(trt, messages)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(job.graph):
        faults = [parser.get_error(index) for index in range(parser.num_errors)]
        said = "; ".join(f"{fault.node_name() or 'graph'}: {fault.desc()}" for fault in faults[:3])
        raise BackendError(f"{_name(library)} cannot read {job.graph}: {messages.line(said)}")
    _check_network(trt, network, job)
    n_attentions = _prepare_attention(trt, network, job)
    kinds = _types(network)
    types = [name for kind, name in PRECISIONS.items() if kind in kinds]
    check_precisions(job.graph, types, library.engine, library.version, job.capabilities)
    config = _configure(trt, builder, job)
    monitor = make_monitor(trt, on_progress)
    config.progress_monitor = monitor
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise BackendError(f"{_name(library)} cannot compile {job.graph}: {messages.line(messages.errors())}")
    messages.refuse_unused(job.graph)
    weights_bytes = _weights_bytes(trt, network)
    n_blocks = job.spec.n_layers if job.spec else 0
    if plan.nbytes > MOST_TIMES_WEIGHTS * weights_bytes + MOST_KERNELS + MOST_LAYER * n_blocks:
        raise BackendError(
            f"{_name(library)} stored the weights of {job.graph} wider than they are, or twice: they take "
            f"{weights_bytes} bytes and the plan {plan.nbytes}; report it"
        )
    with Path(job.out).open("xb") as file:
        file.write(memoryview(plan))
    if job.timing_cache:
        _save_timing(config, Path(job.timing_cache))
    return Compiled(
        size=plan.nbytes,
        sha256=sha256_of(Path(job.out)),
        weights_bytes=weights_bytes,
        seconds=time.perf_counter() - started,
        peak_bytes=int(peak_mib() * 2**20),
        n_layers=network.num_layers,
        n_attentions=n_attentions,
    )


def _check_network(trt: Any, network: Any, job: CompileJob) -> None:
    """The parsed network has the contract's ports: what the parser lost would be missed by the first call only."""
    for count, get, expected in (
        (network.num_inputs, network.get_input, job.ports()[0]),
        (network.num_outputs, network.get_output, job.ports()[1]),
    ):
        found = tuple(_port(get(index)) for index in range(count))
        unnamed = tuple(
            TensorSpec(
                port.name, port.dtype, tuple(-1 if isinstance(size, str) else size for size in port.shape)
            )
            for port in expected
        )
        check_ports(job.graph, _without_outer(unnamed, found), found)
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        if tensor.is_shape_tensor:
            raise BackendError(f"{job.graph} computes shapes from the values of {tensor.name}; report it")


def _without_outer(expected: tuple[TensorSpec, ...], found: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """Outputs whose sizes the compiler does not know take what the contract says of them."""
    known = {port.name: port for port in found}

    def merged(port: TensorSpec) -> TensorSpec:
        own = known.get(port.name, port)
        if len(own.shape) != len(port.shape):
            return port
        sizes = tuple(
            theirs if -1 in (ours, theirs) else ours
            for ours, theirs in zip(port.shape, own.shape, strict=True)
        )
        return TensorSpec(port.name, port.dtype, sizes)

    return tuple(merged(port) for port in expected)


def _port(tensor: Any) -> TensorSpec:
    return TensorSpec(tensor.name, DTYPES.get(tensor.dtype.name, tensor.dtype.name), tuple(tensor.shape))


def _prepare_attention(trt: Any, network: Any, job: CompileJob) -> int:
    """Every fused attention has a mask and every cache is updated in place; returns how many there are.

    No engine has a fused kernel for a single new row, so each may be taken apart where it must be.
    """
    n_attentions = n_updates = 0
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type.name == "KV_CACHE_UPDATE":
            n_updates += 1
        if layer.type.name != "ATTENTION_INPUT":
            continue
        layer.__class__ = trt.IAttentionInputLayer
        attention = layer.attention
        if attention.mask is None:
            raise BackendError(f"{job.graph}: the compiler sees no mask in attention {layer.name}; report it")
        attention.decomposable = True
        n_attentions += 1
    layers = job.spec.n_layers if job.spec is not None and job.spec.graph == "native" else 0
    if (n_attentions, n_updates) != (layers, 2 * layers):
        raise BackendError(
            f"{job.graph} has {layers} layers, and the compiler sees {n_attentions} attentions and {n_updates} updated "
            "caches; report it"
        )
    return n_attentions


def _types(network: Any) -> set[str]:
    """Names of the types of all that is computed."""
    found = set()
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        for place in range(layer.num_outputs):
            tensor = layer.get_output(place)
            found.add(tensor.dtype.name)
    return found


def _weights_bytes(trt: Any, network: Any) -> int:
    """Of all constants, at the width the graph keeps them in."""
    n_bits = 0
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type.name == "CONSTANT":
            tensor = layer.get_output(0)
            n_bits += math.prod(tensor.shape) * BITS[tensor.dtype.name]
    return n_bits // 8


def _configure(trt: Any, builder: Any, job: CompileJob) -> Any:
    """Profiles, capabilities and the cache of timings; products in fp32 are fp32."""
    config = builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)
    for sizes in job.profiles.values():
        profile = builder.create_optimization_profile()
        triples = {letter: (least, tuned, most) for letter, (least, tuned, most) in sizes.items()}
        for name, shapes in input_shapes(job.ports()[0], triples).items():
            profile.set_shape(name, *shapes)
        config.add_optimization_profile(profile)
    if job.engine == "tensorrt-rtx":
        builder.max_threads = 1  # see worker.py
        config.num_compute_capabilities = len(job.capabilities)
        for index, capability in enumerate(job.capabilities):
            name = f"SM{capability.replace('.', '')}"
            config.set_compute_capability(getattr(trt.ComputeCapability, name), index)
    if job.timing_cache:
        path = Path(job.timing_cache)
        cache = config.create_timing_cache(path.read_bytes() if path.is_file() else b"")
        config.set_timing_cache(cache, False)
    return config


def _save_timing(config: Any, path: Path) -> None:
    cache = config.get_timing_cache()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_bytes(memoryview(cache.serialize()))
    partial.replace(path)


def _name(library: Library) -> str:
    return f"{library.engine} {library.version}"
