"""StopWatch: the same end whatever the blocks, and text held back no longer than it must be."""

from __future__ import annotations

import doctest
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers as tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from semspec.export.vocabulary import write_tokenizer
from semspec.runtime import stopping
from semspec.runtime.config import SamplingParams
from semspec.runtime.stopping import Cut, StopWatch, TextSource
from semspec.runtime.tokenizer import Tokenizer

EOS = 99


class Words:
    """Id i is the i-th piece; an id beyond them has no text, as special tokens have none."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = pieces

    def push(self, ids: Sequence[int]) -> str:
        return "".join(self.pieces[token] for token in ids if token < len(self.pieces))

    def finish(self) -> str:
        return ""


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The real tokenizer, rebuilt from the GGUF file."""
    folder = tmp_path_factory.mktemp("smollm2")
    write_tokenizer(smollm2_gguf, folder, config={"eos_token_id": 2, "vocab_size": 49152})
    return Tokenizer.open(folder)


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One id a byte, 258 ends a text: every UTF-8 accident can be written."""
    return Tokenizer.open(tiny.save(tmp_path_factory.mktemp("bytewise"), tiny.byte_level()))


def watch(text: TextSource, *, end_ids: Sequence[int] = (EOS,), **params: Any) -> StopWatch:
    return StopWatch(SamplingParams(**params), end_ids, text)


def run(watch: StopWatch, blocks: Sequence[Sequence[int]]) -> tuple[list[Cut], list[int]]:
    """What came of each block up to the end, and the answer's ids."""
    cuts: list[Cut] = []
    ids: list[int] = []
    for block in blocks:
        cuts.append(watch.push(block))
        ids += block[: cuts[-1].n_ids]
        if cuts[-1].finish_reason:
            break
    return cuts, ids


def chunkings(ids: Sequence[int]) -> Iterator[list[Sequence[int]]]:
    """All ways to cut ids into blocks."""
    if not ids:
        yield []
    for size in range(1, len(ids) + 1):
        for rest in chunkings(ids[size:]):
            yield [ids[:size], *rest]


def answer(cuts: Sequence[Cut]) -> tuple[str, str | None]:
    return "".join(cut.text for cut in cuts), cuts[-1].finish_reason


def in_every_chunking(
    text: Callable[[], TextSource], ids: Sequence[int], **params: Any
) -> tuple[str, int, str | None]:
    """Text, number of ids and reason, after seeing that all chunkings agree."""
    found = set()
    for blocks in chunkings(ids):
        cuts, kept = run(watch(text(), **params), blocks)
        assert kept == list(ids[: len(kept)])
        shown, reason = answer(cuts)
        found.add((shown, len(kept), reason))
    assert len(found) == 1
    return found.pop()


def brute_force(
    pieces: Sequence[str],
    flushed: Sequence[str],
    ids: Sequence[int],
    stops: Sequence[str],
    end_ids: Sequence[int],
    cap: int,
) -> tuple[str, int, str | None]:
    """The rule, read from the whole text. pieces[n]: what id n adds; flushed[n]: what would come at an end there."""
    text = ""
    for n, token in enumerate(ids):
        reason = "stop" if token in end_ids else None
        text += "" if reason else pieces[n]
        if not any(stop in text for stop in stops):
            reason = reason or ("length" if n + 1 == cap else None)
            text += (flushed[n - 1] if n and token in end_ids else flushed[n]) if reason else ""
        places = [text.index(stop) for stop in stops if stop in text]
        if places:
            return text[: min(places)], n + 1, "stop"
        if reason:
            return text, n + 1, reason
    return text, len(ids), None


def test_docstring_examples_hold() -> None:
    """Executed, so they cannot drift."""
    result = doctest.testmod(stopping)
    assert result.attempted and not result.failed


