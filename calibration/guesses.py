"""Guesses: which token may come next, from what came after the same few tokens before.

A guess costs no pass of its own: a row read alone takes as long as two (measured), so it rides along, and where it is
right the row behind it is there already. It knows ids and no model.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Guesses"]

SIZES = (4, 3, 2, 1)  # tokens that are looked up, the longest run first


class Guesses:
    """What followed the last tokens of a text when they were last seen.

    >>> guesses = Guesses([1, 2, 3, 1, 4])
    >>> guesses.after([7, 1]), guesses.after([3, 1]), guesses.after([2]), guesses.after([4])
    (4, 4, 3, None)
    >>> guesses.learn([2], [9, 5])
    >>> guesses.after([1, 2]), guesses.after([8, 2]), guesses.after([2, 9])
    (3, 9, 5)
    """

    def __init__(self, text: Sequence[int] = ()) -> None:
        self._followers: dict[tuple[int, ...], int] = {}
        self.learn((), text)

    def learn(self, before: Sequence[int], ids: Sequence[int]) -> None:
        """`ids` came behind `before`; what is learned last is guessed first."""
        known = tuple(before[-SIZES[0] :])
        text = (*known, *ids)
        for place in range(max(len(known), 1), len(text)):
            for size in SIZES:
                if size <= place:
                    self._followers[text[place - size : place]] = text[place]

    def after(self, text: Sequence[int]) -> int | None:
        """None where nothing like the end of `text` was seen."""
        for size in SIZES:
            token = self._followers.get(tuple(text[-size:]))
            if token is not None:
                return token
        return None
