"""Threshold: from a risk to the score that a segment must reach, with a bound that holds for new questions.

    thresholds from strict to loose -> the share of bad segments among those kept, and its one-sided 95 % bound -> for a
    risk the last threshold, from the strictest that could be enough, before the first whose bound is above the risk

Tried in an order that labels have no say in, and left at the first failure: so one risk's threshold is wrong in at most
5 % of collections, however many are tried. It knows scores and what is bad; it knows no predictor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from semspec.calibration.equivalence import Bools
from semspec.calibration.findings import Refusal, RiskLine
from semspec.calibration.resampling import Resamples
from semspec.runtime.records import Array, Ints

__all__ = ["Judged", "binomial_upper", "bound_risks", "needed"]

CONFIDENCE = 0.95
STEPS = 40  # thresholds, each keeping as many rows more
LEAST_COVERAGE = 0.1  # of a threshold that a refusal speaks of
MOST_TIMES = 1000  # as many contexts as there are; beyond that no number is named


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judged:
    """Rows (n,) to find thresholds on.

    scores: held out, in 0..1, in an order that a row's own label had no say in. bad: what is counted. tokens, labels:
    of each. changed: those that are not the target's arg-max throughout.
    """

    scores: Array
    bad: Bools
    tokens: Ints
    labels: Array
    changed: Bools


def bound_risks(
    judged: Judged,
    greedy: Judged,
    resamples: Resamples,
    risks: Sequence[float],
    *,
    n_contexts: int,
) -> tuple[tuple[RiskLine, ...], tuple[Refusal, ...]]:
    """A line for each risk that the rows can vouch for, and a refusal for each other.

    greedy: the draft's greedy segments, which lines tell of and no bound is about. resamples: of the questions of
    judged's rows. n_contexts: that the rows are of, to say how many would be enough.
    """
    tried = _try(judged, resamples)
    lines, refusals = [], []
    for risk in sorted(risks):
        start = _first_enough(tried, risk)
        passed = None
        for one in tried[start:]:
            if one.upper > risk:
                break
            passed = one
        if passed is None:
            refusals.append(_refuse(tried, risk, n_contexts))
        else:
            lines.append(_line(risk, passed, judged, greedy))
    return tuple(lines), tuple(refusals)


def binomial_upper(bad: float, n: float) -> float:
    """The exact one-sided 95 % bound of a share (Clopper and Pearson) of which `bad` of `n` were seen, whole or not.

    >>> round(binomial_upper(0, 59), 3), round(binomial_upper(2, 100), 3)
    (0.05, 0.062)
    """
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if _excluded(middle, bad, n) else (middle, high)
    return high


def needed(observed: float, risk: float, n: float) -> float:
    """How many times as many independent segments as `n` would bring the bound of this share to `risk`; at least 1,
    infinite where no number would."""

    def enough(times: float) -> bool:
        return _excluded(risk, observed * n * times, n * times)

    if observed >= risk or not enough(MOST_TIMES):
        return math.inf
    low, high = 1.0, float(MOST_TIMES)
    for _ in range(30):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _excluded(share: float, bad: float, n: float) -> bool:
    """Whether so few bad ones are too rare for this share or a larger one."""
    return bad < n and _beta_share(share, bad + 1, n - bad) >= CONFIDENCE


class _Tried(NamedTuple):
    """A threshold and what it keeps. n: as how many independent segments the kept ones count."""

    threshold: float
    kept: int
    questions: int
    coverage: float
    observed: float
    n: float
    upper: float


def _try(judged: Judged, resamples: Resamples) -> list[_Tried]:
    """From strict to loose."""
    scores = np.sort(judged.scores)[::-1]
    places = np.unique(np.ceil(np.arange(1, STEPS + 1) / STEPS * len(scores)).astype(np.int64)) - 1
    found = []
    for threshold in sorted(set(scores[places].tolist()), reverse=True):
        kept = judged.scores >= threshold
        bad = kept & judged.bad
        per_question = resamples.sums(kept.astype(np.float64))
        observed = float(bad.sum() / kept.sum())
        draws = resamples.ratio(bad.astype(np.float64), kept.astype(np.float64))
        drawn = draws.defined
        n = _independent(observed, float(drawn.var()), per_question, resamples.sums(bad.astype(np.float64)))
        found.append(
            _Tried(
                threshold=threshold,
                kept=int(kept.sum()),
                questions=int((per_question > 0).sum()),
                coverage=float(judged.tokens[kept].sum() / judged.tokens.sum()),
                observed=observed,
                n=n,
                upper=max(float(np.quantile(drawn, CONFIDENCE)), binomial_upper(observed * n, n)),
            )
        )
    return found


def _independent(observed: float, variance: float, kept: Array, bad: Array) -> float:
    """As how many independent segments the kept ones count: at least as questions, by what each keeps; more where the
    variance over resamples says so. kept, bad: of each question.

    The variance rests on the questions with bad segments alone, so it is trusted as far as a t law with so many less
    one allows (Korn and Graubard's interval, with its degrees of freedom from these).
    """
    n_questions = float(kept.sum() ** 2 / (kept**2).sum())
    n_bad = int((bad > 0).sum())
    if n_bad < 2 or variance <= 0 or observed >= 1:
        return n_questions
    n = observed * (1 - observed) / variance * (_t_quantile(math.inf) / _t_quantile(n_bad - 1)) ** 2
    return float(np.clip(n, n_questions, kept.sum()))


def _first_enough(tried: Sequence[_Tried], risk: float) -> int:
    """The strictest threshold that keeps segments of so many questions that bad ones among them, half as many as the
    risk allows, would still do; else the strictest for no bad one; else none.

    Stricter ones would rarely pass, and would end the search where they fail.
    """
    for bad in (risk / 2, 0.0):
        for place, one in enumerate(tried):
            if _excluded(risk, bad * one.questions, one.questions):
                return place
    return len(tried)


def _line(risk: float, passed: _Tried, judged: Judged, greedy: Judged) -> RiskLine:
    kept, kept_greedy = judged.scores >= passed.threshold, greedy.scores >= passed.threshold
    changed = kept & judged.changed
    return RiskLine(
        risk=risk,
        threshold=passed.threshold,
        coverage=passed.coverage,
        observed=passed.observed,
        upper=passed.upper,
        kept=passed.kept,
        kept_questions=passed.questions,
        mean_label=float(judged.labels[kept].mean()),
        changed=_share(judged.bad, changed),
        kept_changed=int(changed.sum()),
        greedy_coverage=float(greedy.tokens[kept_greedy].sum() / max(1, greedy.tokens.sum())),
        greedy=_share(greedy.bad, kept_greedy),
    )


def _share(bad: Bools, among: Bools) -> float:
    return float(bad[among].mean()) if among.any() else 0.0


def _refuse(tried: Sequence[_Tried], risk: float, n_contexts: int) -> Refusal:
    able = [one for one in tried if one.coverage >= LEAST_COVERAGE] or list(tried)
    times, best = min(
        ((needed(one.observed, risk, one.n), one) for one in able),
        key=lambda pair: (pair[0], pair[1].observed),
    )
    contexts = 0 if math.isinf(times) else _round_up(n_contexts * times)
    return Refusal(
        risk=risk,
        observed=best.observed,
        coverage=best.coverage,
        contexts=contexts,
        says=f"a risk of {risk:g} cannot be vouched for by {n_contexts} contexts: of the segments that score best, "
        f"{best.coverage:.0%} of the tokens, {best.observed:.1%} are bad, at most {best.upper:.1%}; "
        + (
            f"about {contexts} would do" if contexts else "more of the same would not help, use an exact mode"
        ),
    )


def _round_up(value: float) -> int:
    """To two digits: 1,234 is 1,300."""
    step = float(10 ** max(0, math.floor(math.log10(value)) - 1))
    return int(step) * math.ceil(value / step)


def _t_quantile(freedom: float) -> float:
    """The 95 % point of Student's law."""
    if math.isinf(freedom):
        return 1.6448536269514722
    low, high = 0.0, 700.0
    for _ in range(60):
        middle = (low + high) / 2
        above = _beta_share(freedom / (freedom + middle**2), freedom / 2, 0.5) / 2
        low, high = (middle, high) if above > 1 - CONFIDENCE else (low, middle)
    return high


def _beta_share(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function, by its continued fraction (Lentz)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta_share(1 - x, b, a)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    total, upper, lower, tiny = 1.0, 1.0, 0.0, 1e-300
    for step in range(1000):
        half = step // 2
        if step == 0:
            part = 1.0
        elif step % 2:
            part = -(a + half) * (a + b + half) * x / ((a + 2 * half) * (a + 2 * half + 1))
        else:
            part = half * (b - half) * x / ((a + 2 * half - 1) * (a + 2 * half))
        lower = 1 / _not_nought(1 + part * lower, tiny)
        upper = _not_nought(1 + part / upper, tiny)
        change = upper * lower
        total *= change
        if step and abs(change - 1) < 1e-12:
            break
    return math.exp(log_front) * (total - 1) / a


def _not_nought(value: float, tiny: float) -> float:
    return value if abs(value) > tiny else tiny
