"""Calibrating a bundle: from questions to probes in it, whole or not at all, however often it was interrupted."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_pairs

from semspec.calibration.bench.records import Problem
from semspec.calibration.calibrate import (
    Calibrated,
    CalibrateSettings,
    calibrate,
    collect_shard,
    default_work,
    join_work,
)
from semspec.calibration.collection import CollectSettings, open_collection
from semspec.calibration.learn import LearnSettings
from semspec.calibration.probe_folder import CALIBRATION, read_calibration
from semspec.calibration.relations import Relation
from semspec.calibration.report import REPORT
from semspec.export.probe_graph import CLIP
from semspec.runtime.backends import open_backend
from semspec.runtime.bundle import Bundle
from semspec.runtime.errors import BundleError, CalibrationError, ConfigError
from semspec.runtime.features import segment_text
from semspec.runtime.probe_set import PREDICTOR_FILE, latest_probes, read_probes
from semspec.runtime.probes import Probes
from semspec.runtime.segments import Boundary, Segmenter
from semspec.runtime.tokenizer import Tokenizer

PROBLEMS = tuple(Problem(id=f"q{n}", question=f"{n}+{n}?", answer=str(2 * n)) for n in range(12))
QUICK = LearnSettings(probes=("linear",), paper_probe="linear", n_folds=3, n_resamples=50)
SETTINGS = CalibrateSettings(
    collecting=CollectSettings(n_draft=3, n_target=2, max_segments=2, temperature=0.3),
    relation=Relation(name="exact"),
    learning=QUICK,
)
FILES = {"predictor.onnx", "target.onnx", "draft.onnx", PREDICTOR_FILE, CALIBRATION, REPORT}


def run(bundle: Path, work: Path, problems: tuple[Problem, ...] = PROBLEMS, **options: Any) -> Calibrated:
    return calibrate(bundle, problems, work, **{"settings": SETTINGS, "threads": 1, **options})


def copy(bundle: Path, folder: Path) -> Path:
    return Path(shutil.copytree(bundle, folder / "bundle"))


@pytest.fixture(scope="module")
def done(short_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A bundle that was calibrated in one go, and the work folder. To be read only."""
    folder = tmp_path_factory.mktemp("done")
    bundle = copy(short_pair, folder)
    run(bundle, folder / "work")
    return bundle, folder / "work"


def test_a_bundle_can_judge_afterwards(done: tuple[Path, Path], short_pair: Path) -> None:
    """The score at run time is the one that the thresholds were made for; what was exported is as it was."""
    bundle, work = Bundle.open(done[0]), done[1]
    folder = latest_probes(bundle)
    assert folder == bundle.path / "probes" / "1" and {path.name for path in folder.iterdir()} == FILES
    found = read_probes(bundle)
    assert (found.backend, found.temperature, found.boundary) == ("cpu", 0.3, bundle.manifest.boundary)
    others = {
        name: content for name, content in tiny_pairs.tree(bundle.path).items() if "probes/" not in name
    }
    assert others == tiny_pairs.tree(short_pair)
    tokenizer = Tokenizer.open(bundle.tokenizer)
    segmenter = Segmenter(found.boundary, tokenizer.token_bytes, tokenizer.eos_ids)
    scores = []
    with Probes.open(bundle, open_backend("cpu", threads=1)) as probes:
        for context, samples in open_collection(work / "samples").contexts():
            for sample in samples[:2]:
                segment = segment_text(tokenizer, context.ids, sample.ids, segmenter)
                draft = sample.readings["draft"]
                scores.append(probes.score(sample.readings["target"], draft, segment))
                ratio = probes.ratio_scores(sample.readings["target"].pooled, draft.pooled)
                assert all(CLIP <= one <= 1 for one in ratio)
    assert np.std(scores) > 0.01 and read_calibration(folder).findings.counts.questions == len(PROBLEMS)


def test_the_same_again_does_nothing(done: tuple[Path, Path]) -> None:
    """Neither a second folder with the same probes, nor any step once more."""
    before = {path: path.stat().st_mtime_ns for folder in done for path in folder.rglob("*")}
    steps: list[str] = []
    again = run(*done, on_progress=lambda stage, *_: steps.append(stage))
    assert not again.is_new and again.folder == done[0] / "probes" / "1" and not steps
    assert before == {path: path.stat().st_mtime_ns for folder in done for path in folder.rglob("*")}