# One rule, whatever the blocks


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "n_ids"),
    [
        pytest.param(["a ", "bl", "ue", " wh", "ale", "!"], ["ue wha"], "a bl", 5, id="inside words"),
        pytest.param(["Hi.", "\n", "Hum", "an", ":", " x"], ["\nHuman:"], "Hi.", 5, id="turn marker"),
        pytest.param(["x", "a", "b", "c"], ["ab", "abc"], "x", 3, id="overlapping, short first"),
        pytest.param(["x", "a", "b", "c"], ["abc", "ab"], "x", 3, id="overlapping, long first"),
        pytest.param(["x", "abc"], ["abc", "bc"], "x", 2, id="two in one token: the earlier text"),
        pytest.param(["x", "a", "b", "c", "d"], ["abcd", "bc"], "xa", 4, id="one inside another"),
        pytest.param(["a", "a", "b"], ["aab", "ab"], "", 3, id="two that end together"),
        pytest.param(["a", "b", "x", "c"], ["x"], "ab", 3, id="one character"),
        pytest.param(["EN", "D", "a"], ["END"], "", 2, id="at the very start"),
        pytest.param(["1", "END and more", "a"], ["END"], "1", 2, id="text behind it in its token"),
        pytest.param(["a", "a", "a", "b"], ["aab"], "a", 4, id="begins within a failed one"),
        pytest.param(["ab", "ab", "ac"], ["abac"], "ab", 3, id="begins within a failed one, by two"),
        pytest.param(["a", "", "b", "c"], ["ab"], "", 3, id="tokens without text"),
        pytest.param(["日", "本", "語"], ["本語"], "日", 3, id="wide characters"),
    ],
)
def test_stop_string_ends_the_answer_wherever_it_is_completed(
    pieces: list[str], stops: list[str], text: str, n_ids: int
) -> None:
    """D02, D18: within a block, over blocks, over tokens; the ids end with the token that completes it."""
    ids = range(len(pieces))
    assert in_every_chunking(lambda: Words(pieces), ids, stop=stops) == (text, n_ids, "stop")


@pytest.mark.parametrize(
    ("ids", "params", "expected"),
    [
        pytest.param([0, 1, EOS, 2, 3], {}, ("ab", 3, "stop"), id="end token"),
        pytest.param([EOS, 0], {}, ("", 1, "stop"), id="end token first"),
        pytest.param([0, EOS, 2], {"ignore_eos": True, "max_tokens": 3}, ("ac", 3, "length"), id="ignored"),
        pytest.param(
            [0, 1, 2], {"stop_token_ids": (1,)}, ("a", 2, "stop"), id="stop id: nothing of it is shown"
        ),
        pytest.param(
            [0, 1, EOS], {"stop_token_ids": (1,), "ignore_eos": True}, ("a", 2, "stop"), id="stop id counts"
        ),
        pytest.param([0, 1, 2, 3], {"max_tokens": 2}, ("ab", 2, "length"), id="cap within a block"),
        pytest.param([0, EOS, 2], {"max_tokens": 2}, ("a", 2, "stop"), id="end token at the cap"),
        pytest.param([0, 1, EOS], {"max_tokens": 2}, ("ab", 2, "length"), id="end token after the cap"),
        pytest.param([0, 1, 2], {"max_tokens": 2, "stop": ["b"]}, ("a", 2, "stop"), id="string at the cap"),
        pytest.param(
            [0, 1, 2], {"max_tokens": 2, "stop": ["bc"]}, ("ab", 2, "length"), id="string after the cap"
        ),
        pytest.param(
            [0, 1, 2, 3], {"max_tokens": 4, "stop": ["b"]}, ("a", 2, "stop"), id="string before the cap"
        ),
        pytest.param(
            [0, 1, EOS, 2], {"stop": ["bc"]}, ("ab", 3, "stop"), id="half a string, then the end token"
        ),
        pytest.param([0, 1, 2], {"stop_token_ids": (1,), "stop": ["b"]}, ("a", 2, "stop"), id="both at once"),
        pytest.param(
            [0, 1, 2], {"stop_token_ids": (2,), "stop": ["b"]}, ("a", 2, "stop"), id="string, then stop id"
        ),
        pytest.param([0, 1, 2], {"stop": ["cd"]}, ("ab", 3, None), id="still open"),
    ],
)
def test_whichever_comes_first_ends_the_answer(
    ids: list[int], params: dict[str, Any], expected: tuple[str, int, str | None]
) -> None:
    """D01: the reason is right when a cap and a stop fall into one block; a stop at the cap's own token is a stop."""
    assert in_every_chunking(lambda: Words("abcd"), ids, **params) == expected


