"""What a compiler says while it works: messages kept for errors, phases as progress."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from semspec.runtime.errors import BackendError

__all__ = ["Messages", "Phases", "make_logger", "make_monitor"]

KEPT = ("INTERNAL_ERROR", "ERROR", "WARNING")
UNUSED = "unused input"
STEPS = 1000  # of a progress bar
_loggers: dict[str, Any] = {}  # module name -> its logger


@dataclass(slots=True)
class Messages:
    """Severity name and text of each warning and error."""

    said: list[tuple[str, str]] = field(default_factory=list)

    def refuse_unused(self, graph: str) -> None:
        """Raises BackendError where the compiler has no use for an input: it did not understand what reads it."""
        for _, text in self.said:
            if UNUSED in text.lower():
                raise BackendError(
                    f"the compiler does not use an input of {graph} ({text.strip()}); report it"
                )

    def errors(self) -> str:
        """All that was an error."""
        return "; ".join(text for severity, text in self.said if severity != "WARNING")

    @staticmethod
    def line(text: str) -> str:
        """One line of at most 400 characters; a compiler that failed without a word gets one."""
        joined = " ".join(text.split()) or "it gave no reason"
        return joined if len(joined) <= 400 else f"{joined[:396]} ..."


class Phases:
    """Nested phases as one share of the whole: a child counts as one step of its parent. Any thread may tell."""

    def __init__(self, on_progress: Callable[[int, int], None] | None) -> None:
        self._on_progress = on_progress
        self._phases: dict[str, tuple[str | None, int, int]] = {}  # name -> parent, steps, done
        self._shown = -1
        self._lock = threading.Lock()

    def start(self, name: str, parent: str | None, steps: int) -> None:
        with self._lock:
            self._phases[name] = (parent, max(steps, 1), 0)

    def step(self, name: str, done: int) -> None:
        """done: number of the step that is complete, from 0."""
        with self._lock:
            if name in self._phases:
                parent, steps, _ = self._phases[name]
                self._phases[name] = (parent, steps, min(done + 1, steps))
                self._tell()

    def finish(self, name: str) -> None:
        with self._lock:
            self._phases.pop(name, None)

    def _whole(self) -> float:
        """0..1 of the outermost phase."""
        return max(
            (self._share(name) for name, phase in self._phases.items() if phase[0] is None), default=0.0
        )

    def _share(self, name: str) -> float:
        _, steps, done = self._phases[name]
        inner = max(
            (self._share(child) for child, phase in self._phases.items() if phase[0] == name), default=0.0
        )
        return min((done + inner) / steps, 1.0)

    def _tell(self) -> None:
        done = int(STEPS * self._whole())
        if self._on_progress and done > self._shown:
            self._shown = done
            self._on_progress(done, STEPS)


def make_logger(trt: Any, messages: Messages) -> Any:
    """A logger of the engine that keeps warnings and errors in `messages`, and prints nothing.

    One for all: an engine listens to the first that a process gives it, and to no other.
    """
    if trt.__name__ not in _loggers:
        _loggers[trt.__name__] = _new_logger(trt)
    logger = _loggers[trt.__name__]
    logger.messages = messages
    return logger


def _new_logger(trt: Any) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]
        messages = Messages()

        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity.name in KEPT:
                self.messages.said.append((severity.name, message))

    return Logger()


def make_monitor(trt: Any, on_progress: Callable[[int, int], None] | None) -> Any:
    """A monitor of the engine that never stops it: a build is stopped by ending its process."""
    phases = Phases(on_progress)

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            phases.start(phase_name, parent_phase, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            phases.step(phase_name, step)
            return True

        def phase_finish(self, phase_name: str) -> None:
            phases.finish(phase_name)

    return Monitor()
