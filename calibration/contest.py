"""Contest: everything that is tried on one dataset, fitted out of fold, as entries with held-out scores.

    single signals | linear on signals, text | probes of states | both stacked | the published ratio | shuffled labels

It knows how each is made and how it would be shipped; how good it is, and which wins, is learn.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from semspec.calibration.candidates import (
    LINEAR,
    FeatureFit,
    Option,
    StatesFit,
    Table,
    branch_of,
    fit_features,
    fit_states,
    make_table,
    names_like,
    ship,
    shuffled_labels,
    stack,
)
from semspec.calibration.dataset import Dataset
from semspec.calibration.evaluate import Scored
from semspec.calibration.folds import Nested
from semspec.calibration.networks import SIZES
from semspec.calibration.paper import Ratio, fit_ratio
from semspec.calibration.scaling import scale_nested
from semspec.export.probe_graph import ProbeWeights, Scaling
from semspec.runtime.errors import ConfigError
from semspec.runtime.records import Array, Ints, Progress

__all__ = [
    "BASE",
    "PROBE_SIZES",
    "RICHER",
    "SIGNALS",
    "Contest",
    "Entry",
    "LayerScores",
    "LearnSettings",
    "run_contest",
    "signal_scores",
]

PROBE_SIZES = (LINEAR, *SIZES)

SIGNALS, BASE = "signals", "signals+text"
RICHER = ("signals+draft+text", "signals+text+states")
"""What costs more than the base, the probe last: a draft's signals need a draft model, states a probe."""

SINGLE = {
    "target.mean_logprob": "mean log-probability under the target",
    "target.min_logprob": "its least log-probability under the target",
    "target.sum_logprob": "its summed log-probability under the target",
    "target.mean_entropy": "mean entropy of the target, negated",
    "target.agreement": "share of tokens that are the target's arg-max",
    "draft.mean_logprob": "mean log-probability under the draft",
    "draft.mean_entropy": "mean entropy of the draft, negated",
    "text.log_length": "length in tokens",
}
NEGATED = ("target.mean_entropy", "draft.mean_entropy")

