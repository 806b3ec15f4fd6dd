"""Pace: how much of a segment is drafted before the target looks, by the draft's own word or what became of others.

What ends a draft early depends on the tokens drafted so far and on the law of the next one, never on a token that is
then thrown away, nor on what the target makes of this draft: so the exact rule stays exact. It knows numbers; it knows
no model.
"""

from __future__ import annotations

from semspec.runtime.readings import Row

__all__ = ["Pace"]

MEMORY = 0.75  # of what the running share was before a round, so that about four rounds count


class Pace:
    """One request's. adaptive: one of config.ADAPTIVE. least: `confidence` stops where the draft's own likeliest token
    has a smaller chance; shortest: `acceptance` never drafts less.

    >>> pace = Pace("acceptance", shortest=4)
    >>> pace.saw(drafted=20, kept=0), pace.limit(20), pace.saw(drafted=15, kept=0), pace.limit(20)
    (None, 15, None, 11)
    """

    def __init__(self, adaptive: str = "off", *, least: float = 0.0, shortest: int = 1) -> None:
        self.reads_rows = adaptive == "confidence"
        self._follows = adaptive == "acceptance"
        self._least, self._shortest, self._share = least, shortest, 1.0

    def limit(self, most: int) -> int:
        """Tokens to draft at most, where a segment may have `most`."""
        if not self._follows:
            return most
        return min(most, max(self._shortest, round(self._share * most)))

    def ends(self, row: Row) -> bool:
        """Whether a draft stops before a token is drawn from `row`, the draft's own logits."""
        return self.reads_rows and row.top_chance < self._least

    def saw(self, *, drafted: int, kept: int) -> None:
        """What became of a segment, or of the part of one that was drafted."""
        self._share += (1 - MEMORY) * (kept / drafted - self._share)
