"""Calibrate: from questions to probes in a bundle, each step from what the one before has left on the disk.

    samples/          collect        contexts, samples of both models, and what both make of them
    outcomes/         roll out       for the label `outcome`: does the answer stay right?
    asked-<k>.jsonl   compare        what the relation between texts said
    learned-<k>/      learn          graphs, checked; predictor.json, calibration.json; <k> names all it depends on
    BUNDLE/probes/<n>/               the same with report.html

A run that was killed does no finished step again, and ends with the same bytes. It knows the order of the steps and
where their results lie; each step has a file of its own.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from semspec import calibration, export, models, runtime
from semspec.calibration import encoders, equivalence, equivalence_neural, numerals
from semspec.calibration.bench.data import question_sha256
from semspec.calibration.bench.machine import describe_machine
from semspec.calibration.bench.records import Problem
from semspec.calibration.collect import collect
from semspec.calibration.collection import Collection, CollectSettings, join_collections, open_collection
from semspec.calibration.contexts import SLOTS
from semspec.calibration.dataset import LABELS, Dataset, build_dataset, classify
from semspec.calibration.findings import Findings
from semspec.calibration.learn import LearnSettings, learn
from semspec.calibration.networks import SIZES
from semspec.calibration.outcomes import Outcomes
from semspec.calibration.own_code import code_sha256
from semspec.calibration.probe_folder import install, read_calibration, save_learned
from semspec.calibration.relations import NEURAL, Asked, Relation, open_relation
from semspec.calibration.rollouts import check_answers, find_outcomes
from semspec.calibration.run_folder import WorkFolder
from semspec.export.staging import staged
from semspec.runtime.bundle import Bundle
from semspec.runtime.errors import CalibrationError, ConfigError
from semspec.runtime.features import segment_text
from semspec.runtime.records import Progress
from semspec.runtime.segments import Boundary, Segmenter
from semspec.runtime.tokenizer import Tokenizer
from semspec.runtime.typed import plain

__all__ = ["CalibrateSettings", "Calibrated", "calibrate", "collect_shard", "default_work", "join_work"]

SAMPLES, OUTCOMES = "samples", "outcomes"
OURS = re.compile(rf"{SAMPLES}|{OUTCOMES}|asked-\w+\.jsonl|\.?learned-\w+(\.partial)?|\.{SAMPLES}\.partial")
KEY_LETTERS = 12
CODE = code_sha256(models, runtime, export, calibration)
RELATIONS_CODE = code_sha256(encoders, equivalence, equivalence_neural, numerals)
STRANGERS = (
    "math-verify",
    "onnxruntime-genai",
    "llama-cpp-python",
)  # of the machine's packages: not used here
COLLECTING_SHARE = 1 / 3  # of the budget, where outcomes are to be found with the rest


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateSettings:
    """How a bundle is calibrated. boundary: None for the bundle's. label: one of dataset.LABELS. answer_tokens: that a
    roll-out may write, for the label `outcome`. source: where the questions are from, for people. Raises ConfigError.
    """

    collecting: CollectSettings = field(default_factory=CollectSettings)
    boundary: Boundary | None = None
    relation: Relation = field(default_factory=Relation)
    label: str = "cross"
    answer_tokens: int = 400
    learning: LearnSettings = field(default_factory=LearnSettings)
    source: str = ""

    def __post_init__(self) -> None:
        if self.label not in LABELS:
            raise ConfigError(f"label must be one of {', '.join(LABELS)}, got {self.label!r}")
        if self.label == "outcome" and self.collecting.n_contexts < len(SLOTS):
            raise ConfigError(
                f"outcomes need all {len(SLOTS)} contexts of a question, got {self.collecting.n_contexts}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """folder: with predictor.json and report.html. is_new: False where the bundle had the very same already. missing:
    contexts that were not collected in time; missing_outcomes: those that were, and not gone on from in time."""

    folder: Path
    findings: Findings
    is_new: bool
    missing: int
    missing_outcomes: int = 0


def calibrate(
    bundle: Path,
    problems: Sequence[Problem],
    work: Path,
    settings: CalibrateSettings | None = None,
    *,
    out: Path | None = None,
    budget: float | None = None,
    backend: str = "cpu",
    threads: int | None = None,
    on_progress: Progress | None = None,
) -> Calibrated:
    """Calibrate `bundle` from questions, or go on where an earlier call with the same arguments stopped.

    work: folder of the steps' results. out: a new folder for the probes instead of one in the bundle; must be given for
    another boundary than the bundle's, whose probes the bundle could not use. budget: minutes for collecting, and for
    roll-outs; learning comes after. Not guaranteed: the same bits with other threads.

    Raises CalibrationError, ConfigError, BundleError, BackendError, SourceError (an encoder) as the steps do, before
    the first context where they can be foreseen; the bundle is as it was then.
    """
    settings, started = settings or CalibrateSettings(), time.monotonic()
    opened = _check(bundle, settings, out)
    _check_number(problems, settings)
    relation = settings.relation.describe()
    with WorkFolder(work, OURS):
        collection = collect(
            bundle,
            problems,
            work / SAMPLES,
            settings.collecting,
            boundary=settings.boundary,
            budget=_share(budget, settings),
            backend=backend,
            threads=threads,
            on_progress=on_progress,
        )
        left = None if budget is None else max(budget - (time.monotonic() - started) / 60, 1e-9)
        rolled = _roll_out(bundle, collection, work / OUTCOMES, settings, left, threads, on_progress)
        outcomes = None if rolled is None else rolled.labels()
        kinds = {one.id: one.kind for one in problems if one.kind is not None}
        key = _key(collection, relation, outcomes, kinds, settings)
        learned = work / f"learned-{key}"
        if not learned.exists():
            dataset = _read(
                opened, collection, relation, outcomes, kinds, settings, work, threads, on_progress
            )
            made = learn(dataset, settings.learning, on_progress)
            origin = _origin(opened, collection, relation, rolled, kinds, settings)
            with staged(learned) as folder:
                used = [question_sha256(one) for one in problems if one.id in dataset.questions]
                save_learned(folder, made, dataset, collection.run, origin, used)
        folder, is_new = install(learned, opened, out)
        return Calibrated(
            folder=folder,
            findings=read_calibration(learned).findings,
            is_new=is_new,
            missing=len(collection.missing),
            missing_outcomes=0 if rolled is None else len(rolled.missing),
        )


def collect_shard(
    bundle: Path,
    problems: Sequence[Problem],
    work: Path,
    settings: CalibrateSettings,
    *,
    shard: tuple[int, int],
    budget: float | None = None,
    backend: str = "cpu",
    threads: int | None = None,
    on_progress: Progress | None = None,
) -> Collection:
    """Only collect, and only the i-th of n parts of the questions; join_work puts the parts together. Raises as
    calibrate."""
    Bundle.open(bundle)
    with WorkFolder(work, OURS):
        return collect(
            bundle,
            problems,
            work / SAMPLES,
            settings.collecting,
            boundary=settings.boundary,
            shard=shard,
            budget=budget,
            backend=backend,
            threads=threads,
            on_progress=on_progress,
        )


def join_work(folders: Sequence[Path], out: Path) -> Collection:
    """Put the shards that were collected in the work folders `folders` together in the new work folder `out`, with
    which calibrate goes on. Raises as join_collections."""
    for folder in folders:
        open_collection(folder / SAMPLES)
    if os.path.lexists(out):
        raise ConfigError(f"{out} exists; give a folder that does not")
    try:
        return join_collections([folder / SAMPLES for folder in folders], out / SAMPLES)
    except BaseException:
        if out.is_dir() and not any(out.iterdir()):
            out.rmdir()
        raise


def default_work(bundle: Path) -> Path:
    """Beside the bundle: what is collected outlives it, and is not copied with it."""
    place = bundle.resolve()
    return place.with_name(f"{place.name}.calibration")


def _check(bundle: Path, settings: CalibrateSettings, out: Path | None) -> Bundle:
    """What can be refused is refused before hours of collecting."""
    opened = Bundle.open(bundle)
    networks = {*settings.learning.probes, settings.learning.paper_probe} & SIZES.keys()
    neural = settings.relation.name in NEURAL
    needed = ["matplotlib", *(["torch"] if networks or neural else []), *(["optimum"] if neural else [])]
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise CalibrationError(
            f"calibrating needs {missing[0]}; install it with: pip install 'semspec[calibrate]'"
        )
    ours = opened.manifest.boundary
    if out is None and settings.boundary not in (None, ours):
        raise ConfigError(
            f"{bundle} ends segments at {ours}, and could not use probes for {settings.boundary}; export it with that "
            "--boundary, or give --out for a folder of probes to look at"
        )
    if out is not None and os.path.lexists(out):
        raise ConfigError(f"{out} exists; give --out a new folder")
    if out is not None and not out.absolute().parent.is_dir():
        raise ConfigError(f"{out.absolute().parent} is not a folder; make it first, or give another --out")
    if out is None and not os.access(bundle, os.W_OK):
        raise CalibrationError(
            f"{bundle} cannot be written, and probes go there; give --out, or make it writable"
        )
    return opened


def _check_number(problems: Sequence[Problem], settings: CalibrateSettings) -> None:
    """Whether there can be enough questions with labels for the folds (folds.deal_folds)."""
    least = 2 * settings.learning.n_folds
    if 0 < len(problems) < least:
        raise CalibrationError(
            f"{len(problems)} questions are too few to learn from and to measure on: at least {least} are needed, and "
            "150 or more are wise; give more"
        )
    if problems and settings.label == "outcome":
        check_answers(problems, least)


def _roll_out(
    bundle: Path,
    collection: Collection,
    out: Path,
    settings: CalibrateSettings,
    budget: float | None,
    threads: int | None,
    on_progress: Progress | None,
) -> Outcomes | None:
    """For the label `outcome` alone. budget: minutes that are left."""
    if settings.label != "outcome":
        return None
    return find_outcomes(
        bundle,
        collection,
        out,
        max_tokens=settings.answer_tokens,
        budget=budget,
        threads=threads,
        on_progress=on_progress,
    )


def _share(budget: float | None, settings: CalibrateSettings) -> float | None:
    return budget * COLLECTING_SHARE if budget is not None and settings.label == "outcome" else budget


def _read(
    bundle: Bundle,
    collection: Collection,
    relation: Mapping[str, Any],
    outcomes: Mapping[str, Sequence[float]] | None,
    kinds: Mapping[str, str],
    settings: CalibrateSettings,
    work: Path,
    threads: int | None,
    on_progress: Progress | None,
) -> Dataset:
    """The collection as arrays, what the relation says asked or looked up."""
    path = work / f"asked-{_hash([collection.run.fingerprint, relation, RELATIONS_CODE])}.jsonl"
    tokenizer = Tokenizer.open(bundle.tokenizer)
    segmenter = Segmenter(collection.run.boundary, tokenizer.token_bytes, tokenizer.eos_ids)
    with open_relation(settings.relation, threads=threads) as opened, Asked(opened, path) as asked:
        total = sum(1 for _ in collection.run.cells()) - len(collection.missing)
        classes = classify(collection.contexts(), asked, _counter("comparing", total, on_progress))
    return build_dataset(
        collection.contexts(),
        classes,
        layers=collection.run.pooled_layers,
        equivalence=settings.relation.name,
        describe=lambda context, sample: segment_text(tokenizer, context.ids, sample.ids, segmenter),
        label=settings.label,
        outcomes=outcomes,
        kinds=kinds,
    )


def _counter(stage: str, total: int, on_progress: Progress | None) -> Callable[[str], None]:
    done = 0

    def count(_: str) -> None:
        nonlocal done
        done += 1
        if on_progress is not None:
            on_progress(stage, min(done, total), total)

    return count


def _key(
    collection: Collection,
    relation: Mapping[str, Any],
    outcomes: Mapping[str, Sequence[float]] | None,
    kinds: Mapping[str, str],
    settings: CalibrateSettings,
) -> str:
    """Names all that learning depends on, this very code and the version of torch included."""
    said = [
        replace(collection.run, shard=(1, 1)).fingerprint,
        [cell.file for cell in collection.missing],
        relation,
        {context: [str(label) for label in labels] for context, labels in (outcomes or {}).items()},
        kinds,
        settings.label,
        plain(settings.learning),
        settings.source,
        CODE,
        [_version(name) for name in ("semspec", "torch", "numpy")],
    ]
    return _hash(said)


def _version(name: str) -> str:
    """Linear predictors are learned without torch."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def _hash(said: object) -> str:
    text = json.dumps(said, sort_keys=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:KEY_LETTERS]


def _origin(
    bundle: Bundle,
    collection: Collection,
    relation: Mapping[str, Any],
    rolled: Outcomes | None,
    kinds: Mapping[str, str],
    settings: CalibrateSettings,
) -> dict[str, Any]:
    """For people; a check reads `samples` and `equivalence` back. No time and no path: the same run, the same bytes."""
    run = collection.run
    outcomes = {} if rolled is None else {"outcomes": rolled.facts()}
    return {
        "models": {role: model.name for role, model in bundle.manifest.models.items()},
        "precision": {role: dict(model.precision) for role, model in bundle.manifest.models.items()},
        "questions": settings.source or "given",
        "questions_sha256": run.questions_sha256,
        **({"kinds of questions": len(set(kinds.values()))} if kinds else {}),
        "contexts not collected": len(collection.missing),
        "boundary": str(run.boundary),
        "samples": plain(run.settings),
        "pooled_layers": {role: list(layers) for role, layers in run.pooled_layers.items()},
        "equivalence": dict(relation),
        "label": settings.label,
        **outcomes,
        "learning": plain(settings.learning),
        "backend": run.backend,
        "machine": {name: fact for name, fact in describe_machine().items() if name not in STRANGERS},
    }
