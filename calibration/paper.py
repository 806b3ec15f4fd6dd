"""The published rule: a probe of each model for how likely its own samples are, and the ratio of what both say.

Each learns from its own model's segments, on the last pooled layer, with the label `own`; both are asked about the
draft's. It knows rows and folds; it chooses nothing by what the ratio is worth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from semspec.calibration.candidates import LINEAR, STATE_STRENGTHS, distinct
from semspec.calibration.dataset import Dataset, Rows
from semspec.calibration.equivalence import Bools
from semspec.calibration.folds import log_loss
from semspec.calibration.networks import fit_network, network_logits
from semspec.calibration.train import Basis, fit_basis, fit_linear, sigmoid
from semspec.export.probe_graph import ProbeWeights, StateBranch
from semspec.runtime.records import Array, Floats, Ints

__all__ = ["FLOOR", "OwnProbe", "Ratio", "fit_ratio", "ratio_of"]

FLOOR = 1e-6  # of s_D


class OwnProbe(NamedTuple):
    """scores: (n,) held out, of the draft's rows. label: mean own label that it learned from. weights: from all."""

    scores: Array
    label: float
    weights: ProbeWeights


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ratio:
    """probe: what both probes are. target: s_T. draft: s_D."""

    probe: str
    target: OwnProbe
    draft: OwnProbe

    @property
    def values(self) -> Array:
        """(n,) s_T / s_D."""
        return ratio_of(self.target.scores, self.draft.scores)


def ratio_of(target: Array, draft: Array) -> Array:
    """s_T / max(s_D, FLOOR), (n,) each."""
    found: Array = target / np.maximum(draft, FLOOR)
    return found


def fit_ratio(
    dataset: Dataset,
    folds_of: Ints,
    n_folds: int,
    probe: str,
    seed: int,
    on_done: Callable[[], None] | None = None,
) -> Ratio:
    """probe: LINEAR or a size of networks.SIZES. folds_of: the fold of each question. on_done: called twice."""
    found = {}
    for role, rows in (("target", dataset.target), ("draft", dataset.draft)):
        found[role] = _own(dataset, rows, role, folds_of, n_folds, probe, seed)
        if on_done is not None:
            on_done()
    return Ratio(probe=probe, target=found["target"], draft=found["draft"])


def _own(
    dataset: Dataset, rows: Rows, role: str, folds_of: Ints, n_folds: int, probe: str, seed: int
) -> OwnProbe:
    drawn = np.flatnonzero(rows.drawn)
    first, place = distinct(rows.context[drawn], rows.same[drawn])
    own = _Own(
        states=rows.pooled[role][drawn[first], -1],
        labels=rows.own[drawn[first]],
        weights=np.bincount(place).astype(np.float64),
        questions=rows.question[drawn[first]],
        probe=probe,
        seed=seed,
    )
    asked = dataset.draft.pooled[role][:, -1]
    folds, asked_folds = folds_of[own.questions], folds_of[dataset.draft.question]
    n_options = len(own.strengths)
    held_out, scores = np.empty((len(folds), n_options)), np.empty((len(asked), n_options))
    for fold in range(n_folds):
        branches = own.fit(folds != fold, fold)
        for option, branch in enumerate(branches):
            held_out[folds == fold, option] = _logits(branch, own.states[folds == fold])
            scores[asked_folds == fold, option] = sigmoid(_logits(branch, asked[asked_folds == fold]))
    losses = [log_loss(held_out[:, option], own.labels, own.weights) for option in range(n_options)]
    best = int(np.argmin(losses))
    final = own.fit(np.ones(len(folds), np.bool_), n_folds)[best]
    label = float(np.average(own.labels, weights=own.weights))
    return OwnProbe(scores[:, best], label, ProbeWeights(states=(final,)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Own:
    """What one of the two learns from: (m, E) and (m,) each. Strengths are chosen by how it tells its own label."""

    states: Floats
    labels: Array
    weights: Array
    questions: Ints
    probe: str
    seed: int

    @property
    def strengths(self) -> Sequence[float]:
        return STATE_STRENGTHS if self.probe == LINEAR else (0.0,)

    def fit(self, learned: Bools, number: int) -> list[StateBranch]:
        """One for each strength."""
        basis: Basis = fit_basis(self.states[learned], self.weights[learned])
        x = basis.of(self.states[learned])
        data = self.labels[learned], self.weights[learned]
        if self.probe == LINEAR:
            return [basis.linear(fitted) for fitted in fit_linear(x, *data, self.strengths)]
        seed = int(np.random.SeedSequence((self.seed, 1 << 21, number)).generate_state(1)[0])
        layers = fit_network(x, *data, self.questions[learned], self.probe, seed=seed, squared=True)
        return [basis.network(layers)]


def _logits(branch: StateBranch, states: Floats) -> Array:
    return network_logits(branch.layers, states - branch.center)
