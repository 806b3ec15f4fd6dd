"""Check: collect segments of questions that calibration did not see, as it did, and measure the shipped thresholds.

    samples/             the collection, as calibrate's
    asked-<k>.jsonl      what the relation between texts said
    checked-<k>.json     what was found (Checked), never changed; <k> is of its text, so the same is written once

Scores are those that a bundle gives when it decodes: opened probes, asked about what both models made of a segment.
Interrupted, the same check goes on where it stopped. It knows the order of the steps; measure.py knows the figures.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from semspec.calibration.bench.data import fingerprint, question_sha256
from semspec.calibration.bench.journal import write_once
from semspec.calibration.bench.records import Problem
from semspec.calibration.check.measure import Measured, Segments, measure
from semspec.calibration.collect import collect
from semspec.calibration.collection import Collection, CollectSettings
from semspec.calibration.contest import signal_scores
from semspec.calibration.dataset import Dataset, build_dataset, classify
from semspec.calibration.probe_folder import CALIBRATION, Calibration, read_calibration
from semspec.calibration.records import Context, Sample
from semspec.calibration.relations import Asked, Relation, open_relation
from semspec.calibration.run_folder import WorkFolder, unwritable
from semspec.runtime.backends import open_backend
from semspec.runtime.bundle import Bundle, sha256_of
from semspec.runtime.errors import CalibrationError, ConfigError
from semspec.runtime.features import SegmentText, segment_text
from semspec.runtime.probe_set import PREDICTOR, PREDICTOR_FILE, ProbeSet, read_probes, require_probes
from semspec.runtime.probes import Probes
from semspec.runtime.records import Array, Progress
from semspec.runtime.segments import Segmenter
from semspec.runtime.tokenizer import Tokenizer
from semspec.runtime.typed import plain, read_typed

__all__ = ["Checked", "check", "default_check_work"]

FORMAT = 1
SAMPLES = "samples"
OURS = re.compile(rf"{SAMPLES}|asked-\w+\.jsonl|checked-\w+\.json(\.partial)?")
LABEL = "cross"  # 0: no sample of the target is equivalent
ENCODER_KEYS = ("encoder", "encoder_sha256")
KEY_LETTERS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What checked-<k>.json says.

    unseen: True where the questions are known to be others than those of the calibration, False where it did not write
    down which it used. best_signal: the free signal that ranked best when it was calibrated, so that none is chosen by
    these segments. n_target: samples of the target in a context, beside the greedy one. probes: the folder;
    predictor_sha256: of its predictor.json. collection: fingerprint of the run. questions: where they are from, for
    people; questions_sha256: of all that is asked.
    """

    format: int
    measured: Measured
    unseen: bool
    best_signal: str
    contexts: int
    n_target: int
    equivalence: Mapping[str, Any]
    probes: str
    predictor_sha256: str
    collection: str
    questions: str
    questions_sha256: str

    def to_json(self) -> str:
        """The text of the file."""
        return json.dumps(plain(self), indent=1, sort_keys=True, allow_nan=False) + "\n"


def check(
    bundle: Path,
    problems: Sequence[Problem],
    work: Path,
    *,
    skipped: Sequence[Problem] = (),
    encoder: str = "",
    source: str = "",
    threads: int | None = None,
    n_resamples: int = 1000,
    on_progress: Progress | None = None,
) -> Checked:
    """Check the probes that count in `bundle` on `problems`, or go on with it; the bundle is only read.

    Sampling, segments, relation and backend are those of the calibration. skipped: questions left out; where older
    probes do not list theirs, a fingerprint tells whether it was these. encoder: folder or hub id of a neural
    relation's, which must be the one that it read with. source: where the questions are from.

    Raises CalibrationError: no probes, or none made by `calibrate`, or of another label than `cross`, or without a
    threshold; a question that was calibrated on; fewer than 2 with a context; ConfigError: another encoder, a `work`
    of something else; errors of collecting, of the bundle and its engines.
    """
    opened = Bundle.open(bundle)
    folder, found, calibration = _read(opened)
    unseen = _check_unseen(problems, skipped, calibration)
    relation = _relation(calibration, encoder)
    said, settings = relation.describe(), _settings(calibration)
    with WorkFolder(work, OURS):
        with_what: Mapping[str, Any] = {
            "boundary": found.boundary,
            "backend": found.backend,
            "threads": threads,
        }
        collection = collect(bundle, problems, work / SAMPLES, settings, on_progress=on_progress, **with_what)
        asked = work / f"asked-{_hash([collection.run.fingerprint, said])}.jsonl"
        dataset, scores = _judge(opened, collection, relation, found, asked, threads)
        measured = measure(
            _segments(dataset, scores), found.risks, n_resamples=n_resamples, seed=settings.seed
        )
        checked = Checked(
            format=FORMAT,
            measured=measured,
            unseen=unseen,
            best_signal=calibration.findings.best_signal,
            contexts=dataset.n_contexts,
            n_target=settings.n_target,
            equivalence=said,
            probes=folder.name,
            predictor_sha256=sha256_of(folder / PREDICTOR_FILE),
            collection=collection.run.fingerprint,
            questions=source,
            questions_sha256=collection.run.questions_sha256,
        )
        _keep(checked, work)
        return checked


