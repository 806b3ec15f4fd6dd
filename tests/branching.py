"""Branching: a random generator whose every comparison goes both ways, so that laws are computed, not estimated.

`exact_law(run)` runs `run(rng)` once for each way its chances can fall and adds up what came out. A uniform number is
an interval that comparisons cut; it may be scaled and shifted, and numpy's searchsorted takes it. What remains is the
rounding of float64. It stands in for numpy's Generator as far as `random()` goes.

    >>> law = exact_law(lambda rng: (rng.random() < 0.25, 2 * rng.random() - 1 < 0.5))
    >>> {outcome: law[outcome] for outcome in sorted(law)}
    {(False, False): 0.1875, (False, True): 0.5625, (True, False): 0.0625, (True, True): 0.1875}
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

Outcome = TypeVar("Outcome", bound=Hashable)


def exact_law(run: Callable[[Any], Outcome]) -> dict[Outcome, float]:
    """Outcome -> probability. `run` must depend on nothing but what it asks of the generator."""
    law: defaultdict[Outcome, float] = defaultdict(float)
    script: list[bool] = []
    while True:
        rng = BranchingGenerator(script)
        law[run(rng)] += rng.weight
        script = rng.taken
        while script and not script[-1]:
            script.pop()
        if not script:
            return dict(law)
        script[-1] = False  # the other way at the last place that went the first way


class BranchingGenerator:
    """One way down: comparisons go as `script` says, then the true way. weight: the chance of the way taken."""

    def __init__(self, script: list[bool]) -> None:
        self.weight, self.taken, self._script = 1.0, list[bool](), script

    def random(self) -> Uniform:
        return Uniform(Interval(self))

    def choose(self, share: float) -> bool:
        """True with chance `share`, in 0..1."""
        place = len(self.taken)
        way = self._script[place] if place < len(self._script) else True
        self.taken.append(way)
        self.weight *= share if way else 1 - share
        return way


class Interval:
    """Where a number between 0 and 1 can still be."""

    def __init__(self, rng: BranchingGenerator) -> None:
        self.low, self.high, self._rng = 0.0, 1.0, rng

    def below(self, bound: float) -> bool:
        if bound >= self.high:
            return True
        if bound <= self.low:
            return False
        way = self._rng.choose((bound - self.low) / (self.high - self.low))
        self.low, self.high = (self.low, bound) if way else (bound, self.high)
        return way


class Uniform:
    """scale * u + shift, scale not negative. Equality has no chance, so < and <= are one."""

    def __init__(self, interval: Interval, scale: float = 1.0, shift: float = 0.0) -> None:
        self._interval, self._scale, self._shift = interval, scale, shift

    def __mul__(self, factor: float) -> Uniform:
        return Uniform(self._interval, self._scale * float(factor), self._shift * float(factor))

    __rmul__ = __mul__

    def __add__(self, term: float) -> Uniform:
        return Uniform(self._interval, self._scale, self._shift + float(term))

    def __sub__(self, term: float) -> Uniform:
        return self + -term

    def __lt__(self, bound: float) -> bool:
        if bound is self:  # numpy compares a key with the last key, which is the same one
            return False
        if self._scale == 0:
            return self._shift < bound
        return self._interval.below((float(bound) - self._shift) / self._scale)

    def __gt__(self, bound: float) -> bool:
        return bound is not self and not self < bound

    __le__, __ge__ = __lt__, __gt__
