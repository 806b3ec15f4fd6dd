"""StopWatch: where an answer ends. End ids, stop ids, stop strings, the token limit, in blocks of any size.

One rule: the token that completes a stop is the last of the answer. The text ends before a stop string; of an
end token nothing is shown. Text that may still turn into a stop string is held back, never more of it than the
longest stop string less one character.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from semspec.runtime.config import SamplingParams

__all__ = ["Cut", "StopWatch", "TextSource"]


class TextSource(Protocol):
    """Ids in, text out, whole characters only (tokenizer.TextStream)."""

    def push(self, ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Of the pushed ids the first `n_ids` belong to the answer; text is what can be shown now.

    finish_reason: `stop`, `length`, or None while there is more.
    """

    n_ids: int
    text: str
    finish_reason: str | None


class StopWatch:
    """Watches one answer. end_ids: the model's own end tokens."""

    def __init__(self, params: SamplingParams, end_ids: Collection[int], text: TextSource) -> None:
        self._stop_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else frozenset(end_ids)
        )
        self._strings, self._left = params.stop, params.max_tokens
        self._text, self._held = text, ""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end the answer."""
        return self._stop_ids

    @property
    def left(self) -> int:
        """Tokens that may still be written."""
        return self._left

    def push(self, ids: Sequence[int], *, full: bool = False) -> Cut:
        """Look at new ids in order; the first that ends the answer wins, a stop before a limit.

        full: the context takes no token after these.
        """
        text = ""
        for n, token in enumerate(ids, 1):
            self._left -= 1
            reason = "stop" if token in self._stop_ids else None
            if reason is None:
                self._held += self._text.push((token,))
            found = self._find()
            if found >= 0:
                self._held, reason = self._held[:found], "stop"
            elif reason is None and (self._left <= 0 or (full and n == len(ids))):
                reason = "length"
            if reason:
                if found < 0:
                    self._held += self._text.finish()
                    found = self._find()
                    if found >= 0:  # the unfinished character was the last of a stop string
                        self._held, reason = self._held[:found], "stop"
                return Cut(n_ids=n, text=text + self._held, finish_reason=reason)
            free = len(self._held) - self._pending()
            text, self._held = text + self._held[:free], self._held[free:]
        return Cut(n_ids=len(ids), text=text, finish_reason=None)

    def _find(self) -> int:
        """Where the first stop string in the held text begins, or -1."""
        places = [self._held.find(string) for string in self._strings]
        return min((place for place in places if place >= 0), default=-1)

    def _pending(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        return max((_overlap(self._held, string) for string in self._strings), default=0)


def _overlap(text: str, string: str) -> int:
    """Length of the longest proper beginning of `string` that `text` ends with.

    >>> _overlap("a blue wh", "whale")
    2
    """
    for size in range(min(len(text), len(string) - 1), 0, -1):
        if text.endswith(string[:size]):
            return size
    return 0
