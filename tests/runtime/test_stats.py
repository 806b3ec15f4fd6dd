"""Ledger and Summary, on a clock that the test winds."""

from __future__ import annotations

import dataclasses
import doctest
import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semspec.runtime import stats
from semspec.runtime.stats import Ledger, peak_mib


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
    ledger.add_round(drafted=0, accepted=0, emitted=1)
    clock.now += 1.0
    ledger.add_round(drafted=4, accepted=3, emitted=4)
    clock.now += 50.0  # the reader takes its time: no token, no cost
    summary = ledger.summary()
    assert (summary.prompt_tokens, summary.generated_tokens) == (7, 5)
    assert (summary.ttft_ms, summary.tpot_ms) == (2000.0, 250.0)
    assert summary.tokens_per_second == pytest.approx(5 / 3)


def test_tokens_of_the_first_round_came_with_the_prompt() -> None:
    """Five tokens at once took no time of their own: the time per token is that of the later ones."""
    clock = Clock()
    ledger = Ledger(clock=clock)
    clock.now += 2.0
    ledger.add_round(drafted=4, accepted=4, emitted=5)
    assert ledger.summary().tpot_ms is None
    clock.now += 1.0
    ledger.add_round(drafted=4, accepted=1, emitted=2)
    assert ledger.summary().tpot_ms == 500.0


def test_nothing_generated_has_no_times_and_no_rates() -> None:
    """No division by zero, and no 0 that would look like a measurement (D15)."""
    summary = Ledger().summary()
    assert (summary.ttft_ms, summary.tpot_ms, summary.tokens_per_second) == (None, None, 0.0)
    assert (summary.draft_acceptance_rate, summary.mean_acceptance_length) == (None, None)
    assert (summary.num_rounds, summary.num_drafts, summary.acceptance_lengths) == (0, 0, ())


def test_one_token_has_no_time_per_token() -> None:
    """The first token's time is the prompt's."""
    ledger = Ledger()
    ledger.add_round(drafted=0, accepted=0, emitted=1)
    assert ledger.summary().ttft_ms is not None and ledger.summary().tpot_ms is None


def test_acceptance_is_counted_as_by_hand() -> None:
    """D15: 3 of 4, 0 of 4, 4 of 4, then the end token at place 2 of 4: two looked at and kept, none for free."""
    ledger = Ledger()
    for accepted in (3, 0, 4):
        ledger.add_round(drafted=4, accepted=accepted, emitted=accepted + 1)
    ledger.add_round(drafted=2, accepted=2, emitted=2)
    summary = ledger.summary()
    assert (summary.num_rounds, summary.num_drafts) == (4, 4)
    assert (summary.num_draft_tokens, summary.num_accepted_draft_tokens) == (14, 9)
    assert summary.generated_tokens == 12
    assert summary.draft_acceptance_rate == 9 / 14
    assert summary.mean_acceptance_length == 3.0
    assert summary.acceptance_lengths == (1, 0, 1, 1, 1)


def test_rounds_without_a_draft_are_rounds_but_no_rejections() -> None:
    """D08, D15: plain decoding has length 1 and no acceptance rate; a draft that stops lowers the length only."""
    ledger = Ledger()
    for _ in range(3):
        ledger.add_round(drafted=0, accepted=0, emitted=1)
    plain = ledger.summary()
    assert (plain.draft_acceptance_rate, plain.mean_acceptance_length) == (None, 1.0)
    assert (plain.num_rounds, plain.num_drafts, plain.acceptance_lengths) == (3, 0, ())
    ledger.add_round(drafted=2, accepted=2, emitted=3)
    mixed = ledger.summary()
    assert (mixed.draft_acceptance_rate, mixed.mean_acceptance_length) == (1.0, 1.5)
    assert (mixed.num_rounds, mixed.num_drafts, mixed.acceptance_lengths) == (4, 1, (0, 0, 1))


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.lists(st.integers(0, 6).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), max_size=20))
def test_histogram_adds_up_to_the_counts(rounds: list[tuple[int, int]]) -> None:
    """D15: one number, three ways; and the free token is in none of them."""
    ledger = Ledger()
    for drafted, accepted in rounds:
        ledger.add_round(drafted=drafted, accepted=accepted, emitted=accepted + 1)
    summary = ledger.summary()
    lengths = summary.acceptance_lengths
    assert sum(lengths) == summary.num_drafts == sum(drafted > 0 for drafted, _ in rounds)
    assert sum(n * times for n, times in enumerate(lengths)) == summary.num_accepted_draft_tokens
    assert (
        summary.num_accepted_draft_tokens <= summary.num_draft_tokens == sum(drafted for drafted, _ in rounds)
    )
    assert summary.generated_tokens == summary.num_accepted_draft_tokens + summary.num_rounds
    assert not lengths or lengths[-1] > 0