def default_check_work(bundle: Path) -> Path:
    """Beside the bundle, and not the folder of its calibration, whose questions are others."""
    place = bundle.resolve()
    return place.with_name(f"{place.name}.check")


def _read(bundle: Bundle) -> tuple[Path, ProbeSet, Calibration]:
    """What is to be checked, where it lies, and how it was made."""
    folder = require_probes(bundle)
    found = read_probes(bundle, folder)
    if not (folder / CALIBRATION).is_file():
        raise CalibrationError(
            f"{folder} has no {CALIBRATION}: it was not made by semspec calibrate, and nobody knows from what samples"
        )
    if PREDICTOR not in found.graphs or not found.risks:
        raise CalibrationError(
            f"{folder} supports no risk, so there is no threshold to check; calibrate with more questions"
        )
    calibration = read_calibration(folder)
    if calibration.findings.label != LABEL:
        raise CalibrationError(
            f"the risks of {folder} are about the label {calibration.findings.label!r}, and a check is about {LABEL!r}"
        )
    return folder, found, calibration


def _check_unseen(problems: Sequence[Problem], skipped: Sequence[Problem], calibration: Calibration) -> bool:
    """Whether it can be told that no question was calibrated on. Raises CalibrationError where one was."""
    used = set(calibration.questions)
    if not used and skipped and fingerprint(skipped) == calibration.origin.get("questions_sha256"):
        used = {question_sha256(problem) for problem in skipped}
    seen = [problem.id for problem in problems if question_sha256(problem) in used]
    if seen:
        raise CalibrationError(
            f"question {seen[0]!r} was calibrated on, as were {len(seen)} of these {len(problems)}: thresholds are "
            f"checked on others; skip {len(used)} questions of the same file, or give another"
        )
    return bool(used)


def _relation(calibration: Calibration, encoder: str) -> Relation:
    """The calibration's. Raises ConfigError where its encoder is another one than the one given."""
    said = dict(calibration.origin.get("equivalence", {}))
    known = {name: value for name, value in said.items() if name not in ENCODER_KEYS}
    try:
        relation: Relation = read_typed(Relation, {**known, "encoder": encoder}, "equivalence")
    except ConfigError:  # the encoder that was given does not go with it
        raise
    except ValueError as error:
        raise CalibrationError(
            f"{CALIBRATION} does not say by which relation ({error}); calibrate again"
        ) from None
    theirs, ours = said.get("encoder_sha256"), relation.describe().get("encoder_sha256")
    if theirs != ours:
        raise ConfigError(
            f"it was calibrated with encoder {said.get('encoder')} of sha256 {theirs}, and {encoder} has {ours}; give "
            "the same one"
        )
    return relation


def _settings(calibration: Calibration) -> CollectSettings:
    try:
        settings: CollectSettings = read_typed(CollectSettings, calibration.origin.get("samples"), "samples")
    except ValueError as error:
        raise CalibrationError(
            f"{CALIBRATION} does not say how samples were drawn ({error}); calibrate again"
        ) from None
    return settings


def _judge(
    bundle: Bundle,
    collection: Collection,
    relation: Relation,
    found: ProbeSet,
    asked: Path,
    threads: int | None,
) -> tuple[Dataset, Array]:
    """The collection as arrays; and of each of the draft's rows the score, by the path of a bundle that decodes."""
    tokenizer = Tokenizer.open(bundle.tokenizer)
    segmenter = Segmenter(found.boundary, tokenizer.token_bytes, tokenizer.eos_ids)

    def describe(context: Context, sample: Sample) -> SegmentText:
        return segment_text(tokenizer, context.ids, sample.ids, segmenter)

    with open_relation(relation, threads=threads) as opened, Asked(opened, asked) as asking:
        classes = classify(collection.contexts(), asking)
    dataset = build_dataset(
        collection.contexts(),
        classes,
        layers=collection.run.pooled_layers,
        equivalence=relation.name,
        describe=describe,
        label=LABEL,
    )
    with Probes.open(bundle, open_backend(found.backend, threads=1)) as probes:
        scores = [
            probes.score(sample.readings["target"], sample.readings["draft"], describe(context, sample))
            for context, samples in collection.contexts()
            for sample in samples
            if sample.author == "draft"
        ]
    return dataset, np.array(scores, np.float64)


def _segments(dataset: Dataset, scores: Array) -> Segments:
    """Drawn ones, which the risks are about."""
    rows, chosen = dataset.draft, np.flatnonzero(dataset.measured)
    return Segments(
        scores=scores[chosen],
        signals={name: values[chosen] for name, values in signal_scores(dataset).items()},
        bad=rows.label[chosen] == 0,
        tokens=rows.length[chosen],
        questions=rows.question[chosen],
    )


def _keep(checked: Checked, work: Path) -> None:
    text = checked.to_json()
    path = work / f"checked-{hashlib.sha256(text.encode('ascii')).hexdigest()[:KEY_LETTERS]}.json"
    try:
        write_once(path, text)
    except OSError as error:
        raise unwritable(path, error) from None


def _hash(said: object) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode("ascii")).hexdigest()[:KEY_LETTERS]
