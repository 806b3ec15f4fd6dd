"""Rounding to four bits: searches that are never worse than what they start from, and errors that are made up for."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from semspec.export import rounding
from semspec.export.rounding import Rounded, compensate, compensation, fit_range, search
from semspec.runtime.records import Floats


def columns_of(span: int, m: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_t(4, size=(span, m)).astype(np.float32)


def moments_of(span: int, seed: int = 0) -> Floats:
    """Channels that go together."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(300, 5)) @ rng.normal(size=(5, span)) + 0.5 * rng.normal(size=(300, span))
    return (x.T @ x / 300).astype(np.float32)


def restored(rounded: Rounded) -> Floats:
    codes, scales, zeros = rounded
    size = len(codes) // len(scales)
    values: Floats = (codes - np.repeat(zeros, size, axis=0)) * np.repeat(scales, size, axis=0)
    return values


def test_examples_of_the_docstrings() -> None:
    """The worked examples are run, so they stay true."""
    result = doctest.testmod(rounding)
    assert (result.failed, result.attempted > 0) == (0, True)


@pytest.mark.parametrize("span", [32, 64, 128])
def test_codes_and_zero_points_fit_four_bits(span: int) -> None:
    """What would not fit would be cut off when two are packed into a byte."""
    columns, moments = columns_of(span, 50), moments_of(span)
    known = compensation(moments)
    for codes, scales, zeros in (
        fit_range(columns),
        search(columns),
        search(columns, np.diagonal(moments)),
        compensate(columns, moments, known, 32),
    ):
        for values in (codes, zeros):
            assert_array_equal(values, np.rint(values))
            assert values.min() >= 0 and values.max() <= 15
        assert (scales > 0).all()


def test_search_is_never_worse_by_its_own_measure() -> None:
    """In any block: it starts from the full range and keeps what is better, with weights and without."""
    columns = columns_of(64, 200)
    weights = np.random.default_rng(1).lognormal(sigma=2, size=64).astype(np.float32)
    for measure in (None, weights):
        factor = np.ones(64, np.float32) if measure is None else measure

        def error(rounded: Rounded, factor: Floats = factor) -> Floats:
            found: Floats = factor @ np.square(restored(rounded) - columns, dtype=np.float64)
            return found

        plain, found = error(fit_range(columns)), error(search(columns, measure))
        assert (found <= plain * (1 + 1e-5)).all()
        assert found.sum() < 0.95 * plain.sum()


def test_weights_move_the_error_to_where_it_counts_less() -> None:
    """A channel that carries a hundred times more is rounded better than without weights."""
    columns, weights = columns_of(32, 400), np.ones(32, np.float32)
    weights[7] = 1e4
    plain = np.square(restored(search(columns)) - columns)[7].mean()
    weighed = np.square(restored(search(columns, weights)) - columns)[7].mean()
    assert weighed < 0.2 * plain


def test_channels_that_are_never_used_weigh_nothing_and_break_nothing() -> None:
    """A text may leave channels at zero: their moments are 0, all of a block's perhaps."""
    columns = columns_of(32, 10)
    assert_array_equal(search(columns, np.zeros(32, np.float32))[0], search(columns)[0])
    silent = np.zeros((32, 32), np.float32)
    with np.errstate(all="raise", under="ignore"):
        codes, _, _ = compensate(columns, silent, compensation(silent), 32)
    assert_array_equal(codes, search(columns)[0])


def test_factors_are_those_of_the_inverse() -> None:
    """U' U = (M + 1 % of its mean diagonal)^-1, up to one scale a span, which compensation does not see; channels
    that carry most come first."""
    moments = np.stack([moments_of(16, seed) for seed in (1, 2)])
    for moment, order, factor in zip(moments, *compensation(moments), strict=True):
        assert_array_equal(factor, np.triu(factor))
        assert (np.diff(np.diagonal(moment)[order]) <= 0).all()
        mean = np.trace(moment) / 16
        inverse = np.linalg.inv(moment[np.ix_(order, order)] / mean + 0.01 * np.eye(16))
        assert_allclose(factor.T @ factor, inverse, rtol=1e-3, atol=1e-3 * np.abs(inverse).max())


@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_compensation_is_the_textbook_loop(block_size: int) -> None:
    """Strips are a way to work, not another result: one channel at a time, every later channel corrected at once."""
    columns, moments = columns_of(128, 20), moments_of(128)
    order, factor = known = compensation(moments)
    found = restored(compensate(columns, moments, known, block_size))
    work, expected = columns[order].astype(np.float64), np.empty((128, 20))
    blocks = [slice(start, start + block_size) for start in range(0, 128, block_size)]
    searched = [search(columns[here], np.diagonal(moments)[here]) for here in blocks]
    for place, channel in enumerate(order):
        _, (scales,), (zeros,) = searched[channel // block_size]
        codes = np.clip(np.rint(work[place] / scales) + zeros, 0, 15)
        expected[channel] = (codes - zeros) * scales
        error = (work[place] - expected[channel]) / factor[place, place]
        work[place + 1 :] -= factor[place, place + 1 :, None] * error
    same = np.isclose(found, expected, rtol=1e-4, atol=1e-6).mean(axis=0)
    assert np.median(same) == 1  # a code on the edge may fall either way, and the rest of its column with it


def test_compensation_halves_the_error_of_the_output() -> None:
    """Its purpose, by M itself: e' M e."""
    columns, moments = columns_of(128, 300), moments_of(128)

    def harm(rounded: Rounded) -> float:
        error = restored(rounded) - columns
        return float(np.einsum("im,ij,jm->", error, moments.astype(np.float64), error))

    assert harm(compensate(columns, moments, compensation(moments), 64)) < 0.5 * sum(
        harm_of_blocks(columns, moments, block) for block in (slice(0, 64), slice(64, 128))
    )


def harm_of_blocks(columns: Floats, moments: Floats, block: slice) -> float:
    """Of the weighed search alone, one block at a time."""
    error = restored(search(columns[block], np.diagonal(moments)[block])) - columns[block]
    return float(np.einsum("im,ij,jm->", error, moments[block, block].astype(np.float64), error))


@pytest.mark.parametrize("block_size", [32, 128])
def test_symmetric_rounding_keeps_every_zero_point_in_the_middle(block_size: int) -> None:
    """TensorRT reads none: whatever the quantizer, in blocks of one sign, and in blocks of zeros too."""
    columns, moments = columns_of(128, 60), moments_of(128)
    columns[:, 0], columns[:, 1] = 0, np.abs(columns[:, 1])
    columns[:32, 2] *= 1e-30
    for codes, scales, zeros in (
        fit_range(columns[:block_size], symmetric=True),
        search(columns[:block_size], symmetric=True),
        search(columns[:block_size], np.diagonal(moments)[:block_size], symmetric=True),
        compensate(columns, moments, compensation(moments), block_size, symmetric=True),
    ):
        assert_array_equal(zeros, np.full_like(zeros, 8))
        assert codes.min() >= 0 and codes.max() <= 15 and (scales > 0).all()
        assert (codes[:, 0] == 8).all() and (codes[:, 1] >= 7).all()


def test_symmetric_search_costs_little_and_gains_over_rounding() -> None:
    """On heavy tails around zero: half as much again as with zero points, less than over the full range."""
    columns = columns_of(64, 400)

    def error(rounded: Rounded) -> float:
        return float(np.square(restored(rounded) - columns).mean())

    found = error(search(columns, symmetric=True))
    assert found < 0.9 * error(fit_range(columns, symmetric=True))
    assert found < 1.6 * error(search(columns))
