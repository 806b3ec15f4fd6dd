"""Segments that share passes: each is the one that would be written alone, and a pass takes along what it can."""

from __future__ import annotations

import doctest
from collections.abc import Sequence

import numpy as np
import pytest
from one_pass import read_segment
from scripted import Law, ScriptedModel, chain, scattered

from semspec.calibration import guesses
from semspec.calibration.pair import rng_for
from semspec.calibration.writing import Author, Written, draw_segment, write_segments
from semspec.runtime.config import SamplingParams
from semspec.runtime.errors import ConfigError
from semspec.runtime.sampling import greedy, sample, warp
from semspec.runtime.segments import Boundary, Segmenter

SIZE = 6  # ids; 0 ends a line
CONTEXT = (1, 2, 3, 1, 2, 4, 1)
SAMPLING = SamplingParams(temperature=1, top_p=1)
SEGMENTER = Segmenter(Boundary(kind="newline", min_tokens=2, max_tokens=7), [b"\n", *[b"a"] * 5].__getitem__)
ROUND = chain(9 * np.roll(np.eye(SIZE), 1, axis=1))  # 1 2 3 4 5 0 1 ..


def write(model: ScriptedModel, authors: Sequence[Author]) -> list[Written]:
    return write_segments(
        model, CONTEXT, authors, segmenter=SEGMENTER, sampling=SAMPLING, n_ids=model_size(model)
    )


def model_size(model: ScriptedModel) -> int:
    return int(np.size(model.law(CONTEXT)))


def rngs(seed: int, n: int) -> list[Author]:
    return [rng_for(seed, number) for number in range(n)]


def alone(law: Law, author: Author) -> tuple[int, ...]:
    """A segment token by token, nothing remembered; no code of what is tested."""
    ids: list[int] = []
    while SEGMENTER.length(ids) is None:
        logits = np.asarray(law((*CONTEXT, *ids)), np.float32)
        if isinstance(author, np.random.Generator):
            ids.append(sample(warp(logits, SAMPLING), author))
        else:
            ids.append(greedy(logits) if author is None else author[len(ids)])
    return tuple(ids)


@pytest.mark.parametrize(("spread", "most"), [(0.5, 64), (1.5, 64), (4.0, 64), (1.5, 2)])
def test_what_is_written_together_is_what_would_be_written_alone(
    monkeypatch: pytest.MonkeyPatch, spread: float, most: int
) -> None:
    """Samples, and segments of another author, that part and end inside of one pass: a row pooled twice or left out, a
    cache not rewound, or chances that run from one into the next would all show. States are whole numbers here."""
    monkeypatch.setattr("semspec.calibration.writing.MOST_AHEAD", most)
    n_met = 0
    for seed in range(25):
        law = scattered(SIZE, seed, spread)
        others = [alone(scattered(SIZE, seed, 0.5 * spread), author) for author in rngs(seed + 1000, 5)]
        authors = [None, *rngs(seed, 6), *others]
        model = ScriptedModel(law)
        found = write(model, authors)
        expected = [alone(law, author) for author in [None, *rngs(seed, 6), *others]]
        assert [one.ids for one in found] == expected
        assert model.tokens == list(CONTEXT[:-1])
        for one in found:
            reading = read_segment(ScriptedModel(law), CONTEXT, one.ids, n_ids=SIZE)
            assert np.array_equal(one.reading.pooled, reading.pooled)
            assert one.reading.signals == reading.signals
        n_met += sum(len(ids) > 1 for _, ids in model.calls[1:])
    assert n_met > 60, "hardly a pass took anything along"


def test_equal_segments_are_read_once() -> None:
    """Whoever wrote them; the states of a row are the same for all."""
    law = scattered(SIZE, 3, 4.0)
    first = write(ScriptedModel(law), [None])[0]
    model = ScriptedModel(law)
    found = write(model, [None, first.ids, None, first.ids])
    assert all(one is found[0] for one in found) and found[0].ids == first.ids
    assert [len(ids) for _, ids in model.calls] == [len(CONTEXT) - 1, len(first.ids)]


def test_samples_that_follow_what_is_read_cost_nothing() -> None:
    """The target often says what the draft said. One pass for the common part, and one for each that goes on alone."""
    model = ScriptedModel(ROUND)
    written, *_ = write(model, [None, (2, 3, 4, 5, 0), (2, 3, 5, 1, 0)])
    assert written.ids == (2, 3, 4, 5, 0)
    assert model.calls[1:] == [(6, (1, 2, 3)), (9, (4, 5)), (9, (5, 1))]


