"""Scaling: scores that are right on average, in the same order, as the graph computes them."""

from __future__ import annotations

import numpy as np
import pytest

from semspec.calibration.folds import deal_folds
from semspec.calibration.metrics import ece
from semspec.calibration.scaling import SCALINGS, fit_scaling, scale_nested, scaled
from semspec.calibration.train import sigmoid
from semspec.export.probe_graph import ProbeWeights, run_probe

RNG = np.random.default_rng(0)
M = 1200
LOGITS = 2 * RNG.standard_normal(M)
WEIGHTS = np.ones(M)
FOLDS = deal_folds(np.arange(M) // 6, 5, seed=0)


def drawn(chances: np.ndarray) -> np.ndarray:
    return (RNG.random(M) < chances).astype(np.float64)


def test_a_temperature_is_found_again() -> None:
    """Logits three times too sure."""
    scaling = fit_scaling("temperature", 3 * LOGITS, drawn(sigmoid(LOGITS)), WEIGHTS)
    assert scaling.temperature == pytest.approx(3, rel=0.15)


@pytest.mark.parametrize("name", SCALINGS)
def test_order_is_kept_and_the_graph_agrees(name: str) -> None:
    """Thresholds are on the score: a level stretch, at either end too, would make them blunt."""
    scaling = fit_scaling(name, LOGITS, drawn(0.2 + 0.5 * sigmoid(LOGITS)), WEIGHTS)
    scores = scaled(scaling, LOGITS)
    assert (np.diff(scores[np.argsort(LOGITS)]) > 0).all()
    assert scores.min() > 0 and scores.max() < 1
    weights = ProbeWeights(weights=np.ones(1, np.float32), centers=np.zeros(1, np.float32), scaling=scaling)
    assert run_probe(weights, signals=LOGITS[:, None].astype(np.float32)) == pytest.approx(scores, abs=1e-5)


def test_the_better_one_is_chosen_out_of_fold() -> None:
    """Chances that no temperature can make of the logits; and ones that it can."""
    bent = drawn(np.where(LOGITS > 0, 0.9, 0.5))
    scores, scaling, name = scale_nested(LOGITS, bent, WEIGHTS, FOLDS)
    assert name == "isotonic" and scaling.knots
    assert ece(scores, bent) < 0.07 < ece(sigmoid(LOGITS), bent)
    straight = drawn(sigmoid(LOGITS / 2))
    assert scale_nested(LOGITS, straight, WEIGHTS, FOLDS)[2] == "temperature"


def test_few_rows_and_equal_logits_do_no_harm() -> None:
    """One bin, or all knots in one place."""
    for logits in (np.zeros(30), np.linspace(-1, 1, 30)):
        for name in SCALINGS:
            scores = scaled(fit_scaling(name, logits, np.full(30, 0.25), np.ones(30)), logits)
            assert np.isfinite(scores).all() and (scores > 0).all() and (scores < 1).all()
