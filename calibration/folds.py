"""Folds: which rows are left out together, and what was said of rows by who had not seen them.

    fold (m,) of rows, all of a question in one; models are fitted without one fold, and without any two

With these, strengths and layers are chosen for each fold by predictions that saw neither it nor the row in question:
the model without folds a and b serves both, the choice for b on rows of a and the choice for a on rows of b. It knows
logits and labels; it knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import TypeAlias

import numpy as np

from semspec.calibration.equivalence import Bools
from semspec.runtime.errors import CalibrationError, ConfigError
from semspec.runtime.records import Array, Ints

__all__ = ["Folds", "LeftOut", "Nested", "choose_nested", "cross_fit", "deal_folds", "log_loss"]

LeftOut: TypeAlias = Mapping[frozenset[int], Array]
"""Folds left out -> (m, O) logits of O options, fitted on all others."""

LEAST_FOLDS = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Folds:
    """of: (m,) the fold of each row, 0..n-1."""

    of: Ints
    n: int

    def sets(self) -> Iterator[frozenset[int]]:
        """What is left out: each fold, then every two."""
        for size in (1, 2):
            yield from map(frozenset, combinations(range(self.n), size))

    def within(self, left_out: frozenset[int]) -> Bools:
        """(m,) rows of these folds."""
        return np.isin(self.of, list(left_out))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Nested:
    """Predictions with the choice among options made inside.

    outer: (m,) logits of each row by models that saw nothing of its fold. inner: (n, m), inner[b] of rows outside fold
    b, by models that saw neither b nor the row's fold; NaN within b. chosen: option for each fold; final: that of all.
    """

    outer: Array
    inner: Array
    chosen: tuple[int, ...]
    final: int


def deal_folds(questions: Ints, n_folds: int, seed: int, kinds: Ints | None = None) -> Folds:
    """Questions are shuffled and dealt like cards, those of one kind as one card. questions: (m,) of each row; kinds:
    (m,) of each row's question, None where no two are of a kind.

    Raises ConfigError for fewer than 3 folds, CalibrationError for fewer than two questions or one kind a fold.
    """
    if n_folds < LEAST_FOLDS:
        raise ConfigError(f"n_folds must be at least {LEAST_FOLDS}, got {n_folds}: two are left out together")
    n_questions = len(np.unique(questions))
    if n_questions < 2 * n_folds:
        raise CalibrationError(
            f"{n_questions} questions with labels are too few to learn from and to measure on; at least {2 * n_folds} "
            "are needed, 150 are better"
        )
    known, place = np.unique(questions if kinds is None else kinds, return_inverse=True)
    if len(known) < n_folds:
        raise CalibrationError(
            f"questions of {len(known)} kinds are too few to learn from some and to measure on others; at least "
            f"{n_folds} kinds are needed"
        )
    deck = np.random.default_rng(seed).permutation(len(known))
    dealt = np.empty(len(known), np.int64)
    dealt[deck] = np.arange(len(known)) % n_folds
    return Folds(of=dealt[place.reshape(-1)], n=n_folds)


def cross_fit(
    fit: Callable[[Bools], Array], folds: Folds, on_done: Callable[[], None] | None = None
) -> dict[frozenset[int], Array]:
    """fit: rows (m,) to learn from -> (m, O) logits of all rows. on_done: called after each fit."""
    found = {}
    for left_out in folds.sets():
        found[left_out] = fit(~folds.within(left_out))
        if on_done is not None:
            on_done()
    return found


def choose_nested(logits: LeftOut, folds: Folds, labels: Array, weights: Array) -> Nested:
    """Of each fold's options the one with the least log_loss on the others; the first of equals."""
    m = len(folds.of)
    outer, inner = np.empty(m), np.full((folds.n, m), np.nan)
    chosen = []
    for fold in range(folds.n):
        others = np.full_like(logits[frozenset({fold})], np.nan, np.float64)
        for other in set(range(folds.n)) - {fold}:
            rows = folds.of == other
            others[rows] = logits[frozenset({fold, other})][rows]
        known = folds.of != fold
        option = _least(others[known], labels[known], weights[known])
        inner[fold], chosen_rows = others[:, option], folds.of == fold
        outer[chosen_rows] = logits[frozenset({fold})][chosen_rows, option]
        chosen.append(option)
    held_out = np.empty_like(logits[frozenset({0})], np.float64)
    for fold in range(folds.n):
        rows = folds.of == fold
        held_out[rows] = logits[frozenset({fold})][rows]
    return Nested(outer=outer, inner=inner, chosen=tuple(chosen), final=_least(held_out, labels, weights))


def log_loss(logits: Array, labels: Array, weights: Array) -> float:
    """Mean cross-entropy of soft labels, in nats. All (m,)."""
    losses = np.logaddexp(0.0, logits) - labels * logits
    return float(np.average(losses, weights=weights))


def _least(logits: Array, labels: Array, weights: Array) -> int:
    return int(np.argmin([log_loss(logits[:, option], labels, weights) for option in range(logits.shape[1])]))
