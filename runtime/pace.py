"""Pace: how much is drafted before the target looks, by the draft's own word or by what became of others.

What ends a draft early depends on the tokens drafted so far and on the law of the next one before it is drawn, never on
a token that is then thrown away, nor on what the target makes of this draft: so the exact rule stays exact. It knows
numbers; it knows no model.
"""

from __future__ import annotations

from semspec.runtime.readings import Row

__all__ = ["Pace"]

MEMORY = 0.75  # of what a running share was before, so that about four of the latest count
LIKELY = 0.75  # a further segment saves a pass where all before it are kept, else it is wasted: at three times the cost


class Pace:
    """One request's. adaptive: one of config.ADAPTIVE. least: `confidence` stops with the first token that the draft is
    unsure of, whose place gave even the likeliest one a smaller chance: its law is there, so it costs a row of the
    target's pass and no pass of the draft, and what follows it would be looked at too seldom. shortest: `acceptance`
    never drafts less.

    >>> pace = Pace("acceptance", shortest=4)
    >>> pace.saw(drafted=20, kept=0), pace.limit(20), pace.saw(drafted=15, kept=0), pace.limit(20)
    (None, 15, None, 11)

    One of two segments was not kept whole: a second one in a round has a fair chance to be looked at, a third has not.

    >>> pace = Pace("acceptance")
    >>> pace.saw(drafted=8, kept=8, whole=True), pace.saw(drafted=8, kept=2, whole=True)
    (None, None)
    >>> [pace.goes_on(n, sure=False) for n in (1, 2)]
    [True, False]
    """

    def __init__(self, adaptive: str = "off", *, least: float = 0.0, shortest: int = 1) -> None:
        self.reads_rows = adaptive == "confidence"
        self._follows = adaptive == "acceptance"
        self._least, self._shortest = least, shortest
        self._share = self._whole = 1.0  # of tokens, and of whole segments, that are kept

    def limit(self, most: int) -> int:
        """Tokens to draft at most, where a segment may have `most`."""
        if not self._follows:
            return most
        return min(most, max(self._shortest, round(self._share * most)))

    def ends(self, row: Row) -> bool:
        """Whether a draft ends with the token that is to be drawn from `row`, the draft's own logits."""
        return self.reads_rows and row.top_chance < self._least

    def goes_on(self, n_segments: int, *, sure: bool) -> bool:
        """Whether a further segment is begun behind so many whole ones in one draft. sure: no row of theirs, the first
        one included, would have ended it."""
        if self._follows:
            return self._whole**n_segments >= LIKELY
        return sure or not self.reads_rows

    def saw(self, *, drafted: int, kept: int, whole: bool = False) -> None:
        """What became of a segment, or of the part of one that was drafted. whole: it was all of one."""
        self._share += (1 - MEMORY) * (kept / drafted - self._share)
        if whole:
            self._whole += (1 - MEMORY) * ((kept == drafted) - self._whole)
