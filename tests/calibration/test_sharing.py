"""Work shared out to threads: everything once, groups in order, errors raised where the work was given out."""

from __future__ import annotations

import threading
from contextlib import closing
from time import sleep

import pytest

from semspec.calibration.sharing import share_out

GROUPS = [[(group, place) for place in range(group % 3)] for group in range(40)]


def test_every_item_is_done_once_and_those_of_a_group_in_order() -> None:
    """A question's contexts go on from one another."""
    log: dict[int, list[int]] = {}
    found = dict(share_out("ab", GROUPS, lambda worker, item: log.setdefault(item[0], []).append(item[1])))
    assert sorted(found) == [item for group in GROUPS for item in group]
    assert log == {group: list(range(group % 3)) for group in range(40) if group % 3}


def test_workers_are_at_it_at_once() -> None:
    """Each waits for the other here: one after the other would never end."""
    both = threading.Barrier(2, timeout=20)
    found = list(share_out("ab", [["x"], ["y"]], lambda worker, item: both.wait() >= 0 and worker))
    assert {worker for _, worker in found} == {"a", "b"}


def test_an_error_is_raised_here_and_ends_the_work() -> None:
    """A full disk, an engine that fails: one line for the user, not a thread's traceback."""
    done, before = [], threading.active_count()

    def do(worker: str, item: int) -> int:
        if item == 3:
            raise ValueError(f"item {item}")
        done.append(item)
        sleep(0.001)  # or it would be over before anybody looks
        return item

    with pytest.raises(ValueError, match="item 3"):
        list(share_out("ab", [[item] for item in range(10_000)], do))
    assert 3 not in done and len(done) < 10_000
    assert threading.active_count() == before


def test_who_stops_taking_ends_the_work(caplog: pytest.LogCaptureFixture) -> None:
    """A budget or Ctrl-C: nobody goes on in the background, and who waits is told why, once."""
    done, before = [], threading.active_count()
    with closing(
        share_out("a", [[item] for item in range(10_000)], lambda _, item: done.append(sleep(0.001)))
    ) as found:
        next(found)
    n = len(done)
    assert n < 10_000 and threading.active_count() == before
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["stopping"]


def test_work_that_is_done_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is said where there is nothing to wait for, or an error says it."""
    with closing(share_out("ab", GROUPS, lambda _, item: item)) as found:
        assert len(list(found)) == 39
    with pytest.raises(ZeroDivisionError):
        list(share_out("ab", [[0]], lambda _, item: 1 // item))
    assert not caplog.records
