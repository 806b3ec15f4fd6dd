"""Milliseconds of a pass over S tokens behind a text, and of a drafted token: through the runtime's own model and
drafter, so all that surrounds the engine is in them. A pass is over when the likeliest id of its last row is known.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from semspec.runtime.chooser import Chooser
from semspec.runtime.config import SamplingParams
from semspec.runtime.drafting import ModelDrafter
from semspec.runtime.model import LanguageModel

__all__ = ["CONTEXT", "DRAFTED", "PAST", "SIZES", "Timed", "time_drafting", "time_passes", "time_prompt"]

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
PAST = 512  # tokens of the text behind which is read
DRAFTED = 32  # tokens in a draft
CONTEXT = 1023  # a cache of 1024 rows
WARM = 3  # runs that do not count: kernels are loaded, CUDA graphs captured
LEAST, MOST = 5, 200  # runs that do


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Milliseconds over `runs` runs: the median, the smallest and the largest."""

    ms: float
    least: float
    most: float
    runs: int

    @classmethod
    def of(cls, call: Callable[[], object], prepare: Callable[[], object], seconds: float) -> Timed:
        """Time `call`, each time after `prepare`, for about so many seconds."""
        spans: list[float] = []
        for _ in range(WARM):
            prepare()
            call()
        end = time.perf_counter() + seconds
        while len(spans) < LEAST or (len(spans) < MOST and time.perf_counter() < end):
            prepare()
            started = time.perf_counter()
            call()
            spans.append(1000 * (time.perf_counter() - started))
        return cls(ms=statistics.median(spans), least=min(spans), most=max(spans), runs=len(spans))

    def each(self, n: int) -> Timed:
        """The same of one of `n` things that a run did."""
        return Timed(ms=self.ms / n, least=self.least / n, most=self.most / n, runs=self.runs)


def time_prompt(model: LanguageModel, vocab_size: int, seconds: float) -> Timed:
    """Reading a text of PAST tokens from its start, logits of its last row wanted. The model remembers it then."""
    text = _random_ids(vocab_size, PAST)
    return Timed.of(partial(_read, model, text, [PAST - 1]), partial(model.rewind, 0), seconds)


def time_passes(model: LanguageModel, vocab_size: int, seconds: float) -> Iterator[tuple[int, int, Timed]]:
    """(S, rows of logits wanted, time) for each of SIZES, all rows and one; the model remembers PAST tokens."""
    for size in SIZES:
        ids = _random_ids(vocab_size, size)
        for rows in sorted({1, size}):
            read = partial(_read, model, ids, range(size - rows, size))
            yield size, rows, Timed.of(read, partial(model.rewind, PAST), seconds)


def time_drafting(model: LanguageModel, vocab_size: int, seconds: float) -> Timed:
    """One greedily drafted token, of drafts of DRAFTED tokens; the model remembers PAST tokens."""
    prompt = [*model.tokens[:PAST], 1]
    drafter = ModelDrafter(model, Chooser(SamplingParams(), vocab_size, prompt))
    rng = np.random.default_rng(0)
    timed = Timed.of(partial(drafter.propose, DRAFTED, rng), partial(drafter.start, prompt), seconds)
    return timed.each(DRAFTED)


def _read(model: LanguageModel, ids: Sequence[int], rows: Sequence[int]) -> int:
    return model.forward(ids, rows=rows).rows[-1].best


def _random_ids(vocab_size: int, n: int) -> list[int]:
    """The same at every call."""
    found: list[int] = np.random.default_rng(n).integers(0, vocab_size, n).tolist()
    return found
