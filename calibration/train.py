"""Train: linear predictors of a soft label, from features and from states in a basis of their largest directions.

    features (m, F) -> standardised                  -> ridge logistic
    states (m, E)   -> standardised -> Basis (m, D)  -> ridge logistic, or a network (networks.py)

All that is done to inputs is linear and is folded into the weights that are shipped. It knows arrays; it knows no
folds and no files. Double precision throughout, but for the basis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from semspec.export.probe_graph import Dense, StateBranch
from semspec.runtime.records import Array, Floats

__all__ = ["Basis", "Linear", "Standard", "fit_basis", "fit_linear", "sigmoid", "standardise"]

MOST_DIRECTIONS = 192
"""Of a layer's states. Smaller directions carry what a strong ridge would take away anyway."""

SPARE_DIRECTIONS = 16
ROUNDS = 4  # of subspace iteration: the largest directions to a few digits, in a tenth of the time of all

MOST_STEPS = 50
BIAS_RIDGE = 1e-3  # keeps the bias finite where all labels are alike


class Standard(NamedTuple):
    """What is taken off each column, and what it is divided by (1 for a constant one)."""

    center: Array
    scale: Array

    def of(self, x: Array) -> Array:
        """(m, F) -> (m, F) float64."""
        scaled: Array = (x - self.center) / self.scale
        return scaled


class Linear(NamedTuple):
    """logit = x . weights + bias."""

    weights: Array
    bias: float

    def logits(self, x: Array) -> Array:
        """(m,) of x (m, D)."""
        found: Array = x @ self.weights + self.bias
        return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Basis:
    """Coordinates of standardised states: (x - center) @ matrix, (E, D), with the deviations in the matrix.

    All coordinates are shrunk alike, by sqrt(E / D), so that networks over them begin as if over standardised inputs.
    """

    center: Floats
    matrix: Floats

    def of(self, states: Floats) -> Floats:
        """(m, E) -> (m, D) fp32."""
        return np.asarray((states - self.center) @ self.matrix, np.float32)

    def linear(self, fitted: Linear) -> StateBranch:
        """The same logits from states (E,)."""
        weight = (self.matrix.astype(np.float64) @ fitted.weights).astype(np.float32)[None]
        return StateBranch(
            center=self.center, layers=(Dense(weight=weight, bias=np.array([fitted.bias], np.float32)),)
        )

    def network(self, layers: Sequence[Dense]) -> StateBranch:
        """The same logits from states (E,), for a network over coordinates."""
        first = Dense(weight=layers[0].weight @ self.matrix.T, bias=layers[0].bias)
        return StateBranch(center=self.center, layers=(first, *layers[1:]))


def standardise(x: Array, weights: Array) -> Standard:
    """Weighted mean and deviation of each column of x (m, F)."""
    center = np.average(x, axis=0, weights=weights)
    scale = np.sqrt(np.average((x - center) ** 2, axis=0, weights=weights))
    return Standard(center, np.where(scale > 1e-9 * (1 + np.abs(center)), scale, 1.0))


def fit_basis(states: Floats, weights: Array, n_directions: int = MOST_DIRECTIONS) -> Basis:
    """The largest directions of standardised states (m, E); labels are not looked at."""
    standard = standardise(states, weights)
    scaled = ((states - standard.center) / standard.scale).astype(np.float32)
    shares = np.sqrt(weights / weights.sum()).astype(np.float32)[:, None]
    width = scaled.shape[1]
    n = min(n_directions, width, len(scaled))
    vectors = _largest((scaled * shares).T @ (scaled * shares), n)
    shrunk = float(np.sqrt(width / n))
    return Basis(
        center=standard.center.astype(np.float32),
        matrix=(vectors / standard.scale[:, None] / shrunk).astype(np.float32),
    )


def fit_linear(x: Array, labels: Array, weights: Array, strengths: Sequence[float]) -> list[Linear]:
    """Ridge logistic regression of soft labels (m,), one for each strength, which multiplies half the squared weights.

    x: (m, D), standardised. Newton's method, from the strongest to the weakest; exact to about 1e-7 of the loss.
    """
    x = np.column_stack([x, np.ones(len(x))]).astype(np.float64)
    found: dict[float, Array] = {}
    theta = np.zeros(x.shape[1])
    mean = np.clip(np.average(labels, weights=weights), 1e-3, 1 - 1e-3)
    theta[-1] = np.log(mean / (1 - mean))
    for strength in sorted(set(strengths), reverse=True):
        ridge = np.full(x.shape[1], float(strength))
        ridge[-1] = BIAS_RIDGE
        theta = _newton(x, labels, weights, ridge, theta)
        found[strength] = theta
    return [Linear(found[strength][:-1], float(found[strength][-1])) for strength in strengths]


def sigmoid(logits: Array) -> Array:
    """(m,) -> (m,)."""
    found: Array = 1 / (1 + np.exp(-np.clip(logits, -80, 80)))
    return found


def _largest(matrix: Floats, n: int) -> Array:
    """(E, n) eigenvectors of the n largest eigenvalues, largest first, about; signs fixed."""
    width = len(matrix)
    begun = np.random.default_rng(0).standard_normal((width, min(width, n + SPARE_DIRECTIONS)))
    space = np.linalg.qr(matrix @ begun.astype(np.float32))[0]
    for _ in range(ROUNDS):
        space = np.linalg.qr(matrix @ space)[0]
    _, turned = np.linalg.eigh(space.T @ (matrix @ space))
    vectors = (space @ turned[:, ::-1][:, :n]).astype(np.float64)
    return np.asarray(vectors * np.sign(vectors[np.abs(vectors).argmax(axis=0), np.arange(n)]))


def _newton(x: Array, labels: Array, weights: Array, ridge: Array, theta: Array) -> Array:
    """Falls at every step: a step that would rise is halved."""

    def cost(candidate: Array) -> float:
        logits = x @ candidate
        losses = np.logaddexp(0.0, logits) - labels * logits
        return float(weights @ losses + 0.5 * ridge @ candidate**2)

    reached = cost(theta)
    for _ in range(MOST_STEPS):
        chance = sigmoid(x @ theta)
        slope = x.T @ (weights * (chance - labels)) + ridge * theta
        curve = (x * (weights * chance * (1 - chance))[:, None]).T @ x
        curve[np.diag_indices_from(curve)] += ridge + 1e-12
        step = np.linalg.solve(curve, slope)
        fall = float(slope @ step)
        if fall <= 1e-7 * (1 + abs(reached)):
            break
        size = 1.0
        while (tried := cost(theta - size * step)) > reached and size > 1e-6:
            size /= 2
        if tried >= reached:
            break
        theta, reached = theta - size * step, tried
    return theta
