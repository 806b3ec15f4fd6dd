"""The machine: its GPU, driver and packages, and whether a backend can do on it all that the smallest graph needs."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from gpu.rig import compile_plan

from semspec.calibration.bench.machine import describe_machine
from semspec.export.engines.capability import graphs_for
from semspec.export.engines.device import find_device
from semspec.export.engines.profiles import PROBE_PROFILES
from semspec.export.writer import GraphBuilder
from semspec.runtime.backends import open_backend
from semspec.runtime.contract import probe_ports
from semspec.runtime.errors import BackendError

__all__ = ["describe", "try_backend"]

PACKAGES = (
    "onnx",
    "ml-dtypes",
    "cuda-bindings",
    "tensorrt",
    "tensorrt-rtx",
    "tensorrt-cu12",
    "tensorrt-cu13",
)
# what says how fast the device is allowed to be, where there is such a tool or file
TOOLS = {
    "nvidia-smi": (
        "--query-gpu=name,driver_version,memory.total,power.limit,clocks.max.sm,clocks.max.memory",
        "--format=csv,noheader",
    ),
    "nvpmodel": ("-q",),
}
JETSON = Path("/etc/nv_tegra_release")
N_SIGNALS = 4


def describe() -> dict[str, Any]:
    """Facts that all figures depend on. device: None where there is no NVIDIA driver, or no GPU behind it."""
    device = find_device()
    machine = describe_machine()
    for package in PACKAGES:
        try:
            machine[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue  # most are missing on most machines
    says = {tool: said for tool, arguments in TOOLS.items() if (said := _ask(tool, arguments))}
    if JETSON.is_file():
        says[str(JETSON)] = JETSON.read_text(encoding="utf-8", errors="replace").strip().splitlines()[0]
    return {"device": None if device is None else asdict(device), "machine": machine, "says": says}


def try_backend(name: str, folder: Path) -> dict[str, Any]:
    """Compile where the backend wants plans, open, run, read back; returns release, graphs and capability.

    Raises ConfigError for an unknown backend, and BackendError: missing, refused by the device, or wrong in its sum.
    """
    backend = open_backend(name)
    file = _sum_graph(folder / "sum.onnx")
    facts: dict[str, Any] = {"graphs": [name]}
    if backend.plans is not None:
        compile_plan(name, file, folder / "sum.plan", None, PROBE_PROFILES, probe=(0, 0, N_SIGNALS))
        file = folder / "sum.plan"
        facts = asdict(backend.plans) | {"graphs": list(graphs_for(name, backend.plans.version))}
    session = backend.open(file)
    try:
        signals = np.arange(2 * N_SIGNALS, dtype=np.float32).reshape(2, N_SIGNALS)
        found = session.run({"signals": signals}, ["score"])["score"].numpy()
        if not np.allclose(found, signals.sum(axis=1)):
            raise BackendError(f"backend {name!r} sums {signals.tolist()} to {found.tolist()}")
    finally:
        session.close()
    return facts


def _sum_graph(path: Path) -> Path:
    """A probe without states that adds up its signals."""
    builder = GraphBuilder("sum")
    inputs, outputs = probe_ports(0, 0, N_SIGNALS)
    builder.inputs(inputs)
    builder.outputs(outputs)
    axis = builder.constant("axis", np.array([1], np.int64))
    builder.node("ReduceSum", ["signals", axis], "score", keepdims=0)
    builder.save(path, {})
    return path


def _ask(tool: str, arguments: tuple[str, ...]) -> str:
    """What it prints; "" where there is no such tool, or it has nothing to say."""
    path = shutil.which(tool)
    if path is None:
        return ""
    try:
        done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
