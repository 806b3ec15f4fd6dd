"""What a measurement was made on: processor, memory, system and versions. No names of hosts or users."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

__all__ = ["count_cores", "describe_machine"]

OURS = ("semspec", "numpy", "onnxruntime", "onnxruntime-gpu", "tokenizers", "math-verify")
PEERS = ("onnxruntime-genai", "llama-cpp-python", "torch", "transformers")


def describe_machine() -> dict[str, str | int]:
    """Facts that speeds depend on; the same at every call on an unchanged machine, after a restart too."""
    facts: dict[str, str | int] = {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": count_cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "python": platform.python_version(),
    }
    for package in (*OURS, *PEERS):
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue  # one of the two engines, a peer, or an extra that nothing here needs
    return facts


def count_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> str:
    """The processor's name for people; its architecture where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
