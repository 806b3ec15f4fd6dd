"""What is told of a candidate is what the plain measures say of the rows that results are about."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import toy_dataset
from toy_world import ToyWorld, scattered_masses

from semspec.calibration.dataset import Dataset
from semspec.calibration.evaluate import Measure, Scored, curve_of, lengths_of, reliability_of
from semspec.calibration.metrics import auroc, brier, concordance, ece
from semspec.runtime.errors import CalibrationError

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    world = ToyWorld(*scattered_masses(24, 3))
    questions = [tuple(range(start, start + 3)) for start in range(0, 24, 3)]
    return toy_dataset.make_dataset(world, toy_dataset.draw_contexts(world, questions, RNG))


def scored(dataset: Dataset, name: str) -> Scored:
    shares = RNG.random(len(dataset.draft))
    return Scored(name=name, says="by chance", kind="fitted", scores=shares, shares=shares)


def test_a_candidate_is_measured_on_drawn_rows_and_on_parts_of_them(dataset: Dataset) -> None:
    """Greedy rows are a part of their own; gains are differences of the same rows."""
    one, base = scored(dataset, "one"), scored(dataset, "base")
    found = Measure(dataset, 50, seed=0).candidate(one, base)
    rows = dataset.draft
    drawn, labels = rows.drawn, rows.label
    assert one.shares is not None
    shares, positive = one.shares[drawn], labels[drawn] >= 0.5
    assert found.auroc.value == pytest.approx(auroc(shares, positive))
    assert found.gain.value == pytest.approx(auroc(shares, positive) - auroc(base.scores[drawn], positive))
    assert found.ece[0].value == pytest.approx(ece(shares, labels[drawn]))
    assert found.brier[0].value == pytest.approx(brier(shares, labels[drawn]))
    contexts = rows.context[drawn].tolist()
    assert found.within[0].value == pytest.approx(concordance(shares, labels[drawn], contexts))
    parts = {part.name: part for part in found.subsets}
    assert (
        parts["after the prompt"].rows + parts["after target"].rows + parts["after mixed"].rows == drawn.sum()
    )
    greedy = ~drawn
    assert parts["greedy"].rows == greedy.sum()
    assert parts["greedy"].auroc.value == pytest.approx(auroc(one.scores[greedy], labels[greedy] >= 0.5))
    changed = drawn & (rows.feature("target.agreement") < 1)
    assert parts["changed"].rows == changed.sum()
    assert parts["changed"].auroc.value == pytest.approx(auroc(one.scores[changed], labels[changed] >= 0.5))


def test_a_part_with_labels_of_one_kind_is_left_out(dataset: Dataset) -> None:
    """Nothing can be told of it; nought or a half would be taken for a result."""
    rows = dataset.draft
    after_target = np.array(rows.after) == "target"
    one_kind = replace(dataset, draft=replace(rows, label=np.where(after_target, 1.0, rows.label)))
    found = Measure(one_kind, 50, seed=0).candidate(scored(dataset, "one"), scored(dataset, "base"))
    assert "after target" not in {part.name for part in found.subsets}


def test_one_question_has_no_interval(dataset: Dataset) -> None:
    """Resampling it gives it again."""
    rows = dataset.draft
    alone = replace(rows, label=np.where(rows.question == 0, rows.label, np.nan))
    with pytest.raises(CalibrationError, match="at least 2 questions"):
        Measure(replace(dataset, draft=alone), 50, seed=0)


def test_bins_and_curves_cover_every_row_once() -> None:
    """Ten rows, by hand."""
    shares, tokens = np.linspace(0, 0.9, 10), np.arange(10, 20)
    labels = (shares > 0.4).astype(np.float64)
    assert [(one.rows, one.label) for one in reliability_of(shares, labels)][-1] == (1, 1.0)
    assert sum(one.rows for one in reliability_of(shares, labels)) == 10
    bins = lengths_of(shares, labels, tokens)
    assert sum(one.rows for one in bins) == 10
    assert all(one.low <= one.high for one in bins)
    bad = np.arange(10) == 9  # by what a risk counts, not by labels
    points = curve_of("all", shares, bad, labels, tokens, steps=2).points
    assert points[0].zero == 0.2 and points[0].coverage == sum(range(15, 20)) / sum(range(10, 20))
    assert (points[1].coverage, points[1].label, points[1].zero) == (1, 0.5, 0.1)
