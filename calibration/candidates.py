"""Candidates: every way to score a segment that is tried, with held-out scores of each, and what is shipped of it.

    features -> linear                      states -> linear or network, layers and strengths chosen inside the folds
    features and a states' probe -> linear  both own-label probes -> the published ratio (paper.py)

Segments that are equal in a context are one row of a Table, as heavy as they are many. It knows tables and folds; how
good scores are is evaluate.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from semspec.calibration.dataset import Dataset
from semspec.calibration.equivalence import Bools
from semspec.calibration.folds import Folds, LeftOut, Nested, choose_nested, cross_fit
from semspec.calibration.networks import fit_network, network_logits
from semspec.calibration.train import Basis, Linear, fit_basis, fit_linear, standardise
from semspec.export.probe_graph import Dense, ProbeWeights, Scaling, StateBranch
from semspec.runtime.features import FEATURES
from semspec.runtime.records import Array, Floats, Ints

__all__ = [
    "LINEAR",
    "FeatureFit",
    "Option",
    "StatesFit",
    "Table",
    "branch_of",
    "distinct",
    "fit_features",
    "fit_states",
    "make_table",
    "names_like",
    "ship",
    "shuffled_labels",
    "stack",
]

LINEAR = "linear"
FEATURE_STRENGTHS = (1.0, 10.0, 100.0, 1000.0)
STATE_STRENGTHS = (10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """m different segments of the draft. features (m, F); states (m, K, E) of the target; labels, weights, questions,
    folds (m,): weight 0, and label 0, where there is no label. place: (n,) the segment that each row of the dataset is.
    """

    features: Array
    states: Floats
    labels: Array
    weights: Array
    questions: Ints
    folds: Folds
    place: Ints

    def linear(self, x: Array, learned: Bools, strengths: Sequence[float]) -> list[Linear]:
        """fit_linear on the labelled rows among `learned` (m,)."""
        rows = learned & (self.weights > 0)
        return fit_linear(x[rows], self.labels[rows], self.weights[rows], strengths)

    def nested(self, logits: LeftOut) -> Nested:
        """choose_nested by this table's labels."""
        return choose_nested(logits, self.folds, self.labels, self.weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to read states. probe: LINEAR or a size of networks.SIZES. layers: places among the pooled ones.
    strength: of a linear one's ridge."""

    probe: str
    layers: tuple[int, ...]
    strength: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FeatureFit:
    """Features by name, with a column of a states' probe behind them where one is stacked on. strengths: of each fold's
    ridge, and of the final one."""

    names: tuple[str, ...]
    nested: Nested
    strengths: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StatesFit:
    """options: in the order of `logits`' columns. shuffled: logits of the linear ones on one layer, learned from
    shuffled labels, in the same order."""

    options: tuple[Option, ...]
    logits: LeftOut
    shuffled: LeftOut

    def choose(self, table: Table, fits: Callable[[Option], bool]) -> tuple[Nested, tuple[Option, ...]]:
        """The choice among the options that fit, and these."""
        columns = [column for column, option in enumerate(self.options) if fits(option)]
        logits = {left_out: found[:, columns] for left_out, found in self.logits.items()}
        return table.nested(logits), tuple(self.options[column] for column in columns)


def make_table(dataset: Dataset, folds_of: Ints, n_folds: int) -> Table:
    """folds_of: the fold of each of the dataset's questions."""
    rows = dataset.draft
    first, place = distinct(rows.context, rows.same)
    labelled = np.isfinite(rows.label)
    weights = np.bincount(place, labelled.astype(np.float64))
    sums = np.bincount(place, np.where(labelled, rows.label, 0.0))
    questions = rows.question[first]
    return Table(
        features=rows.features[first].astype(np.float64),
        states=rows.pooled["target"][first],
        labels=sums / np.maximum(weights, 1),
        weights=weights,
        questions=questions,
        folds=Folds(of=folds_of[questions], n=n_folds),
        place=place,
    )


def distinct(contexts: Ints, same: Ints) -> tuple[Ints, Ints]:
    """The first row of each different segment, and for each row (n,) which of these is its."""
    keys = contexts * (int(same.max(initial=0)) + 1) + same
    _, first, place = np.unique(keys, return_index=True, return_inverse=True)
    return first, place.reshape(-1)


def shuffled_labels(table: Table, seed: int) -> Table:
    """The same rows, whose labels are those of another question's rows, in any order: a question's labels stay as much
    alike as they were, and nothing is left to be learned."""
    rng = np.random.default_rng(seed)
    rows_of = [
        np.flatnonzero((table.questions == question) & (table.weights > 0))
        for question in np.unique(table.questions[table.weights > 0])
    ]
    labels = table.labels.copy()
    deck = rng.permutation(len(rows_of))
    for one, other in zip(deck, np.roll(deck, 1), strict=True):
        theirs = rng.permutation(table.labels[rows_of[other]])
        labels[rows_of[one]] = np.resize(theirs, len(rows_of[one]))
    return replace(table, labels=labels)


def fit_features(table: Table, names: Sequence[str]) -> FeatureFit:
    """Linear on some of FEATURES, the strength chosen inside."""
    x = table.features[:, [FEATURES.index(name) for name in names]]

    def fit(learned: Bools) -> Array:
        scaled = standardise(x[learned], np.ones(int(learned.sum()))).of(x)
        fitted = table.linear(scaled, learned, FEATURE_STRENGTHS)
        return np.column_stack([linear.logits(scaled) for linear in fitted])

    nested = table.nested(cross_fit(fit, table.folds))
    strengths = tuple(FEATURE_STRENGTHS[option] for option in (*nested.chosen, nested.final))
    return FeatureFit(names=tuple(names), nested=nested, strengths=strengths)


def stack(table: Table, base: FeatureFit, probe: Nested) -> Array:
    """(m,) held-out logits of linear on base's features and the probe's logit, strengths those of base alone.

    The second stage learns from logits of probes that saw neither its fold nor the row.
    """
    features = table.features[:, [FEATURES.index(name) for name in base.names]]
    outer = np.empty(len(features))
    for fold in range(table.folds.n):
        rows = table.folds.of == fold
        x = np.column_stack([features, np.where(rows, probe.outer, probe.inner[fold])])
        scaled = standardise(x[~rows], np.ones(int((~rows).sum()))).of(x)
        (fitted,) = table.linear(scaled, ~rows, [base.strengths[fold]])
        outer[rows] = fitted.logits(scaled[rows])
    return outer


def fit_states(
    table: Table,
    shuffled: Table,
    probes: Sequence[str],
    seed: int,
    on_done: Callable[[], None] | None = None,
) -> StatesFit:
    """Every option: linear on each layer and on all together; networks on the layer that linear ones choose inside.

    on_done: called after each set of folds left out.
    """
    options = _linear_options(table.states.shape[1])
    found: dict[frozenset[int], Array] = {}
    controls: dict[frozenset[int], Array] = {}
    for left_out in table.folds.sets():
        found[left_out], controls[left_out] = _linear_logits(
            table, shuffled, ~table.folds.within(left_out), options
        )
        if on_done is not None:
            on_done()
    linear = StatesFit(options=options, logits=found, shuffled=controls)
    sizes = [probe for probe in probes if probe != LINEAR]
    if not sizes:
        return linear
    nested, singles = linear.choose(table, lambda option: len(option.layers) == 1)
    layers = [singles[column].layers[0] for column in nested.chosen]
    logits = {}
    for left_out in table.folds.sets():
        networks = _network_logits(table, left_out, layers, sizes, seed)
        logits[left_out] = np.column_stack([found[left_out], networks])
        if on_done is not None:
            on_done()
    final = singles[nested.final].layers
    return StatesFit(
        options=(*options, *(Option(probe=size, layers=final) for size in sizes)),
        logits=logits,
        shuffled=controls,
    )


def _linear_options(n_layers: int) -> tuple[Option, ...]:
    layer_sets: list[tuple[int, ...]] = [(k,) for k in range(n_layers)]
    if n_layers > 1:
        layer_sets.append(tuple(range(n_layers)))
    return tuple(
        Option(probe=LINEAR, layers=layers, strength=strength)
        for layers in layer_sets
        for strength in STATE_STRENGTHS
    )


def _linear_logits(
    table: Table, shuffled: Table, learned: Bools, options: Sequence[Option]
) -> tuple[Array, Array]:
    """(m, O) of the options, and of those on one layer learned from shuffled labels. The basis is that of the rows
    learned from."""
    bases = _bases(table, learned, range(table.states.shape[1]))
    coordinates = [basis.of(table.states[:, k]) for k, basis in bases]
    columns, control = [], []
    for layers in dict.fromkeys(option.layers for option in options):
        x = np.column_stack([coordinates[k] for k in layers])
        columns += [fitted.logits(x) for fitted in table.linear(x, learned, STATE_STRENGTHS)]
        if len(layers) == 1:
            control += [fitted.logits(x) for fitted in shuffled.linear(x, learned, STATE_STRENGTHS)]
    return np.column_stack(columns), np.column_stack(control)


def _network_logits(
    table: Table, left_out: frozenset[int], layers: Sequence[int], sizes: Sequence[str], seed: int
) -> Array:
    """(m, sizes). layers: of each fold, chosen without it. The rows of a fold left out beside another are predicted for
    the other's sake, and so from the other's layer."""
    found = np.full((len(table.labels), len(sizes)), np.nan)
    learned = ~table.folds.within(left_out)
    for layer in sorted({layers[fold] for fold in left_out}):
        ((_, basis),) = _bases(table, learned, [layer])
        x = basis.of(table.states[:, layer])
        theirs = [fold for fold in left_out if all(layers[other] == layer for other in left_out - {fold})]
        if len(left_out) == 1:
            theirs = list(left_out)
        rows = table.folds.within(frozenset(theirs))
        for place, size in enumerate(sizes):
            network = _network(table, x, learned, size, (seed, *sorted(left_out)))
            found[rows, place] = network_logits(network, x[rows])
    return found


def branch_of(table: Table, option: Option, seed: int) -> tuple[StateBranch, ...]:
    """A branch for each layer of the option, learned from all rows."""
    learned = np.ones(len(table.labels), np.bool_)
    bases = dict(_bases(table, learned, option.layers))
    if option.probe != LINEAR:
        (k,) = option.layers
        x = bases[k].of(table.states[:, k])
        return (bases[k].network(_network(table, x, learned, option.probe, (seed, table.folds.n))),)
    x = np.column_stack([bases[k].of(table.states[:, k]) for k in option.layers])
    (fitted,) = table.linear(x, learned, [option.strength])
    edges = np.cumsum([0, *(bases[k].matrix.shape[1] for k in option.layers)])
    parts = [fitted.weights[start:end] for start, end in pairwise(edges)]
    return tuple(
        bases[k].linear(Linear(part, fitted.bias if place == 0 else 0.0))
        for place, (k, part) in enumerate(zip(option.layers, parts, strict=True))
    )


def ship(
    table: Table,
    base: FeatureFit,
    scaling: Scaling,
    probe: Nested | None = None,
    branches: Sequence[StateBranch] = (),
) -> tuple[ProbeWeights, Array]:
    """What is shipped: base's features, and the branches of `probe` on top; and the effect of one deviation of each
    feature on the logit."""
    x = table.features[:, [FEATURES.index(name) for name in base.names]]
    if probe is not None:
        x = np.column_stack([x, probe.outer])
    standard = standardise(x, np.ones(len(x)))
    everything = np.ones(len(x), np.bool_)
    (fitted,) = table.linear(standard.of(x), everything, [base.strengths[-1]])
    n = len(base.names)
    weights, bias = fitted.weights / standard.scale, fitted.bias
    if probe is not None:
        bias -= float(weights[n] * standard.center[n])
        branches = [_times(branch, float(weights[n])) for branch in branches]
    return (
        ProbeWeights(
            states=tuple(branches),
            weights=weights[:n].astype(np.float32),
            centers=standard.center[:n].astype(np.float32),
            bias=bias,
            scaling=scaling,
        ),
        fitted.weights[:n],
    )


def _bases(table: Table, learned: Bools, layers: Sequence[int] | range) -> list[tuple[int, Basis]]:
    return [(k, fit_basis(table.states[learned, k], np.ones(int(learned.sum())))) for k in layers]


def _network(table: Table, x: Floats, learned: Bools, size: str, seed: tuple[int, ...]) -> tuple[Dense, ...]:
    rows = learned & (table.weights > 0)
    return fit_network(
        x[rows],
        table.labels[rows],
        table.weights[rows],
        table.questions[rows],
        size,
        seed=int(np.random.SeedSequence(seed).generate_state(1)[0]),
    )


def _times(branch: StateBranch, factor: float) -> StateBranch:
    last = branch.layers[-1]
    scaled = Dense(weight=last.weight * np.float32(factor), bias=last.bias * np.float32(factor))
    return StateBranch(center=branch.center, layers=(*branch.layers[:-1], scaled))


def names_like(*kinds: str) -> tuple[str, ...]:
    """FEATURES of these kinds, such as `target.`."""
    return tuple(name for name in FEATURES if name.startswith(kinds))
