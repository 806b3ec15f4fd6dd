"""How much memory a build takes and a plan needs, told before either: estimates from measured builds.

Measured with TensorRT-RTX 1.7 on a CPU, the most that a build held: 3.1 to 3.7 times the weights, 260 MiB, and for each
layer of a real model 6 to 12 MiB in native graphs, 11 to 18 in primitive ones, which have more nodes. Full TensorRT was
not measured; its kernels are timed on the device, so there what the plan needs to run is added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from semspec.export.engines.capability import PRECISIONS
from semspec.export.engines.device import Device
from semspec.export.engines.profiles import Profiles
from semspec.runtime.contract import GraphSpec
from semspec.runtime.errors import BackendError

__all__ = ["MemoryNeed", "check_memory", "free_bytes", "memory_need"]

BASE, FACTOR = 400 << 20, 3.5
LAYER: Mapping[str, int] = {"native": 14 << 20, "primitive": 20 << 20}
KERNELS = 48 << 20
WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """Bytes. weights: of the graph. build: of the process that compiles it, at its peak. run: of the plan with its
    cache and its working memory, on the device."""

    weights: int
    build: int
    run: int


def memory_need(spec: GraphSpec | None, weights_bytes: int, profiles: Profiles) -> MemoryNeed:
    """spec: of a model's graph, None for a probe's."""
    run, build = weights_bytes + KERNELS, BASE + int(FACTOR * weights_bytes)
    if spec is not None:
        most = {
            letter: max(profile[letter][2] for profile in profiles.values()) for letter in ("B", "S", "R")
        }
        row = spec.n_kv_heads * spec.head_size
        cache = 2 * spec.n_layers * row * spec.capacity * most["B"] * WIDTHS[spec.cache]
        logits = most["B"] * most["R"] * spec.vocab_size * (WIDTHS[spec.activation] + 8)  # and twice in fp32
        states = most["B"] * most["S"] * spec.width * 16 * WIDTHS[spec.activation]
        run += cache + logits + states
        build += LAYER[spec.graph] * spec.n_layers
    return MemoryNeed(weights=weights_bytes, build=build, run=run)


def check_memory(
    what: str,
    need: MemoryNeed,
    precision: str,
    allowed: Iterable[str],
    device: Device | None,
    free: int | None,
) -> None:
    """Refuse a build that would be ended for want of memory. what: graph and bundle, for the message. allowed: the
    precisions that run on the device, most exact first. device: where kernels are timed during the build, None where on
    none. free: bytes, None where unknown.

    Raises BackendError naming both numbers and what would fit.
    """
    if device is not None and need.run > device.n_bytes:
        raise BackendError(
            f"{what} needs about {_gib(need.run)} on {device.name}, which has {_gib(device.n_bytes)}; fits: "
            f"{_fitting(need, precision, allowed, device.n_bytes, build=False)}"
        )
    extra = need.run if device is not None and device.shared else 0
    if free is not None and need.build + extra > free:
        raise BackendError(
            f"building {what} needs about {_gib(need.build + extra)} of memory and {_gib(free)} are free; fits: "
            f"{_fitting(need, precision, allowed, free - extra, build=True)}; or free some, or build anyway with "
            f"--ignore-memory"
        )


def free_bytes() -> int | None:
    """Memory that can still be had, the limit of a container included; None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None
    limit = _container_bytes()
    return free if limit is None else min(free, limit)


def _container_bytes() -> int | None:
    """What a version 2 control group leaves: its limit less what is held and cannot be dropped."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = int((folder / "memory.max").read_text(encoding="ascii"))
        held = int((folder / "memory.current").read_text(encoding="ascii"))
        statistics = dict(
            line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines()
        )
        return max(limit - held + int(statistics["inactive_file"]), 0)
    except (OSError, ValueError, KeyError):  # no such group, or `max`: no limit
        return None


def _fitting(need: MemoryNeed, precision: str, allowed: Iterable[str], free: int, *, build: bool) -> str:
    """Precisions, by what their weights would take in place of these."""

    def wanted(name: str) -> float:
        weights = need.weights * PRECISIONS[name].bits / PRECISIONS[precision].bits
        saved = need.weights - weights
        return need.build - FACTOR * saved if build else need.run - saved

    fitting = [name for name in allowed if name != precision and wanted(name) <= free]
    if fitting:
        return f"the same model exported in {' or '.join(fitting)}"
    return "no precision of this model, only a smaller one, or another machine"


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.1f} GiB"
