"""Evaluate: how good each candidate's held-out scores are, alone and against the base, on all rows and on some.

    Scored candidates -> Candidate records;   the winner's scores -> reliability, histograms, lengths, curves

It knows scores, labels and rows; it knows no predictor and chooses none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from semspec.calibration.dataset import Dataset, Rows
from semspec.calibration.equivalence import Bools
from semspec.calibration.findings import Bin, Candidate, Curve, CurvePoint, Histogram, LengthBin, Subset
from semspec.calibration.metrics import Interval, auroc, bootstrap, ece
from semspec.calibration.resampling import Draws, Resamples
from semspec.runtime.records import Array, Ints

__all__ = ["Measure", "Scored", "curve_of", "histograms_of", "lengths_of", "reliability_of"]

HALF = 0.5
N_BINS = 15
N_SCORE_BINS = 20
MOST_ECE_RESAMPLES = 200  # it has to be sorted again for each
LENGTH_SHARES = (0.2, 0.4, 0.6, 0.8)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scored:
    """A candidate, as findings.Candidate has it. scores: (n,) of the draft's rows, held out where something was
    fitted. shares: the same as probabilities, scaled out of fold; None where they are none."""

    name: str
    says: str
    kind: str
    scores: Array
    shares: Array | None = None
    probe: str = ""


class Measure:
    """All candidates of one dataset, on the same rows and resamples.

    n_resamples, seed: of questions. Raises CalibrationError for labels that are all of one kind.
    """

    def __init__(self, dataset: Dataset, n_resamples: int, seed: int) -> None:
        rows = dataset.draft
        self.chosen = np.flatnonzero(dataset.measured)
        self.labels, self.contexts = rows.label[self.chosen], rows.context[self.chosen]
        self.positive = self.labels >= HALF
        self.questions = rows.question[self.chosen]
        self.resamples = Resamples(self.questions, n_resamples, seed)
        self._subsets = _subsets(rows, self.chosen)
        self._n_ece, self._seed = min(n_resamples, MOST_ECE_RESAMPLES), seed
        labelled = np.isfinite(rows.label) & ~rows.drawn
        self.greedy = np.flatnonzero(labelled) if dataset.label != "outcome" else np.empty(0, np.int64)
        known = len(np.unique(rows.question[self.greedy]))
        self._greedy_resamples = (
            Resamples(rows.question[self.greedy], n_resamples, seed) if known > 1 else None
        )
        self._greedy_positive = rows.label[self.greedy] >= HALF

    def auroc(self, scores: Array) -> Draws:
        """Of scores (n,) of the draft's rows."""
        return self.resamples.auroc(scores[self.chosen], self.positive)

    def candidate(self, scored: Scored, base: Scored) -> Candidate:
        """Alone, and against the base."""
        draws = self.auroc(scored.scores)
        within = self.resamples.concordance(scored.scores[self.chosen], self.labels, self.contexts)
        eces: tuple[Interval, ...] = ()
        briers: tuple[Interval, ...] = ()
        if scored.shares is not None:
            shares = scored.shares[self.chosen]
            squares = self.resamples.ratio((shares - self.labels) ** 2, np.ones(len(shares)))
            briers = (self.resamples.interval(squares),)
            eces = (
                bootstrap(
                    lambda rows: ece(shares[rows], self.labels[rows], N_BINS),
                    self.questions.tolist(),
                    n_resamples=self._n_ece,
                    seed=self._seed,
                ),
            )
        return Candidate(
            name=scored.name,
            says=scored.says,
            kind=scored.kind,
            probe=scored.probe,
            auroc=self.resamples.interval(draws),
            within=(self.resamples.interval(within),) if self.resamples.tells(within) else (),
            ece=eces,
            brier=briers,
            gain=self.resamples.interval(draws.less(self.auroc(base.scores))),
            subsets=tuple(self._parts(scored, base)),
        )

    def _parts(self, scored: Scored, base: Scored) -> list[Subset]:
        found = []
        for name, among in self._subsets.items():
            ours = self.resamples.auroc(scored.scores[self.chosen], self.positive, among)
            theirs = self.resamples.auroc(base.scores[self.chosen], self.positive, among)
            if self.resamples.tells(ours):
                found.append(_subset(name, self.positive[among], self.resamples, ours, theirs))
        if self._greedy_resamples is not None:
            ours, theirs = (
                self._greedy_resamples.auroc(one.scores[self.greedy], self._greedy_positive)
                for one in (scored, base)
            )
            if self._greedy_resamples.tells(ours):
                found.append(_subset("greedy", self._greedy_positive, self._greedy_resamples, ours, theirs))
        return found


