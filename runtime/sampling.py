"""From logits to one token: pure functions, arrays and a random generator in, arrays and ids out.

It knows temperature, top-k, top-p, min-p and the tie rule (the lowest id wins, everywhere); it knows no
model, no cache and no text. Letters as in records.py: V vocabulary; m ids that have a chance at all.

Precision: weights are float32 (one pass over V is the cost of sampling), sums and probabilities float64. A
probability is off by at most 2e-5 of itself; an id whose weight is below e^-87 of the largest has no chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from semspec.runtime.config import SamplingParams
from semspec.runtime.errors import BackendError
from semspec.runtime.records import Floats, Ints, Law

__all__ = ["TINY", "greedy", "log_probabilities", "rank", "sample", "warp", "weigh"]

Probs: TypeAlias = npt.NDArray[np.float64]

TINY = float(np.finfo(np.float32).tiny)  # the least weight that counts
_HUGE = float(np.finfo(np.float32).max)


def greedy(logits: Floats) -> int:
    """The id of the largest of `logits` (V,); the lowest such id when several are equal.

    Raises BackendError when a logit is NaN or the largest is infinite: there is no likeliest token then.
    """
    best = int(np.argmax(logits))  # NaN counts as the largest
    if not np.isfinite(logits[best]):
        raise BackendError(
            f"the engine computed unusable logits: the largest of {logits.size} is {logits[best]} (id {best})"
            ", not a finite number; export with a wider precision (fp32 activations) or use another backend"
        )
    return best


def warp(logits: Floats, params: SamplingParams) -> Law:
    """The law of the next token: `logits` (V,) after temperature, top-k, top-p and min-p, in that order.

    Top-p keeps the shortest run of the likeliest ids that holds at least top_p of the mass that top-k left;
    min-p keeps ids of at least min_p times the largest chance. Where equal logits compete for a place the
    lowest id gets it. Temperature 0 gives all mass to `greedy(logits)`. Raises BackendError as `greedy`.

    V is never sorted: an id that top-p keeps has less than top_p of the mass before it, hence more than
    1 - top_p in it and after it; at most V ids of at most its own p hold that, so p > (1 - top_p) / V.

    Five ids at temperature 1 have chances 0.1, 0.4, 0, 0.1 and 0.4. Top-p 0.85 takes ids 1 and 4 (0.8 so far)
    and one of the two at 0.1: id 0, the lower. What stays is scaled to 1 by 1 / 0.9.

    >>> logits = np.log(np.array([1, 4, 1e-9, 1, 4], np.float32))
    >>> law = warp(logits, SamplingParams(temperature=1, top_p=0.85))
    >>> law.ids.tolist(), law.probs.round(3).tolist()
    ([0, 1, 4], [0.111, 0.444, 0.444])
    """
    best = greedy(logits)
    if params.temperature == 0:
        return Law(ids=np.array([best], np.int64), probs=np.ones(1))
    ids = _largest(logits, params.top_k) if 0 < params.top_k < logits.size else None
    values = logits if ids is None else logits[ids]
    weights = weigh(values, logits[best], params.temperature)
    total = float(weights.sum(dtype=np.float64))

    tail = total * (1 - params.top_p) / values.size * (1 - 1e-6)  # the proof above, less a rounding
    near = np.flatnonzero(weights >= np.float32(max(tail, params.min_p, TINY)))
    if params.top_p < 1:
        near = near[_holding(params.top_p * total, weights[near], values[near])]

    probs = weights[near].astype(np.float64)
    probs /= probs.sum()
    return Law(ids=near if ids is None else ids[near], probs=probs)


def sample(law: Law, rng: np.random.Generator) -> int:
    """One id drawn from `law` by inverse transform: the first id whose cumulated chance exceeds one uniform.

    Takes exactly one number from `rng`, whatever the law: a run can be replayed.
    """
    width = 512  # cumulate block sums first, then one block: V = 152k in a tenth of the time
    blocks = np.add.reduceat(law.probs, np.arange(0, law.ids.size, width))
    ends = np.cumsum(blocks)
    point = rng.random() * ends[-1]
    block = min(int(np.searchsorted(ends, point, side="right")), ends.size - 1)  # rounding may reach the end
    probs = law.probs[block * width : (block + 1) * width]
    place = int(np.searchsorted(np.cumsum(probs), point - (ends[block] - blocks[block]), side="right"))
    return int(law.ids[block * width + min(place, probs.size - 1)])


def log_probabilities(logits: Floats, ids: Sequence[int]) -> tuple[float, ...]:
    """Natural log-probability of ids[i] under row i of `logits` (n, V) as it is: a model's own law, nothing filtered.

    Rows behind the last id are not looked at.
    """
    found = []
    for token, row in zip(ids, logits, strict=False):
        wide = row.astype(np.float64)
        peak = wide.max()
        found.append(float(wide[token] - peak - np.log(np.exp(wide - peak).sum())))
    return tuple(found)


def rank(logits: Floats, token: int) -> int:
    """How many ids are likelier than `token` under `logits` (V,); of equally likely ids the lowest is.

    >>> rank(np.array([1.0, 3.0, 3.0], np.float32), 2)
    1
    """
    value = logits[token]
    return int(np.count_nonzero(logits > value) + np.count_nonzero(logits[:token] == value))


def weigh(values: Floats, peak: np.float32, temperature: float) -> Floats:
    """exp((values - peak) / temperature), (m,) float32 in 0..1; exactly 1 where the value is the peak.

    Temperatures below 3e-39 or above 8e37 count as these: the scale stays finite and above 0 in float32.
    """
    scale = np.float32(min(max(1 / temperature, TINY), _HUGE))
    with np.errstate(over="ignore", under="ignore"):  # -inf and 0 are the right answers
        weights: Floats = values - peak
        weights *= scale
        np.exp(weights, out=weights)
    return weights


def _holding(mass: float, weights: Floats, values: Floats) -> Ints:
    """Indices, ascending, of the shortest run of the largest `values` (m,) whose `weights` hold `mass`.

    Linear in m: values fall into 1024 bins from the largest down, and only the bin in which the mass is
    reached is sorted.
    """
    depth = values.max() - values.astype(np.float64)
    bins = (depth * (1023 / (depth.max() or 1.0))).astype(np.int32)
    held = np.cumsum(np.bincount(bins, weights))
    edge = min(int(np.searchsorted(held, mass)), held.size - 1)
    missing = mass - (held[edge - 1] if edge else 0.0)
    within = np.flatnonzero(bins == edge)
    run = np.cumsum(np.sort(weights[within])[::-1], dtype=np.float64)
    n = min(int(np.searchsorted(run, missing)) + 1, within.size)
    kept = bins < edge
    kept[within[_largest(values[within], n)]] = True
    return np.flatnonzero(kept)


def _largest(values: Floats, n: int) -> Ints:
    """Indices (n,) of the n largest of `values` (m,), ascending; among equals the lowest indices. 0 < n <= m.

    Many values, few wanted: the n-th largest of the maxima of 64-element groups is no more than the n-th
    largest value, so what lies below it is dropped before the exact selection (20 times faster for V = 152k).
    """
    groups = values.size // 64
    if n <= groups:
        maxima = values[: groups * 64].reshape(64, groups).max(axis=0)
        bound = np.partition(maxima, groups - n)[groups - n]
        near = np.flatnonzero(values >= bound)
        values = values[near]
    else:
        near = np.arange(values.size)
    last = np.partition(values, values.size - n)[values.size - n]
    kept = values > last
    kept[np.flatnonzero(values == last)[: n - np.count_nonzero(kept)]] = True
    chosen: Ints = near[kept]
    return chosen
