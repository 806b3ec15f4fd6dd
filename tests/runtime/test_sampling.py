"""Sampling against a brute-force reference, the tie rule, unusable logits, and the law of what is drawn."""

from __future__ import annotations

import doctest
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semspec.runtime import sampling
from semspec.runtime.config import SamplingParams
from semspec.runtime.errors import BackendError
from semspec.runtime.records import Floats
from semspec.runtime.sampling import Law, greedy, sample, warp

INF = float("inf")


def logits_of(*values: float) -> Floats:
    return np.array(values, np.float32)


def brute_force(logits: Floats, params: SamplingParams, slack: float = 0.0) -> dict[int, float]:
    """The definition, by sorting everything in float64. `slack` shifts top_p and min_p by that share."""
    peak, tiny = float(logits.max()), float(np.finfo(np.float32).tiny)
    weight = {i: math.exp((float(x) - peak) / params.temperature) for i, x in enumerate(logits)}
    order = sorted(weight, key=lambda i: (-float(logits[i]), i))
    if params.top_k:
        order = order[: params.top_k]
    if params.top_p < 1:
        share, total, held = params.top_p * (1 + slack), sum(weight[i] for i in order), 0.0
        for n, i in enumerate(order, start=1):
            held += weight[i]
            if held >= share * total:
                order = order[:n]
                break
    order = [i for i in order if weight[i] >= params.min_p * (1 + slack) and weight[i] >= tiny * (1 + slack)]
    total = sum(weight[i] for i in order)
    return {i: weight[i] / total for i in sorted(order)}


# Few distinct values make ties the rule; wide ones make underflow and -inf meet every filter.
LOGITS = st.one_of(
    st.lists(st.sampled_from([-INF, -3.0, 0.0, 0.5, 1.0, 2.0]), min_size=1, max_size=300),
    st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=300),
    st.lists(st.one_of(st.just(-INF), st.floats(-(2.0**100), 2.0**100, width=32)), min_size=1, max_size=20),
).filter(lambda values: max(values) > -INF)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.one_of(st.sampled_from([1e-30, 1e-4, 0.6, 1.0, 50.0, 1e30]), st.floats(0.05, 5)),
    top_k=st.one_of(st.just(0), st.integers(1, 400)),
    top_p=st.one_of(st.just(1.0), st.floats(0.001, 1), st.sampled_from([1e-9, 1 - 1e-9])),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1), st.just(1.0)),
)


@settings(deadline=None, derandomize=True, max_examples=400)
@given(LOGITS, PARAMS)
def test_warp_equals_brute_force(values: list[float], params: SamplingParams) -> None:
    """Never sorting V must not change the law. Compared wherever rounding does not decide which ids stay."""
    logits = logits_of(*values)
    law = warp(logits, params)
    assert law.ids.dtype == np.int64 and law.probs.dtype == np.float64
    assert (np.diff(law.ids) > 0).all() and (law.probs > 0).all() and abs(law.probs.sum() - 1) < 1e-12
    assert greedy(logits) in law.ids
    expected = [brute_force(logits, params, slack) for slack in (-2e-5, 0.0, 2e-5)]
    if expected[0].keys() == expected[2].keys():
        assert law.ids.tolist() == list(expected[1])
        np.testing.assert_allclose(law.probs, list(expected[1].values()), rtol=3e-5)


@settings(deadline=None, derandomize=True, max_examples=30)
@given(st.integers(0, 2**32), PARAMS, st.sampled_from([0, 1, 3]))
def test_warp_equals_brute_force_on_a_large_vocabulary(
    seed: int, params: SamplingParams, decimals: int
) -> None:
    """The group bound needs thousands of ids to matter; rounded logits put ties in every group."""
    logits = np.random.default_rng(seed).normal(0, 3, 5000).round(decimals).astype(np.float32)
    law = warp(logits, params)
    expected = [brute_force(logits, params, slack) for slack in (-2e-5, 0.0, 2e-5)]
    if expected[0].keys() == expected[2].keys():
        assert law.ids.tolist() == list(expected[1])
        np.testing.assert_allclose(law.probs, list(expected[1].values()), rtol=3e-5)


