"""Learn: from a dataset to the predictor that is shipped, its thresholds, and all that was found out on the way.

    dataset -> held-out scores of all that is tried (contest.py) -> measures -> the winner -> thresholds, weights

It tells the story and chooses the winner; folds, fitting, scaling, thresholds and measuring have files of their own. It
writes no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from semspec.calibration.contest import BASE, RICHER, SIGNALS, Contest, LearnSettings, run_contest
from semspec.calibration.dataset import Dataset
from semspec.calibration.equivalence import Bools
from semspec.calibration.evaluate import Measure, curve_of, histograms_of, lengths_of, reliability_of
from semspec.calibration.findings import (
    Candidate,
    Counts,
    Curve,
    Findings,
    LayerGain,
    Rarer,
    RatioFinding,
    RiskLine,
)
from semspec.calibration.folds import deal_folds
from semspec.calibration.metrics import Interval
from semspec.calibration.scaling import scaled
from semspec.calibration.threshold import Judged, bound_risks
from semspec.export.probe_graph import ProbeWeights
from semspec.runtime.errors import CalibrationError
from semspec.runtime.probes import RatioFacts, RiskPoint
from semspec.runtime.records import Array, Ints, Progress

__all__ = ["LearnSettings", "Learned", "learn"]

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
LEAST_QUESTIONS = 2  # with a label of each kind: resamples of one alone tell nothing of the next


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Learned:
    """What is written into a bundle.

    predictor: states of the target's layers Findings.probe_layers, and Findings.features, -> score. target, draft: the
    own-label probes of the published rule, on the last pooled layer of each. risks: ascending, there may be none.
    """

    predictor: ProbeWeights
    target: ProbeWeights
    draft: ProbeWeights
    risks: tuple[RiskPoint, ...]
    ratio: RatioFacts
    findings: Findings


def learn(
    dataset: Dataset, settings: LearnSettings | None = None, on_progress: Progress | None = None
) -> Learned:
    """Learn from all questions; every number told is of questions, and of kinds of questions, left out. Same dataset
    and seed, same bits on one machine with as many threads.

    on_progress: stages `fitting` and `measuring`. Raises CalibrationError: too few questions, labels of one kind only,
    features that are not finite.
    """
    settings = settings or LearnSettings()
    folds_of = _check(dataset, settings)
    contest = run_contest(dataset, folds_of, settings, on_progress)
    measure = Measure(dataset, settings.n_resamples, settings.seed)
    base = contest.find(BASE)
    candidates: dict[str, Candidate] = {}
    for done, scored in enumerate(contest.scored, 1):
        candidates[scored.name] = measure.candidate(scored, base)
        if on_progress is not None:
            on_progress("measuring", done, len(contest.scored))
    winner, why = _choose(contest, candidates, measure)
    if (
        told := contest.find(winner)
    ).shares is None:  # a signal, which becomes a probability by being shipped
        shares = contest.entry(winner).shares
        candidates[winner] = measure.candidate(replace(told, shares=shares), base)
    return _conclude(dataset, settings, contest, measure, candidates, winner, why)


def _check(dataset: Dataset, settings: LearnSettings) -> Ints:
    """The fold of each question. Raises CalibrationError."""
    rows = dataset.draft
    if not np.isfinite(rows.features).all():
        raise CalibrationError(
            "a segment has a feature that is not finite; export with a wider precision and collect again"
        )
    labels, questions = rows.label[dataset.measured], rows.question[dataset.measured]
    n, positive = len(labels), int((labels >= 0.5).sum())
    if positive in (0, n):
        side = "at least 0.5" if positive else "below 0.5"
        found = f"all {n} labels are {side}" if n else "no segment has a label"
        raise CalibrationError(
            f"there is nothing to tell apart: {found}; collect more or other questions, or take another equivalence or "
            "label"
        )
    rarer = _rarer(labels >= 0.5, questions)
    if rarer.questions < LEAST_QUESTIONS:
        raise CalibrationError(
            f"there is hardly anything to tell apart: of {n} segments {rarer.rows}, all in one question, have a label "
            f"{rarer.label}; collect more or other questions, or take another equivalence or label"
        )
    known = np.unique(rows.question[np.isfinite(rows.label)])
    folds_of = np.arange(len(dataset.questions), dtype=np.int64) % settings.n_folds
    folds_of[known] = deal_folds(known, settings.n_folds, settings.seed, dataset.kinds[known]).of
    return folds_of


def _choose(contest: Contest, candidates: Mapping[str, Candidate], measure: Measure) -> tuple[str, str]:
    """The winner's name, and why.

    The highest AUROC among what is free: the target's best single signal, its signals, signals and text. What costs
    more only with a gain, over the base and over the choice so far, whose interval is above 0; a probe comes last.
    """
    single = best_signal(candidates, "target.")
    chosen = max((BASE, SIGNALS, single), key=lambda name: candidates[name].auroc.value)
    why = f"{chosen} ranks best of what is free, AUROC {candidates[chosen].auroc.value:.3f}"
    for name in RICHER:
        gains = {}
        for other in dict.fromkeys((BASE, chosen)):
            draws = measure.auroc(contest.find(name).scores).less(measure.auroc(contest.find(other).scores))
            gains[other] = measure.resamples.interval(draws)
        other = min(gains, key=lambda other: gains[other].low)
        gain = gains[other]
        why += f"; {name} less {other} {gain.value:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}]"
        if gain.low > 0:
            chosen, why = name, f"{why}: better"
        else:
            why = f"{why}: not shown to be better"
    return chosen, why


def best_signal(candidates: Mapping[str, Candidate], prefix: str = "") -> str:
    """The name of the single signal of the highest AUROC."""
    names = [name for name, one in candidates.items() if one.kind == "signal" and name.startswith(prefix)]
    return max(names, key=lambda name: candidates[name].auroc.value)


def _conclude(
    dataset: Dataset,
    settings: LearnSettings,
    contest: Contest,
    measure: Measure,
    candidates: Mapping[str, Candidate],
    winner: str,
    why: str,
) -> Learned:
    entry = contest.entry(winner)
    shares = entry.shares
    scores = scaled(entry.scaling, entry.scored.scores)  # held out, and named as by what is shipped
    chosen, greedy = _judge(dataset, scores, measure.chosen), _judge(dataset, scores, measure.greedy)
    lines, refused = bound_risks(
        chosen, greedy, measure.resamples, settings.risks, n_contexts=len(np.unique(measure.contexts))
    )
    predictor, effects = contest.ship(entry)
    ratio, ratio_finding = _ratio(dataset, contest)
    layers = dataset.layers["target"]
    findings = Findings(
        label=dataset.label,
        equivalence=dataset.equivalence,
        seed=settings.seed,
        counts=_count(dataset, measure),
        mean_label=float(measure.labels.mean()),
        zero_labels=float((measure.labels == 0).mean()),
        positive=float(measure.positive.mean()),
        candidates=tuple(candidates.values()),
        layers=tuple(_layer_gains(contest, measure, layers)),
        base=BASE,
        best_signal=best_signal(candidates),
        winner=winner,
        has_probe=entry.option is not None,
        probe=entry.option.probe if entry.option else "",
        probe_layers=tuple(layers[place] for place in entry.option.layers) if entry.option else (),
        features=entry.fit.names,
        effects=tuple(effects.tolist()),
        scaling=entry.scaling_name,
        why=why,
        shuffled=_shuffled(contest, measure),
        risks=lines,
        refused=refused,
        reliability=reliability_of(shares[measure.chosen], measure.labels),
        histograms=histograms_of(shares[measure.chosen], measure.labels),
        lengths=lengths_of(shares[measure.chosen], measure.labels, chosen.tokens),
        curves=tuple(_curves(dataset, contest, measure, scores, winner, best_signal(candidates))),
        ratio=ratio_finding,
    )
    return Learned(
        predictor=predictor,
        target=contest.ratio.target.weights,
        draft=contest.ratio.draft.weights,
        risks=tuple(_point(line) for line in lines),
        ratio=ratio,
        findings=findings,
    )


def _point(line: RiskLine) -> RiskPoint:
    return RiskPoint(
        risk=line.risk,
        threshold=line.threshold,
        coverage=line.coverage,
        observed=line.observed,
        upper=line.upper,
    )


def _shuffled(contest: Contest, measure: Measure) -> Interval:
    scores, labels = contest.shuffled[measure.chosen], contest.shuffled_labels[measure.chosen]
    return measure.resamples.interval(measure.resamples.auroc(scores, labels >= 0.5))


def _judge(dataset: Dataset, scores: Array, chosen: Ints) -> Judged:
    rows = dataset.draft
    labels = rows.label[chosen]
    return Judged(
        scores=scores[chosen],
        bad=dataset.bad[chosen],
        tokens=rows.length[chosen],
        labels=labels,
        changed=rows.feature("target.agreement")[chosen] < 1,
    )


def _count(dataset: Dataset, measure: Measure) -> Counts:
    rows, chosen = dataset.draft, measure.chosen
    asked = ~rows.drawn if dataset.label == "outcome" else np.ones(len(rows), np.bool_)
    return Counts(
        questions=len(np.unique(measure.questions)),
        contexts=len(np.unique(measure.contexts)),
        draft_rows=len(chosen),
        greedy_rows=len(measure.greedy),
        unlabelled=int((asked & ~np.isfinite(rows.label)).sum()),
        target_rows=int(dataset.target.drawn.sum()),
        with_number=float((rows.feature("text.no_number")[chosen] == 0).mean()),
        changed=float((rows.feature("target.agreement")[chosen] < 1).mean()),
        rarer=_rarer(measure.positive, measure.questions),
    )


def _rarer(positive: Bools, questions: Ints) -> Rarer:
    """positive: (n,) labels of at least 0.5. questions: (n,) of each."""
    kinds = [("below 0.5", ~positive), ("of at least 0.5", positive)]
    found = [
        Rarer(label=label, rows=int(kind.sum()), questions=len(np.unique(questions[kind])))
        for label, kind in kinds
    ]
    return min(found, key=lambda one: (one.questions, one.rows))


def _layer_gains(contest: Contest, measure: Measure, layers: tuple[int, ...]) -> list[LayerGain]:
    signals, base = (measure.auroc(contest.find(name).scores) for name in (SIGNALS, BASE))
    return [
        LayerGain(
            layers=tuple(layers[place] for place in one.layers),
            alone=measure.resamples.interval(measure.auroc(one.alone)),
            on_signals=measure.resamples.interval(measure.auroc(one.on_signals).less(signals)),
            on_base=measure.resamples.interval(measure.auroc(one.on_base).less(base)),
        )
        for one in contest.layers
    ]


def _ratio(dataset: Dataset, contest: Contest) -> tuple[RatioFacts, RatioFinding]:
    """Of drawn segments, as the overlap is, whichever have a label."""
    ratio, chosen = contest.ratio, dataset.draft.drawn
    values = ratio.values[chosen]
    facts = RatioFacts(mean_acceptance=float(np.minimum(1.0, values).mean()), overlap=dataset.overlap)
    return facts, RatioFinding(
        probe=ratio.probe,
        mean_acceptance=facts.mean_acceptance,
        overlap=facts.overlap,
        quantiles=tuple(np.quantile(values, QUANTILES).tolist()),
        target_label=ratio.target.label,
        target_score=float(ratio.target.scores[chosen].mean()),
        draft_label=ratio.draft.label,
        draft_score=float(ratio.draft.scores[chosen].mean()),
    )


def _curves(
    dataset: Dataset, contest: Contest, measure: Measure, scores: Array, winner: str, signal: str
) -> list[Curve]:
    tokens, bad, labels = dataset.draft.length[measure.chosen], dataset.bad[measure.chosen], measure.labels
    by_chance = np.random.default_rng(contest.seed).random(len(labels))
    curves = {winner: scores[measure.chosen]}
    for name in (signal, "ratio"):
        curves.setdefault(name, contest.find(name).scores[measure.chosen])
    curves["random"] = by_chance
    return [curve_of(name, theirs, bad, labels, tokens) for name, theirs in curves.items()]