PIECES = ["a", "b", "ab", "ba", "aab", "", " b"]


@settings(deadline=None, derandomize=True, max_examples=500)
@given(
    st.lists(st.integers(0, len(PIECES)), max_size=14),
    st.lists(st.text("ab ", min_size=1, max_size=4), max_size=3),
    st.sets(st.integers(0, len(PIECES)), max_size=1),
    st.integers(1, 16),
    st.data(),
)
def test_blocks_of_any_size_equal_brute_force(
    ids: list[int], stops: list[str], end_ids: set[int], cap: int, data: st.DataObject
) -> None:
    """D02, D18: two letters make near-matches and overlaps the rule. Streamed text equals the whole text."""
    blocks = []
    rest = ids
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        blocks.append(rest[:size])
        rest = rest[size:]
    cuts, kept = run(watch(Words(PIECES), end_ids=tuple(end_ids), stop=stops, max_tokens=cap), blocks)
    pieces = [Words(PIECES).push([token]) for token in ids]
    text, n_ids, reason = brute_force(pieces, [""] * len(ids), ids, stops, tuple(end_ids), cap)
    assert kept == ids[:n_ids] and (cuts[-1].finish_reason if cuts else None) == reason
    shown = "".join(cut.text for cut in cuts)
    if reason:
        assert shown == text
    else:  # what is held is the end of the text, begins a stop string, and is no longer than it must be
        assert text.startswith(shown)
        held = text[len(shown) :]
        ends = [text[at:] for at in range(len(text)) if any(stop.startswith(text[at:]) for stop in stops)]
        assert held == max(ends, key=len, default="")


# What is held back


def test_nothing_is_held_without_stop_strings() -> None:
    """Every token is shown as it comes."""
    cuts, _ = run(watch(Words("abc")), [[0], [1], [2]])
    assert [cut.text for cut in cuts] == ["a", "b", "c"]


def test_near_match_is_released_as_soon_as_it_is_ruled_out() -> None:
    """D18: over-cautious versions hold far too much, or lose it."""
    cuts, _ = run(watch(Words(["<|", "end", "ing", "!"]), stop=["<|end|>"]), [[0], [1], [2], [3]])
    assert [cut.text for cut in cuts] == ["", "", "<|ending", "!"]


def test_of_a_failed_match_only_what_may_still_begin_one_is_held() -> None:
    """After "aa" another "a" frees the first: two can still begin "aab"."""
    cuts, _ = run(watch(Words("ab"), stop=["aab"], max_tokens=5), [[0]] * 5)
    assert [cut.text for cut in cuts] == ["", "", "a", "a", "aaa"]


@pytest.mark.parametrize("stop", ["aaaa", "aaab"])
def test_held_text_is_shorter_than_the_longest_stop_string(stop: str) -> None:
    """D18: at most its length less one, however long the near-match goes on."""
    text = watch(Words(["a", "b"]), stop=[stop, "x"])
    shown = 0
    for n in range(1, 4 if stop == "aaaa" else 40):
        shown += len(text.push([0]).text)
        assert n - shown == min(n, len(stop) - 1)


@pytest.mark.parametrize(("last", "reason"), [(EOS, "stop"), (1, "length")])
def test_held_text_comes_out_at_the_end(last: int, reason: str) -> None:
    """D18: half a stop string is text, once nothing can follow it."""
    cuts, _ = run(watch(Words(["<|", "x"]), stop=["<|x|>"], max_tokens=2), [[0, last]])
    assert cuts == [Cut(n_ids=2, text="<|" if last == EOS else "<|x", finish_reason=reason)]


# Limits


def test_left_counts_down_and_never_below_what_was_kept() -> None:
    """The loop shortens drafts by it, so that max_tokens is never overshot."""
    text = watch(Words("abcd"), max_tokens=3)
    assert text.left == 3
    text.push([0, 1])
    assert text.left == 1
    assert text.push([2, 3, 0]) == Cut(n_ids=1, text="c", finish_reason="length")
    assert text.left == 0


