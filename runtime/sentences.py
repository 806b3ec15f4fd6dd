"""Sentences: does one end in the text that a token adds? Told from what was read, never from what follows.

A cut cannot be taken back: a token drawn to look ahead and then thrown away would bend the target's law. So where a
full stop may turn out to be something else, the sentence goes on: behind a digit (3.5, v1.2, a list number), behind
a single letter (an initial, `e.g.`), behind a known abbreviation, within `code`. What follows within the same token
is seen: `.mean` and `.75` end nothing. Not recognized: three tokens that are an ellipsis together, of which the first
ends a sentence. It knows bytes and characters; it knows no ids.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["START", "SoFar", "read_on"]

MARKS = frozenset(".!?")
STOPS = frozenset("\n。！？｡।॥؟۔։።፧፨។៕။᙮")
"""Characters that end a sentence whatever stands beside them: a line's end, full stops of other scripts."""

FULL_WIDTH = frozenset("．")  # a decimal point behind a digit

_SHORT = (
    "mr mrs ms dr prof st sr jr rev hon gen col sgt capt lt mt hr fr nr messrs mme "
    "vs etc approx ca cf al resp incl excl viz eg ie fig figs eq eqs sec ch vol no nos pp ed eds ref refs def thm "
    "inc ltd co corp dept est min max avg hrs lb lbs oz ft sq usw bzw "
    "jan feb mar apr jun jul aug sep sept oct nov dec mon tue tues wed thu thurs fri sat sun "
    "ii iii iv vi vii viii ix xi xii"
)
ABBREVIATIONS = frozenset(_SHORT.split())
"""Words whose full stop ends no sentence, in lower case; Roman list numbers too."""

KEPT = 96  # bytes of the text before, enough for any word of interest
OPENERS = "(\"'“‘«[{*_#>-"
_WORD = re.compile(r"\S*\Z")
_DOTTED = re.compile(r"[\w.]*\.\w+")
_OVER = re.compile(r"[\"'”’»)\]}*_]*(?:\s|\Z)")


class SoFar(NamedTuple):
    """Of a begun sentence: its last bytes, and whether it stands within `code`."""

    tail: bytes
    in_code: bool


START = SoFar(b"", False)


def read_on(so_far: SoFar, added: bytes) -> tuple[SoFar, bool]:
    """Take the bytes of the next token; whether a sentence ends in them. A character counts where its last byte is.

    >>> so_far, _ = read_on(START, b"It costs 4")
    >>> so_far, ends = read_on(so_far, b".")
    >>> ends, read_on(so_far, b"75, said Dr.")[1], read_on(so_far, b"75, no more.")[1]
    (False, False, True)
    """
    known = so_far.tail.decode("utf-8", "ignore")
    text = (so_far.tail + added).decode("utf-8", "ignore")
    in_code, ends = so_far.in_code, False
    for place in range(len(known), len(text)):
        if text[place] == "`":
            in_code = not in_code
        elif not ends:
            ends = _ends(text, place, in_code)
    return SoFar((so_far.tail + added)[-KEPT:], in_code), ends


def _ends(text: str, place: int, in_code: bool) -> bool:
    """Whether the character at `place` ends a sentence."""
    character = text[place]
    if character in STOPS:
        return True
    if character in FULL_WIDTH:
        return not text[:place][-1:].isdigit()
    if character not in MARKS or in_code or not _OVER.match(text, place + 1):
        return False
    found = _WORD.search(text[:place])
    word = "" if found is None else found[0].lstrip(OPENERS)
    if not word or character == "?":
        return bool(word)
    if word[-1].isdigit() or (len(word) == 1 and word.isalpha()):
        return False
    return character == "!" or not (
        word.endswith(".") or _DOTTED.fullmatch(word) or word.lower() in ABBREVIATIONS
    )
