"""TensorRT-RTX where it is installed: it compiles without a GPU. Elsewhere its tests are skipped and say why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from semspec.export.engines.capability import allowed_precisions
from semspec.export.engines.compiler import Compiled, CompileJob, compile_graph
from semspec.export.engines.library import Library, open_library
from semspec.export.engines.profiles import BuildSizes, make_profiles
from semspec.export.engines.worker import SAME_ADDRESSES
from semspec.export.precisions import parse_precision
from semspec.runtime.contract import GraphSpec
from semspec.runtime.errors import BackendError

CAPABILITIES = ("8.0", "8.6", "8.9", "12.0")
VERSION = "1.7.1.116"


def _missing() -> str:
    try:
        open_library("tensorrt-rtx")
    except BackendError as error:
        return str(error)
    return ""


def _turns() -> bool:
    """Whether a process may have the same addresses each time, and its threads take turns (worker.py). Asked by another
    one, for it stays so."""
    ask = (
        "import ctypes, os; os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)); "
        f"raise SystemExit(ctypes.CDLL(None).personality(ctypes.c_ulong({SAME_ADDRESSES})) < 0)"
    )
    several = len(os.sched_getaffinity(0)) > 1
    return several and subprocess.run([sys.executable, "-c", ask], stderr=subprocess.DEVNULL).returncode == 0


needs_rtx = pytest.mark.skipif(bool(_missing()), reason=_missing())

needs_turns = pytest.mark.skipif(
    sys.platform != "linux" or not _turns(),
    reason="the system lets no process order its threads, so plans of one graph may differ (export/engines/worker.py)",
)


def library() -> Library:
    return open_library("tensorrt-rtx")


def fits(precision: str) -> tuple[str, ...]:
    """Those of CAPABILITIES that run a precision."""
    name = parse_precision(precision)[0].name
    return tuple(
        capability
        for capability in CAPABILITIES
        if name in allowed_precisions("tensorrt-rtx", VERSION, [capability])
    )


def job(
    graph: Path,
    spec: GraphSpec | None,
    out: Path,
    capabilities: tuple[str, ...] = CAPABILITIES,
    **changes: Any,
) -> CompileJob:
    """What compiles one graph. changes: fields of CompileJob."""
    given: dict[str, Any] = {
        "engine": "tensorrt-rtx",
        "graph": str(graph),
        "out": str(out),
        "capabilities": capabilities,
        "spec": spec,
        "probe": (),
        "profiles": make_profiles(spec, BuildSizes()) if spec else {},
    }
    return CompileJob(**{**given, **changes})


def compiled(
    graph: Path, spec: GraphSpec, out: Path, capabilities: tuple[str, ...] = CAPABILITIES
) -> Compiled:
    """Compile in this process."""
    return compile_graph(library(), job(graph, spec, out, capabilities))


def compiler_says(graph: Path, spec: GraphSpec, capability: str) -> str:
    """What the compiler itself has against a graph, our own rules left aside; "" where it makes a plan."""
    trt: Any = library().trt
    said: list[str] = []

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            said.append(message)

    logger = Logger()
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    assert trt.OnnxParser(network, logger).parse_from_file(str(graph)), said
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{capability.replace('.', '')}"), 0)
    sizes = {"B": 1, "S": 8, "R": 8, "T": 256}
    profile = builder.create_optimization_profile()
    for port in spec.inputs():
        shape = tuple(sizes[size] if isinstance(size, str) else size for size in port.shape)
        profile.set_shape(port.name, shape, shape, shape)
    config.add_optimization_profile(profile)
    return "" if builder.build_serialized_network(network, config) is not None else " ".join(said)
