"""A run spread over a Ray cluster: its nodes measure shards with run(), the driver keeps what they send and joins it.

    shards in --out -> a node for each -> run() there, in a temporary folder -> --out/shards/<i>/ -> join

An answer is on the driver's disk a moment after it was measured; what is there is not measured again. This file
decides which node measures what; run.py measures, shards.py and join.py keep files, ray_cluster.py speaks to Ray.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from semspec.calibration.bench.join import join_into
from semspec.calibration.bench.journal import CELLS, RUN
from semspec.calibration.bench.ray_cluster import (
    Node,
    check_nodes,
    connect,
    fetch,
    find_nodes,
    remote_on,
    this_node,
)
from semspec.calibration.bench.records import Mode, Problem
from semspec.calibration.bench.run import Run, prepare, run
from semspec.calibration.bench.settings import plan_cells
from semspec.calibration.bench.shards import Shard, claim, new_shards, open_shards, read_files
from semspec.runtime.config import SamplingParams
from semspec.runtime.errors import ConfigError, SemspecError
from semspec.runtime.records import Progress

__all__ = ["run_on_ray"]

POLL_S = 1.0  # between two looks at what the nodes have sent
FAREWELL_S = 20.0  # for cancelled tasks to end by themselves: a pass over a long prompt on a slow machine


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What every node is asked: the arguments of run()."""

    bundle: Path
    problems: Sequence[Problem]
    modes: Sequence[Mode]
    sampling: SamplingParams
    limits: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _News:
    """What was added to the journal of a shard at byte `at`; with the first of it its run.json, else nothing."""

    index: int
    origin: bytes
    at: int
    cells: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """The files of a shard, and what stopped it before its end."""

    files: Mapping[str, bytes]
    error: SemspecError | None


def run_on_ray(
    bundle: Path,
    problems: Sequence[Problem],
    modes: Sequence[Mode],
    out: Path,
    sampling: SamplingParams,
    *,
    address: str,
    workers: int | None = None,
    seeds: int = 1,
    repeats: int = 1,
    backend: str = "cpu",
    threads: int | None = None,
    on_progress: Progress | None = None,
) -> Run:
    """As run, by the nodes of a Ray cluster; `out` is then the run that its shards, in out/shards, were joined to.

    address: as ray.init takes it; `local` starts a cluster of this machine. workers: shards to split the run into;
    None: those that `out` holds, else one a node. A shard takes `threads` CPUs of its node, all of them where that is
    None, so no two share a core; shards beyond that wait for their turn. The bundle must be at this path everywhere.

    Interrupted, or after an error, the same call goes on: a shard on a machine like the one it was begun on. Needs no
    cluster where all shards are finished. Raises as run and join; BackendError for a cluster or a node that is lost.
    """
    limits = {"seeds": seeds, "repeats": repeats, "backend": backend, "threads": threads}
    settings = prepare(bundle, problems, modes, sampling, shard=(1, workers or 1), **limits)
    job = _Job(bundle=bundle.absolute(), problems=problems, modes=modes, sampling=sampling, limits=limits)
    with claim(out):
        shards = open_shards(out, settings, workers)
        if not shards or not all(shard.finished for shard in shards):
            with connect(address) as ray:
                nodes = find_nodes(ray, threads, backend)
                shards = shards or new_shards(out, min(len(nodes), len(problems)))
                machines = check_nodes(ray, nodes, job.bundle, settings.bundle_sha256)
                keeper = _Keeper(shards, len(list(plan_cells(settings))), on_progress)
                _measure_all(ray, job, shards, nodes, machines, keeper)
        return join_into(out, [shard.folder for shard in shards])


class _Keeper:
    """Writes what the nodes send to the folders of the shards, and tells how much there is."""

    def __init__(self, shards: Sequence[Shard], total: int, on_progress: Progress | None) -> None:
        self._shards = {shard.index: shard for shard in shards}
        self._n_done = {shard.index: shard.n_measured for shard in shards}
        self._total, self._on_progress = total, on_progress

    def add(self, news: Sequence[_News]) -> None:
        """News of a shard come in order; late ones, of what is there already, do nothing."""
        for one in news:
            if one.origin and not self._n_done[one.index]:
                self._shards[one.index].keep({RUN: one.origin})
            if self._shards[one.index].append(one.cells, at=one.at):
                self._tell(one.index, self._n_done[one.index] + one.cells.count(b"\n"))

    def end(self, shard: Shard, node: Node, outcome: _Outcome) -> None:
        """Raises what stopped the node."""
        shard.keep(outcome.files)
        self._tell(shard.index, outcome.files.get(CELLS, b"").count(b"\n"))
        if outcome.error is not None:
            raise type(outcome.error)(f"{shard} on node {node}: {outcome.error}")

    def _tell(self, index: int, n_done: int) -> None:
        if n_done != self._n_done[index]:
            self._n_done[index] = n_done
            if self._on_progress is not None:
                self._on_progress("measuring", sum(self._n_done.values()), self._total)


