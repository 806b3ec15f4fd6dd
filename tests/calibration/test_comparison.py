"""Calibrations beside each other: what differs is the boundary, and nothing is compared that differs in more."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from semspec.calibration.bench.records import Problem
from semspec.calibration.calibrate import CalibrateSettings, calibrate
from semspec.calibration.cli import calibrate as command
from semspec.calibration.collection import CollectSettings
from semspec.calibration.comparison import compare_tables, format_comparison, read_compared
from semspec.calibration.learn import LearnSettings
from semspec.calibration.outcomes import MISSING_OUTCOMES
from semspec.calibration.probe_folder import read_calibration
from semspec.calibration.relations import Relation
from semspec.calibration.tables import ranged
from semspec.runtime.errors import CalibrationError, ConfigError
from semspec.runtime.segments import Boundary

PROBLEMS = tuple(Problem(id=f"q{n}", question=f"{n}+{n}?", answer=str(2 * n)) for n in range(10))
SETTINGS = CalibrateSettings(
    collecting=CollectSettings(n_draft=3, n_target=2, max_segments=2, temperature=0.3),
    relation=Relation(name="exact"),
    learning=LearnSettings(probes=("linear",), paper_probe="linear", n_folds=3, n_resamples=50),
)


@pytest.fixture(scope="module")
def made(short_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same questions with segments of up to six tokens, and of up to three; and one question fewer."""
    folder = tmp_path_factory.mktemp("compared")
    short = replace(SETTINGS, boundary=Boundary(kind="newline", min_tokens=1, max_tokens=3))
    runs = {"six": (SETTINGS, PROBLEMS), "three": (short, PROBLEMS), "fewer": (short, PROBLEMS[1:])}
    return {
        name: calibrate(
            short_pair, problems, folder / f"{name}-work", settings, out=folder / name, threads=1
        ).folder
        for name, (settings, problems) in runs.items()
    }


def test_boundaries_stand_beside_each_other(made: dict[str, Path]) -> None:
    """Every number is the one that the calibration itself tells."""
    found = read_compared([made["six"], made["three"]])
    tables = compare_tables(found)
    for one, boundary in zip(found, ("newline:2-6", "newline:1-3"), strict=True):
        findings = one.calibration.findings
        title = (one.folder.name, boundary)
        assert [row[2:5] for row in tables["Segments of the draft"].rows if row[:2] == title] == [
            (str(findings.counts.questions), str(findings.counts.contexts), str(findings.counts.draft_rows))
        ]
        shipped = next(each for each in findings.candidates if each.name == findings.winner)
        predictors = [row for row in tables["Predictors on unseen questions"].rows if row[:2] == title]
        assert [row[4:6] for row in predictors] == [(shipped.name, ranged(shipped.auroc))]
        layers = [
            row for row in tables["The target's states alone, by pooled layer"].rows if row[:2] == title
        ]
        assert [row[3] for row in layers] == [ranged(gain.alone) for gain in findings.layers] and layers
    for table in tables.values():
        assert {len(row) for row in table.rows} == {len(table.heads)}
    lines = format_comparison(found).splitlines()
    assert "Segments of the draft" in lines and ["three", "newline:1-3"] in [
        line.split()[:2] for line in lines
    ]


def edited(folder: Path, place: Path, origin: dict[str, Any], **findings: Any) -> Path:
    """A copy at `place` whose calibration.json says something else."""
    shutil.copytree(folder, place)
    found = read_calibration(folder)
    changed = replace(found, findings=replace(found.findings, **findings), origin={**found.origin, **origin})
    (place / "calibration.json").write_text(changed.to_json(), encoding="utf-8")
    return place


def test_bundles_are_told_apart_by_their_path(made: dict[str, Path], tmp_path: Path) -> None:
    """Probes of every bundle lie in a folder `1`."""
    folders = [shutil.copytree(made[name], tmp_path / name / "1") for name in ("six", "three")]
    assert [one.name for one in read_compared([made["six"], made["three"]])] == ["six", "three"]
    assert [one.name for one in read_compared(folders)] == [str(folder) for folder in folders]
    assert str(folders[0]) in format_comparison(read_compared(folders))


def test_what_no_table_shows_is_said(made: dict[str, Path], tmp_path: Path) -> None:
    """One that was cut short is of other questions than the rest, though the same were asked for; one that was learned
    in another way may ship another predictor for it; and a table without risks is left out."""
    said = format_comparison(read_compared([made["six"], made["three"]]))
    assert "cut short" not in said and "other settings" not in said
    cut = {"contexts not collected": 4, "outcomes": {MISSING_OUTCOMES: 3}, "learning": {}}
    short = edited(made["three"], tmp_path / "short", cut, risks=())
    first = edited(made["six"], tmp_path / "first", {}, risks=())
    *_, one, two, three = format_comparison(read_compared([first, short])).split("\n\n")
    assert one == "short was cut short: 7 contexts less, and so perhaps other questions."
    assert two.startswith("short was learned with other settings than first")
    assert three == "No risk that was asked for can be vouched for by any of them."


@pytest.mark.parametrize(
    ("label", "head"), [("outcome", "spoiled"), ("cross", "none alike"), ("own", "label 0")]
)
def test_a_label_of_nought_is_called_what_it_is(
    made: dict[str, Path], tmp_path: Path, label: str, head: str
) -> None:
    """That no sample is alike is not what an outcome says."""
    folders = [
        edited(made[name], tmp_path / name, {"label": label}, label=label, zero_labels=0.125)
        for name in ("six", "three")
    ]
    table = compare_tables(read_compared(folders))["Segments of the draft"]
    place = table.heads.index(head)
    assert [row[place] for row in table.rows] == ["12.5 %"] * 2


def test_the_command_prints_it(made: dict[str, Path]) -> None:
    """One command over what others left; it opens no bundle and no engine."""
    done = CliRunner().invoke(command, ["compare", str(made["six"]), str(made["three"])])
    assert done.exit_code == 0
    assert done.stdout.rstrip("\n") == format_comparison(read_compared([made["six"], made["three"]]))


def test_what_differs_in_more_is_not_compared(made: dict[str, Path], tmp_path: Path) -> None:
    """Other questions would pass for another boundary's doing."""
    with pytest.raises(ConfigError, match=r"three differ in questions, so neither is better"):
        read_compared([made["three"], made["fewer"]])
    with pytest.raises(ConfigError, match="at least two folders are compared, got 1"):
        read_compared([made["six"]])
    with pytest.raises(
        CalibrationError, match=r"has no calibration\.json: it is no folder that semspec calibrate made"
    ):
        read_compared([made["six"], tmp_path])
    other = shutil.copytree(made["three"], tmp_path / "nli")
    calibration = read_calibration(other)
    changed = replace(calibration, origin={**calibration.origin, "equivalence": {"name": "nli"}})
    (other / "calibration.json").write_text(changed.to_json(), encoding="utf-8")
    with pytest.raises(ConfigError, match="differ in equivalence"):
        read_compared([made["six"], other])
