"""What a person reads of a calibration: whole, safe to open, and claiming no more than was found."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pages import Page, pictures

from semspec.calibration.findings import (
    Bin,
    Candidate,
    Counts,
    Curve,
    CurvePoint,
    Findings,
    Histogram,
    LayerGain,
    LengthBin,
    Rarer,
    RatioFinding,
    Refusal,
    RiskLine,
    Subset,
)
from semspec.calibration.metrics import Interval
from semspec.calibration.probe_folder import Calibration
from semspec.calibration.report import REPORT, write_calibration_report
from semspec.calibration.tables import candidate_table, format_findings, gain_table, headline, risk_table
from semspec.runtime.errors import ConfigError
from semspec.runtime.typed import read_typed

ORIGIN = {
    "questions": "problems.jsonl",
    "models": {"target": "Big", "draft": "Small"},
    "samples": {"seed": 0},
}


def about(value: float) -> Interval:
    return Interval(value=value, low=value - 0.05, high=value + 0.05, n_questions=150, n_left_out=0)


def candidate(name: str, kind: str, auroc: float, **changes: Any) -> Candidate:
    values: dict[str, Any] = {
        "says": f"{name} in a line",
        "probe": "",
        "within": (about(0.6),),
        "ece": (about(0.06),) if kind == "fitted" else (),
        "brier": (about(0.12),) if kind == "fitted" else (),
        "gain": about(auroc - 0.85),
        "subsets": (
            Subset(name="with numbers", rows=900, positive=0.6, auroc=about(0.8), gain=about(-0.01)),
        ),
    }
    return Candidate(name=name, kind=kind, auroc=about(auroc), **{**values, **changes})


def risk(value: float) -> RiskLine:
    return RiskLine(
        risk=value,
        threshold=0.9 - value,
        coverage=0.3 + value,
        observed=0.6 * value,
        upper=0.9 * value,
        kept=400,
        kept_questions=120,
        mean_label=0.9,
        changed=2 * value,
        greedy_coverage=0.5,
        greedy=value,
    )


def findings(**changes: Any) -> Findings:
    points = tuple(CurvePoint(coverage=n / 10, zero=n / 40, label=1 - n / 40) for n in range(1, 11))
    values: dict[str, Any] = {
        "label": "cross",
        "equivalence": "numbers",
        "seed": 0,
        "counts": Counts(
            questions=150, contexts=440, draft_rows=3500, greedy_rows=440, unlabelled=0, target_rows=1760,
            with_number=0.7, changed=0.6,
        ),
        "mean_label": 0.6,
        "zero_labels": 0.2,
        "positive": 0.62,
        "candidates": (
            candidate("target.mean_logprob", "signal", 0.84),
            candidate("signals+text", "fitted", 0.85),
            candidate("states", "fitted", 0.7, probe="linear"),
            candidate("ratio", "ratio", 0.51),
        ),
        "layers": (LayerGain(layers=(20,), alone=about(0.8), on_signals=about(0.01), on_base=about(0.0)),),
        "base": "signals+text",
        "best_signal": "target.mean_logprob",
        "winner": "signals+text",
        "has_probe": False,
        "probe": "",
        "probe_layers": (),
        "features": ("target.mean_logprob", "text.numbers"),
        "effects": (1.25, -0.5),
        "scaling": "temperature",
        "why": "signals+text ranks best of what is free",
        "shuffled": about(0.5),
        "risks": (risk(0.05), risk(0.1)),
        "refused": (Refusal(risk=0.01, observed=0.02, coverage=0.1, contexts=900, says="a risk of 0.01 needs 900"),),
        "reliability": tuple(Bin(score=n / 10, label=n / 11, rows=100 * n) for n in range(1, 10)),
        "histograms": tuple(Histogram(label=name, counts=(1, 2, 3, 4)) for name in ("0", "0 to 0.5", "0.5 to 1", "1")),
        "lengths": (LengthBin(low=1, high=8, rows=9, score=0.6, label=0.5, zero=0.2, auroc=(0.8,)),
                    LengthBin(low=9, high=9, rows=3, score=0.6, label=0.5, zero=0.2, auroc=())),
        "curves": (Curve(name="signals+text", points=points), Curve(name="random", points=points[::2])),
        "ratio": RatioFinding(
            probe="mlp4", mean_acceptance=0.75, overlap=0.7, quantiles=(0.8, 0.9, 1.0, 1.1, 1.2),
            target_label=0.8, target_score=0.81, draft_label=0.7, draft_score=0.69,
        ),
    }  # fmt: skip
    return Findings(**{**values, **changes})


def written(folder: Path, found: Findings, origin: Any = None) -> str:
    write_calibration_report(folder, found, ORIGIN if origin is None else origin)
    return (folder / REPORT).read_text(encoding="utf-8")


def test_the_page_is_whole_and_asks_for_nothing_else(tmp_path: Path) -> None:
    """A report is opened years later, offline, by a stranger. The same findings give the same bytes."""
    text = written(tmp_path, findings())
    page = Page(text)
    assert not {"script", "link", "iframe", "object", "form", "a"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name == "href" or name.startswith("on")]
    assert text == written(tmp_path, findings()) and [path.name for path in tmp_path.iterdir()] == [REPORT]
    assert "150 questions, 440 contexts: 3500 drawn and 440 greedy segments" in page.text
    assert "problems.jsonl" in page.text and "models / targetBig" in page.text


def test_every_plot_is_a_picture_of_something(tmp_path: Path) -> None:
    """Predictors, reliability, risk, scores, lengths, layers; what has nothing to show is left out."""
    from matplotlib.image import imread

    found = pictures(written(tmp_path, findings()))
    assert len(found) == 6
    for png in found:
        dots = np.asarray(imread(io.BytesIO(png)))
        assert dots.shape[1] > 1500 and dots.std() > 0.01
    bare = findings(layers=(), lengths=(), histograms=(), curves=(), reliability=(), risks=())
    assert len(pictures(written(tmp_path, bare))) == 1


def test_a_hurried_reader_is_told_what_was_shown_and_no_more() -> None:
    """Which predictor, how good with its interval, for which risks; no threshold where none can be vouched for, and
    the published rule only where it accepts as it should."""
    first, why, risks = headline(findings())
    assert first.startswith(
        "Shipped: signals+text, which reads no hidden states; AUROC 0.850 [0.800, 0.900], ECE "
    )
    assert why == "signals+text ranks best of what is free." and "thresholds for 5 %, 10 %" in risks
    said = headline(
        findings(risks=(), winner="states", has_probe=True, probe="linear", probe_layers=(20, 28))
    )
    assert "reads states 20, 28" in said[0] and "No risk that was asked for can be vouched for" in said[2]
    ratio = replace(findings().ratio, mean_acceptance=0.99)
    assert headline(findings(ratio=ratio))[-1].startswith("Preset paper would accept 99 % where exact scores")


def test_tables_show_intervals_the_base_and_the_control() -> None:
    """A number alone invites belief; what is no probability has no calibration error."""
    rows = {row[0]: row for row in candidate_table(findings()).rows}
    assert rows["signals+text *"][1:3] == ("0.850 [0.800, 0.900]", "base")
    assert rows["target.mean_logprob"][2:] == ("-0.010 [-0.060, +0.040]", "0.600 [0.550, 0.650]", "-", "-")
    assert rows["shuffled labels"][1] == "0.500 [0.450, 0.550]"
    assert [row[0] for row in gain_table(findings()).rows] == ["states"]
    assert risk_table(findings()).rows[0][:5] == ("5 %", "0.850", "35 %", "3 %", "4.5 %")
    text = format_findings(findings())
    assert "A risk of 0.01 needs 900." in text and text.isascii()
    table = text[text.index("Predictors") :].splitlines()[1:5]
    assert len({line.index(" [") for line in table[1:]}) == 1, "columns stand below each other"


def test_outcomes_are_told_as_what_they_are(tmp_path: Path) -> None:
    """Greedy segments, whether they spoil an answer, and how many nobody went on from: not drawn ones, nor what samples
    say; and nothing of greedy ones beside them, of which there are none."""
    counts = replace(findings().counts, draft_rows=60, greedy_rows=0, unlabelled=90)
    line = replace(risk(0.1), greedy_coverage=0.0, greedy=0.0)
    text = Page(written(tmp_path, findings(label="outcome", counts=counts, risks=(line,)))).text
    assert "60 greedy segments of the draft; the target went on" in text and "20 % of them spoil" in text
    assert (
        "90 more greedy segments have no outcome" in text and "segments that spoil the answer. Bound" in text
    )
    assert "whether an answer that the target gets right by itself stays right" in text
    for wrong in (
        "60 drawn",
        "drawn and not greedy",
        "no sample of the target",
        "at least 0.5",
        "equivalence numbers",
    ):
        assert wrong not in text, wrong
    assert risk_table(findings(counts=counts, risks=(line,))).rows[0][-2:] == ("-", "-")


@pytest.mark.parametrize("label", ["own", "own-loo", "joint", "cross"])
def test_labels_are_told_as_what_they_are(tmp_path: Path, label: str) -> None:
    """Whose samples are counted differs; what a risk counts does not."""
    text = Page(written(tmp_path, findings(label=label))).text
    whose = {"cross": "share of the target's samples", "joint": "mean of both models' shares"}
    assert f"The label is the {whose.get(label, 'share of the draft')}" in text
    assert "3500 drawn" in text and "no sample of the target is equivalent to. Bound" in text


def test_a_share_of_none_is_not_nought() -> None:
    """Where no segment is kept that an exact mode would not keep, none of these is bad, and nothing was shown."""
    lines = [replace(risk(0.1), changed=0.0, kept_changed=0), replace(risk(0.2), kept_changed=34), risk(0.3)]
    assert [row[7] for row in risk_table(findings(risks=tuple(lines))).rows] == ["-", "40 % (34)", "60 %"]


def test_a_ranking_that_rests_on_few_says_so(tmp_path: Path) -> None:
    """Beside the shipped predictor; where both kinds of label are common, nothing is said."""
    for n, told in ((7, True), (20, False)):
        rarer = Rarer(label="below 0.5", rows=9, questions=n)
        found = findings(counts=replace(findings().counts, rarer=rarer))
        assert (
            "Ranking rests on few: 9 of 3500 segments, in 7 questions" in "\n".join(headline(found))
        ) is told
        assert ("Ranking rests on few" in written(tmp_path, found)) is told
        calibration = Calibration(format=1, findings=found, origin=ORIGIN)
        assert read_typed(Calibration, json.loads(calibration.to_json()), "calibration") == calibration


def test_few_questions_are_called_few(tmp_path: Path) -> None:
    """Their intervals look no different from good ones."""
    few = replace(findings().counts, questions=20)
    assert "20 questions are few" in written(tmp_path, findings(counts=few))
    assert "are few" not in written(tmp_path, findings())


def test_text_from_outside_is_escaped_and_kept(tmp_path: Path) -> None:
    """File and model names are strangers'; half a surrogate pair must not stop the report either."""
    evil = "<script>alert('x')</script>\"&\ud800 $x_1$"
    found = findings(why=evil, candidates=(candidate(evil, "signal", 0.8), *findings().candidates))
    page = Page(written(tmp_path, found, {evil: evil}))
    assert "script" not in page.tags and page.text.count("<script>alert('x')</script>\"&") >= 5


def test_findings_survive_json() -> None:
    """calibration.json says what the report says: it is made from it."""
    calibration = Calibration(format=1, findings=findings(), origin=ORIGIN)
    assert read_typed(Calibration, json.loads(calibration.to_json()), "calibration") == calibration


def test_drawing_leaves_pyplot_alone_and_says_when_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report inside an application touches no window; without matplotlib nothing is written."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    assert len(pictures(written(tmp_path, findings()))) == 6
    (tmp_path / REPORT).unlink()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="needs matplotlib"):
        written(tmp_path, findings())
    assert not list(tmp_path.iterdir())
