"""Where segments end: every kind of boundary, over tokens that cut newlines in every way."""

from __future__ import annotations

import copy
import doctest
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import tiny_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from semspec.runtime import segments
from semspec.runtime.errors import ConfigError
from semspec.runtime.segments import Boundary, Segmenter, parse_boundary
from semspec.runtime.tokenizer import Tokenizer
from semspec.runtime.typed import plain, read_typed


def segmenter(
    pieces: Sequence[str], kind: str, low: int = 1, cap: int = 99, stop_ids: Sequence[int] = ()
) -> Segmenter:
    """Over tokens that are `pieces`, ids in that order."""
    boundary = Boundary(kind=kind, min_tokens=low, max_tokens=cap)
    return Segmenter(boundary, lambda token: pieces[token].encode(), stop_ids)


def cut(pieces: Sequence[str], kind: str, low: int = 1, cap: int = 99) -> int | None:
    """Length of the segment that begins with these tokens."""
    return segmenter(pieces, kind, low, cap).length(range(len(pieces)))


def test_docstring_example_holds() -> None:
    """The worked example is executed, so it cannot drift from the code."""
    result = doctest.testmod(segments)
    assert result.attempted and not result.failed


@pytest.mark.parametrize(
    ("pieces", "line", "blank_line"),
    [
        (["a", "b", "c"], None, None),
        (["a.", "\n", "b", "\n"], 2, None),
        (["a.\n", "b", "\n\n"], 1, 3),
        (["a", ".\n\n", "b"], 2, 2),
        (["a.\n", "\n", "b"], 1, 2),  # over two tokens
        (["a.\n", "  ", "\t\n", "b"], 1, 3),  # blanks do not fill a line, wherever they stand
        (["a.\n", "  b", "\n"], 1, None),
        (["a.\r\n", "\r\n"], 1, 2),
        (["a.\n  ", "\n"], 1, 2),
        (["x\n \ny"], 1, 1),  # a token is never cut, whatever follows in it
        (["\n", "a", "\n"], 1, None),
        (["\n", "\n"], 1, 2),
        (["", "a\n"], 2, None),
        (["a\n", "", "\n"], 1, 3),
    ],
)
def test_a_segment_ends_with_the_token_that_completes_a_line(
    pieces: list[str], line: int | None, blank_line: int | None
) -> None:
    """The paper's list of tokens that end in two newlines misses those that a vocabulary writes as two tokens."""
    assert cut(pieces, "newline") == line
    assert cut(pieces, "blank-line") == blank_line


@pytest.mark.parametrize("kind", ["newline", "blank-line"])
def test_short_segments_go_on_and_long_ones_are_cut(kind: str) -> None:
    """Boundaries before min_tokens do not count, the one at it does; the cap cuts anywhere."""
    pieces = ["\n\n", "a", "\n\n", "b", "\n\n"]
    assert [cut(pieces, kind, low) for low in range(1, 7)] == [1, 3, 3, 5, 5, None]
    assert [cut(["a"] * 5, kind, 1, cap) for cap in (1, 3, 5, 6)] == [1, 3, 5, None]
    assert cut(pieces, kind, 4, 4) == 4


def test_a_stop_ends_a_segment_of_any_length() -> None:
    """Nothing can follow it, so there is nothing to wait for."""
    cutter = segmenter(["a", "<end>"], "newline", 3, 9, stop_ids=[1])
    assert [cutter.length(ids) for ids in ([1], [0, 1, 0], [0, 0, 0, 0])] == [1, 2, None]


def test_a_segment_does_not_depend_on_the_one_before_it() -> None:
    """A newline that follows a segment is the first of the next one, not a second newline of the last."""
    cutter = segmenter(["a\n\n", "\n", "b"], "blank-line")
    segment = cutter.begin()
    assert segment.push(0)
    following = cutter.begin()
    assert not following.push(1) and following.n == 1


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.lists(st.sampled_from(["a", "\n", " ", "\r", "\n\n", "b\n", " \n", "\na"]), max_size=12))
def test_where_it_ends_depends_on_the_text_and_not_on_its_tokens(pieces: list[str]) -> None:
    """A blank line is a blank line: the same characters one by one end at the character within the same token."""
    for kind, mark in (("newline", "\n"), ("blank-line", "\n\n")):
        n = cut(pieces, kind)
        text = "".join(pieces)
        at = cut(list(text), kind)
        if at is None:
            assert n is None
            continue
        assert n is not None and len("".join(pieces[: n - 1])) < at <= len("".join(pieces[:n]))
        assert mark in text[:at].replace("\r", "").replace(" ", "") and text[at - 1] == "\n"


