"""Labels of segments: how likely a model is to say something meaning this, counted in samples of one context.

    own       share of the author's drawn samples in the segment's class, itself included    as published
    own-loo   without itself
    joint     mean of the target's and the draft's share, itself included
    cross     share of the target's drawn samples, itself left out where it is one of them

A class of mass mu has, seen from one of its own N samples, the expected share mu + (1 - mu) / N: `own` is biased by
that much and never 0; `own-loo` and `cross` are not. Greedy segments were not drawn: they get labels and count in
none. Pure functions of class ids (cluster.py), one context at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from semspec.calibration.cluster import classes_of
from semspec.calibration.equivalence import Bools, Equivalence
from semspec.calibration.records import Sample
from semspec.runtime.errors import CalibrationError
from semspec.runtime.records import Array, Ints

__all__ = ["KINDS", "Labels", "label_classes", "label_outcomes", "label_samples"]

KINDS = ("own", "own-loo", "joint", "cross")

AUTHORS = ("draft", "target")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Labels:
    """The labels of one context's samples, in their order: (n,) float64 in 0..1. classes: (n,) class ids."""

    own: Array
    own_loo: Array
    joint: Array
    cross: Array
    classes: Ints

    def kind(self, name: str) -> Array:
        """One of KINDS. Raises CalibrationError for another name."""
        if name not in KINDS:
            raise CalibrationError(f"a label must be one of {', '.join(KINDS)}, got {name!r}")
        found: Array = getattr(self, name.replace("-", "_"))
        return found


def label_samples(samples: Sequence[Sample], equivalence: Equivalence) -> Labels:
    """Label the samples of one context, classes found among all of them together.

    Raises CalibrationError: as label_classes; samples of several contexts; what the relation raises.
    """
    contexts = sorted({sample.context for sample in samples})
    if len(contexts) > 1:
        raise CalibrationError(
            f"labels are counted in one context, and these samples are of {', '.join(contexts)}; split them"
        )
    return label_classes(
        classes_of([sample.text for sample in samples], equivalence),
        authors=[sample.author for sample in samples],
        drawn=np.array([not sample.greedy for sample in samples], np.bool_),
    )


def label_classes(classes: Ints, *, authors: Sequence[str], drawn: Bools) -> Labels:
    """Label segments by their class ids (n,). drawn: (n,), which were sampled; the others are greedy ones.

    Raises CalibrationError: an author who is neither `draft` nor `target`, fewer than two drawn samples of one of
    them, arguments of different lengths.
    """
    if not len(classes) == len(authors) == len(drawn):
        raise CalibrationError(
            f"{len(classes)} classes, {len(authors)} authors and {len(drawn)} marks of what was drawn: give one each a "
            "segment"
        )
    if strangers := sorted(set(authors) - set(AUTHORS)):
        raise CalibrationError(f"a segment's author must be draft or target, got {strangers[0]!r}")
    by = {author: np.array([one == author for one in authors], np.bool_) for author in AUTHORS}
    for author in AUTHORS:
        if (n := int((by[author] & drawn).sum())) < 2:
            raise CalibrationError(
                f"labels need at least 2 drawn samples of each model, and the {author} has {n}; collect more"
            )
    share = {author: _share(classes, by[author] & drawn) for author in AUTHORS}
    others = {author: _share_of_others(classes, by[author] & drawn) for author in AUTHORS}
    by_draft = by["draft"]
    return Labels(
        own=np.where(by_draft, share["draft"], share["target"]),
        own_loo=np.where(by_draft, others["draft"], others["target"]),
        joint=(share["draft"] + share["target"]) / 2,
        cross=others["target"],
        classes=classes,
    )


def label_outcomes(after_draft: Bools, after_own: Bools) -> Array:
    """(n,) float64: 1 where the answer stays right, 0 where the draft's segment spoils it, else NaN.

    after_draft: whether the target, going on greedily from the draft's segment, ends at the right answer. after_own:
    the same from its own segment. Where its own way goes wrong nothing can be spoiled: NaN, to be left out and
    counted. Raises CalibrationError for arguments of different shapes.
    """
    if after_draft.shape != after_own.shape:
        raise CalibrationError(
            f"outcomes come in pairs, got shapes {after_draft.shape} and {after_own.shape}; give both of each segment"
        )
    return np.where(after_own, after_draft.astype(np.float64), np.nan)


def _share(classes: Ints, counted: Bools) -> Array:
    """Of each segment, the share of the counted ones in its class."""
    share: Array = (classes[:, None] == classes[None, counted]).mean(axis=1)
    return share


def _share_of_others(classes: Ints, counted: Bools) -> Array:
    """The same without the segment itself."""
    n = int(counted.sum())
    share: Array = (_share(classes, counted) * n - counted) / (n - counted)
    return share
