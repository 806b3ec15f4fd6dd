"""Ledger and Summary, on a clock that the test winds."""

from __future__ import annotations

import dataclasses
import doctest
import json

import pytest

from semspec.runtime import stats
from semspec.runtime.stats import Ledger


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_docstring_example_holds() -> None:
    """The worked example is executed, so it cannot drift from the code."""
    result = doctest.testmod(stats)
    assert result.attempted and not result.failed


def test_first_token_and_rate_are_told_apart() -> None:
    """A long prompt must not hide in the time per token, nor decoding in the time to the first token."""
    clock = Clock()
    ledger = Ledger(clock=clock)
    ledger.add_prompt(7)
    clock.now += 2.0
    ledger.add_generated(1)
    clock.now += 1.0
    ledger.add_generated(4)  # one accepted segment
    clock.now += 50.0  # the reader takes its time: no token, no cost
    summary = ledger.summary()
    assert (summary.prompt_tokens, summary.generated_tokens) == (7, 5)
    assert (summary.ttft_ms, summary.tpot_ms) == (2000.0, 250.0)
    assert summary.tokens_per_second == pytest.approx(5 / 3)


def test_nothing_generated_has_no_times() -> None:
    """No division by zero, and no 0 ms that would look like a measurement (D15)."""
    ledger = Ledger()
    ledger.add_generated(0)
    summary = ledger.summary()
    assert (summary.ttft_ms, summary.tpot_ms, summary.tokens_per_second) == (None, None, 0.0)


def test_one_token_has_no_time_per_token() -> None:
    """The first token's time is the prompt's."""
    ledger = Ledger()
    ledger.add_generated(1)
    assert ledger.summary().ttft_ms is not None and ledger.summary().tpot_ms is None


def test_phases_add_up_also_when_they_fail() -> None:
    """An interrupted review was still paid for."""
    clock = Clock()
    ledger = Ledger(clock=clock)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), ledger.time("review"):
            clock.now += 0.5
            raise KeyboardInterrupt
    with ledger.time("draft"):
        clock.now += 0.25
    assert list(ledger.summary().phase_ms.items()) == [("review", 1000.0), ("draft", 250.0)]


def test_summary_is_a_snapshot_and_goes_into_json() -> None:
    """Summaries are kept and reported while the request goes on."""
    ledger = Ledger()
    with ledger.time("prefill"):
        pass
    before = ledger.summary()
    with ledger.time("decode"):
        ledger.add_generated(3)
    assert list(before.phase_ms) == ["prefill"] and before.generated_tokens == 0
    assert json.loads(json.dumps(dataclasses.asdict(before)))["generated_tokens"] == 0
