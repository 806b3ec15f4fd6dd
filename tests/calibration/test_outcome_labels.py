"""Calibrating on outcomes: what can be refused before hours of collecting is, and a run that was cut short says so.

How a tiny model's answers end is written down here, since none of them is ever right; all else is done as by a user.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from pages import Page

from semspec.calibration.bench.records import Problem
from semspec.calibration.calibrate import Calibrated, CalibrateSettings, calibrate, collect_shard
from semspec.calibration.cli import calibrate as command
from semspec.calibration.collection import Cell, Collection, CollectSettings, open_collection
from semspec.calibration.contexts import SLOTS
from semspec.calibration.learn import LearnSettings
from semspec.calibration.outcomes import FORMAT, Outcome, OutcomeRun, RollOut, WritingOutcomes
from semspec.calibration.probe_folder import read_calibration
from semspec.calibration.relations import Relation
from semspec.calibration.report import REPORT
from semspec.runtime.bundle import Bundle
from semspec.runtime.errors import CalibrationError
from semspec.runtime.probe_set import read_probes

PROBLEMS = tuple(Problem(id=f"q{n}", question=f"{n}+{n}?", answer=str(2 * n)) for n in range(14))
SETTINGS = CalibrateSettings(
    collecting=CollectSettings(n_draft=3, n_target=2, temperature=0.9),
    relation=Relation(name="exact"),
    label="outcome",
    learning=LearnSettings(probes=("linear",), paper_probe="linear"),
    source="questions.jsonl",
)
NOT_IN_TIME = "mixed"  # the slot that nobody went on from


def ends(collection: Collection, cell: Cell) -> Outcome | None:
    """As if the target were right by itself but in every fourth context, and spoiled by every third draft that says
    something else."""
    context, samples = collection.read(cell)
    if context is None or context.answer is None:
        return None
    greedy = {sample.author: sample.ids for sample in samples if sample.greedy}
    number = 2 * cell.question + SLOTS.index(cell.slot)
    own, same = number % 4 != 3, greedy["draft"] == greedy["target"]
    kept = own if same else own and number % 3 != 0

    def rolled(segment: tuple[int, ...], right: bool) -> RollOut:
        return RollOut(segment=segment, ids=(1,), whole=cell.question != 5, right=right)

    return Outcome(
        context=context.id,
        question=context.question,
        answer=context.answer,
        after_draft=rolled(greedy["draft"], kept),
        after_own=rolled(greedy["target"], own),
    )


@pytest.fixture(scope="module")
def cut(short_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Calibrated]:
    """A bundle, the work folder, and what was made where only two of three contexts were gone on from."""
    folder = tmp_path_factory.mktemp("outcome-labels")
    bundle = Path(shutil.copytree(short_pair, folder / "bundle"))
    collection = collect_shard(bundle, PROBLEMS, folder / "work", SETTINGS, shard=(1, 1), threads=1)
    run = OutcomeRun(
        format=FORMAT, collection=collection.run.fingerprint, max_tokens=SETTINGS.answer_tokens, backend="cpu"
    )
    with WritingOutcomes(folder / "work" / "outcomes", run, collection) as writing:
        for cell in collection.run.cells():
            if cell.slot != NOT_IN_TIME:
                writing.add(cell, ends(collection, cell))
    made = calibrate(bundle, PROBLEMS, folder / "work", SETTINGS, budget=1e-6, threads=1)
    return bundle, folder / "work", made


def test_a_run_that_was_cut_short_learns_from_what_is_there(cut: tuple[Path, Path, Calibrated]) -> None:
    """And counts the rest: in the report, for machines, and in what a risk that is refused would take."""
    bundle, work, made = cut
    collection = open_collection(work / "samples")
    cells = [cell for cell in collection.run.cells() if cell.slot != NOT_IN_TIME]
    found = [one for one in (ends(collection, cell) for cell in cells) if one is not None]
    right = [one for one in found if one.after_own.right]
    spoiled = sum(not one.after_draft.right for one in right)
    counts, told = made.findings.counts, read_calibration(made.folder).origin["outcomes"]
    assert made.missing == 0 and made.missing_outcomes == len(PROBLEMS)
    assert told["contexts not gone on from in time"] == len(PROBLEMS)
    assert told["contexts gone on from"] == len(found)
    assert told["right after the target's own segment"] == counts.draft_rows == counts.contexts == len(right)
    assert told["of these right after the draft's as well"] == len(right) - spoiled
    assert made.findings.zero_labels == spoiled / len(right) and 0 < spoiled < len(right)
    assert counts.unlabelled == sum(1 for _ in collection.contexts()) - len(right)
    assert told["answers cut off"] > 0
    assert all(f"by {len(right)} contexts" in refusal.says for refusal in made.findings.refused)
    text = Page((made.folder / REPORT).read_text(encoding="utf-8")).text
    assert f"{len(right)} greedy segments of the draft; the target went on" in text
    assert f"outcomes / contexts not gone on from in time{len(PROBLEMS)}" in text
    probes = read_probes(Bundle.open(bundle))
    assert (probes.risk_of, probes.temperature, probes.top_p) == ("answer", 0.0, 1.0)


def test_the_command_says_what_is_missing(cut: tuple[Path, Path, Calibrated], tmp_path: Path) -> None:
    """Whoever sees a result should know that it is of a part. What was learned is not learned again."""
    bundle, work, _ = cut
    path = tmp_path / "questions.jsonl"
    lines = [{"id": one.id, "question": one.question, "answer": one.answer} for one in PROBLEMS]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    given = ["run", str(bundle), "--contexts", str(path), "--work", str(work), "--label", "outcome"]
    given += ["--samples", "3,2", "--temperature", "0.9", "--equivalence", "exact", "--probes", "linear"]
    done = CliRunner().invoke(command, [*given, "--budget", "0.000001", "--threads", "1", "--json"])
    assert done.exit_code == 0, done.output
    assert f"{len(PROBLEMS)} contexts were not gone on from in time; the same command goes on" in done.stderr
    line = json.loads(done.stdout)
    assert line["missing_outcomes"] == len(PROBLEMS) and line["missing"] == 0 and line["new"] is False


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([None] * 14, "0 of 14 questions have a known answer, and outcomes need at least 10"),
        (["1"] * 5 + [None] * 9, "5 of 14 questions have a known answer"),
        (["1"] * 13 + ["{"], "question 'q13': the answer '{' cannot be read"),
    ],
)
def test_what_nobody_can_judge_is_refused_before_anything_is_collected(
    short_pair: Path, tmp_path: Path, answers: list[str | None], message: str
) -> None:
    """An hour later would be too late; nothing is written."""
    problems = [replace(one, answer=answer) for one, answer in zip(PROBLEMS, answers, strict=True)]
    bundle = Path(shutil.copytree(short_pair, tmp_path / "bundle"))
    with pytest.raises(CalibrationError) as caught:
        calibrate(bundle, problems, tmp_path / "work", SETTINGS, threads=1)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
