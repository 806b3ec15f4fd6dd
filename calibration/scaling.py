"""Scaling: from a logit to a score that is right on average, by a temperature or by a rising line (isotonic).

Both keep the order of logits within the range they were fitted on. It knows logits and labels only; probe_graph.Scaling
is what is fitted, and what a probe's graph does.
"""

from __future__ import annotations

import numpy as np

from semspec.calibration.folds import Folds, log_loss
from semspec.calibration.train import sigmoid
from semspec.export.probe_graph import CLIP, Scaling
from semspec.runtime.records import Array

__all__ = ["SCALINGS", "fit_scaling", "scale_nested", "scaled"]

SCALINGS = ("temperature", "isotonic")

MOST_BINS = 15
LEAST_IN_BIN = 40.0  # rows by weight
BEYOND = 1.0  # of the logits' range, on either side
TEMPERATURES = np.geomspace(0.2, 10, 80)


def scaled(scaling: Scaling, logits: Array) -> Array:
    """(m,) scores, as probe_graph.run_probe has them, in double precision."""
    inner = logits / scaling.temperature
    values = np.interp(inner, scaling.knots, scaling.values) if scaling.knots else sigmoid(inner)
    found: Array = np.clip(values, CLIP, 1 - CLIP)
    return found


def fit_scaling(name: str, logits: Array, labels: Array, weights: Array) -> Scaling:
    """name: one of SCALINGS. All arrays (m,)."""
    if name == "isotonic":
        knots, values = _rising(logits, labels, weights)
        return Scaling(knots=tuple(knots.tolist()), values=tuple(values.tolist()))
    losses = [log_loss(logits / temperature, labels, weights) for temperature in TEMPERATURES]
    return Scaling(temperature=float(TEMPERATURES[int(np.argmin(losses))]))


def scale_nested(logits: Array, labels: Array, weights: Array, folds: Folds) -> tuple[Array, Scaling, str]:
    """Held-out logits (m,) -> scores (m,) of each fold by a scaling, chosen and fitted on the others; the scaling for
    new rows, fitted on all; and its name. A temperature where both do equally well."""
    scores = np.empty(len(logits))
    for fold in range(folds.n):
        inside = folds.of != fold
        name = _better(logits, labels, weights, folds, sorted(set(range(folds.n)) - {fold}))
        fitted = fit_scaling(name, logits[inside], labels[inside], weights[inside])
        scores[~inside] = scaled(fitted, logits[~inside])
    name = _better(logits, labels, weights, folds, range(folds.n))
    return scores, fit_scaling(name, logits, labels, weights), name


def _better(logits: Array, labels: Array, weights: Array, folds: Folds, among: range | list[int]) -> str:
    """By log loss on each of these folds, fitted on the others of them."""
    losses = {}
    inside = np.isin(folds.of, list(among))
    for name in SCALINGS:
        total = 0.0
        for fold in among:
            rows, rest = folds.of == fold, inside & (folds.of != fold)
            scores = scaled(fit_scaling(name, logits[rest], labels[rest], weights[rest]), logits[rows])
            total += (
                log_loss(np.log(scores / (1 - scores)), labels[rows], weights[rows]) * weights[rows].sum()
            )
        losses[name] = total
    return min(SCALINGS, key=losses.__getitem__)


def _rising(logits: Array, labels: Array, weights: Array) -> tuple[Array, Array]:
    """Knots and values: means of bins of equal mass, pooled until they rise; beyond the outermost half-way on to 0 and
    1, so that order is kept there too."""
    order = np.argsort(logits, kind="stable")
    mass = np.cumsum(weights[order]) - weights[order] / 2
    n_bins = int(np.clip(weights.sum() // LEAST_IN_BIN, 1, MOST_BINS))
    place = np.minimum((mass / weights.sum() * n_bins).astype(np.int64), n_bins - 1)
    blocks: list[tuple[float, float, float]] = []  # mass, mean logit, mean label
    for number in range(n_bins):
        rows = order[place == number]
        if not len(rows):
            continue
        total = float(weights[rows].sum())
        label = (float(weights[rows] @ labels[rows]) + 0.5) / (total + 1)
        blocks.append((total, float(np.average(logits[rows], weights=weights[rows])), label))
        while len(blocks) > 1 and blocks[-1][2] <= blocks[-2][2]:
            blocks[-2:] = [_pooled(*blocks[-2:])]
    knots = [float(logits.min()) - BEYOND, *(block[1] for block in blocks), float(logits.max()) + BEYOND]
    values = [blocks[0][2] / 2, *(block[2] for block in blocks), (1 + blocks[-1][2]) / 2]
    apart = np.concatenate([[True], np.diff(np.asarray(knots, np.float32)) > 1e-4])
    return np.array(knots)[apart], np.array(values)[apart]


def _pooled(one: tuple[float, float, float], other: tuple[float, float, float]) -> tuple[float, float, float]:
    total = one[0] + other[0]
    mean = [(one[0] * one[part] + other[0] * other[part]) / total for part in (1, 2)]
    return total, mean[0], mean[1]