def test_docstring_example_holds() -> None:
    """The worked example of `warp` is executed, so it cannot drift from the code."""
    result = doctest.testmod(sampling)
    assert result.attempted and not result.failed


@pytest.mark.parametrize(
    ("params", "ids"),
    [
        (SamplingParams(temperature=1, top_k=2), [0, 1]),
        (SamplingParams(temperature=1, top_p=0.5), [0, 1]),
        (SamplingParams(temperature=1, top_p=0.51), [0, 1, 2]),
        (SamplingParams(temperature=1, min_p=1.0), [0, 1, 2, 3]),
        (SamplingParams(), [0]),
    ],
)
def test_equal_logits_give_their_places_to_the_lowest_ids(params: SamplingParams, ids: list[int]) -> None:
    """One tie rule everywhere (D05): two routines that break ties differently part ways under speculation."""
    assert warp(logits_of(1, 1, 1, 1), params).ids.tolist() == ids


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    """As numpy and torch do (D05): row 7 copied to rows 5 and 31."""
    logits = np.zeros(64, np.float32)
    logits[[31, 7, 5]] = 3
    assert greedy(logits) == 5


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=1, top_p=0.9), SamplingParams(temperature=1)]
)
@pytest.mark.parametrize("bad", [(0.0, float("nan"), 1.0), (-INF, -INF), (0.0, INF)])
def test_unusable_logits_are_an_error(bad: tuple[float, ...], params: SamplingParams) -> None:
    """NaN, all -inf or +inf means a broken engine; token 0 in silence would look like an answer (D05)."""
    with pytest.raises(BackendError, match="unusable logits"):
        warp(logits_of(*bad), params)
    with pytest.raises(BackendError, match="unusable logits"):
        greedy(logits_of(*bad))


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-46, 0.6, 1e46, 1.7e308])
def test_one_finite_logit_takes_all_mass_at_any_temperature(temperature: float) -> None:
    """A mask may leave one id; extreme temperatures must neither divide by zero nor revive masked ids."""
    law = warp(logits_of(-INF, 2, -INF), SamplingParams(temperature=temperature, top_p=0.9))
    assert law.ids.tolist() == [1] and law.probs.tolist() == [1.0]


def test_warp_leaves_the_logits_as_they_were() -> None:
    """The same row is read again for statistics and by the acceptance rule."""
    logits = logits_of(3, 1, 2)
    warp(logits, SamplingParams(temperature=0.5, top_k=2, top_p=0.9, min_p=0.1))
    assert logits.tolist() == [3, 1, 2]


def test_sample_follows_the_law() -> None:
    """Chi-square over six ids, 5 degrees of freedom: above 36 with chance 9.5e-7 if right (D13)."""
    chances = np.array([0.4, 0.3, 0.15, 0.1, 0.04, 0.01])
    law = warp(np.log(chances).astype(np.float32), SamplingParams(temperature=1))
    rng, n = np.random.default_rng(12), 20_000
    counts = np.bincount([sample(law, rng) for _ in range(n)], minlength=6)
    assert float(((counts - n * chances) ** 2 / (n * chances)).sum()) < 36


def test_sample_is_the_inverse_transform_of_one_uniform() -> None:
    """Replays count on one number per token, and block sums must not change which id it selects.

    Chances are multiples of 2^-14, so every sum is exact and the plain definition is too.
    """
    parts = np.random.default_rng(3).multinomial(2**14 - 3000, np.full(3000, 1 / 3000)) + 1
    law = Law(ids=np.arange(3000) * 2, probs=parts / 2**14)
    ends = np.cumsum(law.probs)
    ours, plain = np.random.default_rng(5), np.random.default_rng(5)
    for _ in range(3000):
        assert sample(law, ours) == law.ids[int(np.searchsorted(ends, plain.random(), side="right"))]


def test_same_seed_draws_the_same_ids() -> None:
    """A seed is a promise; so is another result for another seed (equal 40 times in a row: chance 2^-40)."""
    law = warp(logits_of(0, 0), SamplingParams(temperature=1))
    draws = [[sample(law, rng) for _ in range(40)] for rng in map(np.random.default_rng, (1, 1, 2))]
    assert draws[0] == draws[1] != draws[2]