def test_few_rows_of_logits_are_asked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment may have 500 tokens, and a row of logits 600 KB, for which the engine keeps room."""
    monkeypatch.setattr("semspec.calibration.writing.MOST_AHEAD", 2)
    model = ScriptedModel(ROUND)
    assert write(model, [(2, 3, 4, 5, 1, 2, 0)])[0].ids == (2, 3, 4, 5, 1, 2, 0)
    assert [len(ids) for _, ids in model.calls[1:]] == [3, 3, 1]


def test_a_row_that_would_be_read_alone_takes_a_guess_along() -> None:
    """Two rows take as long as one; a wrong guess is read over, and the row before it with what follows instead."""
    model = ScriptedModel(ROUND)
    written = write(model, [None])[0]
    assert written.ids == (2, 3, 4, 5, 0)
    # the context says 2 behind `4 1`, 4 behind `1 2`, 1 behind `3`, and nothing behind 5
    assert model.calls[1:] == [(6, (1, 2)), (8, (3, 1)), (8, (3, 4)), (10, (5,))]
    assert written.reading.pooled.tolist() == [[np.mean([7, 8, 9, 10, 11]), np.mean([1, 2, 3, 4, 5])]]


def test_right_guesses_halve_the_passes() -> None:
    """A text that says again what it said before."""
    for law, context in ((ROUND, (1, 2, 3, 4, 5, 0, 1)), (chain(9 * np.eye(SIZE)), (3, 3, 3))):
        model = ScriptedModel(law)
        one = write_segments(model, context, [None], segmenter=SEGMENTER, sampling=SAMPLING, n_ids=SIZE)[0]
        assert len(model.calls) - 1 == (len(one.ids) + 1) // 2
        assert {len(ids) for _, ids in model.calls[1:]} <= {1, 2}


@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_a_drawn_segment_is_the_sample_and_is_remembered(spread: float) -> None:
    """For prefixes, which nobody reads: the same tokens, and the next segment goes on without reading them again."""
    for seed in range(20):
        law = scattered(SIZE, seed, spread)
        model = ScriptedModel(law)
        ids = draw_segment(model, CONTEXT, rng_for(seed), segmenter=SEGMENTER, sampling=SAMPLING, n_ids=SIZE)
        assert ids == alone(law, rng_for(seed))
        assert model.tokens == [*CONTEXT, *ids[:-1]]
        assert all(len(given) <= 2 for _, given in model.calls[1:])
        before = len(model.calls)
        draw_segment(
            model, [*CONTEXT, *ids], rng_for(seed + 1), segmenter=SEGMENTER, sampling=SAMPLING, n_ids=SIZE
        )
        assert model.calls[before][0] == len(CONTEXT) + len(ids) - 1


@pytest.mark.parametrize("room", [0, 1])
def test_a_guess_never_needs_more_context_than_the_segment(room: int) -> None:
    """A segment of seven that just fits is written; a guess behind the end of the context is not read."""
    law = chain(9 * np.eye(SIZE))  # the same again, to the cap
    max_context = len(CONTEXT) - 1 + 7 + room
    model = ScriptedModel(law, max_context=max_context)
    assert write(model, [None, rng_for(0)])[0].ids == (1,) * 7
    ids = draw_segment(model, CONTEXT, rng_for(1), segmenter=SEGMENTER, sampling=SAMPLING, n_ids=SIZE)
    assert SEGMENTER.length(ids) == len(ids)
    with pytest.raises(ConfigError, match="cannot read"):
        write(ScriptedModel(law, max_context=max_context - room - 1), [None])


@pytest.mark.parametrize("ids", [(), (2, 3), (2, 0, 3), (0,)])
def test_what_is_no_whole_segment_is_refused(ids: tuple[int, ...]) -> None:
    """A reading of half a segment would be learned from as one of a whole."""
    with pytest.raises(ConfigError, match=f"{len(ids)} ids are not one whole segment"):
        write(ScriptedModel(ROUND), [None, ids])


def test_nobody_writes_nothing() -> None:
    """Not even a pass."""
    model = ScriptedModel(ROUND)
    assert write(model, []) == [] and len(model.calls) == 1


def test_the_examples_of_guesses_hold() -> None:
    """The docstring is the specification."""
    result = doctest.testmod(guesses)
    assert result.attempted and not result.failed
