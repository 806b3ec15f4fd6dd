"""Ledger and Summary: what one request cost, in tokens and milliseconds, and how its drafts fared.

It knows counts, phases and a clock; it knows no model and prints nothing. The ledger is written while a
request runs; a summary is what it amounts to at one moment. Names of the speculation counts are vLLM's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

__all__ = ["Ledger", "Summary", "peak_mib"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One request so far.

    ttft_ms: from the start of the request to its first token; None before it. tpot_ms: mean time of each
    token after the first step's; None before a second step. tokens_per_second: generated tokens over the time
    from the start of the request to the last token, prefill included; 0 before the first. phase_ms: time by
    phase, in the order in which phases first began; a phase within another counts in both, so the sum may
    exceed the whole.

    num_rounds: target passes after the prefill, those that answer a judge's question included. num_drafts: drafts that
    were judged, a segment each where a round has several. num_draft_tokens: proposed tokens, without those behind a
    stop, with those behind a segment that was not kept. num_accepted_draft_tokens: those kept in the output; the token
    the target adds for free is not one of them. draft_acceptance_rate: accepted / proposed; None without proposals.
    mean_acceptance_length: generated tokens per round, the target's own included; plain decoding is 1.
    acceptance_lengths: how many drafts had 0, 1, 2, .. of their tokens kept. note: what the drafter has to say.

    num_segments: drafts that were judged as whole segments; num_accepted_segments: those kept whole;
    semantic_acceptance_rate: the one over the other, long segments counting no more than short ones.
    num_segment_tokens: of all that were judged; num_accepted_segment_tokens: of those kept whole. Both are among the
    draft tokens, with those that were judged one by one. num_lossy_tokens: generated tokens that need not follow the
    target's law; lossy_token_fraction: their share of all. The rates are None where there is nothing to divide by.
    """

    prompt_tokens: int
    generated_tokens: int
    ttft_ms: float | None
    tpot_ms: float | None
    tokens_per_second: float
    phase_ms: Mapping[str, float]
    num_rounds: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    draft_acceptance_rate: float | None
    mean_acceptance_length: float | None
    acceptance_lengths: tuple[int, ...]
    num_segments: int
    num_accepted_segments: int
    semantic_acceptance_rate: float | None
    num_segment_tokens: int
    num_accepted_segment_tokens: int
    num_lossy_tokens: int
    lossy_token_fraction: float | None
    note: str


class Ledger:
    """Counts and times of one request; the request starts when its ledger is made.

    clock: seconds that never go back. Not thread-safe: one request, one thread.

    >>> ledger = Ledger(clock=iter([0.0, 1.0, 3.0, 3.0, 4.0]).__next__)
    >>> with ledger.time("prefill"):  # the clock says 1.0, then 3.0
    ...     ledger.add_prompt(5)
    >>> ledger.add_round(drafted=0, accepted=0, emitted=1)  # at 3.0
    >>> ledger.add_round(drafted=4, accepted=1, emitted=2)  # at 4.0
    >>> summary = ledger.summary()
    >>> summary.ttft_ms, summary.tpot_ms, summary.tokens_per_second
    (3000.0, 500.0, 0.75)
    >>> summary.draft_acceptance_rate, summary.mean_acceptance_length, summary.acceptance_lengths
    (0.25, 1.5, (0, 1))
    """

    def __init__(self, *, clock: Callable[[], float] = perf_counter) -> None:
        self.note = ""
        self.prompt_tokens = 0
        self.generated_tokens = self.lossy_tokens = 0
        self._rounds = self._drafted = self._accepted = 0
        self._segments = self._kept_segments = self._segment_tokens = self._kept_tokens = 0
        self._lengths: list[int] = []  # drafts by accepted tokens
        self._clock = clock
        self._phase_ms: dict[str, float] = {}
        self._lap_ms: dict[str, float] = {}
        self._first: float | None = None  # when the first and the latest step came
        self._last: float | None = None
        self._at_first = 0  # tokens of the first step
        self._started = clock()

    def add_prompt(self, n_tokens: int) -> None:
        """Count tokens that were given."""
        self.prompt_tokens += n_tokens

    def add_round(
        self, *, drafted: int, accepted: int, emitted: int, lossy: int = 0, passes: int = 1
    ) -> None:
        """Count a round that just ended, or one segment of it: tokens proposed, those kept, all that came out, and what
        of it is lossy.

        passes: of the target.
        """
        self._rounds += passes
        self.lossy_tokens += lossy
        self._drafted += drafted
        self._accepted += accepted
        if drafted:
            self._lengths += [0] * (accepted + 1 - len(self._lengths))
            self._lengths[accepted] += 1
        self.generated_tokens += emitted
        self._last = self._clock()
        if self._first is None:
            self._first, self._at_first = self._last, emitted

    def add_segment(self, n_tokens: int, *, kept: bool) -> None:
        """Count a segment that was judged; kept: all of it."""
        self._segments += 1
        self._segment_tokens += n_tokens
        self._kept_segments += kept
        self._kept_tokens += n_tokens if kept else 0

    def add_question(self) -> None:
        """Count a pass of the target that answered a judge."""
        self._rounds += 1

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        """Add the time spent inside to `phase`, also when it ends in an exception."""
        self._phase_ms.setdefault(phase, 0.0)
        began = self._clock()
        try:
            yield
        finally:
            self._phase_ms[phase] += (self._clock() - began) * 1000

    def lap(self) -> dict[str, float]:
        """Phase -> milliseconds since this was last asked."""
        lap = {phase: ms - self._lap_ms.get(phase, 0.0) for phase, ms in self._phase_ms.items()}
        self._lap_ms = dict(self._phase_ms)
        return {phase: ms for phase, ms in lap.items() if ms > 0}

    def summary(self) -> Summary:
        """What the counts and times amount to now; later changes of the ledger do not reach it."""
        ttft_ms = tpot_ms = None
        tokens_per_second = 0.0
        if self._first is not None and self._last is not None:
            ttft_ms = (self._first - self._started) * 1000
            later = self.generated_tokens - self._at_first
            tpot_ms = (self._last - self._first) * 1000 / later if later else None
            whole = self._last - self._started
            tokens_per_second = self.generated_tokens / whole if whole > 0 else 0.0
        return Summary(
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            ttft_ms=ttft_ms,
            tpot_ms=tpot_ms,
            tokens_per_second=tokens_per_second,
            phase_ms=dict(self._phase_ms),
            num_rounds=self._rounds,
            num_drafts=sum(self._lengths),
            num_draft_tokens=self._drafted,
            num_accepted_draft_tokens=self._accepted,
            draft_acceptance_rate=_rate(self._accepted, self._drafted),
            mean_acceptance_length=_rate(self.generated_tokens, self._rounds),
            acceptance_lengths=tuple(self._lengths),
            num_segments=self._segments,
            num_accepted_segments=self._kept_segments,
            semantic_acceptance_rate=_rate(self._kept_segments, self._segments),
            num_segment_tokens=self._segment_tokens,
            num_accepted_segment_tokens=self._kept_tokens,
            num_lossy_tokens=self.lossy_tokens,
            lossy_token_fraction=_rate(self.lossy_tokens, self.generated_tokens),
            note=self.note,
        )


def _rate(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def peak_mib() -> float:
    """Most memory this process has held so far, in MiB."""
    import resource  # not on every system, and only reports ask

    if sys.platform == "linux":
        # getrusage would tell the size of the process that started this one where that is larger
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        held = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
        if held:
            return int(held[0]) / 2**10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)