def test_segments_and_lossy_tokens_are_counted_as_by_hand() -> None:
    """A segment of 20 kept whole, one of 4 thrown away, a token of the target's, a question: by segment half is kept,
    by tokens 20 of 24; a question is a pass that writes nothing."""
    ledger = Ledger()
    empty = ledger.summary()
    assert (empty.semantic_acceptance_rate, empty.lossy_token_fraction) == (None, None)
    ledger.add_segment(20, kept=True)
    ledger.add_round(drafted=20, accepted=20, emitted=20, lossy=18)
    ledger.add_segment(4, kept=False)
    ledger.add_question()
    ledger.add_round(drafted=4, accepted=0, emitted=1)
    ledger.add_round(drafted=0, accepted=0, emitted=1)
    summary = ledger.summary()
    assert (summary.num_segments, summary.num_accepted_segments) == (2, 1)
    assert (summary.semantic_acceptance_rate, summary.draft_acceptance_rate) == (0.5, 20 / 24)
    assert (summary.num_segment_tokens, summary.num_accepted_segment_tokens) == (24, 20)
    assert (summary.num_lossy_tokens, summary.lossy_token_fraction) == (18, 18 / 22)
    assert (summary.num_rounds, summary.mean_acceptance_length) == (4, 22 / 4)


def test_rounds_without_the_target_are_no_passes_of_it() -> None:
    """A draft model alone has tokens and no target to divide them by."""
    ledger = Ledger()
    ledger.add_round(drafted=0, accepted=0, emitted=1, lossy=1, passes=0)
    summary = ledger.summary()
    assert (summary.num_rounds, summary.mean_acceptance_length, summary.generated_tokens) == (0, None, 1)


def test_note_is_passed_on() -> None:
    """D08: what a drafter has to say reaches the user."""
    ledger = Ledger()
    assert ledger.summary().note == ""
    ledger.note = "drafting stopped"
    assert ledger.summary().note == "drafting stopped"


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


def test_laps_are_the_times_since_the_last_one() -> None:
    """What a round took is told apart from what came before; phases that did not run are left out."""
    ledger = Ledger(clock=iter([0.0, 0.0, 1.0, 1.0, 3.0, 3.0, 3.5]).__next__)
    for phase in ("draft", "target"):
        with ledger.time(phase):
            pass
    assert ledger.lap() == {"draft": 1000.0, "target": 2000.0}
    with ledger.time("draft"):
        pass
    assert ledger.lap() == {"draft": 500.0} and ledger.lap() == {}
    assert ledger.summary().phase_ms == {"draft": 1500.0, "target": 2000.0}


def test_summary_is_a_snapshot_and_goes_into_json() -> None:
    """Summaries are kept and reported while the request goes on."""
    ledger = Ledger()
    with ledger.time("prefill"):
        pass
    before = ledger.summary()
    with ledger.time("decode"):
        ledger.add_round(drafted=3, accepted=2, emitted=3)
    assert list(before.phase_ms) == ["prefill"] and before.generated_tokens == 0
    assert before.acceptance_lengths == () and ledger.summary().acceptance_lengths == (0, 0, 1)
    assert json.loads(json.dumps(dataclasses.asdict(before)))["generated_tokens"] == 0


def test_peak_memory_grows_with_what_is_held() -> None:
    """MiB, and a high-water mark."""
    before = peak_mib()
    held = bytearray(b"x") * (256 << 20)
    assert peak_mib() >= before and peak_mib() > len(held) >> 20


def test_peak_memory_is_not_that_of_the_process_that_started_this_one() -> None:
    """The system's own count begins where the parent was: a small worker of a large run would look as large."""
    held = bytearray(b"x" * (300 << 20))
    code = "from semspec.runtime.stats import peak_mib; print(peak_mib())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < len(held) >> 20
