"""The story of an export, top to bottom: checkpoints in, one verified bundle out, or nothing.

It knows the order of things; how each is done is told in the file it is named after.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import numpy as np

from semspec.export.checkpoint import expected_tensors, open_checkpoint
from semspec.export.dialects.ort import build_ort_graph
from semspec.export.packing import PackedWeights
from semspec.export.pairing import write_tokenizers
from semspec.export.plan import ACTIVATIONS, ExportSettings, ModelRequest, Plan, fit_plan, make_plan, stage
from semspec.export.ranges import match_ranges
from semspec.export.staging import require_space, staged
from semspec.export.tally import weight_classes
from semspec.export.verify import Quality, check_fp16, verify_graph
from semspec.export.vocabulary import copy_licence
from semspec.export.writer import WeightFile
from semspec.models.ops import Weights
from semspec.models.spec import ModelSpec
from semspec.runtime.backends import open_backend
from semspec.runtime.bundle import (
    BundleModel,
    FileEntry,
    Manifest,
    WeightClass,
    sha256_of,
    write_manifest,
)
from semspec.runtime.errors import BundleError, SourceError
from semspec.runtime.model import CachedModel
from semspec.runtime.records import Floats, Progress
from semspec.runtime.tokenizer import Tokenizer

__all__ = ["ExportReport", "ModelReport", "export_pair"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport:
    """What exporting one model gave and took."""

    name: str
    weights_bytes: int
    export_s: float
    verify_s: float
    quality: Quality | None
    weights: Mapping[str, WeightClass]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """The finished bundle and its models, by role."""

    path: Path
    models: Mapping[str, ModelReport]


def export_pair(
    target: ModelRequest,
    draft: ModelRequest | None,
    out: Path,
    settings: ExportSettings,
    *,
    force: bool = False,
    on_progress: Progress | None = None,
) -> ExportReport:
    """Export a target, and a draft unless None, into the bundle `out`, which appears complete or not at all.

    Raises SourceError (checkpoint), PairError (vocabularies), BundleError (output folder, space, a graph the
    gate refuses), ConfigError (settings that do not fit the model), BackendError (no engine for the gate).
    """
    if settings.verify != "off":
        open_backend("cpu")  # the gate's engine: missed now, not after the work
    requests = {"target": target} if draft is None else {"target": target, "draft": draft}
    checkpoints = {role: open_checkpoint(request.path) for role, request in requests.items()}
    ranges = match_ranges(settings.ranges, checkpoints)
    plans = {
        role: make_plan(checkpoints[role], request, ranges.get(role), settings)
        for role, request in requests.items()
    }
    with staged(out, force=force) as folder:
        require_space(out, sum(plan.n_bytes for plan in plans.values()))
        ids = _gate_ids(write_tokenizers(folder, checkpoints), plans)
        reports = {}
        for role, plan in plans.items():
            started = time.perf_counter()
            plans[role] = fit_plan(plan, role, on_progress)
            reports[role] = _export_model(
                folder / role, role, plans[role], ids, settings, on_progress, started
            )
        manifest = Manifest(
            models={role: _entry(requests[role], plans[role], reports[role]) for role in plans},
            boundary=settings.boundary,
            files=_list_files(folder, on_progress),
            origin=_origin(requests),
        )
        write_manifest(folder, manifest)
    return ExportReport(path=out, models=reports)


def _export_model(
    folder: Path,
    role: str,
    plan: Plan,
    ids: list[int],
    settings: ExportSettings,
    on_progress: Progress | None,
    started: float,
) -> ModelReport:
    """Config, licence, graphs and shared weights of one model; then the gate. started: when its plan was taken up."""
    onnx_folder = folder / "onnx"
    onnx_folder.mkdir(parents=True)
    config = {**plan.checkpoint.config, "tie_word_embeddings": plan.spec.tied}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    copy_licence(plan.checkpoint.path, folder)
    weights = _Counted(plan.weights, plan.spec, f"{role}: weights", on_progress)
    with WeightFile(onnx_folder / "weights.data") as file:
        dtypes = tuple(ACTIVATIONS[graph] for graph in settings.graphs)
        packed = PackedWeights(weights, file, plan.schemes.quantizer, dtypes, plan.moments, plan.steps)
        for name, graph in plan.graphs.items():
            builder = build_ort_graph(plan.spec, graph, plan.schemes, packed)
            builder.save(
                onnx_folder / f"{name}.onnx", {"graph": name, "semspec": metadata.version("semspec")}
            )
    exported = time.perf_counter()
    quality = None
    if settings.verify != "off":
        quality = _verify(onnx_folder, role, plan, ids, settings, on_progress)
    return ModelReport(
        name=plan.name,
        weights_bytes=(onnx_folder / "weights.data").stat().st_size,
        export_s=exported - started,
        verify_s=time.perf_counter() - exported,
        quality=quality,
        weights=weight_classes(plan.spec, packed.roundings),
    )


def _verify(
    folder: Path,
    role: str,
    plan: Plan,
    ids: list[int],
    settings: ExportSettings,
    on_progress: Progress | None,
) -> Quality:
    on_row = stage(f"{role}: verify", on_progress)
    try:
        with CachedModel(open_backend("cpu"), folder / "cpu.onnx", plan.graphs["cpu"]) as model:
            quality = verify_graph(
                model,
                plan.checkpoint.spec,
                plan.checkpoint,
                ids,
                plan.schemes,
                level=settings.verify,
                on_row=on_row,
            )
        if "cuda" in plan.graphs:
            check_fp16(quality.state_peak)
    except BundleError as error:
        raise BundleError(f"{role} {plan.name}: {error}") from None
    return quality


class _Counted:
    """Weights that tell how much of them was read."""

    def __init__(self, weights: Weights, spec: ModelSpec, stage: str, on_progress: Progress | None) -> None:
        self.weights, self.stage, self.on_progress = weights, stage, on_progress
        self.total = sum(int(np.prod(shape)) for shape in expected_tensors(spec).values())
        self.done = 0

    def shape(self, name: str) -> tuple[int, ...]:
        return self.weights.shape(name)

    def read(self, name: str, rows: slice | None = None) -> Floats:
        values = self.weights.read(name, rows)
        self.done += values.size
        if self.on_progress:
            self.on_progress(self.stage, min(self.done, self.total), self.total)
        return values


def _entry(request: ModelRequest, plan: Plan, report: ModelReport) -> BundleModel:
    return BundleModel(
        name=request.name,
        source={"from": request.source, "sha256": plan.checkpoint.sha256(), "licence": request.licence},
        precision=plan.schemes.describe(tied=plan.spec.tied),
        graphs=plan.graphs,
        quality={} if report.quality is None else report.quality.to_dict(),
        weights=report.weights,
    )


def _list_files(folder: Path, on_progress: Progress | None) -> dict[str, FileEntry]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    entries = {}
    for done, path in enumerate(paths, 1):
        entries[path.relative_to(folder).as_posix()] = FileEntry(
            size=path.stat().st_size, sha256=sha256_of(path)
        )
        if on_progress:
            on_progress("checksums", done, len(paths))
    return entries


def _origin(requests: Mapping[str, ModelRequest]) -> dict[str, Any]:
    """What made the bundle. No dates and no paths of the output: the same export gives the same bytes."""
    versions = {name: metadata.version(name) for name in ("semspec", "onnx", "numpy", "tokenizers")}
    return {"versions": versions, "sources": {role: request.source for role, request in requests.items()}}


def _gate_ids(tokenizer: Tokenizer, plans: Mapping[str, Plan]) -> list[int]:
    """The gate's text. Raises SourceError where it has ids that a model has no rows for."""
    text = resources.files("semspec.export").joinpath("gate_text.txt").read_text(encoding="utf-8")
    ids = tokenizer.encode(text)
    for role, plan in plans.items():
        if max(ids) >= plan.spec.vocab_size:
            raise SourceError(
                f"{role} {plan.name}: has {plan.spec.vocab_size} rows of embedding, and the target's tokenizer gives "
                f"id {max(ids)} for plain English: they do not belong together"
            )
    return ids
