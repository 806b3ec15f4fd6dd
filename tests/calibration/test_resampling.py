"""Resampling as linear algebra gives what resampling row by row gives."""

from __future__ import annotations

import numpy as np
import pytest

from semspec.calibration.metrics import auroc, concordance
from semspec.calibration.resampling import Resamples
from semspec.runtime.errors import CalibrationError

RNG = np.random.default_rng(0)
QUESTIONS = np.sort(RNG.integers(0, 9, 90)) * 7
CONTEXTS = np.arange(90) // 3
SCORES = RNG.integers(0, 6, 90) / 5
LABELS = RNG.integers(0, 5, 90) / 4
SEED, R = 4, 40


def resampled() -> list[np.ndarray]:
    """Row numbers of each resample, questions drawn as Resamples draws them."""
    known = np.unique(QUESTIONS)
    drawn = np.random.default_rng(SEED).integers(0, len(known), (R, len(known)))
    return [np.concatenate([np.flatnonzero(known[one] == QUESTIONS) for one in draw]) for draw in drawn]


def test_auroc_is_that_of_the_drawn_rows() -> None:
    """Ties, and rows left out, included."""
    resamples = Resamples(QUESTIONS, R, SEED)
    positive, among = LABELS >= 0.5, RNG.random(90) < 0.7
    draws = resamples.auroc(SCORES, positive)
    assert draws.value == pytest.approx(auroc(SCORES, positive))
    assert draws.found == pytest.approx([auroc(SCORES[rows], positive[rows]) for rows in resampled()])
    some = resamples.auroc(SCORES, positive, among)
    chosen = [rows[among[rows]] for rows in resampled()]
    assert some.found == pytest.approx([auroc(SCORES[rows], positive[rows]) for rows in chosen])


def test_shares_and_concordance_are_those_of_the_drawn_rows() -> None:
    """A context that is drawn twice counts twice."""
    resamples = Resamples(QUESTIONS, R, SEED)
    contexts = QUESTIONS * 100 + CONTEXTS
    draws = resamples.concordance(SCORES, LABELS, contexts)
    assert draws.value == pytest.approx(concordance(SCORES, LABELS, contexts.tolist()))
    share = resamples.ratio(LABELS * SCORES, SCORES)
    wanted = [float((LABELS * SCORES)[rows].sum() / SCORES[rows].sum()) for rows in resampled()]
    assert share.found == pytest.approx(wanted)


def test_what_is_undefined_too_often_has_no_interval() -> None:
    """All positives in one question: a third of the resamples have none, and that is said; in none at all, refused."""
    resamples = Resamples(QUESTIONS, R, SEED)
    rare = resamples.auroc(SCORES, QUESTIONS[0] == QUESTIONS)
    assert resamples.interval(rare).n_left_out == int(np.isnan(rare.found).sum()) > 0
    never = resamples.auroc(SCORES, np.zeros(90, np.bool_))
    assert not resamples.tells(never)
    with pytest.raises(CalibrationError, match="undefined in 40 of 40 resamples of"):
        resamples.interval(never)
    with pytest.raises(CalibrationError, match="at least 2 questions"):
        Resamples(np.zeros(5, np.int64), R, SEED)