LINEAR_ON = {
    SIGNALS: ("linear on the target's signals", ("target.",)),
    "text": ("linear on features of the segment's text", ("text.",)),
    BASE: ("linear on the target's signals and the text's features", ("target.", "text.")),
    RICHER[0]: ("the same and the draft's signals", ("target.", "draft.", "text.")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnSettings:
    """How learning goes. Raises ConfigError for a value out of range.

    probes: sizes of probe that are tried, of PROBE_SIZES, `linear` among them; fewer: quicker. paper_probe: that of the
    published rule. n_folds: at least 3; more: larger training sets, slower. n_resamples: behind intervals and bounds;
    more: steadier ones. risks: that get a threshold. seed: of folds, networks and resamples.
    """

    probes: tuple[str, ...] = PROBE_SIZES
    paper_probe: str = "mlp4"
    n_folds: int = 5
    n_resamples: int = 1000
    risks: tuple[float, ...] = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3)
    seed: int = 0

    def __post_init__(self) -> None:
        for probe in (*self.probes, self.paper_probe):
            if probe not in PROBE_SIZES:
                raise ConfigError(f"a probe must be one of {', '.join(PROBE_SIZES)}, got {probe!r}")
        if LINEAR not in self.probes:
            raise ConfigError(
                f"probes must have {LINEAR!r} among them, got {', '.join(self.probes) or 'none'}"
            )
        if self.n_folds < 3:
            raise ConfigError(f"n_folds must be at least 3, got {self.n_folds}: two are left out together")
        if self.n_resamples < 20:
            raise ConfigError(
                f"n_resamples must be at least 20, got {self.n_resamples}: a bound is their 95 % point"
            )
        if not all(0 < risk < 1 for risk in self.risks) or len(set(self.risks)) != len(self.risks):
            raise ConfigError(
                f"risks must differ and lie between 0 and 1, got {list(self.risks)}; 0 is exact modes"
            )
        if self.seed < 0:
            raise ConfigError(f"seed must be at least 0, got {self.seed}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entry:
    """A fitted candidate that can be shipped.

    shares: (n,) as in `scored`. fit: of its features. probe: held-out logits of what is stacked on, None for none;
    option: how it would be fitted on all. scaling: for new rows, and its name.
    """

    scored: Scored
    shares: Array
    fit: FeatureFit
    scaling: Scaling
    scaling_name: str
    probe: Nested | None = None
    option: Option | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerScores:
    """Held-out logits (n,) of a linear probe of these places among the pooled layers: alone, on signals, on base."""

    layers: tuple[int, ...]
    alone: Array
    on_signals: Array
    on_base: Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contest:
    """All that was tried. scored: every candidate, in the order of a report. entries: by name, those that can be
    shipped. shuffled, shuffled_labels: (n,) held-out logits of the control, and what it was to learn."""

    table: Table
    scored: tuple[Scored, ...]
    entries: dict[str, Entry]
    layers: tuple[LayerScores, ...]
    ratio: Ratio
    shuffled: Array
    shuffled_labels: Array
    seed: int

    def find(self, name: str) -> Scored:
        """By name."""
        return next(one for one in self.scored if one.name == name)

    def entry(self, name: str) -> Entry:
        """By name; that of a single signal is fitted now."""
        return self.entries[name] if name in self.entries else _enter(self.table, name, SINGLE[name], [name])

    def ship(self, entry: Entry) -> tuple[ProbeWeights, Array]:
        """candidates.ship of an entry, learned from all rows."""
        branches = () if entry.option is None else branch_of(self.table, entry.option, self.seed)
        return ship(self.table, entry.fit, entry.scaling, entry.probe, branches)


def run_contest(
    dataset: Dataset, folds_of: Ints, settings: LearnSettings, on_progress: Progress | None = None
) -> Contest:
    """Fit everything. folds_of: the fold of each of the dataset's questions. on_progress: stage `fitting`."""
    table = make_table(dataset, folds_of, settings.n_folds)
    control = shuffled_labels(table, settings.seed)
    n_sets = len(list(table.folds.sets()))
    n_steps = 3 + n_sets * (1 + (len(settings.probes) > 1))
    done = iter(range(1, n_steps + 1))

    def step() -> None:
        if on_progress is not None:
            on_progress("fitting", next(done), n_steps)

    entries = {
        name: _enter(table, name, says, names_like(*kinds)) for name, (says, kinds) in LINEAR_ON.items()
    }
    step()
    states = fit_states(table, control, settings.probes, settings.seed, step)
    of_states, (stacked, option) = _score_states(table, states, settings.probes)
    for name, base in (("signals+states", SIGNALS), (RICHER[-1], BASE)):
        entries[name] = _stack_on(table, name, entries[base], stacked, option)
    ratio = fit_ratio(dataset, folds_of, settings.n_folds, settings.paper_probe, settings.seed, step)
    scored = [
        *(
            Scored(name=name, says=SINGLE[name], kind="signal", scores=scores)
            for name, scores in signal_scores(dataset).items()
        ),
        *(entry.scored for entry in entries.values() if entry.probe is None),
        *of_states,
        *(entry.scored for entry in entries.values() if entry.probe is not None),
        *_score_ratio(ratio),
    ]
    return Contest(
        table=table,
        scored=tuple(scored),
        entries=entries,
        layers=tuple(_layers(table, states, entries)),
        ratio=ratio,
        shuffled=_learn_nothing(control, states)[table.place],
        shuffled_labels=control.labels[table.place],
        seed=settings.seed,
    )


def _enter(table: Table, name: str, says: str, features: Sequence[str]) -> Entry:
    fit = fit_features(table, features)
    scores, scaling, scaling_name = scale_nested(fit.nested.outer, table.labels, table.weights, table.folds)
    scored = _fitted(table, name, says, fit.nested.outer, scores)
    return Entry(
        scored=scored, shares=scores[table.place], fit=fit, scaling=scaling, scaling_name=scaling_name
    )


def _stack_on(table: Table, name: str, base: Entry, probe: Nested, option: Option) -> Entry:
    outer = stack(table, base.fit, probe)
    scores, scaling, scaling_name = scale_nested(outer, table.labels, table.weights, table.folds)
    says = f"linear on {base.scored.name} and the logit of the probe `states`"
    return Entry(
        scored=_fitted(table, name, says, outer, scores, option.probe),
        shares=scores[table.place],
        fit=base.fit,
        scaling=scaling,
        scaling_name=scaling_name,
        probe=probe,
        option=option,
    )


def _score_states(
    table: Table, states: StatesFit, probes: Sequence[str]
) -> tuple[list[Scored], tuple[Nested, Option]]:
    """Probes by themselves, each size and the choice among all; and that choice, which is stacked on."""
    found = []
    for size in probes if len(probes) > 1 else ():
        nested, _ = states.choose(table, lambda option, size=size: option.probe == size)  # type: ignore[misc]
        says = f"{size} on the target's states, layer and strength chosen inside the folds"
        found.append(_probe(table, f"states.{size}", says, nested, size))
    nested, options = states.choose(table, lambda option: True)
    option = options[nested.final]
    says = "a probe of the target's states, its size, layer and strength chosen inside the folds"
    found.append(_probe(table, "states", says, nested, option.probe))
    return found, (nested, option)


def _probe(table: Table, name: str, says: str, nested: Nested, probe: str) -> Scored:
    scores, *_ = scale_nested(nested.outer, table.labels, table.weights, table.folds)
    return _fitted(table, name, says, nested.outer, scores, probe)


def _fitted(table: Table, name: str, says: str, logits: Array, shares: Array, probe: str = "") -> Scored:
    """Ranked by logits: every fold has a scaling of its own, and what is shipped has one."""
    place = table.place
    return Scored(
        name=name, says=says, kind="fitted", scores=logits[place], shares=shares[place], probe=probe
    )


def signal_scores(dataset: Dataset) -> dict[str, Array]:
    """Each single signal of the draft's rows (n,), more of it speaking for a segment."""
    found = {}
    for name in SINGLE:
        values = dataset.draft.feature(name).astype(np.float64)
        found[name] = -values if name in NEGATED else values
    return found


def _score_ratio(ratio: Ratio) -> list[Scored]:
    """Both probes of the published rule, and their ratio."""
    target, draft = ratio.target.scores, ratio.draft.scores
    probe = ratio.probe
    return [
        Scored(
            name="own.target",
            says="s_T of the published rule, learned from the target's own segments",
            kind="fitted",
            scores=target,
            shares=target,
            probe=probe,
        ),
        Scored(
            name="own.draft",
            says="s_D of the published rule, learned from the draft's own segments",
            kind="fitted",
            scores=draft,
            shares=draft,
            probe=probe,
        ),
        Scored(
            name="ratio",
            says="the published rule, s_T / s_D; as a probability min(1, s_T / s_D)",
            kind="ratio",
            scores=ratio.values,
            shares=np.minimum(1.0, ratio.values),
            probe=probe,
        ),
    ]


def _layers(table: Table, states: StatesFit, entries: dict[str, Entry]) -> list[LayerScores]:
    found = []
    for layers in dict.fromkeys(option.layers for option in states.options if option.probe == LINEAR):
        nested, _ = states.choose(
            table,
            lambda option, layers=layers: option.probe == LINEAR and option.layers == layers,  # type: ignore[misc]
        )
        signals, base = (stack(table, entries[name].fit, nested) for name in (SIGNALS, BASE))
        found.append(
            LayerScores(
                layers=layers,
                alone=nested.outer[table.place],
                on_signals=signals[table.place],
                on_base=base[table.place],
            )
        )
    return found


def _learn_nothing(control: Table, states: StatesFit) -> Array:
    """Held-out logits (m,) of base and linear probe, learned from shuffled labels all the way."""
    fit = fit_features(control, names_like(*LINEAR_ON[BASE][1]))
    return stack(control, fit, control.nested(states.shuffled))
