"""report.html of a calibration: what a person reads of it.

It knows what the page says; it reckons nothing (evaluate.py), draws nothing (plots.py), words no table (tables.py),
and what all pages have in common is page.py's. The same findings and origin give the same page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from semspec.calibration.findings import Findings, RatioFinding
from semspec.calibration.page import facts, figure, head, paragraph, table, write_page
from semspec.calibration.plots import (
    draw_candidates,
    draw_histograms,
    draw_layers,
    draw_lengths,
    draw_reliability,
    draw_risk,
)
from semspec.calibration.tables import (
    Table,
    candidate_table,
    gain_table,
    headline,
    layer_table,
    percent,
    refusals,
    risk_table,
    subset_table,
)

__all__ = ["REPORT", "write_calibration_report"]

REPORT = "report.html"
FEW_QUESTIONS = 60


def write_calibration_report(folder: Path, found: Findings, origin: Mapping[str, Any]) -> None:
    """Write report.html into `folder`, replacing an earlier one at once.

    origin: what was calibrated, on what and how: JSON values under names of your choice, shown as given. Raises
    ConfigError where matplotlib is missing, before anything is written; OSError where `folder` cannot be written.
    """
    write_page(folder / REPORT, list(_page(found, origin)))


def _page(found: Findings, origin: Mapping[str, Any]) -> Iterator[str]:
    yield head("semspec calibrate")
    yield "<h1>semspec calibrate</h1>"
    yield from (paragraph(words, "size") for words in _size(found))
    first, *others = headline(found)
    yield paragraph(first, "finding")
    yield from (paragraph(words) for words in others)
    yield from _titled("Predictors on unseen questions", candidate_table(found))
    yield paragraph("* is shipped. " + _subject(found), "note")
    if found.counts.questions < FEW_QUESTIONS:
        yield paragraph(f"{found.counts.questions} questions are few: the intervals are rough.", "note")
    yield from _plots(found)
    yield from _risks(found)
    yield from _titled("AUROC on parts of the segments", subset_table(found))
    yield paragraph(PARTS_NOTE, "note")
    yield from _titled("AUROC less the base's on parts of the segments", gain_table(found))
    if found.layers:
        yield from _titled("Pooled layers", layer_table(found))
    yield from _ratio(found.ratio)
    yield from _shipped(found)
    yield "<h2>What was calibrated, on what</h2>"
    yield from facts(origin, drop="settings")
    yield from _meanings(found)
    yield "</body></html>"


def _size(found: Findings) -> Iterator[str]:
    """How much was looked at, in words."""
    counts = found.counts
    many = f"{counts.questions} questions, {counts.contexts} contexts: {counts.draft_rows}"
    shares = (
        f"{percent(counts.with_number)} hold a number, and {percent(counts.changed)} are not the target's arg-max "
        "throughout"
    )
    if found.label == "outcome":
        yield f"{many} greedy segments of the draft; the target went on to the end after each, and after its own."
        yield f"{percent(found.zero_labels)} of them spoil an answer that would have been right; {shares}."
        if counts.unlabelled:
            yield (
                f"{counts.unlabelled} more greedy segments have no outcome and are left out: nobody went on in time, "
                "no answer is known, or the target's own way goes wrong."
            )
        return
    yield (
        f"{many} drawn and {counts.greedy_rows} greedy segments of the draft, {counts.target_rows} drawn segments of "
        f"the target. Label {found.label}, by equivalence {found.equivalence}."
    )
    yield (
        f"Of the draft's drawn segments {percent(found.zero_labels)} have label 0 and {percent(found.positive)} at "
        f"least 0.5, {found.mean_label:.3f} on average; {shares}."
    )
    if counts.unlabelled:
        yield f"{counts.unlabelled} more segments have no label and are left out."


def _subject(found: Findings) -> str:
    """What labels are, and whose results are told."""
    if found.label == "outcome":
        whose, positive = "greedy ones", ""
    else:
        whose, positive = "drawn and not greedy ones", ", and positive is a label of at least 0.5"
    return (
        f"The label is {LABELS[found.label]}{positive}. All are measured on segments of the draft, {whose}, of "
        "questions that were not learned from."
    )


def _risks(found: Findings) -> Iterator[str]:
    content = risk_table(found)
    if content.rows:
        yield from _titled("Risk and thresholds", content)
        yield paragraph(RISK_NOTE.format(bad=BAD[found.label == "outcome"]), "note")
    else:
        yield "<h2>Risk and thresholds</h2>"
    yield from (paragraph(words, "note") for words in refusals(found))


def _titled(title: str, content: Table) -> Iterator[str]:
    yield f"<h2>{title}</h2>"
    yield from table(content.heads, content.rows, words=content.words)


def _plots(found: Findings) -> Iterator[str]:
    drawn = (
        (
            "Predictors compared",
            draw_candidates(found),
            "Bars are 95 % intervals over questions. Circles are single signals, squares fitted predictors, triangles "
            "the published ratio, crosses controls; the filled one is shipped.",
        ),
        (
            "Reliability",
            draw_reliability(found.reliability),
            "Of the predictor that is shipped, on unseen questions. On the diagonal scores mean what they say: "
            "segments that score 70 % have a mean label of 70 %.",
        ),
        (
            "Risk and coverage",
            draw_risk(found.curves, found.risks),
            "The further to the right at the same height, the better; the table below says what "
            "risk is. Crosses are thresholds that can be asked for "
            "by their risk, and their one-sided 95 % bounds.",
        ),
        (
            "Scores by label",
            draw_histograms(found.histograms),
            "Of the predictor that is shipped. The less label 0 and label 1 overlap, the better.",
        ),
        (
            "By length of the segment",
            draw_lengths(found.lengths),
            "Where mean score and mean label part, scores of that length do not mean what they say.",
        ),
        (
            "By pooled layer",
            draw_layers(found.layers),
            "Linear probes of the target's mean state. A probe is worth its cost only where the interval of what it "
            "adds lies right of the dashed line.",
        ),
    )
    for title, png, caption in drawn:
        if png is not None:
            yield figure(title, png, caption)


def _ratio(ratio: RatioFinding) -> Iterator[str]:
    yield "<h2>The published ratio (preset paper)</h2>"
    low, _, middle, _, high = (f"{value:.2f}" for value in ratio.quantiles)
    yield paragraph(
        f"Probes of size {ratio.probe} give a mean acceptance min(1, s_target / s_draft) of "
        f"{percent(ratio.mean_acceptance)}; the classes of the samples themselves would allow about "
        f"{percent(ratio.overlap)}. The ratio is {middle} in the middle and {low} to {high} in nine of ten segments. "
        f"The target's probe says {ratio.target_score:.3f} on average where its own label is "
        f"{ratio.target_label:.3f}, the draft's {ratio.draft_score:.3f} where its is {ratio.draft_label:.3f}."
    )


def _shipped(found: Findings) -> Iterator[str]:
    yield "<h2>The predictor that is shipped</h2>"
    states = (
        f"A probe {found.probe} of the target's states {', '.join(map(str, found.probe_layers))}, and features."
        if found.has_probe
        else "No probe: it reads features only, and target passes need no pooled states."
    )
    yield paragraph(f"{states} Scaling: {found.scaling}.")
    rows = [(name, f"{weight:+.3f}") for name, weight in zip(found.features, found.effects, strict=False)]
    if rows:
        yield from table(("feature", "effect of one deviation"), rows)
    yield paragraph(
        f"The same learning on shuffled labels has AUROC {found.shuffled.value:.3f} [{found.shuffled.low:.3f}, "
        f"{found.shuffled.high:.3f}]; clearly above 0.5 would be a fault of the method. Below, a mark of few "
        "questions: where those left out have high labels, the others have low ones, whose mean is all there is to "
        "learn.",
        "note",
    )


def _meanings(found: Findings) -> Iterator[str]:
    yield "<h2>What the words mean</h2><dl>"
    for name, means in MEANINGS:
        yield f"<dt>{name}</dt><dd>{means}</dd>"
    yield "</dl><h2>What each predictor is</h2>"
    yield from table(("predictor", "what it is"), [(one.name, one.says) for one in found.candidates], words=2)


LABELS = {
    "own": "the share of the draft's own samples that say the same as the segment, itself included",
    "own-loo": "the share of the draft's other samples that say the same as the segment",
    "joint": "the mean of both models' shares of samples that say the same as the segment",
    "cross": "the share of the target's samples that say the same as the segment",
    "outcome": "whether an answer that the target gets right by itself stays right when it goes on from the segment",
}

BAD = ("no sample of the target is equivalent to", "spoil the answer")
"""What a risk counts, and what it counts of outcomes."""

PARTS_NOTE = (
    "Changed: segments that are not the target's arg-max throughout, so that an exact mode does not keep them whole. "
    "After target, mixed, the prompt: who wrote what they follow. Greedy: the draft's greedy segments. A part "
    "in which all labels are alike is left out."
)

RISK_NOTE = (
    "Keep a segment that scores at least the threshold. Kept: share of drafted tokens. Observed: share of the kept "
    "segments that {bad}. Bound: of that share, with 95 % confidence, one-sided, over questions like these; not of "
    "another kind of question. Changed: the same share of those, so many, that are not the target's arg-max "
    "throughout, which an exact mode would not keep by itself; greedy: of the draft's greedy segments beside them. The "
    "bound is not theirs. A risk is of one segment, and an answer may keep many. Risk 0 is an exact mode."
)

MEANINGS = (
    (
        "AUROC",
        "Chance that a segment with a positive label scores above one with a negative label; 0.5 is a coin.",
    ),
    (
        "base",
        "Target signals and text features, fitted: all that costs nothing. A probe must beat it to be shipped.",
    ),
    ("within", "Share of pairs of segments of one context that are ordered as their labels; 0.5 is a coin."),
    (
        "ECE",
        "Mean distance of score and label over bins of equal mass; 0 where a score means what it says. "
        "Resampling raises it, so that it may lie below its own interval.",
    ),
    ("Brier", "Mean squared distance of score and label; not 0 even for the truth, as labels are shares."),
    ("[low, high]", "95 % interval, resampling whole questions; predictions are held fixed."),
)
