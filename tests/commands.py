"""The commands as a user runs them: another process, another folder, its stdout, stderr and status."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ENTRY = {"semspec": "main", "semspec-export": "export_main"}  # functions of semspec.cli, as in pyproject
LIMIT_S = 300


class Done(NamedTuple):
    """status: as a shell shows it, but minus the number for a process that died of a signal."""

    status: int
    out: str
    err: str


def run(
    command: str,
    *arguments: object,
    cwd: Path,
    stdin: str | bytes = "",
    without: Sequence[str] = (),
    **environment: str,
) -> Done:
    """Run `command` (semspec or semspec-export) in the folder `cwd`, which had better be empty.

    without: modules that cannot be imported. environment: variables to change.
    """
    given = stdin.encode("utf-8") if isinstance(stdin, str) else stdin
    with start(command, *arguments, cwd=cwd, without=without, **environment) as process:
        return finish(process, given)


def finish(process: subprocess.Popen[bytes], stdin: bytes = b"") -> Done:
    """Wait for the end of it; killed after LIMIT_S."""
    try:
        out, err = process.communicate(stdin, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return Done(process.returncode, (out or b"").decode("utf-8"), err.decode("utf-8"))


def start(
    command: str, *arguments: object, cwd: Path, without: Sequence[str] = (), **environment: str
) -> subprocess.Popen[bytes]:
    """The same, still running. SIGINT reaches it also where the tests themselves run in the background."""
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"sys.modules.update(dict.fromkeys({list(without)!r})); sys.argv[0] = {command!r}; "
        f"from semspec.cli import {ENTRY[command]} as main; main()"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "COLUMNS": "80", "NO_COLOR": "1", "PYTHONSAFEPATH": "1", **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def one_line(done: Done, status: int) -> str:
    """The message of a failure of ours: one line on stderr, nothing on stdout, no traceback."""
    assert (done.status, done.out) == (status, ""), done
    assert done.err.endswith("\n") and done.err.count("\n") == 1, done.err
    return done.err.rstrip("\n")
