"""Checking a bundle's thresholds on questions that it was not calibrated on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import commands
import numpy as np
import pytest
import tiny_pairs
import tiny_probes

from semspec.calibration.bench.records import Problem
from semspec.calibration.calibrate import CalibrateSettings, calibrate
from semspec.calibration.check.measure import PREDICTOR, RANDOM
from semspec.calibration.check.run import Checked, check
from semspec.calibration.check.tables import format_check
from semspec.calibration.collection import CollectSettings, open_collection
from semspec.calibration.learn import LearnSettings
from semspec.calibration.probe_folder import CALIBRATION
from semspec.calibration.relations import Relation
from semspec.runtime.backends import open_backend
from semspec.runtime.bundle import Bundle
from semspec.runtime.errors import CalibrationError, ConfigError
from semspec.runtime.features import segment_text
from semspec.runtime.probes import Probes
from semspec.runtime.segments import Segmenter
from semspec.runtime.tokenizer import Tokenizer

PROBLEMS = [Problem(id=f"q{n}", question=f"{n}+{n}?", answer=str(2 * n)) for n in range(18)]
USED, NEW = PROBLEMS[:12], PROBLEMS[12:]
SETTINGS = CalibrateSettings(
    collecting=CollectSettings(n_draft=4, n_target=4, max_segments=2, temperature=0.1),
    relation=Relation(name="exact"),
    learning=LearnSettings(
        probes=("linear",), paper_probe="linear", n_folds=3, n_resamples=50, risks=(0.6, 0.9)
    ),
)


def run(bundle: Path, work: Path, problems: list[Problem] = NEW, **options: object) -> Checked:
    return check(bundle, problems, work, threads=1, n_resamples=50, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def calibrated(short_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """To be read only."""
    folder = tmp_path_factory.mktemp("calibrated")
    bundle = Path(shutil.copytree(short_pair, folder / "bundle"))
    made = calibrate(bundle, USED, folder / "work", SETTINGS, threads=1)
    assert made.findings.risks, "the tiny pair must support a risk, or nothing below is tried"
    return bundle


def edit(bundle: Path, out: Path, **changes: object) -> Path:
    """A copy whose calibration.json says something else."""
    copy = Path(shutil.copytree(bundle, out))
    path = copy / "probes" / "1" / CALIBRATION
    said = json.loads(path.read_text(encoding="utf-8"))
    said |= changes
    path.write_text(json.dumps(said), encoding="utf-8")
    return copy


def test_thresholds_are_held_against_other_questions(calibrated: Path, tmp_path: Path) -> None:
    """Counted again by hand, with the scores that a decoding bundle would give; the bundle is only read, and a second
    call does no step again."""
    before = tiny_pairs.tree(calibrated)
    found = run(calibrated, tmp_path / "work", source="made up")
    bundle = Bundle.open(calibrated)
    tokenizer = Tokenizer.open(bundle.tokenizer)
    segmenter = Segmenter(bundle.manifest.boundary, tokenizer.token_bytes, tokenizer.eos_ids)
    kept, bad, tokens, all_tokens = 0, 0, 0, 0
    with Probes.open(bundle, open_backend("cpu", threads=1)) as probes:
        line = found.measured.risks[-1]
        assert [one.risk for one in found.measured.risks] == [one.risk for one in probes.set.risks]
        for context, samples in open_collection(tmp_path / "work" / "samples").contexts():
            assert context.question in {problem.id for problem in NEW}
            of_target = {one.text for one in samples if one.author == "target" and not one.greedy}
            for one in samples:
                if one.author == "draft" and not one.greedy:
                    text = segment_text(tokenizer, context.ids, one.ids, segmenter)
                    all_tokens += len(one.ids)
                    if (
                        probes.score(one.readings["target"], one.readings["draft"], text)
                        >= probes.set.risks[-1].threshold
                    ):
                        kept, tokens = kept + 1, tokens + len(one.ids)
                        bad += " ".join(one.text.split()) not in {
                            " ".join(text.split()) for text in of_target
                        }
    assert found.unseen and found.contexts > 12 and found.measured.segments == 4 * found.contexts
    assert line.predictor.segments.value == pytest.approx(kept / found.measured.segments)
    assert line.predictor.tokens.value == pytest.approx(tokens / all_tokens)
    assert kept == 0 or line.predictor.bad[0].value == pytest.approx(bad / kept)
    assert line.way(RANDOM).tokens.value == pytest.approx(line.way(PREDICTOR).tokens.value)
    assert tiny_pairs.tree(calibrated) == before
    (record,) = (tmp_path / "work").glob("checked-*.json")
    assert json.loads(record.read_text(encoding="utf-8")) == json.loads(found.to_json())
    stages: list[str] = []
    assert (
        run(calibrated, tmp_path / "work", source="made up", on_progress=lambda *said: stages.append(said[0]))
        == found
    )
    assert not stages and list((tmp_path / "work").glob("checked-*.json")) == [record]
    words = format_check(found)
    assert "none of which was calibrated on" in words and "target.mean_logprob" in words


class _Killed(Exception):
    pass


def test_killed_it_goes_on_and_ends_with_the_same_bytes(calibrated: Path, tmp_path: Path) -> None:
    """An hour of collecting is not done twice: neither what was told of, nor what others were at meanwhile."""

    def kill(stage: str, done: int, total: int) -> None:
        if done == 2:
            raise _Killed

    with pytest.raises(_Killed):
        run(calibrated, tmp_path / "cut", NEW[:2], on_progress=kill)
    counts = []
    run(calibrated, tmp_path / "cut", NEW[:2], on_progress=lambda _, done, __: counts.append(done))
    run(calibrated, tmp_path / "whole", NEW[:2])
    assert len(counts) <= 4 and counts == list(range(7 - len(counts), 7))
    assert tiny_pairs.tree(tmp_path / "cut") == tiny_pairs.tree(tmp_path / "whole")


def test_questions_that_were_calibrated_on_are_refused(calibrated: Path, tmp_path: Path) -> None:
    """By what they ask, not by their id: those would be learned by heart. Older probes do not say which they were, and
    the record says so."""
    again = Problem(id="other", question=" 3+3?\n", answer="6")
    with pytest.raises(
        CalibrationError, match=r"question 'other' was calibrated on, as were 1 of these 7.*skip 12"
    ):
        run(calibrated, tmp_path / "work", [*NEW, again])
    assert not list(tmp_path.iterdir())
    older = edit(calibrated, tmp_path / "older", questions=[])
    found = run(older, tmp_path / "work", [again, *NEW[:1]])
    assert not found.unseen and "nobody knows" in format_check(found)
    assert run(older, tmp_path / "again", NEW[:2], skipped=USED).unseen, "known by the fingerprint of all"
    with pytest.raises(CalibrationError, match="'other' was calibrated on"):
        run(older, tmp_path / "work", [again, *NEW[:1]], skipped=USED)


def test_what_cannot_be_checked_is_told_before_collecting(
    calibrated: Path, short_pair: Path, tmp_path: Path
) -> None:
    """Probes that are not there, from elsewhere, without a threshold, or made for another question."""
    with pytest.raises(CalibrationError, match="has no probes; calibrate it"):
        run(short_pair, tmp_path / "work")
    strange = Path(shutil.copytree(short_pair, tmp_path / "strange"))
    tiny_probes.add_probes(strange)
    with pytest.raises(CalibrationError, match=r"no calibration\.json: it was not made by semspec calibrate"):
        run(strange, tmp_path / "work")
    tiny_probes.add_probes(strange, number=2, risks=())
    shutil.copyfile(calibrated / "probes" / "1" / CALIBRATION, strange / "probes" / "2" / CALIBRATION)
    with pytest.raises(CalibrationError, match="supports no risk"):
        run(strange, tmp_path / "work")
    said = json.loads((calibrated / "probes" / "1" / CALIBRATION).read_text(encoding="utf-8"))
    own = edit(calibrated, tmp_path / "own", findings={**said["findings"], "label": "own"})
    with pytest.raises(CalibrationError, match="about the label 'own'"):
        run(own, tmp_path / "work")
    with pytest.raises(ConfigError, match="exact reads without an encoder"):
        run(calibrated, tmp_path / "work", encoder="some/model")
    assert not (tmp_path / "work").exists()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"holds 'mine\.txt'"):
        run(calibrated, tmp_path / "notes")


def test_the_command_prints_a_table_and_one_line(calibrated: Path, tmp_path: Path) -> None:
    """As a user runs it: the questions behind the first twelve of a file, and again as JSON with no step done again."""
    rows = [{"id": one.id, "question": one.question, "answer": one.answer} for one in PROBLEMS]
    (tmp_path / "questions.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    given = ("calibrate", "check", calibrated, "--contexts", "questions.jsonl", "--work", "w", "--threads", 1)
    done = commands.run("semspec", *given, "--skip", 12, "--questions", 2, cwd=tmp_path)
    assert done.status == 0 and "collecting: 6 of 6" in done.err and "w holds what was checked" in done.err, (
        done
    )
    assert "predictor's less this" in done.out and "Risk 90 %" in done.out
    again = commands.run("semspec", *given, "--skip", 12, "--questions", 2, "--json", cwd=tmp_path)
    line = json.loads(again.out)
    assert again.status == 0 and line["measured"]["segments"] > 12 and "collecting" not in again.err
    assert line["questions"] == "questions.jsonl, 2 behind the first 12" and np.isfinite(
        line["measured"]["bad"]["value"]
    )
    refused = commands.run("semspec", *given, "--questions", 2, cwd=tmp_path)
    assert "was calibrated on" in commands.one_line(refused, 1)
