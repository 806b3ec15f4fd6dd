"""Findings: what the steps of run.sh saw, as JSON lines in one file, written as they come.

A step that is killed leaves what it had. It knows the file; what a finding means is told by who adds and who reads it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["REFUSED", "Findings", "NotHere", "not_here", "read_findings", "run_step", "shorten"]

REFUSED = 3  # exit status of a step that cannot be done here, and says why


class NotHere(Exception):
    """A step cannot be done on this machine; the message says why. It is no failure."""


@contextmanager
def not_here(*errors: type[Exception]) -> Iterator[None]:
    """Inside, these errors mean just that."""
    try:
        yield
    except errors as error:
        raise NotHere(str(error)) from error


class Findings:
    """Of one step. path: of all steps, which come one after the other."""

    def __init__(self, path: Path, step: str) -> None:
        self.path, self.step = path, step

    def add(self, **facts: Any) -> None:
        """One more. Raises ValueError for a number that JSON does not have, such as NaN: nothing is written then."""
        line = json.dumps(shorten({"step": self.step, **facts}), allow_nan=False)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"\n{line}\n")  # a line that a kill cut short is ended first


def shorten(value: Any) -> Any:
    """Numbers with six digits, more than any clock or engine gives; all else as it is."""
    if isinstance(value, dict):
        return {key: shorten(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shorten(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def read_findings(path: Path) -> list[dict[str, Any]]:
    """All of them, in order. A line that was cut short by a kill is a finding too."""
    found: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line:
            continue
        try:
            found.append(json.loads(line))
        except ValueError:
            found.append({"step": "findings", "failed": f"a line was cut short: {line[:80]}"})
    return found


def run_step(findings: Findings, body: Callable[[Findings], None]) -> str:
    """Do `body`; returns why it cannot be done here, "" where it was done. Any other error is added, and raised."""
    try:
        body(findings)
    except NotHere as reason:
        findings.add(refused=str(reason))
        return str(reason)
    except Exception as error:
        first = (str(error).strip() or "no message").splitlines()[0]
        findings.add(failed=f"{type(error).__name__}: {first}")
        raise
    return ""