def test_bytes_are_asked_for_once_an_id() -> None:
    """A segment costs what is new in it, not the vocabulary."""
    asked: list[int] = []

    def token_bytes(token: int) -> bytes:
        asked.append(token)
        return b"a"

    cutter = Segmenter(Boundary(), token_bytes)
    cutter.length([3, 3, 4] * 5)
    cutter.length([4, 3])
    assert asked == [3, 4]


@pytest.mark.parametrize("make", [tiny_tokenizers.byte_level, tiny_tokenizers.sentencepiece])
def test_both_ways_to_write_bytes_are_read(make: Callable[[], object], tmp_path: Path) -> None:
    """A newline is Ċ in one kind of vocabulary and <0x0A> in the other; both are known by their byte."""
    tokenizer = Tokenizer.open(tiny_tokenizers.save(tmp_path, make()))  # type: ignore[arg-type]
    cutter = Segmenter(Boundary(kind="blank-line", min_tokens=1, max_tokens=99), tokenizer.token_bytes)
    ids = tokenizer.encode("a b\nc\n\na")
    n = cutter.length(ids)
    assert n is not None and tokenizer.decode(ids[:n]) == "a b\nc\n\n"


def test_sentences_are_cut_at_their_marks() -> None:
    """What a sentence is, test_sentences.py says; least length, cap and stops are those of the other kinds."""
    pieces = [" 3", ".", "5", " kg", ".", " Next", " line", "\n", " Dr", ".", " No"]
    assert [cut(pieces, "sentence", low) for low in (1, 5, 6, 9)] == [5, 5, 8, None]
    assert cut(pieces, "sentence", 1, 3) == 3
    assert segmenter([" x", "<end>"], "sentence", 4, 9, stop_ids=[1]).length([0, 1]) == 2


def test_a_sentence_that_others_begin_too_goes_on_from_its_copy() -> None:
    """Samples of one context share their beginnings: what one reads must not reach the other."""
    cutter = segmenter([" 3", ".", "5", " kg", "`"], "sentence")
    one = cutter.begin()
    assert not one.push(3)
    other = copy.copy(one)
    assert not other.push(4) and not other.push(1)  # within code
    assert one.push(1)


def test_ids_end_a_segment_whatever_they_mean() -> None:
    """The paper's own rule: a list of tokens; their text is never asked for."""

    def nothing(token: int) -> bytes:
        raise AssertionError(token)

    boundary = Boundary(kind="ids", min_tokens=2, max_tokens=5, ids=(4, 7))
    cutter = Segmenter(boundary, nothing, [9])
    assert [cutter.length(ids) for ids in ([4, 1, 7, 4], [7, 4], [1, 9], [1, 2, 3, 5, 6], [4, 1])] == [
        3,
        2,
        2,
        5,
        None,
    ]


@pytest.mark.parametrize(
    ("text", "boundary"),
    [
        ("newline", Boundary()),
        ("sentence:5-40", Boundary(kind="sentence", min_tokens=5, max_tokens=40)),
        ("blank-line", Boundary(kind="blank-line", min_tokens=1, max_tokens=500)),
        ("ids=382,271,382:2-9", Boundary(kind="ids", min_tokens=2, max_tokens=9, ids=(271, 382))),
    ],
)
def test_a_boundary_is_written_in_one_word(text: str, boundary: Boundary) -> None:
    """For commands; what is printed can be given back. In JSON it comes back as well."""
    assert parse_boundary(text) == boundary == parse_boundary(str(boundary))
    assert read_typed(Boundary, json.loads(json.dumps(plain(boundary))), "boundary") == boundary


@pytest.mark.parametrize(
    "text", ["comma", "newline:9", "newline=3", "ids", "ids=", "ids=-1", "newline:9-3", ""]
)
def test_what_is_not_a_boundary_is_refused(text: str) -> None:
    """In one line that says how one is written, or what is wrong with it."""
    with pytest.raises(ConfigError) as caught:
        parse_boundary(text)
    assert "\n" not in str(caught.value)


def test_boundaries_of_before_ids_keep_their_bytes() -> None:
    """Manifests, collections and their fingerprints were written without: they are read, and written the same."""
    old = {"kind": "newline", "min_tokens": 12, "max_tokens": 64}
    assert read_typed(Boundary, old, "boundary") == Boundary()
    assert plain(Boundary()) == old


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "comma"},
        {"min_tokens": 0},
        {"min_tokens": 65},
        {"max_tokens": 3},
        {"kind": "ids"},
        {"ids": (1,)},
        {"kind": "ids", "ids": (2, 1)},
        {"kind": "ids", "ids": (1, 1)},
        {"kind": "ids", "ids": (-1,)},
    ],
)
def test_boundaries_that_cannot_be_are_refused(changes: dict[str, object]) -> None:
    """A manifest may have been edited."""
    with pytest.raises(ConfigError):
        Boundary(**changes)  # type: ignore[arg-type]
