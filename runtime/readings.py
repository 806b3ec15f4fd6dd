"""Readings: what one model made of a segment, as free numbers (Signals) and as its pooled states (Reading).

The same numbers are read when a bundle is calibrated and when it decodes. It knows logits and ids; it knows no model
and no text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from semspec.runtime.errors import BackendError
from semspec.runtime.records import Floats
from semspec.runtime.sampling import greedy

__all__ = ["NO_SIGNALS", "NO_STATES", "Reading", "Row", "Signals", "TokenSignals", "read_signals", "sum_up"]


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
    """What one model made of a segment. pooled: (K, E), mean over the rows that predicted its tokens.

    What was not asked for holds nothing: no pooled layers (NO_STATES), signals that are not numbers (NO_SIGNALS).
    """

    pooled: Floats
    signals: Signals

    def __post_init__(self) -> None:
        if not np.isfinite(self.pooled).all():
            raise BackendError(
                "the engine computed hidden states that are not finite; export with a wider precision (fp32 "
                "activations) or use another backend"
            )


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
    """One row of logits (V,), padding cut off; its sums are made once."""

    def __init__(self, logits: Floats) -> None:
        self.logits, self.best = logits, greedy(logits)
        self._shifted = logits - logits[self.best]
        weights = np.exp(self._shifted)
        total = float(weights.sum(dtype=np.float64))
        self._log_total = float(np.log(total))
        self._entropy = self._log_total - float(np.sum(weights * self._shifted, dtype=np.float64)) / total

    @property
    def top_chance(self) -> float:
        """Of the arg-max."""
        return float(np.exp(-self._log_total))

    def of(self, token: int) -> TokenSignals:
        """What this row says of `token`."""
        return TokenSignals(float(self._shifted[token]) - self._log_total, self._entropy, token == self.best)


def read_signals(logits: Floats, ids: Sequence[int]) -> Signals:
    """Signals of a segment. logits: (n, V), row i predicts ids[i]; further rows are not looked at.

    Two ids, equally likely at both places: each costs log 2, and of equals the lowest is the arg-max.

    >>> read_signals(np.zeros((2, 2), np.float32), [0, 1])
    Signals(mean_logprob=-0.6931471805599453, min_logprob=-0.6931471805599453, \
sum_logprob=-1.3862943611198906, mean_entropy=0.6931471805599453, agreement=0.5)
    """
    return sum_up([Row(row).of(token) for row, token in zip(logits, ids, strict=False)])


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
