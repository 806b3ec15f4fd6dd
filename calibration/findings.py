"""Findings: everything that learning tells about a collection, as records that go into calibration.json and the report.

Frozen, without behaviour, and JSON by `dataclasses.asdict`; read back with runtime/typed.read_typed. Who reckons what
is evaluate.py's and threshold.py's. What may be missing is a tuple of one or none. All scores of something fitted are
of questions that it was not fitted on; intervals are 95 % percentile bootstraps over questions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from semspec.calibration.metrics import Interval

__all__ = [
    "Bin",
    "Candidate",
    "Counts",
    "Curve",
    "CurvePoint",
    "Findings",
    "Histogram",
    "LayerGain",
    "LengthBin",
    "Rarer",
    "RatioFinding",
    "Refusal",
    "RiskLine",
    "Subset",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rarer:
    """Of labels below and of at least 0.5 those that fewer questions have: what ranking rests on. label: `below 0.5` or
    `of at least 0.5`. rows, questions: that have such a label."""

    label: str
    rows: int
    questions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How much was looked at. draft_rows: segments of the draft that results are about, drawn ones; of outcomes greedy
    ones. greedy_rows: by arg-max, beside them. unlabelled: segments that have no label (of outcomes greedy ones, where
    nobody went on in time, no answer is known, or the target's own way goes wrong). target_rows: drawn segments of the
    target. with_number, changed: shares of the draft rows that hold a number, and that are not the target's arg-max
    throughout. rarer: none where it was not counted, by an earlier version."""

    questions: int
    contexts: int
    draft_rows: int
    greedy_rows: int
    unlabelled: int
    target_rows: int
    with_number: float
    changed: float
    rarer: Rarer | None = field(default=None, metadata={"left_out_by_default": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class Subset:
    """A candidate on some of the rows. name: `with numbers`, `without numbers`, `changed` (not the target's arg-max
    throughout), `after target`, `after mixed`, `after the prompt`, `greedy` (rows by arg-max, and no others). gain:
    AUROC less the base's."""

    name: str
    rows: int
    positive: float
    auroc: Interval
    gain: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to score a segment of the draft, alone.

    says: what it is, in a line. kind: `signal` (one number, as it is), `fitted` (a probability), `ratio` (the published
    rule), `control`. probe: `linear`, `mlp2`, `mlp4` where states are read, else empty. auroc: for a label of at least
    0.5. within: share of pairs of one context that it orders as their labels. ece, brier: none for signals, which are
    no probabilities, but for one that is shipped, as scaled for that. gain: AUROC less the base's, on the same
    resamples. subsets: where both kinds of label are there.
    """

    name: str
    says: str
    kind: str
    probe: str
    auroc: Interval
    within: tuple[Interval, ...]
    ece: tuple[Interval, ...]
    brier: tuple[Interval, ...]
    gain: Interval
    subsets: tuple[Subset, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGain:
    """What the target's states of some pooled layers are worth: linear probe, its strength chosen inside the folds.

    layers: state indices. alone: AUROC of the probe by itself. on_signals, on_base: AUROC of signals and of signals
    and text with the probe, less without it.
    """

    layers: tuple[int, ...]
    alone: Interval
    on_signals: Interval
    on_base: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class RiskLine:
    """One line of the risk table: keep a segment that scores at least `threshold`.

    coverage: share of drafted tokens kept. observed: share of the kept segments that no target sample is equivalent to
    (outcome labels: that spoil the answer). upper: one-sided 95 % bound of it, at most `risk`. kept, kept_questions:
    segments and questions that it rests on. mean_label: of the kept. changed: the same share among the kept segments
    that are not the target's arg-max throughout, which an exact rule does not keep by itself, 0 where none is kept;
    greedy_coverage, greedy: coverage and share among the draft's greedy segments (0 and 0 where there are none). No
    bound holds for these three. kept_changed: segments that `changed` is of, none where an earlier version did not say.
    """

    risk: float
    threshold: float
    coverage: float
    observed: float
    upper: float
    kept: int
    kept_questions: int
    mean_label: float
    changed: float
    greedy_coverage: float
    greedy: float
    kept_changed: int | None = field(default=None, metadata={"left_out_by_default": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A risk that the collection cannot vouch for. observed, coverage: at the threshold that comes nearest.
    contexts: how many would be enough if that share stayed as it is, 0 where no number would. says: in a line."""

    risk: float
    observed: float
    coverage: float
    contexts: int
    says: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Reliability: rows of neighbouring scores, their mean score, mean label and how many."""

    score: float
    label: float
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Scores of the rows with one kind of label. label: `0`, `0 to 0.5`, `0.5 to 1`, `1`. counts: in equal bins of
    0..1, from the lowest."""

    label: str
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBin:
    """Segments of `low` to `high` tokens. auroc: none where all labels are of one kind."""

    low: int
    high: int
    rows: int
    score: float
    label: float
    zero: float
    auroc: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """coverage: share of drafted tokens kept. zero: share of kept segments that no target sample is equivalent to
    (outcome labels: that spoil the answer). label: mean label of the kept."""

    coverage: float
    zero: float
    label: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Risk against coverage of one candidate, from the highest scores on; `random` keeps by chance."""

    name: str
    points: tuple[CurvePoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioFinding:
    """The published rule, as evaluated. probe: its architecture. mean_acceptance: mean min(1, s_T / s_D) over the
    draft's segments. overlap: what exact scores would accept, from sampled classes (a little too low: few samples
    overlap less than their laws). quantiles: 5, 25, 50, 75 and 95 % of the ratio. target, draft: mean own label and
    mean score of each of the two probes on the texts it is asked about."""

    probe: str
    mean_acceptance: float
    overlap: float
    quantiles: tuple[float, ...]
    target_label: float
    target_score: float
    draft_label: float
    draft_score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What was found.

    label: KINDS of labels.py or `outcome`. equivalence: its name. mean_label, zero_labels: mean, and share of 0, of
    the draft's drawn rows; positive: share of at least 0.5. base: name of the candidate that a probe must beat;
    best_signal: name. winner: of the candidate that is shipped; has_probe: whether it reads states, then probe and
    probe_layers say how and which; why: in a line. features: that it reads; effects: of one deviation of each on its
    logit. scaling: `temperature` or `isotonic`. shuffled: AUROC of the same learning on shuffled labels, to be near
    0.5. risks from strict to loose; refused: those asked for that have no line.
    """

    label: str
    equivalence: str
    seed: int
    counts: Counts
    mean_label: float
    zero_labels: float
    positive: float
    candidates: tuple[Candidate, ...]
    layers: tuple[LayerGain, ...]
    base: str
    best_signal: str
    winner: str
    has_probe: bool
    probe: str
    probe_layers: tuple[int, ...]
    features: tuple[str, ...]
    effects: tuple[float, ...]
    scaling: str
    why: str
    shuffled: Interval
    risks: tuple[RiskLine, ...]
    refused: tuple[Refusal, ...]
    reliability: tuple[Bin, ...]
    histograms: tuple[Histogram, ...]
    lengths: tuple[LengthBin, ...]
    curves: tuple[Curve, ...]
    ratio: RatioFinding
