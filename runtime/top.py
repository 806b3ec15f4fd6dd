"""Top: the likeliest ids of one row of logits, and what follows from them alone: the row's own answer, or none.

A graph on a device names the 64 largest of a row's V logits and the log of the sum of all exponentials, so that the V
numbers can stay there. What is asked here is answered as the whole row would answer it, or with None where ids that are
not named, or a rounding, could decide: then the row must be read in full. It knows numbers; it knows no memory.

Greedy is nearly always answered, and so is a law that top-k, top-p or min-p narrow to fewer ids than are named. A law
that nothing narrows is not: every id has a chance there.
"""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np

from semspec.runtime.config import SamplingParams
from semspec.runtime.records import Array, Floats, Ints, Law
from semspec.runtime.sampling import TINY, weigh

__all__ = ["Top"]

SLACK = 2e-5  # of a sum: what an engine's rounding and ours may be off by
UNSEEN = 0.01  # of all mass: the most that padding may take unseen where log_total leaves it in


class Top:
    """Of a row of `size` logits. Those behind the first n_ids are padding, which is never drawn.

    values: (m,) float32, the m largest of all `size`; ids: theirs, each once. In any order, and of equal values it does
    not matter which were named. lse: log of the sum of all `size` exponentials.
    """

    def __init__(self, values: Floats, ids: Array, lse: float, *, size: int, n_ids: int) -> None:
        order = np.argsort(ids)
        n_drawable = int(np.count_nonzero(ids < n_ids))
        self.ids: Ints = ids[order][:n_drawable].astype(np.int64)
        self.values: Floats = values[order][:n_drawable]
        self._lse, self._named = lse, values
        self._edge = float(values.min())  # no id that is not named has a larger logit
        self._n_others = n_ids - n_drawable  # that can be drawn and are not named
        self._n_hidden = (size - n_ids) - (ids.size - n_drawable)  # padding that is not named

    @cached_property
    def best(self) -> int | None:
        """The likeliest id, the lowest of equals."""
        # one NaN or infinity among all logits makes the sum none: that is for the whole row to say
        if not self.ids.size or not math.isfinite(self._lse):
            return None
        place = int(np.argmax(self.values))
        value = float(self.values[place])
        return int(self.ids[place]) if math.isfinite(value) and self._has_all_of(value) else None

    def law(self, params: SamplingParams) -> Law | None:
        """What `warp` makes of the row's first n_ids logits."""
        if self.best is None:
            return None
        if params.temperature == 0:
            return Law(ids=np.array([self.best], np.int64), probs=np.ones(1))
        order = np.argsort(-self.values, kind="stable")  # likeliest first, of equals the lowest id
        weights = weigh(self.values, self.values[order[0]], params.temperature)
        n = self._n_kept(weights[order], params)
        if n is None or not self._has_all_of(float(self.values[order[n - 1]])):
            return None
        kept = np.sort(order[:n])
        probs = weights[kept].astype(np.float64)
        return Law(ids=self.ids[kept], probs=probs / probs.sum())

    @cached_property
    def log_total(self) -> float | None:
        """Log of the sum of exponentials of all ids that can be drawn.

        Padding that is not named stays in: it is less than UNSEEN of all, so this is too large by 0.01 at most.
        """
        if self.best is None or self.ids.size < self._named.size:
            return None
        unseen = self._n_hidden * math.exp(self._edge - self._lse)
        return self._lse if unseen <= UNSEEN else None

    def value(self, token: int) -> float | None:
        """The logit of a named id."""
        place = int(np.searchsorted(self.ids, token))
        named = place < self.ids.size and self.ids[place] == token
        return float(self.values[place]) if named else None

    def is_among(self, token: int, n: int) -> bool | None:
        """Whether `token` is among the n likeliest ids; of equals the lowest is likelier."""
        value = self.value(token)
        if self.best is None:
            return None
        if value is None or not self._has_all_of(value):  # no larger than the edge
            return False if np.count_nonzero(self.values > self._edge) >= n else None
        equals = self.ids[self.values == value]
        return int(np.count_nonzero(self.values > value) + np.count_nonzero(equals < token)) < n

    def _has_all_of(self, value: float) -> bool:
        """Whether all ids of this logit, which a named one has, are named, and so all of larger ones."""
        return self._n_others == 0 or value > self._edge

    def _n_kept(self, weights: Floats, params: SamplingParams) -> int | None:
        """How many of the likeliest stay. weights: theirs, descending from 1, at the temperature."""
        cut = 0 < params.top_k < weights.size + self._n_others
        if cut and params.top_k > weights.size:
            return None
        ahead = weights[: params.top_k] if cut else weights
        floor = np.float32(max(params.min_p, TINY))  # as in warp
        n_above = int(np.count_nonzero(ahead >= floor))
        # whether no id behind these stays, whatever top-p says
        alone = cut or self._n_others == 0 or self._edge_weight(params.temperature) * (1 + SLACK) < floor
        if params.top_p == 1:
            return n_above if alone else None
        low, high = (0.0, 0.0) if cut else self._others(params.temperature)
        held = np.cumsum(ahead, dtype=np.float64)
        total = held[-1] + np.array([low * (1 - SLACK), high * (1 + SLACK)])
        runs = np.searchsorted(held, params.top_p * total * (1 + np.array([-SLACK, SLACK]))) + 1
        if runs[1] > held.size and not alone:
            return None
        fewest, most = np.minimum(runs, n_above)
        return int(most) if fewest == most else None

    def _edge_weight(self, temperature: float) -> float:
        return math.exp((self._edge - float(self.values.max())) / temperature)

    def _others(self, temperature: float) -> tuple[float, float]:
        """Between what and what the weights of the n ids that are not named sum up to, the likeliest id's being 1.

        The graph's sum tells it at temperature 1; say it is r times the edge's weight there, so r is at most n. At
        temperature 1/s each is raised to s: so many edge weights of that temperature as lie between r and n (r/n)**s,
        the first being the larger where s > 1 (none exceeds the edge) and the second where s < 1 (of all ways to
        share r, even shares have the largest sum of powers below 1, and the least above).
        """
        n, peak = self._n_others, float(self.values.max())
        if not n:
            return 0.0, 0.0
        fewest, most = 0.0, float(n)
        edge = math.exp(self._edge - peak)
        # beyond that, padding is all there is, and the rest is lost in its rounding
        if edge > 0 and self._lse - peak < 100:
            mass = math.exp(self._lse - peak)
            named = float(np.exp(self._named.astype(np.float64) - peak).sum())
            most = min(max((mass * (1 + SLACK) - named) / edge, 0.0), most)
            fewest = min(max((mass * (1 - SLACK) - named) / edge - self._n_hidden, 0.0), most)
        unit, power = self._edge_weight(temperature), 1 / temperature
        return (
            unit * min(fewest, n * (fewest / n) ** power),
            unit * max(most, n * (most / n) ** power),
        )
