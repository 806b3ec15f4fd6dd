"""What 64 likeliest ids tell of a row: never anything but what the whole row says, and enough in the usual settings."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semspec.runtime.config import SamplingParams
from semspec.runtime.records import Floats
from semspec.runtime.sampling import greedy, log_probabilities, rank, warp
from semspec.runtime.top import Top

N_NAMED = 64
SIZE = 2000


def top_of(logits: Floats, n_ids: int | None = None, *, named: int = N_NAMED, backwards: bool = False) -> Top:
    """As a graph gives it: sums in float32. backwards: of equals the highest id is named first, as an engine may."""
    wide = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):
        lse = float(np.float32(wide.max() + np.log(np.exp(wide - wide.max()).sum())))
    ids = np.arange(logits.size)
    order = np.lexsort((-ids if backwards else ids, -logits))[:named]
    return Top(
        logits[order],
        order.astype(np.int32),
        lse,
        size=logits.size,
        n_ids=logits.size if n_ids is None else n_ids,
    )


def peaked(seed: int, spread: float = 6.0, size: int = SIZE) -> Floats:
    """Normal logits: at a spread of 6 the likeliest few of 2000 hold most of the mass, as in a language model."""
    found: Floats = np.random.default_rng(seed).normal(0, spread, size).astype(np.float32)
    return found


# Few distinct values make ties the rule, at the edge of what is named too; -inf is what nobody may draw.
LOGITS = st.one_of(
    st.builds(
        lambda seed, spread, decimals: peaked(seed, spread, 300).round(decimals),
        st.integers(0, 2**32),
        st.sampled_from([0.1, 1.0, 4.0, 12.0]),
        st.sampled_from([0, 1, 3, 8]),
    ),
    st.lists(st.sampled_from([-math.inf, -3.0, 0.0, 0.5, 2.0]), min_size=1, max_size=200),
    st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=100),
).map(lambda values: np.asarray(values, np.float32))
PARAMS = st.builds(
    SamplingParams,
    temperature=st.one_of(st.sampled_from([0.0, 1e-30, 1e-4, 0.6, 1.0, 50.0, 1e30]), st.floats(0.05, 5)),
    top_k=st.one_of(st.just(0), st.integers(1, 70)),
    top_p=st.one_of(st.just(1.0), st.floats(0.001, 1), st.sampled_from([1e-9, 0.5, 0.9, 1 - 1e-9])),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1), st.just(1.0)),
)


@settings(deadline=None, derandomize=True, max_examples=500)
@given(LOGITS, PARAMS, st.integers(0, 40), st.sampled_from([4, 16, N_NAMED]), st.booleans())
def test_a_law_is_that_of_the_whole_row_or_none(
    logits: Floats, params: SamplingParams, n_padding: int, named: int, backwards: bool
) -> None:
    """Exactness is the promise of the lossless modes, and a nucleus that ends elsewhere would break it unseen."""
    n_ids = max(1, logits.size - n_padding)
    if logits[:n_ids].max() == -math.inf:
        return
    law = top_of(logits, n_ids, named=named, backwards=backwards).law(params)
    if law is not None:
        expected = warp(logits[:n_ids], params)
        assert law.ids.dtype == np.int64 and law.probs.dtype == np.float64
        assert law.ids.tolist() == expected.ids.tolist()
        np.testing.assert_allclose(law.probs, expected.probs, rtol=1e-6)


@pytest.mark.parametrize(
    "filters",
    [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.0, "top_p": 0.95},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "top_k": 20},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
        {"temperature": 1.5, "min_p": 0.1},
        {"temperature": 0.6, "top_p": 0.95, "min_p": 0.02},
    ],
    ids=str,
)
def test_usual_settings_are_answered(filters: dict[str, Any]) -> None:
    """Or nothing would be spared: 55 rows of 60, half of them above temperature 1; and it is the whole row's law."""
    params, n_told = SamplingParams(**filters), 0
    for seed in range(60):
        logits = peaked(seed)
        law = top_of(logits).law(params)
        if law is not None:
            n_told += 1
            assert law.ids.tolist() == warp(logits, params).ids.tolist()
    assert n_told >= (30 if params.temperature == 1.3 else 55)


@pytest.mark.parametrize(
    "filters",
    [{}, {"top_p": 0.999999}, {"top_k": 65}, {"min_p": 1e-9}, {"top_p": 0.9, "top_k": 500}],
    ids=str,
)
def test_laws_with_ids_that_are_not_named_are_none(filters: dict[str, Any]) -> None:
    """Nearly all of 2000 equally likely ids can be drawn, or a hundred: no 64 of them can stand for the law."""
    flat = peaked(1, spread=0.01)
    assert top_of(flat).law(SamplingParams(temperature=1.0, **filters)) is None


@pytest.mark.parametrize(
    ("temperature", "top_p", "tail", "n_ids"),
    [
        (
            0.5,
            0.92,
            -8.0,
            1004,
        ),  # they weigh 0.0001 there, and would 0.045 if one were as likely as the fourth id
        (2.0, 0.30, -8.0, 1004),  # 18, and would 0.9 if few of them had it all
        (1.0, 0.70, -8.0, 504),  # 0.17, for half of them are padding
    ],
)
def test_what_others_weigh_is_bounded_on_both_sides(
    temperature: float, top_p: float, tail: float, n_ids: int
) -> None:
    """A graph tells their sum at temperature 1, padding included. Where the nucleus ends depends on more: none."""
    logits = np.full(1004, tail, np.float32)
    logits[:4] = 0, -1, -1.5, -2
    params = SamplingParams(temperature=temperature, top_p=top_p)
    assert top_of(logits, n_ids, named=4).law(params) is None
    surely = SamplingParams(temperature=temperature, top_p=top_p / 100)
    told = top_of(logits, n_ids, named=4).law(surely)
    assert told is not None and told.ids.tolist() == warp(logits[:n_ids], surely).ids.tolist() == [0]


