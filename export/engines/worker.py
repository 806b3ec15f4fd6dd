"""A process that compiles one graph: a job as JSON on its input, a line of JSON for each thing that it has to say.

    {"progress": [done, total]}                             while it works
    {"compiled": {...}}  or  {"error": ..., "kind": ...}    at its end

A build holds several times its weights in memory, does not hear an interruption, and is ended by the system where
memory is short: in a process of its own it leaves nothing behind, and its end is no end of ours.

TensorRT-RTX orders what it compiles by addresses and by which of its threads comes first, which the system deals anew
to every process: plans of one graph differ from build to build, the nearest in 16 of 9.5 million bytes (entries of
lists that changed places), others in 15 thousand. So the process fixes both, where the system lets it (Linux; for the
threads, the right to a real-time class, as root has): addresses are not random, paths are equally long wherever a
bundle lies, and threads take turns on one core. Measured with 1.7 on a busy machine, one graph of a tiny model, from
folders of other names: 16 of 16 builds alike, twice; 6 of 8 where a turn ends after 100 ms. Unaided, of another graph,
none to three of four were alike. Elsewhere what is promised is that a bundle is not compiled twice (shelf.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from semspec.export.engines.compiler import Compiled, CompileJob, compile_graph
from semspec.export.engines.library import open_library
from semspec.runtime.errors import BackendError, BundleError, ConfigError, SemspecError
from semspec.runtime.typed import plain, read_typed

__all__ = ["compile_apart", "main"]

MODULE = "semspec.export.engines.worker"
ALIKE = "alike"
SAME_ADDRESSES = 0x0040000  # ADDR_NO_RANDOMIZE of Linux's personality()
PATIENCE = 600.0  # seconds that threads take turns for; nobody has been seen to wait for another that long
SAME_HASHES = {"PYTHONHASHSEED": "0"}
KINDS = {kind.__name__: kind for kind in (BackendError, BundleError, ConfigError)}


def compile_apart(job: CompileJob, on_progress: Callable[[int, int], None] | None = None) -> Compiled:
    """compile_graph in a process of its own, which does not outlive this call, however it ends.

    Raises what compile_graph raises, and BackendError where the process was killed or broke.
    """
    alike = job.engine == "tensorrt-rtx" and sys.platform == "linux"
    command = [sys.executable, "-m", MODULE, *([ALIKE] if alike else [])]
    with _renamed(job) if alike else contextlib.nullcontext(job) as asked, tempfile.TemporaryFile() as log:
        worker = subprocess.Popen(
            command, env=os.environ | SAME_HASHES, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        )
        patience = threading.Timer(PATIENCE, _calm, [worker.pid])
        try:
            if alike:
                patience.start()
            ending = _ask(worker, asked, on_progress)
            status = worker.wait()
        finally:
            patience.cancel()
            worker.kill()
            worker.wait()
        if "error" in ending:
            raise KINDS[ending["kind"]](ending["error"].replace(asked.graph, job.graph))
        if "compiled" not in ending:
            raise BackendError(_broken(job, status, log))
    compiled: Compiled = read_typed(Compiled, ending["compiled"], "compiled")
    return compiled


@contextlib.contextmanager
def _renamed(job: CompileJob) -> Iterator[CompileJob]:
    """The same files by paths that are as long for every bundle, for as long as the context lasts."""
    graph, out = Path(job.graph), Path(job.out)
    with tempfile.TemporaryDirectory() as folder:
        places = {name: Path(folder, name) for name in ("graph", "out")}
        for place, file in zip(places.values(), (graph, out), strict=True):
            place.symlink_to(file.absolute().parent, target_is_directory=True)
        yield replace(job, graph=str(places["graph"] / graph.name), out=str(places["out"] / out.name))


def main(*, alike: bool = False) -> None:
    """The process itself. alike: plans of one graph are to be alike to the byte.

    What the engine's own libraries print goes to its errors, never among the answers.
    """
    if alike:
        _start_over()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(**line: Any) -> None:
        answers.write(json.dumps(line) + "\n")
        answers.flush()

    try:
        job: CompileJob = read_typed(CompileJob, json.load(sys.stdin), "job")
        library = open_library(job.engine)
        compiled = compile_graph(library, job, lambda done, total: say(progress=[done, total]))
    except SemspecError as error:
        say(error=str(error), kind=next(name for name, kind in KINDS.items() if isinstance(error, kind)))
    else:
        say(compiled=plain(compiled))


def _start_over() -> None:
    """The same program again, as it is each time: same addresses, and threads that take turns on one core. Where the
    system does not let it, go on without. Linux."""
    personality = ctypes.CDLL(None).personality
    now = personality(ctypes.c_ulong(0xFFFFFFFF))
    if now < 0 or now & SAME_ADDRESSES or personality(ctypes.c_ulong(now | SAME_ADDRESSES)) < 0:
        return
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[os.getpid() % len(cores)]})
    _take_turns(alone=len(cores) == 1)
    os.execv(sys.executable, [sys.executable, "-m", MODULE])


def _take_turns(*, alone: bool) -> None:
    """A thread runs until it waits, whatever else the machine does; where the system allows that to nobody, or there is
    one core for all, as the system sees fit."""
    turns = os.SCHED_BATCH if alone else os.SCHED_FIFO
    try:
        os.sched_setscheduler(0, turns, os.sched_param(os.sched_get_priority_min(turns)))
    except PermissionError:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _calm(pid: int) -> None:
    """End the turns of a process: a thread that waits for another without sleeping would wait for ever."""
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):  # it has ended
            os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))


def _ask(
    worker: subprocess.Popen[bytes], job: CompileJob, on_progress: Callable[[int, int], None] | None
) -> dict[str, Any]:
    """Its last word; {} where it had none."""
    assert worker.stdin is not None and worker.stdout is not None
    ending: dict[str, Any] = {}
    with worker.stdout as answers:
        with contextlib.suppress(BrokenPipeError), worker.stdin as questions:  # broken: it died at once
            questions.write(json.dumps(plain(job)).encode())
        for line in answers:
            said = json.loads(line)
            if "progress" not in said:
                ending = said
            elif on_progress:
                on_progress(*said["progress"])
    return ending


def _broken(job: CompileJob, status: int, log: IO[bytes]) -> str:
    if status == -9:
        return (
            f"building {job.graph} was killed by the system, most likely for want of memory; free some, export in "
            f"fewer bits, or build on another machine"
        )
    log.seek(0)
    lines = log.read().decode("utf-8", "replace").strip().splitlines() or ["it said nothing"]
    return f"building {job.graph} broke with status {status}: {lines[-1][:300]}"


if __name__ == "__main__":
    main(alike=ALIKE in sys.argv)
