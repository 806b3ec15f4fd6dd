"""Thresholds: bounds against known laws, an order of trying that labels have no say in, and honest refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest

from semspec.calibration.findings import RiskLine
from semspec.calibration.resampling import Resamples
from semspec.calibration.threshold import Judged, binomial_upper, bound_risks, needed
from semspec.runtime.records import Array

N_ROWS = 24  # of a question
RISKS = (0.05, 0.1, 0.15)
LEVELS = np.linspace(0.05, 0.95, 10)  # scores there are


def chance_bad(level: Array) -> Array:
    """How likely a segment of this score is bad; a question's mood moves it."""
    return 0.5 * (1 - level) ** 2


def judged(rng: np.random.Generator, n_questions: int) -> tuple[Judged, Resamples]:
    """Questions differ: in some, most segments of a level are bad, in others none."""
    questions = np.repeat(np.arange(n_questions), N_ROWS)
    levels = rng.choice(LEVELS, (n_questions, N_ROWS // 4)).repeat(4, axis=1).reshape(-1)
    chance = chance_bad(levels)
    mood = rng.beta(0.5, 0.5, (n_questions, N_ROWS // 4)).repeat(4, axis=1).reshape(-1)  # mean a half
    bad = rng.random(len(levels)) < 2 * chance * mood
    rows = Judged(
        scores=levels,
        bad=bad,
        tokens=np.full(len(levels), 10),
        labels=1 - bad.astype(np.float64),
        changed=np.ones(len(levels), np.bool_),
    )
    return rows, Resamples(questions, 400, seed=0)


def true_risk(threshold: float) -> float:
    """Levels are equally likely."""
    return float(chance_bad(LEVELS[threshold <= LEVELS]).mean())


def nobody() -> Judged:
    empty = np.empty(0)
    return Judged(
        scores=empty,
        bad=empty.astype(bool),
        tokens=empty.astype(int),
        labels=empty,
        changed=empty.astype(bool),
    )


def test_the_binomial_bound_is_the_exact_one() -> None:
    """Below it, so few bad ones are seen in 5 % of samples, by the sum of the law itself."""
    for bad, n in ((0, 59), (1, 93), (3, 20), (40, 60)):
        share = binomial_upper(bad, n)
        tail = sum(math.comb(n, k) * share**k * (1 - share) ** (n - k) for k in range(bad + 1))
        assert tail == pytest.approx(0.05, abs=1e-6)
    assert binomial_upper(5, 5) == pytest.approx(1)


def test_more_of_the_same_is_enough_where_the_share_is_below_the_risk() -> None:
    """As many times as asked for, the bound is the risk; of too large a share no number is enough."""
    times = needed(0.03, 0.05, 100)
    assert binomial_upper(3 * times, 100 * times) == pytest.approx(0.05, abs=1e-4)
    assert needed(0.05, 0.05, 100) == math.inf
    assert needed(0.0, 0.2, 100) == pytest.approx(1.0, abs=1e-3)


def test_the_bound_holds() -> None:
    """In 95 of 100 collections at least, on questions whose segments resemble each other. 150 are tried: if it is so,
    more than 15 failures at one risk have a chance below 1 %. And it is of use: most find a threshold."""
    failed, kept = dict.fromkeys(RISKS, 0), dict[float, list[float]]({risk: [] for risk in RISKS})
    for seed in range(150):
        rows, resamples = judged(np.random.default_rng(seed), 120)
        for line in bound_risks(rows, nobody(), resamples, RISKS, n_contexts=120)[0]:
            kept[line.risk].append(line.coverage)
            failed[line.risk] += true_risk(line.threshold) > line.risk
    assert max(failed.values()) <= 15
    assert all(len(found) >= 75 and np.mean(found) > 0.1 for found in kept.values())


def test_a_line_tells_what_is_kept() -> None:
    """All its shares, counted again."""
    rows, resamples = judged(np.random.default_rng(1), 120)
    lines, refused = bound_risks(rows, rows, resamples, [0.2, 0.1], n_contexts=120)
    assert [line.risk for line in lines] == [0.1, 0.2] and not refused
    for line in lines:
        kept = rows.scores >= line.threshold
        assert line.kept == kept.sum() and line.coverage == line.greedy_coverage == kept.mean()
        assert line.observed == line.changed == line.greedy == rows.bad[kept].mean()
        assert line.kept_changed == (kept & rows.changed).sum()
        assert line.observed < line.upper <= line.risk
    assert lines[0].threshold >= lines[1].threshold


def test_what_the_rows_cannot_vouch_for_is_refused_with_a_number() -> None:
    """Too few: how many would do. Hopeless: that more do not help."""
    rows, resamples = judged(np.random.default_rng(2), 30)
    lines, refused = bound_risks(rows, nobody(), resamples, [0.03], n_contexts=90)
    assert not lines and refused[0].contexts > 90
    assert "90 contexts: of the segments that score best, " in refused[0].says
    assert refused[0].says.endswith(f"about {refused[0].contexts} would do")
    hopeless = Judged(
        scores=rows.scores, bad=~rows.bad, tokens=rows.tokens, labels=rows.labels, changed=rows.changed
    )
    _, refused = bound_risks(hopeless, nobody(), resamples, [0.1], n_contexts=90)
    assert refused[0].contexts == 0 and refused[0].says.endswith("use an exact mode")


def test_equal_scores_are_kept_or_left_together() -> None:
    """A threshold cannot part them."""
    rows, resamples = judged(np.random.default_rng(3), 120)
    flat = Judged(
        scores=np.full(len(rows.scores), 0.5),
        bad=rows.bad,
        tokens=rows.tokens,
        labels=rows.labels,
        changed=rows.changed,
    )
    lines, _ = bound_risks(flat, nobody(), resamples, [0.3], n_contexts=120)
    assert [(line.threshold, line.coverage) for line in lines] == [(0.5, 1.0)]
    assert isinstance(lines[0], RiskLine)