def test_other_code_learns_again_from_the_same_samples(
    done: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was learned is of the code that learned it, between two releases as well; so is what a relation said."""
    bundle, work = copy(done[0], tmp_path), tmp_path / "work"
    shutil.copytree(done[1], work)
    before = {path.name for path in work.iterdir()}
    for changed, begins in (({"CODE"}, {"learned"}), ({"CODE", "RELATIONS_CODE"}, {"asked", "learned"})):
        for name in changed:
            monkeypatch.setattr(f"semspec.calibration.calibrate.{name}", f"another of {len(changed)}")
        steps: list[str] = []
        again = run(bundle, work, on_progress=lambda stage, *_, steps=steps: steps.append(stage))
        assert "collecting" not in steps and {"fitting", "measuring"} <= set(steps)
        assert not again.is_new, "the same again, in another folder of the work"
        now = {path.name for path in work.iterdir()}
        assert {found.split("-")[0] for found in now - before} == begins
        before = now


class _Killed(Exception):
    pass


def test_killed_in_every_step_it_ends_with_the_same_bytes(
    done: tuple[Path, Path], short_pair: Path, tmp_path: Path
) -> None:
    """And no finished step is done again: each run gets one stage further."""
    bundle, work, seen = copy(short_pair, tmp_path), tmp_path / "work", list[str]()
    for last in ("collecting", "comparing", "fitting", "measuring"):
        stages: list[str] = []

        def kill(stage: str, done: int, total: int, last: str = last, stages: list[str] = stages) -> None:
            stages.append(stage)
            if stage == last and (done == total or (stage == "comparing" and done > 3)):
                raise _Killed

        with pytest.raises(_Killed):
            run(bundle, work, on_progress=kill)
        assert "collecting" not in stages or last == "collecting"
        seen += [stage for stage in dict.fromkeys(stages) if stage not in seen]
        assert tiny_pairs.tree(bundle) == tiny_pairs.tree(short_pair), "the bundle is as it was"
    assert seen == ["collecting", "comparing", "fitting", "measuring"]
    run(bundle, work)
    assert tiny_pairs.tree(bundle) == tiny_pairs.tree(done[0])
    assert tiny_pairs.tree(work) == tiny_pairs.tree(done[1])
    shutil.rmtree(bundle / "probes")  # killed between the last two steps
    steps: list[str] = []
    run(bundle, work, on_progress=lambda stage, *_: steps.append(stage))
    assert not steps and tiny_pairs.tree(bundle) == tiny_pairs.tree(done[0])


def test_other_settings_make_the_next_number_from_the_same_samples(
    done: tuple[Path, Path], short_pair: Path, tmp_path: Path
) -> None:
    """Earlier probes stay as they are; the newest count."""
    bundle, work = copy(done[0], tmp_path), Path(shutil.copytree(done[1], tmp_path / "work"))
    first = tiny_pairs.tree(bundle / "probes" / "1")
    steps: list[str] = []
    own = run(
        bundle,
        work,
        settings=replace(SETTINGS, label="own-loo"),
        on_progress=lambda stage, *_: steps.append(stage),
    )
    assert own.folder == bundle / "probes" / "2" == latest_probes(Bundle.open(bundle)) and own.is_new
    assert "collecting" not in steps and own.findings.label == "own-loo"
    assert tiny_pairs.tree(bundle / "probes" / "1") == first
    third = run(bundle, work)
    assert third.folder.name == "3" and tiny_pairs.tree(third.folder) == first


def test_shards_joined_give_the_probes_of_the_whole_run(
    done: tuple[Path, Path], short_pair: Path, tmp_path: Path
) -> None:
    """Collecting takes the time: it is spread over machines, the rest is not."""
    bundle, shards = copy(short_pair, tmp_path), [tmp_path / "1", tmp_path / "2"]
    for index, shard in enumerate(shards, start=1):
        collect_shard(bundle, PROBLEMS, shard, SETTINGS, shard=(index, 2), threads=1)
    with pytest.raises(ConfigError, match=r"shard is \[1, 2\] there and \[1, 1\] here"):
        run(bundle, shards[0])
    join_work(shards, tmp_path / "work")
    steps: list[str] = []
    run(bundle, tmp_path / "work", on_progress=lambda stage, *_: steps.append(stage))
    assert "collecting" not in steps and tiny_pairs.tree(bundle) == tiny_pairs.tree(done[0])
    with pytest.raises(ConfigError, match="exists"):
        join_work(shards, tmp_path / "work")
    with pytest.raises(ConfigError, match=r"all 2 shards .* found 1/2"):
        join_work(shards[:1], tmp_path / "again")
    with pytest.raises(CalibrationError, match="holds no collection"):
        join_work([tmp_path], tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_budget_uses_what_was_collected_in_time(short_pair: Path, tmp_path: Path) -> None:
    """None at all is enough for nobody, and says so."""
    bundle = copy(short_pair, tmp_path)
    with pytest.raises(CalibrationError, match="no context"):
        run(bundle, tmp_path / "none", budget=1e-9)
    assert tiny_pairs.tree(bundle) == tiny_pairs.tree(short_pair)


def test_another_boundary_is_studied_elsewhere(short_pair: Path, tmp_path: Path) -> None:
    """The bundle could not use such probes: they would be refused when it is opened."""
    bundle, other = copy(short_pair, tmp_path), Boundary(kind="newline", min_tokens=1, max_tokens=4)
    settings = replace(SETTINGS, boundary=other)
    with pytest.raises(ConfigError, match=r"newline:2-6, and could not use probes for newline:1-4; .* --out"):
        run(bundle, tmp_path / "work", settings=settings)
    made = run(bundle, tmp_path / "work", settings=settings, out=tmp_path / "probes")
    assert made.folder == tmp_path / "probes" and {path.name for path in made.folder.iterdir()} == FILES
    assert tiny_pairs.tree(bundle) == tiny_pairs.tree(short_pair)
    read_probes(Bundle.open(bundle), made.folder, boundary=other)
    with pytest.raises(CalibrationError, match="segments that end"):
        read_probes(Bundle.open(bundle), made.folder)
    with pytest.raises(ConfigError, match="exists; give --out a new folder"):
        run(bundle, tmp_path / "work", settings=settings, out=tmp_path / "probes")


@contextmanager
def _largest_file(n_bytes: int) -> Iterator[None]:
    """A real refusal to write more, as a full disk gives it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_the_bundle_as_it_was(
    done: tuple[Path, Path], short_pair: Path, tmp_path: Path
) -> None:
    """Wherever it is full first: for answers of the relation, learned files, the report."""
    bundle, work = copy(short_pair, tmp_path), Path(shutil.copytree(done[1], tmp_path / "work"))
    learned = next(work.glob("learned-*"))
    report = (done[0] / "probes" / "1" / REPORT).stat().st_size
    with _largest_file(report - 1), pytest.raises(BundleError, match="no space left"):
        run(bundle, work)
    shutil.rmtree(learned)
    with _largest_file(1000), pytest.raises(BundleError, match="no space left"):
        run(bundle, work)
    next(work.glob("asked-*")).unlink()
    with _largest_file(100), pytest.raises(CalibrationError, match="cannot be written: No space left"):
        run(bundle, work)
    assert tiny_pairs.tree(bundle) == tiny_pairs.tree(short_pair)
    assert not [path for path in bundle.rglob("*") if path.name == "probes"]
    run(bundle, work)
    assert tiny_pairs.tree(bundle) == tiny_pairs.tree(done[0])


@pytest.mark.parametrize(
    ("problems", "settings", "error", "message"),
    [
        ((), SETTINGS, CalibrationError, "no questions"),
        (
            (*PROBLEMS, Problem(id="long", question="7" * 250)),
            SETTINGS,
            CalibrationError,
            r"question 'long' has \d+ tokens, and at most 250 leave room",
        ),
        (PROBLEMS[:2], SETTINGS, CalibrationError, r"2 questions are too few .* at least 6"),
        (
            PROBLEMS,
            replace(SETTINGS, collecting=CollectSettings(n_draft=2, n_target=2, temperature=50.0)),
            CalibrationError,
            r"nothing to tell apart: all \d+ labels are below 0\.5",
        ),
        (
            PROBLEMS[:6],
            replace(SETTINGS, label="outcome", answer_tokens=8),
            CalibrationError,
            "no segment has a label",
        ),
    ],
    ids=["no question", "longer than the context", "few questions", "one class", "no outcome"],
)
def test_what_cannot_be_learned_from_is_told(
    short_pair: Path,
    tmp_path: Path,
    problems: tuple[Problem, ...],
    settings: CalibrateSettings,
    error: type[Exception],
    message: str,
) -> None:
    """In a line, and the bundle is as it was (D44)."""
    bundle = copy(short_pair, tmp_path)
    with pytest.raises(error, match=message) as caught:
        run(bundle, tmp_path / "work", problems, settings=settings)
    assert "\n" not in str(caught.value)
    assert tiny_pairs.tree(bundle) == tiny_pairs.tree(short_pair)


def test_a_work_folder_of_something_else_or_in_use_is_left_alone(short_pair: Path, tmp_path: Path) -> None:
    """Nothing of ours among a user's files, and nobody calibrates twice at once."""
    bundle, other = copy(short_pair, tmp_path), tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"holds 'notes\.txt'; give a --work folder"):
        run(bundle, other)

    def again(*_: Any) -> None:
        with pytest.raises(CalibrationError, match=r"another run is writing .* another --work"):
            run(bundle, tmp_path / "work")
        raise _Killed

    with pytest.raises(_Killed):
        run(bundle, tmp_path / "work", on_progress=again)
    assert default_work(bundle) == tmp_path.resolve() / "bundle.calibration"


def test_a_damaged_learned_folder_is_named(done: tuple[Path, Path], tmp_path: Path) -> None:
    """Never installed, and the repair is in the message."""
    bundle, work = copy(done[0], tmp_path), Path(shutil.copytree(done[1], tmp_path / "work"))
    path = next(work.glob("learned-*")) / CALIBRATION
    for content in (b"{}", path.read_bytes()[:200], b'{"format": 9, "findings": 1, "origin": {}}'):
        path.write_bytes(content)
        with pytest.raises(CalibrationError, match=r"calibration\.json cannot be read .*; remove .*learned-"):
            run(bundle, work)
    assert tiny_pairs.tree(bundle) == tiny_pairs.tree(done[0])
