"""Talking to another process: a JSON object a line, one question, one answer, each with a limit in seconds.

It knows pipes, limits and how a process ends; it knows no peer. A process that dies, hangs or says something else
becomes one BackendError with its name and the last line of its stderr.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any

from semspec.runtime.errors import BackendError

__all__ = ["Wire", "last_line"]

CLOSE_S = 10.0  # for a process to end by itself when nobody asks any more


class Wire:
    """A running process that answers questions. A context manager; one question at a time.

    name: what errors call it. command: what to run; its stdin and stdout are the wire, its stderr is kept for
    errors only. While nobody asks, it waits for a line and uses no processor time but what its libraries
    spend on winding down.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], cwd: Path) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        self._process = subprocess.Popen(
            command,
            cwd=cwd,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            bufsize=0,
        )
        self._heard = b""

    def __enter__(self) -> Wire:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, op: str, *, limit_s: float, **fields: Any) -> dict[str, Any]:
        """Send {"op": op, ...} and wait for the answer, an object whose "ok" is true.

        Raises BackendError: the process ended or hung (it is killed then), answered with an error, or with
        something that is no answer.
        """
        assert self._process.stdin is not None
        line = json.dumps({"op": op, **fields}).encode("ascii") + b"\n"
        try:
            self._process.stdin.write(line)
        except (BrokenPipeError, ValueError):  # ValueError: closed by an earlier error
            raise self._ended(op) from None
        answer = self._read(op, limit_s)
        if not isinstance(answer, dict) or not isinstance(answer.get("ok"), bool):
            raise self._fail(f"answered something else than JSON with `ok` to {op!r}")
        if not answer["ok"]:
            words = last_line(str(answer.get("error")).encode())
            raise BackendError(f"peer {self.name} failed at {op!r}: {words}")
        return answer

    def close(self) -> None:
        """End the process; it is killed where it does not end by itself. Safe to call twice."""
        process = self._process
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            process.wait(CLOSE_S if process.returncode is None else 0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._log.close()

    def _read(self, op: str, limit_s: float) -> Any:
        """The next line, within the limit."""
        assert self._process.stdout is not None
        deadline = monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._heard:
                if not selector.select(max(deadline - monotonic(), 0.0)):
                    self._process.kill()
                    raise self._fail(f"did not answer {op!r} within {limit_s:g} s and was ended")
                chunk = os.read(self._process.stdout.fileno(), 1 << 20)
                if not chunk:
                    raise self._ended(op)
                self._heard += chunk
        line, _, self._heard = self._heard.partition(b"\n")
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            return None

    def _ended(self, op: str) -> BackendError:
        try:
            status = self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        how = f"of signal {_signal_name(-status)}" if status < 0 else f"with status {status}"
        return self._fail(f"ended {how} at {op!r}")

    def _fail(self, what: str) -> BackendError:
        if self._log.closed:
            return BackendError(f"peer {self.name} is closed")
        self._log.seek(0)
        return BackendError(f"peer {self.name} {what}; it last said: {last_line(self._log.read())}")


def last_line(log: bytes) -> str:
    """The last line that says something, fit for one line of a message; `(nothing)` where there is none."""
    lines = [line.strip() for line in log.decode("utf-8", "replace").splitlines() if line.strip()]
    text = "".join(char if char.isprintable() else "?" for char in lines[-1]) if lines else "(nothing)"
    return text if len(text) <= 300 else f"{text[:297]}..."


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
