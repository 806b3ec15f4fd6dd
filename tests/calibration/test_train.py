"""Fitting: the optimum is one, and what is shipped says what was fitted."""

from __future__ import annotations

import numpy as np
import pytest

from semspec.calibration.networks import SIZES, fit_network, network_logits
from semspec.calibration.train import fit_basis, fit_linear, sigmoid, standardise
from semspec.export.probe_graph import ProbeWeights, run_probe

RNG = np.random.default_rng(0)
M, E = 300, 24
STATES = (
    RNG.standard_normal((M, 6)) @ RNG.standard_normal((6, E)) + 0.3 * RNG.standard_normal((M, E)) + 5
).astype(np.float32)
LABELS = np.round(4 * sigmoid(STATES[:, 0] - 5 + RNG.standard_normal(M))) / 4
WEIGHTS = RNG.integers(1, 4, M).astype(np.float64)


def test_ridge_logistic_regression_is_at_its_optimum() -> None:
    """The slope of what it minimises is nought, whatever the strength; stronger is smaller."""
    x = standardise(STATES.astype(np.float64), WEIGHTS).of(STATES)
    found = fit_linear(x, LABELS, WEIGHTS, [1.0, 100.0, 10.0])
    for linear, strength in zip(found, (1.0, 100.0, 10.0), strict=True):
        slope = x.T @ (WEIGHTS * (sigmoid(linear.logits(x)) - LABELS)) + strength * linear.weights
        assert np.abs(slope).max() < 0.1
    sizes = [float(np.linalg.norm(linear.weights)) for linear in found]
    assert sizes[0] > sizes[2] > sizes[1]


def test_weights_count_as_rows() -> None:
    """Equal segments are one row, as heavy as they are many."""
    x = STATES[:60, :3].astype(np.float64) - 5
    (once,) = fit_linear(x, LABELS[:60], WEIGHTS[:60], [5.0])
    times = np.repeat(np.arange(60), WEIGHTS[:60].astype(int))
    (repeated,) = fit_linear(x[times], LABELS[times], np.ones(len(times)), [5.0])
    assert once.weights == pytest.approx(repeated.weights, abs=1e-4)


def test_labels_of_one_kind_do_not_run_away() -> None:
    """No finite weights are best without a ridge; a fold may be so even where the data is not."""
    (linear,) = fit_linear(STATES[:, :2] - 5, np.ones(M), WEIGHTS, [1.0])
    assert np.isfinite(linear.weights).all() and 2 < linear.bias < 20


def test_a_constant_column_is_harmless() -> None:
    """A feature that no segment has, such as a box, is nought throughout."""
    x = np.column_stack([STATES[:, 0], np.full(M, 0.1)]).astype(np.float64)
    scaled = standardise(x, WEIGHTS).of(x)
    assert np.isfinite(scaled).all() and np.abs(scaled[:, 1]).max() < 1e-6


def test_the_basis_is_of_the_largest_directions() -> None:
    """As a full decomposition finds them; and coordinates have mean square 1 where all directions are kept."""
    basis = fit_basis(STATES, WEIGHTS, 4)
    standard = standardise(STATES, WEIGHTS)
    scaled = standard.of(STATES) * np.sqrt(WEIGHTS / WEIGHTS.sum())[:, None]
    wanted = np.linalg.svd(scaled)[2][:4]
    found = (basis.matrix * standard.scale[:, None]).T
    found /= np.linalg.norm(found, axis=1, keepdims=True)
    assert np.abs((found * wanted).sum(axis=1)) == pytest.approx(np.ones(4), abs=1e-3)
    whole = fit_basis(STATES, WEIGHTS).of(STATES)
    assert np.average((whole**2).mean(axis=1), weights=WEIGHTS) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("size", ["linear", *SIZES])
def test_what_is_shipped_says_what_was_fitted(size: str) -> None:
    """Standardising and turning are folded into the first layer; a slip there costs nothing but quality."""
    basis = fit_basis(STATES, WEIGHTS, 8)
    x = basis.of(STATES)
    if size == "linear":
        (linear,) = fit_linear(x, LABELS, WEIGHTS, [3.0])
        logits, branch = linear.logits(x), basis.linear(linear)
    else:
        layers = fit_network(x, LABELS, WEIGHTS, np.arange(M) // 10, size, seed=3)
        logits, branch = network_logits(layers, x), basis.network(layers)
    scores = run_probe(ProbeWeights(states=(branch,)), STATES[:, None])
    assert scores == pytest.approx(sigmoid(logits), abs=1e-5)


@pytest.mark.parametrize("squared", [False, True])
def test_networks_learn_and_are_the_same_each_time(squared: bool) -> None:
    """Better than the mean on rows of other questions; the same seed, the same bits, whatever torch drew before."""
    import torch

    questions = np.arange(M) // 10
    train = questions < 22
    x = fit_basis(STATES[train], WEIGHTS[train], 8).of(STATES)
    arguments = (x[train], LABELS[train], WEIGHTS[train], questions[train], "mlp2")
    first = fit_network(*arguments, seed=1, squared=squared)
    torch.rand(7)
    state = torch.get_rng_state()
    second = fit_network(*arguments, seed=1, squared=squared)
    assert all((a.weight == b.weight).all() for a, b in zip(first, second, strict=True))
    assert (torch.get_rng_state() == state).all(), "the caller's chances are left alone"
    errors = (sigmoid(network_logits(first, x[~train])) - LABELS[~train]) ** 2
    assert errors.mean() < 0.7 * LABELS[~train].var()
