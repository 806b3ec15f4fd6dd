"""Acceptance rules: how much of a draft is kept. Arrays and a random generator in, a Verdict out.

No model, no cache, no clock. Indices: y_1..y_n are the drafted tokens, q[i] the law y_{i+1} was drawn from,
p[i] the target's law at the same place, p[n] its law after the whole draft. Mind the shift by one.

Both rules are lossless: whatever q is, the tokens they let out follow p exactly. Source: Leviathan et al.
(arXiv 2211.17192) for tokens, Sun et al. (arXiv 2403.10444) for blocks. What is not promised: the tokens that
the same seed gives without speculation; for temperature 0 they are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from semspec.runtime.records import Array, Law, Verdict
from semspec.runtime.sampling import sample

__all__ = ["RULES", "Rule", "accept_block", "accept_tokens", "residual"]

Rule = Callable[[Sequence[int], Sequence[Law], Sequence[Law], np.random.Generator], Verdict]


def accept_tokens(
    ids: Sequence[int], q: Sequence[Law], p: Sequence[Law], rng: np.random.Generator
) -> Verdict:
    """Keep y_i with chance min(1, p(y_i) / q(y_i)); at the first that falls, draw from what q left of p.

    ids: n tokens. q: n laws. p: n + 1 laws, read in order and only as far as needed. Always one extra token.

    The target wants 0 and 1 equally, the draft says 0. It is kept in half of the cases; in the other half
    nothing of 0 is left, so 1 is drawn. Kept drafts are followed by a token of the target's own.

    >>> half = Law(ids=np.array([0, 1]), probs=np.array([0.5, 0.5]))
    >>> sure = Law(ids=np.array([0]), probs=np.array([1.0]))
    >>> verdicts = [accept_tokens([0], [sure], [half, sure], np.random.default_rng(seed)) for seed in range(4)]
    >>> [(verdict.keep, verdict.extra) for verdict in verdicts]
    [(0, 1), (0, 1), (1, 0), (1, 0)]
    """
    for i, token in enumerate(ids):
        if not rng.random() * q[i].prob(token) < p[i].prob(token):
            return Verdict(keep=i, extra=sample(residual(p[i], q[i]), rng))
    return Verdict(keep=len(ids), extra=sample(p[len(ids)], rng))


def accept_block(ids: Sequence[int], q: Sequence[Law], p: Sequence[Law], rng: np.random.Generator) -> Verdict:
    """Judge all prefixes together: on average keeps at least as many tokens as accept_tokens.

    w_i = min(1, w_{i-1} p(y_i) / q(y_i)) is how much of prefix i the target stands behind. Prefix i < n is good
    with chance A_i / (A_i + 1 - w_i), where A_i is the mass of w_i p - q above 0 at the next place; the whole
    draft with chance w_n. The longest good prefix is kept, and the next token drawn from w p - q above 0.
    Arguments and result as in accept_tokens; laws are read up to the first token that the target cannot draw.

    The draft is sure of 0, where the target wants 0 and 1 equally, then draws 0 by chance, where the target is sure
    of it. Token by token the first 0 is kept in half of the cases. Here the second makes up for it: both stay.

    >>> half = Law(ids=np.array([0, 1]), probs=np.array([0.5, 0.5]))
    >>> sure = Law(ids=np.array([0]), probs=np.array([1.0]))
    >>> verdicts = [
    ...     accept_block([0, 0], [sure, half], [half, sure, half], np.random.default_rng(seed)) for seed in range(4)
    ... ]
    >>> [verdict.keep for verdict in verdicts]
    [2, 2, 2, 2]

    Two symbols drawn independently, p = (1/3, 2/3), q = (2/3, 1/3): of two drafted tokens 10/9 are kept on
    average by accept_tokens and 11/9 here (the test counts them).
    """
    weight, kept, kept_weight = 1.0, 0, 1.0
    for i, token in enumerate(ids, 1):
        weight = min(1.0, weight * p[i - 1].prob(token) / q[i - 1].prob(token))
        if not weight:  # no longer prefix can be good; a grammar need not have a law behind what it forbids
            break
        if i == len(ids):
            chance = weight
        else:
            above = float(_above(p[i], q[i], weight).sum())
            chance = above / (above + 1 - weight) if above or weight < 1 else 1.0
        if rng.random() < chance:
            kept, kept_weight = i, weight
    if kept == len(ids):
        return Verdict(keep=kept, extra=sample(p[kept], rng))
    return Verdict(keep=kept, extra=sample(residual(p[kept], q[kept], kept_weight), rng))


def residual(p: Law, q: Law, weight: float = 1.0) -> Law:
    """The law proportional to weight * p - q where that is above 0; p itself where nothing is.

    >>> p = Law(ids=np.array([0, 1, 2]), probs=np.array([0.5, 0.25, 0.25]))
    >>> q = Law(ids=np.array([0, 1]), probs=np.array([0.75, 0.25]))
    >>> left = residual(p, q)
    >>> left.ids.tolist(), left.probs.tolist()
    ([2], [1.0])
    """
    above = _above(p, q, weight)
    total = above.sum()
    if not total > 0:
        # p equals q but for rounding: a rejection had no chance to happen
        return p
    places = np.flatnonzero(above)
    return Law(ids=p.ids[places], probs=above[places] / total)


def _above(p: Law, q: Law, weight: float) -> Array:
    """max(0, weight * p - q) on p's ids: (m,)."""
    shared = np.zeros_like(p.probs)
    places = np.searchsorted(q.ids, p.ids)
    places[places == q.ids.size] = 0
    found = q.ids[places] == p.ids
    shared[found] = q.probs[places[found]]
    above: Array = np.maximum(weight * p.probs - shared, 0.0)
    return above


RULES: Mapping[str, Rule] = {"token": accept_tokens, "block": accept_block}
