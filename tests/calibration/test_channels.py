"""Statistics in pieces against statistics of the whole, computed by numpy in double precision."""

from __future__ import annotations

import doctest
import math
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from semspec.calibration import channels
from semspec.calibration.channels import ChannelStatistics
from semspec.export.ranges import PERCENTILES
from semspec.runtime.records import Floats


def rows(n: int, width: int, seed: int = 0) -> Floats:
    """Heavy-tailed values, a silent channel, a shifted one."""
    x = np.random.default_rng(seed).standard_t(2, (n, width)).astype(np.float32)
    x[:, 0] = 0
    x[:, -1] += 50
    return x


def gathered(x: Floats, *sizes: int) -> ChannelStatistics:
    statistics = ChannelStatistics(len(x), x.shape[1])
    for block in np.split(x, np.cumsum(sizes)):
        statistics.add(block)
    return statistics


@given(n=st.integers(1, 400), width=st.integers(2, 9), cuts=st.lists(st.integers(0, 90), max_size=4))
@settings(max_examples=60, deadline=None)
def test_any_blocks_give_the_statistics_of_the_whole(n: int, width: int, cuts: list[int]) -> None:
    """Percentiles are exact, whatever the number of rows: numpy's own take the rank in floating point, where 99.9 % of
    1,000 is a little more than 999."""
    x = rows(n, width, seed=n)
    found = gathered(x, *cuts).finish()
    exact, size = x.astype(np.float64), np.abs(x)
    assert_array_equal(found.abs_max, size.max(axis=0))
    assert_allclose(found.mean_abs, np.abs(exact).mean(axis=0), rtol=1e-6)
    assert_allclose(found.mean, exact.mean(axis=0), rtol=1e-6, atol=1e-6)
    assert_allclose(found.second_moment, np.square(exact).mean(axis=0), rtol=1e-6)
    assert_array_equal(found.channel_percentiles, least_not_below(size))
    assert_array_equal(found.percentiles, least_not_below(size.reshape(-1)))


def least_not_below(values: Floats) -> Floats:
    """A row a percentile, along the first axis."""
    places = [math.ceil(Fraction(str(q)) / 100 * len(values)) - 1 for q in PERCENTILES]
    found: Floats = np.sort(values, axis=0)[places]
    return found


def test_ties_and_constant_channels_are_exact() -> None:
    """Equal values at the edge of what is kept: the filter that saves time must not lose them."""
    x = np.repeat(np.float32([[1, 2, 2, 2, 3]]), 300, axis=0)
    found = gathered(x, 100, 100).finish()
    assert_array_equal(found.channel_percentiles, np.repeat([[1, 2, 2, 2, 3]], 3, axis=0))
    assert_array_equal(found.percentiles, [3, 3, 3])


def test_moments_of_spans_of_channels() -> None:
    """What error compensation reads: E[x x'] within 512 channels, symmetric, 0 behind the last channel."""
    x = rows(200, 1100)
    found = gathered(x, 70, 1).finish().moments
    exact = x.astype(np.float64).T @ x / 200
    assert found.shape == (3, 512, 512)
    for span in range(3):
        inside = slice(512 * span, min(512 * (span + 1), 1100))
        width = inside.stop - inside.start
        scale = np.abs(exact[inside, inside]).max()
        assert_allclose(found[span, :width, :width], exact[inside, inside], rtol=0, atol=1e-6 * scale)
        assert not found[span, width:].any() and not found[span, :, width:].any()
        assert_array_equal(found[span], found[span].T)


def test_missing_rows_are_a_fault() -> None:
    """Percentiles over other than the promised rows would be of other ranks."""
    statistics = ChannelStatistics(3, 2)
    statistics.add(np.ones((2, 2), np.float32))
    with pytest.raises(ValueError, match="2 rows have come and 3 were promised"):
        statistics.finish()


def test_rows_do_not_fill_the_memory() -> None:
    """D37: of 40,000 rows 2 % are kept."""
    width, block = 64, rows(500, 64)
    statistics = ChannelStatistics(40_000, width)
    tracemalloc.start()
    try:
        for _ in range(80):
            statistics.add(block)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1.2 * 0.02 * 40_000 * width * 4


def test_example_of_the_docstring() -> None:
    """The worked example is run, so it stays true."""
    result = doctest.testmod(channels)
    assert (result.failed, result.attempted > 0) == (0, True)
