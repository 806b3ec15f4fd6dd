"""Readings: what one model made of a segment, as free numbers (Signals) and as its pooled states (Reading).

The same numbers are read when a bundle is calibrated and when it decodes. It knows rows and ids; it knows no model
and no text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from semspec.runtime.config import SamplingParams
from semspec.runtime.errors import BackendError
from semspec.runtime.pooled import HeldPooled
from semspec.runtime.records import Floats, Law
from semspec.runtime.sampling import greedy, log_probabilities, rank

__all__ = [
    "NOT_FINITE",
    "NO_SIGNALS",
    "NO_STATES",
    "Reading",
    "Row",
    "Signals",
    "TokenSignals",
    "check_states",
    "read_signals",
    "sum_up",
]

NOT_FINITE = (
    "the engine computed hidden states that are not finite; export with a wider precision (fp32 activations) or use "
    "another backend"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """Free numbers of one model's pass over a segment of n tokens; log-probabilities in nats, at temperature 1.

    mean_logprob, min_logprob, sum_logprob: of the segment's tokens. mean_entropy: of the laws at their places,
    before temperature and top-p. agreement: share of tokens that are the model's arg-max.
    """

    mean_logprob: float
    min_logprob: float
    sum_logprob: float
    mean_entropy: float
    agreement: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reading:
    """What one model made of a segment. pooled: (K, E), mean over the rows that predicted its tokens; held: the same
    where it is on a device, and `pooled` empty.

    What was not asked for holds nothing: no pooled layers (NO_STATES), signals that are not numbers (NO_SIGNALS).
    Raises BackendError for states in memory that are not finite.
    """

    pooled: Floats
    signals: Signals
    held: HeldPooled | None = None

    def __post_init__(self) -> None:
        check_states(self.pooled)

    @property
    def states(self) -> Floats | HeldPooled:
        """Those that were pooled, where they are."""
        return self.pooled if self.held is None else self.held


NO_STATES: Floats = np.zeros((0, 0), np.float32)
NO_SIGNALS = Signals(
    mean_logprob=math.nan,
    min_logprob=math.nan,
    sum_logprob=math.nan,
    mean_entropy=math.nan,
    agreement=math.nan,
)


class TokenSignals(NamedTuple):
    """What a model thinks of one token: nats at temperature 1. agreed: it is the arg-max."""

    logprob: float
    entropy: float
    agreed: bool


class Row:
    """What may come next at one place, as logits (V,), padding cut off; what is made of them is made once.

    TopRows (rows.py) have another kind, which reads its logits only where less does not do.
    """

    def __init__(self, logits: Floats) -> None:
        self._logits = logits

    @property
    def logits(self) -> Floats:
        """(V,): all of them."""
        return self._logits

    @cached_property
    def best(self) -> int:
        """The arg-max, of equals the lowest id. Raises BackendError where there is none."""
        return greedy(self.logits)

    @cached_property
    def top_chance(self) -> float:
        """Of the arg-max, at temperature 1."""
        _, log_total, _ = self._sums
        return float(np.exp(-log_total))

    def short_law(self, params: SamplingParams) -> Law | None:
        """What `warp` makes of the logits, where that follows exactly from less than all of them; None: read them."""
        return None

    def of(self, token: int) -> TokenSignals:
        """What this row says of `token`."""
        shifted, log_total, entropy = self._sums
        return TokenSignals(float(shifted[token]) - log_total, entropy, token == self.best)

    def logprob(self, token: int) -> float:
        """Natural log-probability of `token`, in double precision: what users are told."""
        return log_probabilities(self.logits[None], [token])[0]

    def is_among(self, token: int, n: int) -> bool:
        """Whether `token` is one of the n likeliest ids; of equals the lowest is likelier."""
        return rank(self.logits, token) < n

    @cached_property
    def _sums(self) -> tuple[Floats, float, float]:
        """Logits below the largest; log of the sum of their exponentials; entropy."""
        shifted = self.logits - self.logits[self.best]
        weights = np.exp(shifted)
        total = float(weights.sum(dtype=np.float64))
        log_total = float(np.log(total))
        return shifted, log_total, log_total - float(np.sum(weights * shifted, dtype=np.float64)) / total


def check_states(pooled: Floats) -> None:
    """Raises BackendError for states that are not finite."""
    if not np.isfinite(pooled).all():
        raise BackendError(NOT_FINITE)


def read_signals(rows: Iterable[Row], ids: Sequence[int]) -> Signals:
    """Signals of a segment. rows: row i predicts ids[i]; further ones are not looked at.

    Two ids, equally likely at both places: each costs log 2, and of equals the lowest is the arg-max.

    >>> read_signals([Row(np.zeros(2, np.float32))] * 2, [0, 1])
    Signals(mean_logprob=-0.6931471805599453, min_logprob=-0.6931471805599453, \
sum_logprob=-1.3862943611198906, mean_entropy=0.6931471805599453, agreement=0.5)
    """
    return sum_up([row.of(token) for token, row in zip(ids, rows, strict=False)])


def sum_up(tokens: Sequence[TokenSignals]) -> Signals:
    """Of at least one token."""
    logprobs = [token.logprob for token in tokens]
    n = len(tokens)
    return Signals(
        mean_logprob=sum(logprobs) / n,
        min_logprob=min(logprobs),
        sum_logprob=sum(logprobs),
        mean_entropy=sum(token.entropy for token in tokens) / n,
        agreement=sum(token.agreed for token in tokens) / n,
    )
