"""Thinking: where a reasoning model's thoughts end and its answer begins, seen from the tokens alone.

The chat template may have opened the thoughts itself, or opened and closed them at once; so the state at the end of the
prompt counts, not whether an opening tag was written. It knows ids; it knows no text and no rule.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

__all__ = ["Thinking"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """starts, ends: the tags' ids, None where the vocabulary has no such token.

    >>> tags = Thinking(starts=7, ends=8)
    >>> [tags.may_end(prompt, stop_ids={9}) for prompt in ([1, 7, 2], [1, 7, 8, 2], [7, 8, 9, 1], [1])]
    [True, False, True, True]
    """

    starts: int | None
    ends: int | None

    def may_end(self, prompt: Sequence[int], stop_ids: Collection[int]) -> bool:
        """Whether the first closing tag of the answer to `prompt` ends thoughts: not where the prompt has closed them
        already. Earlier turns, which end with one of `stop_ids`, do not count, nor do tags that they quote."""
        if self.ends is None:
            return False
        for token in reversed(prompt):
            if token == self.ends:
                return False
            if token == self.starts or token in stop_ids:
                return True
        return True
