"""Labels in a toy world whose truth is known: two models that say one of a few meanings, with known chances."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest

from semspec.calibration.equivalence import Numbers
from semspec.calibration.labels import KINDS, label_classes, label_outcomes, label_samples
from semspec.calibration.records import Sample
from semspec.runtime.errors import CalibrationError

TARGET = (Fraction(6, 10), Fraction(3, 10), Fraction(1, 10), Fraction(0))
DRAFT = (Fraction(2, 10), Fraction(3, 10), Fraction(0), Fraction(5, 10))
"""Chances of four meanings; the draft's favourite is nothing the target would say."""

N = 3  # samples of each

WORDINGS = (
    ("3 * 4 = 12", "4 × 3 = 12", "Here 3 \\cdot 4 comes to 12."),
    ("3 + 4 = 7", "7 = 4 + 3"),
    ("4 - 3 = 1",),
    ("We begin with the lemons.", "We now begin with the lemons."),
)


def expected(author: str, meaning: int) -> dict[str, Fraction]:
    """The exact mean of each label of the author's first sample, given what it means: all draws enumerated."""
    law = {"draft": DRAFT, "target": TARGET}
    totals = dict.fromkeys(KINDS, Fraction(0))
    authors = ["draft"] * N + ["target"] * N
    first = authors.index(author)
    free = [place for place in range(2 * N) if place != first]
    for drawn in itertools.product(range(4), repeat=2 * N - 1):
        classes = np.empty(2 * N, np.int64)
        classes[first], classes[free] = meaning, drawn
        chance = Fraction(1)
        for place, one in zip(free, drawn, strict=True):
            chance *= law[authors[place]][one]
        if chance:
            labels = label_classes(classes, authors=authors, drawn=np.ones(2 * N, np.bool_))
            for kind in KINDS:
                totals[kind] += chance * Fraction(float(labels.kind(kind)[first])).limit_denominator(100)
    return totals


@pytest.mark.parametrize("meaning", [0, 1, 3])
def test_a_drafts_labels_are_unbiased_but_for_the_published_one(meaning: int) -> None:
    """own is (1 - mu) / N too high; own-loo is the draft's chance, cross the target's, zero included."""
    found, mass = expected("draft", meaning), DRAFT[meaning]
    assert found["own"] == mass + (1 - mass) / N
    assert found["own-loo"] == mass
    assert found["cross"] == TARGET[meaning]
    assert found["joint"] == (found["own"] + TARGET[meaning]) / 2


@pytest.mark.parametrize("meaning", [0, 1, 2])
def test_a_targets_cross_label_leaves_itself_out(meaning: int) -> None:
    """So both kinds of text can train one probe of the target."""
    found, mass = expected("target", meaning), TARGET[meaning]
    assert found["own"] == mass + (1 - mass) / N
    assert found["own-loo"] == found["cross"] == mass
    assert found["joint"] == (found["own"] + DRAFT[meaning]) / 2


def sample(text: str, author: str, *, greedy: bool = False, context: str = "c") -> Sample:
    return Sample(context=context, author=author, greedy=greedy, ids=(1,), text=text, readings={})


def test_labels_of_texts_converge_to_the_chances_of_their_meanings() -> None:
    """The same world in words: many samples, several wordings of each meaning, one relation."""
    rng, said = np.random.default_rng(0), list[tuple[str, int, str]]()
    for author, law in (("draft", DRAFT), ("target", TARGET)):
        for meaning in rng.choice(4, size=2000, p=[float(chance) for chance in law]):
            said.append((author, int(meaning), str(rng.choice(WORDINGS[meaning]))))
    labels = label_samples([sample(text, author) for author, _, text in said], Numbers())
    assert labels.classes.max() == 3
    for place, (author, meaning, _) in enumerate(said):
        own = float((DRAFT if author == "draft" else TARGET)[meaning])
        assert abs(labels.own_loo[place] - own) < 0.04
        assert abs(labels.cross[place] - float(TARGET[meaning])) < 0.04


def test_greedy_segments_are_labelled_but_not_counted() -> None:
    """They were not drawn by chance: as a draw they would make the likeliest meaning likelier still."""
    labels = label_classes(
        np.array([0, 0, 1, 0, 0, 1, 1]),
        authors=["draft", "draft", "draft", "target", "target", "target", "target"],
        drawn=np.array([False, True, True, False, True, True, True]),
    )
    assert labels.own.tolist() == pytest.approx([1 / 2, 1 / 2, 1 / 2, 1 / 3, 1 / 3, 2 / 3, 2 / 3])
    assert labels.own_loo.tolist() == pytest.approx([1 / 2, 0, 0, 1 / 3, 0, 1 / 2, 1 / 2])
    assert labels.cross.tolist() == pytest.approx([1 / 3, 1 / 3, 2 / 3, 1 / 3, 0, 1 / 2, 1 / 2])
    assert labels.joint[0] == pytest.approx((1 / 2 + 1 / 3) / 2)


def test_an_outcome_is_what_becomes_of_a_right_answer() -> None:
    """Where the target goes wrong by itself there is nothing to spoil, and no label is made up."""
    found = label_outcomes(np.array([True, False, True, False]), np.array([True, True, False, False]))
    assert found.tolist()[:2] == [1, 0] and np.isnan(found[2:]).all()
    with pytest.raises(CalibrationError, match="come in pairs"):
        label_outcomes(np.array([True]), np.array([True, False]))


def texts(n_draft: int, n_target: int) -> Sequence[Sample]:
    return [sample("a", "draft")] * n_draft + [sample("b", "target")] * n_target


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (texts(1, 4), "at least 2 drawn samples of each model, and the draft has 1"),
        (texts(8, 1), "the target has 1"),
        ([*texts(1, 2), sample("a", "draft", greedy=True)], "the draft has 1"),
        ([], "the draft has 0"),
        ([*texts(2, 2), sample("a", "draft", context="d")], "these samples are of c, d"),
        ([*texts(2, 2), sample("a", "user")], "must be draft or target, got 'user'"),
    ],
)
def test_what_gives_no_label_is_refused(samples: Sequence[Sample], message: str) -> None:
    """N of 1 says nothing of how likely a meaning is; samples of another context say nothing of this one."""
    with pytest.raises(CalibrationError, match=message):
        label_samples(samples, Numbers())


def test_kinds_and_lengths_are_checked() -> None:
    """A misspelt kind names the known ones."""
    labels = label_samples(texts(2, 2), Numbers())
    assert [labels.kind(kind).shape for kind in KINDS] == [(4,)] * 4
    with pytest.raises(CalibrationError, match="must be one of own, own-loo, joint, cross, got 'loo'"):
        labels.kind("loo")
    with pytest.raises(CalibrationError, match="3 classes, 1 authors and 1 marks"):
        label_classes(np.zeros(3, np.int64), authors=["draft"], drawn=np.ones(1, np.bool_))
