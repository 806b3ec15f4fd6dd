"""The story of an export, top to bottom: checkpoints in, one verified bundle out, or nothing.

It knows the order of things; how each is done is told in the file it is named after.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import numpy as np

from semspec.export.boundary import fit_boundary
from semspec.export.checkpoint import expected_tensors, open_checkpoint
from semspec.export.dialects.ort import build_ort_graph
from semspec.export.engine_graphs import verify_engine, write_engine_graphs
from semspec.export.engine_plan import ENGINE_GRAPHS
from semspec.export.packing import PackedWeights
from semspec.export.pairing import write_tokenizers
from semspec.export.plan import ACTIVATIONS, ExportSettings, ModelRequest, Plan, fit_plan, make_plan, stage
from semspec.export.probe_import import match_probes, write_probes
from semspec.export.ranges import match_ranges
from semspec.export.staging import require_space, staged
from semspec.export.tally import weight_classes
from semspec.export.verify import Quality, check_fp16, gate_text, verify_graph
from semspec.export.vocabulary import copy_licence
from semspec.export.writer import WeightFile
from semspec.models.ops import Weights
from semspec.models.reference import run_reference
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
    """What exporting one model gave and took. engine_bytes: of the TensorRT graphs' weights, 0 without such graphs;
    engine_quality: graph -> the gate's figures of each."""

    name: str
    weights_bytes: int
    engine_bytes: int
    export_s: float
    verify_s: float
    quality: Quality | None
    engine_quality: Mapping[str, Quality]
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

    The manifest does not list the requests' probes, which list themselves: they are replaced by calibration.

    Raises SourceError (checkpoint, probe), PairError (vocabularies), BundleError (output folder, space, a graph the
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
    probes = match_probes(requests, plans)
    with staged(out, force=force) as folder:
        require_space(out, sum(plan.n_bytes for plan in plans.values()))
        tokenizer = write_tokenizers(folder, checkpoints)
        ids = _gate_ids(tokenizer, plans)
        boundary = fit_boundary(settings.boundary, settings.segment_cap, tokenizer)
        reports = {}
        for role, plan in plans.items():
            started = time.perf_counter()
            plans[role] = fit_plan(plan, role, on_progress)
            reports[role] = _export_model(
                folder / role, role, plans[role], ids, settings, on_progress, started
            )
        manifest = Manifest(
            models={role: _entry(requests[role], plans[role], reports[role]) for role in plans},
            boundary=boundary,
            files=_list_files(folder, on_progress),
            origin=_origin(requests),
        )
        if probes:
            write_probes(folder, probes, manifest, verify=settings.verify != "off")
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
        dtypes = tuple(ACTIVATIONS[graph] for graph in plan.graphs if graph in ACTIVATIONS)
        packed = PackedWeights(weights, file, plan.schemes.quantizer, dtypes, plan.moments, plan.steps)
        for name, graph in plan.graphs.items():
            if name in ACTIVATIONS:
                builder = build_ort_graph(plan.spec, graph, plan.schemes, packed)
                builder.save(onnx_folder / f"{name}.onnx", _about(name))
    engine_bytes = 0
    if plan.engine is not None:
        counted = _Counted(plan.engine.weights, plan.spec, f"{role}: engine weights", on_progress)
        engine = replace(plan.engine, weights=counted)
        engine_bytes = write_engine_graphs(onnx_folder, plan.spec, engine, plan.graphs, _about)
    exported = time.perf_counter()
    quality: dict[str, Quality] = {}
    if settings.verify != "off":
        quality = _verify(onnx_folder, role, plan, ids, settings, on_progress)
    return ModelReport(
        name=plan.name,
        weights_bytes=(onnx_folder / "weights.data").stat().st_size,
        engine_bytes=engine_bytes,
        export_s=exported - started,
        verify_s=time.perf_counter() - exported,
        quality=quality.pop("cpu", None),
        engine_quality=quality,
        weights=weight_classes(plan.spec, packed.roundings),
    )


def _verify(
    folder: Path,
    role: str,
    plan: Plan,
    ids: list[int],
    settings: ExportSettings,
    on_progress: Progress | None,
) -> dict[str, Quality]:
    """Graph -> what the gate found, for `cpu` and the TensorRT graphs; `cuda` is judged by its kin."""
    cpu, engines = plan.graphs["cpu"], [name for name in ENGINE_GRAPHS if name in plan.graphs]
    spec, weights = plan.checkpoint.spec, plan.checkpoint
    level = settings.verify
    text = gate_text(ids, level, cpu.max_context)
    found: dict[str, Quality] = {}
    try:
        reference = run_reference(spec, weights, text, keep_states=cpu.pooled_layers)
        with CachedModel(open_backend("cpu"), folder / "cpu.onnx", cpu) as model:
            on_row = stage(f"{role}: verify", on_progress)
            found["cpu"] = verify_graph(
                model, spec, weights, ids, plan.schemes, level=level, on_row=on_row, reference=reference
            )
        if "cuda" in plan.graphs:
            check_fp16(found["cpu"].state_peak, "leave cuda out of --graphs: it has no other")
        for done, name in enumerate(engines, 1):
            assert plan.engine is not None
            found[name] = verify_engine(
                folder / f"{name}.onnx", plan.spec, plan.engine, plan.graphs[name], reference, text, level
            )
            stage(f"{role}: verify {name}", on_progress)(done, len(engines))
    except BundleError as error:
        raise BundleError(f"{role} {plan.name}: {error}") from None
    return found


def _about(graph: str) -> dict[str, str]:
    """What a graph file says of itself."""
    return {"graph": graph, "semspec": metadata.version("semspec")}


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
    precision = plan.schemes.describe(tied=plan.spec.tied)
    if plan.engine is not None:
        precision |= plan.engine.describe(plan.graphs)
    quality = {} if report.quality is None else report.quality.to_dict()
    quality |= {graph: found.to_dict() for graph, found in report.engine_quality.items()}
    return BundleModel(
        name=request.name,
        source={"from": request.source, "sha256": plan.checkpoint.sha256(), "licence": request.licence},
        precision=precision,
        graphs=plan.graphs,
        quality=quality,
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
