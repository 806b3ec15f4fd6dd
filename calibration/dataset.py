"""Dataset: a collection, its classes of meaning and its labels as arrays, which is all that learning sees.

    contexts with samples + equivalence -> classes of each -> labels -> rows of the draft, rows of the target

It knows records, labels and features; it knows no model and no predictor. Rows keep the order of the collection, the
greedy segment of each author first in its context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from semspec.calibration.cluster import classes_of
from semspec.calibration.equivalence import Bools, Equivalence
from semspec.calibration.labels import KINDS, Labels, label_classes
from semspec.calibration.records import Context, Sample
from semspec.runtime.errors import CalibrationError, ConfigError
from semspec.runtime.features import FEATURES, SegmentText, feature_values
from semspec.runtime.records import Array, Floats, Ints

__all__ = ["LABELS", "Classes", "Dataset", "Described", "Rows", "build_dataset", "classify"]

LABELS = (*KINDS, "outcome")

Described: TypeAlias = Iterable[tuple[Context, Sequence[Sample]]]
"""Contexts with their samples, as Collection.contexts gives them."""

Classes: TypeAlias = Mapping[str, Sequence[int]]
"""Context id -> class id of each of its samples."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """n segments of one author.

    question, context: (n,) numbers, of Dataset.questions and of the context. same: (n,), equal for equal ids in one
    context. drawn: (n,), not by arg-max. after: (n,) who wrote the prefix (Context.written_by). length: (n,) tokens.
    label: (n,) float64 in 0..1, NaN where there is none. own: (n,) the published label, its author's samples counted.
    cross: (n,) share of the target's drawn samples that say the same. pooled: role -> (n, K, E), each role that read
    it. features: (n, F), F as in FEATURES; of the target's rows F is 0.
    """

    question: Ints
    context: Ints
    same: Ints
    drawn: Bools
    after: tuple[str, ...]
    length: Ints
    label: Array
    own: Array
    cross: Array
    pooled: Mapping[str, Floats]
    features: Floats

    def __len__(self) -> int:
        return len(self.question)

    def feature(self, name: str) -> Floats:
        """(n,) values of one of FEATURES."""
        values: Floats = self.features[:, FEATURES.index(name)]
        return values


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dataset:
    """What is learned from.

    questions: ids of those with a context; kinds: (Q,) numbers, equal for questions that are made alike. draft: its
    segments, read by both models. target: its own. label: which of LABELS the rows have. layers: role -> pooled layers
    (CollectionRun.pooled_layers). overlap: mean over contexts of the mass that the drawn classes of both models share.
    """

    questions: tuple[str, ...]
    kinds: Ints
    n_contexts: int
    draft: Rows
    target: Rows
    label: str
    equivalence: str
    layers: Mapping[str, tuple[int, ...]]
    overlap: float

    @property
    def measured(self) -> Bools:
        """(n,) of the draft's rows, those that results are about: drawn ones with a label. Outcomes are known of greedy
        segments, one a context: then those."""
        labelled = np.isfinite(self.draft.label)
        return labelled if self.label == "outcome" else labelled & self.draft.drawn

    @property
    def bad(self) -> Bools:
        """(n,) of the draft's rows, those that a risk counts: the answer is spoiled where labels are outcomes, else no
        sample of the target is equivalent, whatever the label."""
        found: Bools = (self.draft.label if self.label == "outcome" else self.draft.cross) == 0
        return found


def classify(
    contexts: Described, equivalence: Equivalence, on_context: Callable[[str], None] | None = None
) -> dict[str, tuple[int, ...]]:
    """Context id -> class id of each of its samples; classes are found among those of one context together.

    on_context: told each context's id when it is done. Raises what the relation raises.
    """
    found = {}
    for context, samples in contexts:
        classes = classes_of([sample.text for sample in samples], equivalence)
        found[context.id] = tuple(int(number) for number in classes)
        if on_context is not None:
            on_context(context.id)
    return found


def build_dataset(
    contexts: Described,
    classes: Classes,
    *,
    layers: Mapping[str, tuple[int, ...]],
    equivalence: str,
    describe: Callable[[Context, Sample], SegmentText],
    label: str = "cross",
    outcomes: Mapping[str, Sequence[float]] | None = None,
    kinds: Mapping[str, str] | None = None,
) -> Dataset:
    """Arrays of a collection, read once, one context in memory beside them.

    classes: as classify gives them; equivalence: the name of what made them. describe: the segment of a sample
    (features.segment_text). label: of the rows. outcomes: for the label `outcome`, context id -> of each sample 0..1,
    or NaN where nobody knows; contexts may be missing. kinds: question id -> Problem.kind, of those that have one.

    Raises CalibrationError: no context, one without classes or with those of other samples, outcomes that are missing
    or of other samples, labels that cannot be counted (labels.label_classes); ConfigError for an unknown label.
    """
    if label not in LABELS:
        raise ConfigError(f"label must be one of {', '.join(LABELS)}, got {label!r}")
    if label == "outcome" and outcomes is None:
        raise CalibrationError("the label outcome needs outcomes, and there are none; roll them out first")
    questions: dict[str, int] = {}
    rows: dict[str, list[_Row]] = {"draft": [], "target": []}
    overlaps = []
    for number, (context, samples) in enumerate(contexts):
        question = questions.setdefault(context.question, len(questions))
        labels = _labels(context, samples, classes)
        chosen = _chosen(context, samples, labels, label, outcomes or {})
        overlaps.append(_overlap(samples, labels.classes))
        found = _described(context, samples, labels, chosen, describe)
        for sample, row in zip(samples, found, strict=True):
            rows[sample.author].append(row._replace(question=question, context=number))
    if not overlaps:
        raise CalibrationError("the collection has no context with samples; collect with other questions")
    return Dataset(
        questions=tuple(questions),
        kinds=_number_kinds(tuple(questions), kinds or {}),
        n_contexts=len(overlaps),
        draft=_stack(rows["draft"], ("target", "draft")),
        target=_stack(rows["target"], ("target",)),
        label=label,
        equivalence=equivalence,
        layers=dict(layers),
        overlap=float(np.mean(overlaps)),
    )


def _number_kinds(questions: Sequence[str], kinds: Mapping[str, str]) -> Ints:
    """A question without a kind is one of its own."""
    numbers: dict[tuple[str, bool], int] = {}
    named = [(kinds.get(question, question), question in kinds) for question in questions]
    return np.array([numbers.setdefault(name, len(numbers)) for name in named], np.int64)


class _Row(NamedTuple):
    """One of Rows."""

    question: int
    context: int
    same: int
    drawn: bool
    after: str
    length: int
    label: float
    own: float
    cross: float
    pooled: Mapping[str, Floats]
    features: Floats


def _described(
    context: Context,
    samples: Sequence[Sample],
    labels: Labels,
    chosen: Array,
    describe: Callable[[Context, Sample], SegmentText],
) -> list[_Row]:
    """A row for each sample of one context, which has number 0 here, as its question has."""
    same: dict[tuple[int, ...], int] = {}
    return [
        _Row(
            question=0,
            context=0,
            same=same.setdefault(sample.ids, len(same)),
            drawn=not sample.greedy,
            after=context.written_by,
            length=len(sample.ids),
            label=float(chosen[place]),
            own=float(labels.own[place]),
            cross=float(labels.cross[place]),
            pooled={role: reading.pooled for role, reading in sample.readings.items()},
            features=_features(sample, describe(context, sample))
            if sample.author == "draft"
            else np.empty(0, np.float32),
        )
        for place, sample in enumerate(samples)
    ]


def _labels(context: Context, samples: Sequence[Sample], classes: Classes) -> Labels:
    found = classes.get(context.id)
    if found is None or len(found) != len(samples):
        have = "none" if found is None else str(len(found))
        raise CalibrationError(
            f"context {context.id!r} has {len(samples)} samples and classes of {have}; find the classes again"
        )
    return label_classes(
        np.array(found, np.int64),
        authors=[sample.author for sample in samples],
        drawn=np.array([not sample.greedy for sample in samples], np.bool_),
    )


def _chosen(
    context: Context,
    samples: Sequence[Sample],
    labels: Labels,
    label: str,
    outcomes: Mapping[str, Sequence[float]],
) -> Array:
    """(n,) labels. Outcomes are those of greedy segments: drawn ones that are equal would count one outcome twice."""
    if label != "outcome":
        return labels.kind(label)
    found = outcomes.get(context.id, [float("nan")] * len(samples))
    if len(found) != len(samples):
        raise CalibrationError(
            f"context {context.id!r} has {len(samples)} samples and outcomes of {len(found)}; roll them out again"
        )
    greedy = [sample.greedy for sample in samples]
    return np.where(greedy, np.array(found, np.float64), np.nan)


def _overlap(samples: Sequence[Sample], classes: Ints) -> float:
    """Sum over classes of the smaller of the shares that both models' drawn samples have."""
    counts = {}
    for author in ("draft", "target"):
        drawn = [sample.author == author and not sample.greedy for sample in samples]
        counts[author] = np.bincount(classes[drawn], minlength=int(classes.max()) + 1) / sum(drawn)
    return float(np.minimum(counts["draft"], counts["target"]).sum())


def _features(sample: Sample, segment: SegmentText) -> Floats:
    readings = sample.readings
    return feature_values(
        FEATURES, target=readings["target"].signals, draft=readings["draft"].signals, segment=segment
    )


def _stack(rows: Sequence[_Row], roles: Sequence[str]) -> Rows:
    return Rows(
        question=np.array([row.question for row in rows], np.int64),
        context=np.array([row.context for row in rows], np.int64),
        same=np.array([row.same for row in rows], np.int64),
        drawn=np.array([row.drawn for row in rows], np.bool_),
        after=tuple(row.after for row in rows),
        length=np.array([row.length for row in rows], np.int64),
        label=np.array([row.label for row in rows], np.float64),
        own=np.array([row.own for row in rows], np.float64),
        cross=np.array([row.cross for row in rows], np.float64),
        pooled={role: np.stack([row.pooled[role] for row in rows]) for role in roles},
        features=np.stack([row.features for row in rows]),
    )
