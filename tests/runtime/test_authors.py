"""Who wrote which characters: joined they are the text, whatever is held back, split or cut."""

from __future__ import annotations

from itertools import product

import pytest
import tiny_tokenizers
from decoding import Letters

from semspec.runtime.authors import Authors
from semspec.runtime.config import SamplingParams
from semspec.runtime.stopping import StopWatch
from semspec.runtime.tokenizer import Tokenizer

PIECES = ("ab", "c", "", "defg")


def test_tokens_are_the_targets_the_drafts_and_the_drafts_lossy_ones() -> None:
    """Of five tokens four are from the draft, the last two of these lossy."""
    found = Authors(Letters(PIECES)).split("abcabdefgc", [0, 1, 0, 3, 1], n_from_draft=4, n_lossy=2)
    assert [*found] == [
        ("draft", "ab"),
        ("draft", "c"),
        ("draft, lossy", "ab"),
        ("draft, lossy", "defg"),
        ("target", "c"),
    ]


@pytest.mark.parametrize("stop", ["gz", "efgc", "cab", "x"])
def test_what_is_held_back_keeps_its_author(stop: str) -> None:
    """Pieces of every size through a stop watch: joined, texts are the answer's, and authors those of the tokens."""
    ids = [0, 3, 2, 1, 0, 1, 3, 3, 1]
    for size, drafted in product((1, 2, 3, 9), (0, 1, 2)):
        watch, authors = (
            StopWatch(SamplingParams(stop=(stop,)), (), Letters(PIECES)),
            Authors(Letters(PIECES)),
        )
        shown, marked, by_token = "", "", ""
        for at in range(0, len(ids), size):
            block = ids[at : at + size]
            cut = watch.push(block)
            n = min(drafted, len(block))
            parts = [*authors.split(cut.text, block, n_from_draft=n, n_lossy=n)]
            shown += cut.text
            marked += "".join(author[0] * len(text) for author, text in parts)
            by_token += "".join(("d" if i < n else "t") * len(PIECES[token]) for i, token in enumerate(block))
            assert "".join(text for _, text in parts) == cut.text
            if cut.finish_reason:
                break
        assert marked == by_token[: len(shown)]


def test_half_a_character_is_told_when_it_is_whole_or_over() -> None:
    """Bytes of one character by two authors: it is the one's who completed it; left alone it is shown at the end."""
    tokenizer = Tokenizer(tiny_tokenizers.byte_level(), config={}, generation={}, chat_template=None)
    ids = tokenizer.encode("\u00e4")
    authors = Authors(tokenizer.stream())
    assert len(ids) == 2
    assert [*authors.split("", ids[:1], n_from_draft=1, n_lossy=0)] == []
    assert [*authors.split("\u00e4", ids[1:], n_from_draft=0, n_lossy=0)] == [("target", "\u00e4")]
    assert [*authors.split("\ufffd", ids[:1], n_from_draft=1, n_lossy=0)] == [("target", "\ufffd")]
