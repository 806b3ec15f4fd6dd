"""A Ray cluster as a benchmark needs it: connected to, its nodes found, checked, and given tasks one by one.

The one file that knows Ray, with ray_run.py. Ray runs what it is sent by pickle and without asking: connect to
clusters that you trust. Its own processes share the nodes' cores with what is measured.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from semspec import __version__
from semspec.calibration.bench.machine import describe_machine
from semspec.runtime.bundle import Bundle
from semspec.runtime.errors import BackendError, BundleError, ConfigError
from semspec.runtime.probe_set import identity_of

__all__ = [
    "Facts",
    "Node",
    "check_nodes",
    "connect",
    "describe_node",
    "fetch",
    "find_nodes",
    "remote_on",
    "this_node",
]

REPAIR = "install the same semspec there: pip install 'semspec[cpu,bench,ray]'"
CONNECT_S, CHECK_S = 5.0, 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine of the cluster. name: for people. cpus, gpus: what one shard takes; slots: shards at a time."""

    id: str
    name: str
    cpus: float
    gpus: float
    slots: int

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a node says of itself."""

    version: str
    bundle_sha256: str
    machine: Mapping[str, Any]


@contextmanager
def connect(address: str) -> Iterator[Any]:
    """The module `ray`, connected: `local` starts a cluster of this machine, which ends with the block.

    address: as ray.init takes it. Raises BackendError where no cluster answers, ConfigError for what is no address.
    """
    import ray

    _knock(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ours = {"include_dashboard": False} if address == "local" else {}
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", **ours)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"--ray {address}: {_line(error)}; give host:port, auto or local") from None
    except (OSError, RuntimeError, ray.exceptions.RayError) as error:
        raise BackendError(
            f"--ray {address}: {_line(error)}; see `ray status`, or start one: local"
        ) from None
    finally:
        if threading.current_thread() is threading.main_thread():  # Ray's own would exit with another status
            signal.signal(signal.SIGTERM, handler)
    try:
        yield ray
    finally:
        ray.shutdown()


def describe_node(bundle: Path) -> Facts | BundleError:
    """On the node: what it is, or what is wrong with its bundle."""
    try:
        found = identity_of(Bundle.open(bundle))
    except BundleError as error:
        return error
    return Facts(version=__version__, bundle_sha256=found, machine=describe_machine())


def find_nodes(ray: Any, threads: int | None, backend: str) -> list[Node]:
    """Nodes that can measure a shard: `threads` CPUs of Ray's each, all of the node's where None; with cuda a GPU.

    Raises ConfigError where none can.
    """
    nodes, seen = [], []
    gpus = 1 if backend == "cuda" else 0
    for node in sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: str(node["NodeID"])):
        has = node["Resources"]
        cpus = threads or int(has.get("CPU", 0))
        slots = int(has.get("CPU", 0) // cpus) if cpus else 0
        if gpus:
            slots = min(slots, int(has.get("GPU", 0)))
        name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
        seen.append(f"{name} has {has.get('CPU', 0):g} CPUs and {has.get('GPU', 0):g} GPUs")
        if slots:
            nodes.append(Node(id=node["NodeID"], name=name, cpus=cpus, gpus=gpus, slots=slots))
    if not nodes:
        wanted = f"{threads or 1} CPUs" + (" and a GPU" if gpus else "")
        raise ConfigError(f"no node of the cluster has {wanted} for --threads: {', '.join(seen)}")
    return nodes


def check_nodes(ray: Any, nodes: Sequence[Node], bundle: Path, sha256: str) -> dict[str, Mapping[str, Any]]:
    """Node id -> the machine it is. Raises BundleError where a node lacks the very bundle at this path, BackendError
    where it lacks this semspec."""

    def inspect(path: Path) -> Any:  # sent by value, being no module's: a node without semspec can run it
        try:
            from semspec.calibration.bench.ray_cluster import describe_node
        except ImportError as error:
            return error
        return describe_node(path)

    asked = [(node, remote_on(ray, node, inspect, cpus=0).remote(bundle)) for node in nodes]
    machines = {}
    for node, answer in asked:
        facts = fetch(ray, answer, f"node {node}")
        if isinstance(facts, ImportError):
            raise BackendError(f"node {node}: {_line(facts)}; {REPAIR}")
        if isinstance(facts, BundleError):
            raise BundleError(f"node {node}: {facts}; the bundle must be at the same path on every node")
        if facts.bundle_sha256 != sha256:
            raise BundleError(
                f"node {node} has another bundle at {bundle}, or other probes in it: sha256 "
                f"{facts.bundle_sha256[:12]} there and {sha256[:12]} here; copy it there"
            )
        if facts.version != __version__:
            raise BackendError(f"node {node} has semspec {facts.version} and this is {__version__}; {REPAIR}")
        machines[node.id] = facts.machine
    return machines


def this_node(ray: Any) -> Node:
    """Where the driver runs; nothing is measured in its name."""
    return Node(id=ray.get_runtime_context().get_node_id(), name="this node", cpus=0, gpus=0, slots=0)


def remote_on(ray: Any, node: Node, function: Callable[..., Any], *, cpus: float, gpus: float = 0) -> Any:
    """`function` (or a class) as a task of that node and no other, never tried twice; `.remote(...)` starts it."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node.id, soft=False)
    once = {"max_restarts": 0} if isinstance(function, type) else {"max_retries": 0}
    return ray.remote(num_cpus=cpus, num_gpus=gpus, scheduling_strategy=there, **once)(function)


def fetch(ray: Any, answer: Any, what: str) -> Any:
    """The value of a task. Raises BackendError where the node was lost or lacks a library; an error of the task's own
    is a bug and comes as Ray tells it."""
    try:
        return ray.get(answer, timeout=CHECK_S)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ModuleNotFoundError):
            raise BackendError(f"{what}: {_line(error.cause)}; {REPAIR}") from None
        raise
    except ray.exceptions.RayError as error:
        raise BackendError(
            f"{what} was lost ({_line(error)}); run the same command again: what was measured is kept"
        ) from None


def _knock(address: str) -> None:
    """Ray tries a dead address for two minutes, and then exits."""
    host, colon, port = address.rpartition(":")
    if "://" in address or not colon or not (port.isascii() and port.isdigit()):
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise BackendError(
            f"--ray {address}: nobody answers ({error}); start a cluster there with `ray start --head`, or give local"
        ) from None


def _line(error: BaseException) -> str:
    """The first line of a message, for Ray's go on."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].strip().rstrip(".")[:300]
