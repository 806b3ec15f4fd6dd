"""Ledger and Summary: what one request cost, in tokens and milliseconds.

It knows counts, phases and a clock; it knows no model and prints nothing. The ledger is written while a
request runs; a summary is what it amounts to at one moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

__all__ = ["Ledger", "Summary"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One request so far.

    ttft_ms: from the start of the request to its first token; None before it. tpot_ms: mean time of each
    token after the first; None below two tokens. tokens_per_second: generated tokens over the time from the
    start of the request to the last token, prefill included; 0 before the first. phase_ms: time by phase, in
    the order in which phases first began; a phase within another counts in both, so the sum may exceed the
    whole.
    """

    prompt_tokens: int
    generated_tokens: int
    ttft_ms: float | None
    tpot_ms: float | None
    tokens_per_second: float
    phase_ms: Mapping[str, float]


class Ledger:
    """Counts and times of one request; the request starts when its ledger is made.

    clock: seconds that never go back. Not thread-safe: one request, one thread.

    >>> ledger = Ledger(clock=iter([0.0, 1.0, 3.0, 3.0, 4.0]).__next__)
    >>> with ledger.time("prefill"):  # the clock says 1.0, then 3.0
    ...     ledger.add_prompt(5)
    >>> ledger.add_generated(1)  # at 3.0
    >>> ledger.add_generated(1)  # at 4.0
    >>> ledger.summary()  # doctest: +NORMALIZE_WHITESPACE
    Summary(prompt_tokens=5, generated_tokens=2, ttft_ms=3000.0, tpot_ms=1000.0, tokens_per_second=0.5,
            phase_ms={'prefill': 2000.0})
    """

    __slots__ = ("_clock", "_first", "_last", "_phase_ms", "_started", "generated_tokens", "prompt_tokens")

    def __init__(self, *, clock: Callable[[], float] = perf_counter) -> None:
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self._clock = clock
        self._phase_ms: dict[str, float] = {}
        self._first: float | None = None  # when the first and the latest token came
        self._last: float | None = None
        self._started = clock()

    def add_prompt(self, n_tokens: int) -> None:
        """Count tokens that were given."""
        self.prompt_tokens += n_tokens

    def add_generated(self, n_tokens: int) -> None:
        """Count tokens that were just written; 0 changes nothing, not even the time of the latest token."""
        if n_tokens == 0:
            return
        self.generated_tokens += n_tokens
        self._last = self._clock()
        if self._first is None:
            self._first = self._last

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        """Add the time spent inside to `phase`, also when it ends in an exception."""
        self._phase_ms.setdefault(phase, 0.0)
        began = self._clock()
        try:
            yield
        finally:
            self._phase_ms[phase] += (self._clock() - began) * 1000

    def summary(self) -> Summary:
        """What the counts and times amount to now; later changes of the ledger do not reach it."""
        ttft_ms = tpot_ms = None
        tokens_per_second = 0.0
        if self._first is not None and self._last is not None:
            ttft_ms = (self._first - self._started) * 1000
            if self.generated_tokens > 1:
                tpot_ms = (self._last - self._first) * 1000 / (self.generated_tokens - 1)
            whole = self._last - self._started
            tokens_per_second = self.generated_tokens / whole if whole > 0 else 0.0
        return Summary(
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            ttft_ms=ttft_ms,
            tpot_ms=tpot_ms,
            tokens_per_second=tokens_per_second,
            phase_ms=dict(self._phase_ms),
        )