def test_everything_is_told_where_everything_is_named() -> None:
    """A vocabulary of 64 ids at most has no tail, however it is filtered."""
    logits = peaked(3, spread=1.0, size=N_NAMED)
    for filters in ({}, {"top_k": 64}, {"top_k": 10}, {"min_p": 0.2}):
        law = top_of(logits).law(SamplingParams(temperature=0.9, **filters))
        expected = warp(logits, SamplingParams(temperature=0.9, **filters))
        assert law is not None and law.ids.tolist() == expected.ids.tolist()


def test_greedy_takes_the_lowest_of_equals_however_they_are_named() -> None:
    """An engine promises no order of equal logits; where all that are named are equal, a lower id may not be named."""
    logits = np.zeros(200, np.float32)
    logits[[150, 20, 90]] = 2
    for backwards in (False, True):
        top = top_of(logits, backwards=backwards)
        assert top.best == greedy(logits) == 20
        assert top_of(np.zeros(200, np.float32), backwards=backwards).best is None
    at_the_edge = np.zeros(200, np.float32)
    at_the_edge[100:164] = 1  # exactly 64, all named, but nothing says that there is no 65th
    assert top_of(at_the_edge).best is None


def test_a_tie_at_the_end_of_the_kept_ids_is_none_where_it_reaches_the_edge() -> None:
    """Top-k takes the lowest of equals, and which those are only the whole row knows."""
    logits = np.zeros(200, np.float32)
    logits[:10] = 5
    params = SamplingParams(temperature=1.0, top_k=12)
    assert top_of(logits, backwards=True).law(params) is None
    told = top_of(logits, backwards=True).law(SamplingParams(temperature=1.0, top_k=4))
    assert told is not None and told.ids.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_unusable_logits_are_left_to_the_whole_row(bad: float) -> None:
    """It raises the error, or finds that only padding is unusable; wherever the bad number stands."""
    for place in (0, 150, 199):
        logits = peaked(2, size=200)
        logits[place] = bad
        top = top_of(logits)
        assert top.best is None and top.log_total is None and top.is_among(3, 2) is None
        assert top.law(SamplingParams(temperature=0.7, top_p=0.5)) is None


def test_padding_is_never_the_answer() -> None:
    """Rows of an embedding that no token has: likely, unlikely, and all that is likely at all."""
    logits = peaked(5, size=300)
    logits[250:] = -9
    greedy_one, sampled = SamplingParams(), SamplingParams(temperature=1.0, top_p=0.5)
    for padding in (-9.0, float(logits.max()) - 0.5, 30.0, 200.0):
        logits[290] = padding
        top = top_of(logits, 250)
        assert top.best == greedy(logits[:250])
        for params in (greedy_one, sampled):
            law = top.law(params)
            assert law is None or law.ids.tolist() == warp(logits[:250], params).ids.tolist()
    logits[236:] = 40  # 64 of padding: nothing is known of the rest
    assert top_of(logits, 236).best is None


def test_the_sum_of_all_leaves_padding_in_only_where_it_is_next_to_nothing() -> None:
    """A log-probability that a predictor reads may be off by 0.01, never by more."""
    logits = peaked(6, spread=8.0)
    expected = float(np.log(np.exp(logits[:1900].astype(np.float64)).sum()))
    logits[1900:] = -20
    total = top_of(logits, 1900).log_total
    assert total is not None and total == pytest.approx(expected, abs=0.01)
    flat = peaked(6, spread=0.5)
    flat[1900:] = np.sort(flat[:1900])[-70]  # a hundred of padding, each nearly as likely as the 64th
    assert top_of(flat, 1900).best is not None and top_of(flat, 1900).log_total is None
    named = logits.copy()
    named[1950] = named.max()
    assert top_of(named, 1900).log_total is None
    without = top_of(flat).log_total
    assert without == pytest.approx(float(np.log(np.exp(flat.astype(np.float64)).sum())), abs=1e-5)


def test_values_and_ranks_are_those_of_the_row() -> None:
    """Of the named: all that there is to say; of others: that 64 ids are likelier, or nothing."""
    logits = peaked(7, size=300).round(1)
    top = top_of(logits, 290)
    for token in range(290):
        place = rank(logits[:290], token)
        for n in (1, 2, 10, 63, 64, 70):
            assert top.is_among(token, n) in (place < n, None)
        value = top.value(token)
        assert value is None or value == logits[token]
        if place < 50:
            assert value is not None and top.is_among(token, 2) is (place < 2)
    least = int(logits[:290].argmin())
    assert top.value(least) is None and top.is_among(least, 2) is False and top.is_among(least, 70) is None


def test_log_probabilities_are_those_of_the_row() -> None:
    """In float32, as an engine sums: to 2e-5 of a nat."""
    logits = peaked(8)
    top = top_of(logits)
    assert top.best is not None and top.log_total is not None
    value = top.value(top.best)
    assert value is not None
    expected = log_probabilities(logits[None], [top.best])[0]
    assert value - top.log_total == pytest.approx(expected, abs=2e-5)