def reliability_of(shares: Array, labels: Array) -> tuple[Bin, ...]:
    """N_BINS bins of neighbouring scores, all (n,)."""
    parts = np.array_split(np.argsort(shares, kind="stable"), min(N_BINS, len(shares)))
    return tuple(
        Bin(score=float(shares[rows].mean()), label=float(labels[rows].mean()), rows=len(rows))
        for rows in parts
    )


def histograms_of(shares: Array, labels: Array) -> tuple[Histogram, ...]:
    """Scores by label, all (n,)."""
    kinds = (
        ("0", labels == 0),
        ("0 to 0.5", (labels > 0) & (labels < HALF)),
        ("0.5 to 1", (labels >= HALF) & (labels < 1)),
        ("1", labels == 1),
    )
    edges = np.linspace(0, 1, N_SCORE_BINS + 1)
    return tuple(
        Histogram(label=name, counts=tuple(np.histogram(shares[rows], edges)[0].tolist()))
        for name, rows in kinds
    )


def lengths_of(shares: Array, labels: Array, tokens: Ints) -> tuple[LengthBin, ...]:
    """Five bins of length, about as many rows in each; fewer where lengths are all alike."""
    edges = [int(tokens.min()), *np.quantile(tokens, LENGTH_SHARES).astype(int).tolist()]
    edges = sorted(set(edges))
    found = []
    for low, high in zip(edges, [*(edge - 1 for edge in edges[1:]), int(tokens.max())], strict=True):
        rows = (tokens >= low) & (tokens <= high)
        if rows.any():
            ranking = auroc(shares[rows], labels[rows] >= HALF)
            found.append(
                LengthBin(
                    low=low,
                    high=high,
                    rows=int(rows.sum()),
                    score=float(shares[rows].mean()),
                    label=float(labels[rows].mean()),
                    zero=float((labels[rows] == 0).mean()),
                    auroc=(ranking,) if np.isfinite(ranking) else (),
                )
            )
    return tuple(found)


def curve_of(name: str, scores: Array, bad: Bools, labels: Array, tokens: Ints, steps: int = 20) -> Curve:
    """From the highest scores on, `steps` points. bad: what a risk counts. Rows of equal score are taken in their
    order. All (n,)."""
    order = np.argsort(-scores, kind="stable")
    points = []
    for step in range(1, steps + 1):
        kept = order[: max(1, round(step * len(order) / steps))]
        points.append(
            CurvePoint(
                coverage=float(tokens[kept].sum() / tokens.sum()),
                zero=float(bad[kept].mean()),
                label=float(labels[kept].mean()),
            )
        )
    return Curve(name=name, points=tuple(points))


def _subsets(rows: Rows, chosen: Ints) -> dict[str, Bools]:
    """Name -> (n,) among the rows chosen."""
    no_number = rows.feature("text.no_number")[chosen] > 0
    after = np.array(rows.after)[chosen]
    return {
        "with numbers": ~no_number,
        "without numbers": no_number,
        "changed": rows.feature("target.agreement")[chosen] < 1,
        "after the prompt": after == "nobody",
        "after target": after == "target",
        "after mixed": after == "mixed",
    }


def _subset(name: str, positive: Bools, resamples: Resamples, ours: Draws, theirs: Draws) -> Subset:
    return Subset(
        name=name,
        rows=len(positive),
        positive=float(positive.mean()),
        auroc=resamples.interval(ours),
        gain=resamples.interval(ours.less(theirs)),
    )