@pytest.mark.parametrize(
    ("ids", "stop", "expected"),
    [
        ([0, 1], (), Cut(n_ids=2, text="ab", finish_reason="length")),
        ([0, EOS], (), Cut(n_ids=2, text="a", finish_reason="stop")),
        ([0, EOS, 1], (), Cut(n_ids=2, text="a", finish_reason="stop")),
        ([0, 1], ("b",), Cut(n_ids=2, text="a", finish_reason="stop")),
        ([0, 1, 2], ("b",), Cut(n_ids=2, text="a", finish_reason="stop")),
    ],
)
def test_full_context_is_a_limit_behind_the_last_id(
    ids: list[int], stop: tuple[str, ...], expected: Cut
) -> None:
    """Only after the block's last token; a stop in it, or with it, wins."""
    assert watch(Words("abc"), stop=stop).push(ids, full=True) == expected


def test_no_ids_change_nothing() -> None:
    """A round may commit nothing."""
    text = watch(Words("a"), max_tokens=1)
    assert text.push([]) == Cut(n_ids=0, text="", finish_reason=None)
    assert text.left == 1


def test_stop_ids_are_the_models_and_the_users() -> None:
    """Drafts end with them too."""
    assert watch(Words(""), stop_token_ids=(3,)).stop_ids == {3, EOS}
    assert watch(Words(""), stop_token_ids=(3,), ignore_eos=True).stop_ids == {3}


# Real tokenizers


@settings(deadline=None, derandomize=True, max_examples=300)
@given(
    st.lists(st.sampled_from([*"a🦊é".encode(), 0xFF, 258]), max_size=14),
    st.lists(st.sampled_from(["é", "🦊", "a🦊", "éa", "\ufffd", "a\ufffd"]), max_size=2),
    st.integers(1, 16),
    st.integers(1, 5),
)
def test_bytes_as_tokens_equal_brute_force(
    bytewise: Tokenizer, ids: list[int], stops: list[str], cap: int, size: int
) -> None:
    """D17, D18: characters over several tokens, broken ones, and stop strings made of them."""
    blocks = [ids[at : at + size] for at in range(0, len(ids), size)]
    cuts, kept = run(watch(bytewise.stream(), end_ids=(258,), stop=stops, max_tokens=cap), blocks)
    pieces, flushed = [], []
    stream = bytewise.stream()
    for n, token in enumerate(ids, 1):
        pieces.append(stream.push([token]))
        whole = bytewise.stream()
        whole.push(ids[:n])
        flushed.append(whole.finish())
    text, n_ids, reason = brute_force(pieces, flushed, ids, stops, (258,), cap)
    assert kept == ids[:n_ids] and (cuts[-1].finish_reason if cuts else None) == reason
    if reason:
        assert answer(cuts) == (text, reason)


@pytest.mark.parametrize(("last", "reason"), [([258], "stop"), ([], "length")])
def test_unfinished_character_comes_out_once_at_the_end(
    bytewise: Tokenizer, last: list[int], reason: str
) -> None:
    """D17: as the decoding of the whole shows it, after the end token as after the cap."""
    ids = [*b"ok", *"🦊".encode()[:2], *last]
    found = in_every_chunking(bytewise.stream, ids, end_ids=(258,), max_tokens=len(ids))
    assert found == (bytewise.decode(ids), len(ids), reason) and found[0] == "ok\ufffd"


REAL = "1. 1\n2. 2\n3. 3\n4. 4\n5. 5, blue whale 👩‍🚀 END.\nHuman: no"


@pytest.mark.parametrize(
    "stop", [" 4", "4. 4", "3\n4", "ue wha", "\nHuman:", "\n", "👩‍🚀 E", "🚀", "1", "nowhere"]
)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 100])
def test_real_text_stops_in_blocks_of_every_size(smollm2: Tokenizer, stop: str, size: int) -> None:
    """D02: the field's own example and others, with the ids and the text that one token at a time gives."""
    ids = smollm2.encode(REAL)
    blocks = [ids[at : at + size] for at in range(0, len(ids), size)]
    cuts, kept = run(watch(smollm2.stream(), end_ids=(2,), stop=[stop], max_tokens=len(ids)), blocks)
    n_ids = next((n for n in range(1, len(ids)) if stop in smollm2.decode(ids[:n])), len(ids))
    assert kept == ids[:n_ids]
    assert answer(cuts) == (REAL.partition(stop)[0], "stop" if stop in REAL else "length")
