"""Work shared out: several workers at it at once, each in a thread of its own, for as long as its Budget allows.

Engines compute outside of Python's lock, so threads are enough. It knows neither models nor files.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar

from semspec.runtime.errors import ConfigError

__all__ = ["Budget", "share_out"]

logger = logging.getLogger(__name__)

Worker = TypeVar("Worker")
Item = TypeVar("Item")
Result = TypeVar("Result")


class Budget:
    """Minutes for pieces of work of unknown length, by `clock` from now on; None: as long as it takes."""

    def __init__(self, minutes: float | None, clock: Callable[[], float]) -> None:
        """Raises ConfigError for no minutes."""
        if minutes is not None and not minutes > 0:
            raise ConfigError(f"the budget must be more than 0 minutes, got {minutes}")
        self._seconds, self._clock = None if minutes is None else 60 * minutes, clock
        self._started, self._longest = clock(), 0.0

    def begin(self) -> float | None:
        """When a piece begins; None where it might not be ready in time, by the longest so far."""
        now = self._clock()
        late = self._seconds is not None and now - self._started + self._longest > self._seconds
        return None if late else now

    def end(self, began: float) -> None:
        """A piece is ready that began then."""
        self._longest = max(self._longest, self._clock() - began)


def share_out(
    workers: Sequence[Worker], groups: Iterable[Sequence[Item]], do: Callable[[Worker, Item], Result]
) -> Generator[tuple[Item, Result], None, None]:
    """`do(worker, item)` for every item; each with what it gave, in the order in which they are done.

    The items of a group are done one after another by one worker, groups by whichever is free. A generator: close it to
    end early. Ended early or by an error in `do`, which is raised here, it waits until no worker is at anything, and
    what was done but not taken is lost. Whoever ends it early, as by Ctrl-C, is told in the log what it waits for.
    """
    todo, over = deque(groups), threading.Event()
    done: SimpleQueue[tuple[Item, Result] | Future[None]] = SimpleQueue()

    def work(worker: Worker) -> None:
        while todo and not over.is_set():
            try:
                group = todo.popleft()
            except IndexError:  # another worker was faster
                return
            for item in group:
                if over.is_set():
                    return
                done.put((item, do(worker, item)))

    with ThreadPoolExecutor(len(workers)) as pool:
        try:
            for worker in workers:
                pool.submit(work, worker).add_done_callback(done.put)
            at_work = len(workers)
            while at_work:
                found = done.get()
                if isinstance(found, Future):
                    at_work -= 1
                    found.result()  # raises what `do` raised
                else:
                    yield found
        except (KeyboardInterrupt, GeneratorExit):
            logger.warning("stopping: what is being worked on is finished first, which may take some seconds")
            raise
        finally:
            over.set()
