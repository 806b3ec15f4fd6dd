"""Where sentences end: full stops that are none, those of other scripts, in tokens of every size (D45)."""

from __future__ import annotations

import doctest
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semspec.runtime import sentences
from semspec.runtime.sentences import START, read_on

TEXTS = {
    "It costs 4.75 and weighs 0.9. Next": [],
    "Dr. Lee at 8 a.m. ok. Go": ["Dr. Lee at 8 a.m. ok."],
    "第一。第二！": ["第一。", "第二！"],
    "यह है। ठीक": ["यह है।"],
    "هل هذا؟ نعم۔ لا": ["هل هذا؟", " نعم۔"],
    "- apples\n- pears\n": ["- apples\n", "- pears\n"],
    "1. First do this. 2. Then that! And": ["1. First do this.", " 2. Then that!"],
    "v1.2.3 is out. Get it at 10.0.0.1": ["v1.2.3 is out."],
    "Use e.g. this one, i.e. a good one. Ok": ["Use e.g. this one, i.e. a good one."],
    "J. R. Smith, Prof. at U.S. schools etc. came. He": ["J. R. Smith, Prof. at U.S. schools etc. came."],
    "5! is 120. So is n! too. And": ["5! is 120. So is n! too."],
    "Is it 5? Yes, see Fig. 3 and Eq. (2). Done": ["Is it 5?", " Yes, see Fig. 3 and Eq. (2)."],
    "Call `np.mean(x). y` or `a`. Then": ["Call `np.mean(x). y` or `a`."],
    "So $x$. It is \\boxed{5}. And 3.5%. Fine": ["So $x$.", " It is \\boxed{5}.", " And 3.5%."],
    "a) yes. ii. so... but": ["a) yes.", " ii. so."],  # see the file's docstring
    "全角３．５だ。完": ["全角３．５だ。"],
    "?? ! . x": ["??"],
    "": [],
}
"""Text -> the sentences that are over in it, each cut off before the next is read."""


def segments(pieces: Sequence[bytes]) -> list[bytes]:
    """Joined pieces of each sentence that is over."""
    found, so_far, begun = list[bytes](), START, b""
    for piece in pieces:
        so_far, ends = read_on(so_far, piece)
        begun += piece
        if ends:
            found.append(begun)
            so_far, begun = START, b""
    return found


def test_docstring_example_holds() -> None:
    """The worked example is executed, so it cannot drift from the code."""
    result = doctest.testmod(sentences)
    assert result.attempted and not result.failed


@pytest.mark.parametrize("text", TEXTS)
def test_sentences_end_where_a_reader_ends_them(text: str) -> None:
    """D45: no cut in numbers, versions, abbreviations, initials, list numbers and code; newlines and the full stops of
    other scripts cut."""
    assert [part.decode() for part in segments([letter.encode() for letter in text])] == TEXTS[text]


@pytest.mark.parametrize("text", TEXTS)
def test_a_character_counts_with_its_last_byte(text: str) -> None:
    """Vocabularies write rare characters as bytes; a cut never falls inside one."""
    pieces = [bytes([byte]) for byte in text.encode()]
    assert [part.decode() for part in segments(pieces)] == TEXTS[text]


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.sampled_from([text for text in TEXTS if "..." not in text]), st.data())
def test_the_cut_is_the_token_with_the_mark_however_the_text_is_cut_into_tokens(
    text: str, data: st.DataObject
) -> None:
    """D45: the same cuts for every chunking, but that no token is ever divided."""
    places = sorted(data.draw(st.sets(st.integers(0, len(text)))) | {0, len(text)})
    ends, marks = [], []
    at = 0
    so_far = START
    for low, high in pairwise(places):
        so_far, over = read_on(so_far, text[low:high].encode())
        if over:
            ends.append(high)
    for sentence in TEXTS[text]:
        at += len(sentence)
        marks.append(min(place for place in places if place >= at))
    assert set(marks) == set(ends)


@pytest.mark.parametrize(
    ("pieces", "n"),
    [
        (["wait", "...", " what", "?"], 4),
        (["np", ".mean", "(x)", " is", " it", "."], 6),
        (["He", " said", ' "go', '."', " Then"], 4),
        (["It", " is", " done", ".\n\n", "So"], 4),
        (["Yes", "?!", " No"], 2),
        (["x", "!=", "y", " holds", ".)"], 5),
        (["see", " example", ".com", "/a", "?b", "=c"], None),
        (["pi", " is", " ", "3", ".", "1", "4", "."], None),
    ],
)
def test_what_follows_within_a_token_is_seen(pieces: list[str], n: int | None) -> None:
    """As real vocabularies cut: a mark and its closing quotes are one token, a full stop of code is not."""
    found = segments([piece.encode() for piece in pieces])
    assert (found[0].decode() if found else None) == (None if n is None else "".join(pieces[:n]))
