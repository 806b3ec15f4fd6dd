"""Folds: questions stay whole, and no choice is made by predictions that saw what they are judged by."""

from __future__ import annotations

import numpy as np
import pytest

from semspec.calibration.equivalence import Bools
from semspec.calibration.folds import choose_nested, cross_fit, deal_folds, log_loss
from semspec.runtime.errors import CalibrationError, ConfigError
from semspec.runtime.records import Array

QUESTIONS = np.repeat(np.arange(12), 3)


def test_questions_are_dealt_whole_and_evenly() -> None:
    """Rows of one question resemble each other: one on either side would leak."""
    folds = deal_folds(QUESTIONS, 4, seed=0)
    for question in range(12):
        assert len(set(folds.of[question == QUESTIONS].tolist())) == 1
    assert np.bincount(folds.of).tolist() == [9, 9, 9, 9]
    assert (deal_folds(QUESTIONS, 4, seed=0).of == folds.of).all()
    assert (deal_folds(QUESTIONS, 4, seed=1).of != folds.of).any()


def test_kinds_of_questions_are_dealt_whole() -> None:
    """Twelve questions of four templates: who learned from one knows the wording of the other two."""
    kinds = QUESTIONS % 4
    folds = deal_folds(QUESTIONS, 3, seed=0, kinds=kinds)
    for kind in range(4):
        assert len(set(folds.of[kinds == kind].tolist())) == 1
    assert sorted(np.bincount(folds.of).tolist()) == [9, 9, 18]
    assert (deal_folds(QUESTIONS, 3, seed=0, kinds=QUESTIONS).of == deal_folds(QUESTIONS, 3, seed=0).of).all()
    with pytest.raises(CalibrationError, match=r"questions of 2 kinds are too few .* at least 3"):
        deal_folds(QUESTIONS, 3, seed=0, kinds=QUESTIONS % 2)


def test_too_few_questions_or_folds_are_refused() -> None:
    """With the number that would do."""
    with pytest.raises(CalibrationError, match=r"12 questions with labels are too few.*at least 14"):
        deal_folds(QUESTIONS, 7, seed=0)
    with pytest.raises(ConfigError, match="at least 3"):
        deal_folds(QUESTIONS, 2, seed=0)


def test_predictions_are_of_models_that_saw_neither_the_fold_nor_the_row() -> None:
    """A model that says which folds it learned from: its logit is the sum of their powers of two."""
    folds = deal_folds(QUESTIONS, 4, seed=0)
    marks = 2.0**folds.of

    def fit(learned: Bools) -> Array:
        said = float(sum(set(marks[learned].tolist())))
        return np.full((len(marks), 1), said)

    labels, weights = np.zeros(len(marks)), np.ones(len(marks))
    nested = choose_nested(cross_fit(fit, folds), folds, labels, weights)
    assert (nested.outer == 15 - marks).all()
    for fold in range(4):
        outside = folds.of != fold
        assert (nested.inner[fold][outside] == 15 - 2.0**fold - marks[outside]).all()
        assert np.isnan(nested.inner[fold][~outside]).all()


def test_the_choice_for_a_fold_does_not_see_its_labels() -> None:
    """Option 1 is right in fold 0 alone: there it is not chosen, though it would be by looking."""
    folds = deal_folds(QUESTIONS, 3, seed=0)
    labels = np.ones(len(QUESTIONS))
    options = np.column_stack([np.where(folds.of == 0, -9.0, 1.0), np.where(folds.of == 0, 9.0, -1.0)])
    nested = choose_nested(cross_fit(lambda _: options, folds), folds, labels, np.ones(len(labels)))
    assert nested.chosen[0] == 0
    assert (nested.outer[folds.of == 0] == -9).all()
    assert nested.final == int(np.argmin([log_loss(options[:, column], labels, labels) for column in (0, 1)]))