def _measure_all(
    ray: Any,
    job: _Job,
    shards: Sequence[Shard],
    nodes: Sequence[Node],
    machines: Mapping[str, Mapping[str, Any]],
    keeper: _Keeper,
) -> None:
    """Measure what is unfinished. Whatever ends this, nothing runs on, and what was measured is kept."""
    waiting = sorted(
        (shard for shard in shards if not shard.finished), key=lambda shard: shard.machine is None
    )
    _check_machines(waiting, machines)
    rounds = range(max(node.slots for node in nodes))
    free = [node for turn in rounds for node in nodes if turn < node.slots]  # every node once, then again
    inbox = remote_on(ray, this_node(ray), _Inbox, cpus=0).remote()
    running: dict[Any, tuple[Shard, Node]] = {}
    try:
        while waiting or running:
            while pair := _next_pair(waiting, free, machines):
                shard, node = pair
                waiting.remove(shard)
                free.remove(node)
                there = remote_on(ray, node, _measure, cpus=node.cpus, gpus=node.gpus)
                running[there.remote(job, shard.index, shard.count, shard.files(), inbox)] = pair
            ready, _ = ray.wait(list(running), timeout=POLL_S)
            keeper.add(fetch(ray, inbox.take.remote(), "this node"))
            for answer in ready:
                shard, node = running.pop(answer)
                keeper.end(shard, node, fetch(ray, answer, f"{shard} on node {node}"))
                free.append(node)
    finally:
        with suppress(ray.exceptions.RayError):
            for answer in running:
                ray.cancel(answer)
            if running:
                ray.wait(list(running), num_returns=len(running), timeout=FAREWELL_S)
            keeper.add(ray.get(inbox.take.remote(), timeout=FAREWELL_S))


def _check_machines(waiting: Sequence[Shard], machines: Mapping[str, Mapping[str, Any]]) -> None:
    """One journal is of one machine."""
    for shard in waiting:
        if shard.machine is not None and shard.machine not in machines.values():
            facts = ", ".join(f"{name} {value}" for name, value in shard.machine.items())
            raise ConfigError(
                f"{shard.folder} was begun on another machine than the cluster has now ({facts}); add it, or remove "
                f"the folder to begin the shard again"
            )


def _next_pair(
    waiting: Sequence[Shard], free: Sequence[Node], machines: Mapping[str, Mapping[str, Any]]
) -> tuple[Shard, Node] | None:
    """A shard and a node that may measure it."""
    for shard in waiting:
        for node in free:
            if shard.machine in (None, machines[node.id]):
                return shard, node
    return None


# On the nodes


class _Inbox:
    """Where nodes leave news for the driver: an actor beside it."""

    def __init__(self) -> None:
        self._news: list[_News] = []

    def put(self, news: _News) -> None:
        self._news.append(news)

    def take(self) -> list[_News]:
        news, self._news = self._news, []
        return news


class _Post:
    """Sends what is new in a journal. n_sent: bytes that the driver has."""

    def __init__(self, inbox: Any, index: int, folder: Path, n_sent: int) -> None:
        self._inbox, self._index, self._folder, self._n_sent = inbox, index, folder, n_sent

    def __call__(self, stage: str, done: int, total: int) -> None:
        with (self._folder / CELLS).open("rb") as file:
            file.seek(self._n_sent)
            cells = file.read()
        origin = b"" if self._n_sent else (self._folder / RUN).read_bytes()
        self._inbox.put.remote(_News(index=self._index, origin=origin, at=self._n_sent, cells=cells))
        self._n_sent += len(cells)


def _measure(job: _Job, index: int, count: int, files: Mapping[str, bytes], inbox: Any) -> _Outcome:
    """Measure a shard, or go on with the one whose files are given."""
    with TemporaryDirectory(prefix="semspec-bench-") as made:
        folder, error = Path(made), None
        for name, content in files.items():
            (folder / name).write_bytes(content)
        post = _Post(inbox, index, folder, len(files.get(CELLS, b"")))
        try:
            run(
                job.bundle,
                job.problems,
                job.modes,
                folder,
                job.sampling,
                shard=(index, count),
                on_progress=post,
                **job.limits,
            )
        except SemspecError as failure:
            error = failure
        return _Outcome(files=read_files(folder), error=error)
