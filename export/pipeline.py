"""The story of an export, top to bottom: checkpoints in, one verified bundle out, or nothing.

It knows the order of things; how each is done is told in the file it is named after.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import numpy as np

from semspec.export.checkpoint import Checkpoint, expected_tensors, open_checkpoint
from semspec.export.dialects.ort import build_ort_graph, check_model
from semspec.export.packing import Moments, PackedWeights, Schemes, no_moments
from semspec.export.pairing import write_tokenizers
from semspec.export.ranges import Ranges, match_ranges
from semspec.export.scaling import FoldedWeights, choose_folding, folded_moments
from semspec.export.staging import require_space, staged
from semspec.export.tying import SAME_MATRIX, SharedHead, head_difference
from semspec.export.verify import LEVELS, Quality, check_fp16, verify_graph
from semspec.export.vocabulary import copy_licence
from semspec.export.writer import WeightFile
from semspec.models.decoder import EMBEDDING, HEAD
from semspec.models.ops import Weights
from semspec.models.spec import ModelSpec
from semspec.runtime.backends import open_backend
from semspec.runtime.bundle import BundleModel, FileEntry, Manifest, sha256_of, write_manifest
from semspec.runtime.contract import GraphSpec
from semspec.runtime.errors import BundleError, ConfigError, SourceError
from semspec.runtime.model import CachedModel
from semspec.runtime.records import Floats, Progress
from semspec.runtime.segments import Boundary
from semspec.runtime.tokenizer import Tokenizer

__all__ = ["ExportReport", "ExportSettings", "ModelReport", "ModelRequest", "export_pair"]

logger = logging.getLogger(__name__)

GRAPHS = ("cpu", "cuda")
ACTIVATIONS = {"cpu": "float32", "cuda": "float16"}
DEFAULT_CONTEXT = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """One model to export. path: a folder of safetensors or a GGUF file. source: what the user called it."""

    path: Path
    name: str
    source: str
    schemes: Schemes
    licence: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSettings:
    """What applies to both models. Raises ConfigError for unknown graphs or levels.

    graphs: `cpu` always, `cuda` on request. max_context: tokens a model can remember; None: 8192, or what the
    model was trained for if that is less. hidden_layers: states to return, negative counts from the last.
    pooled_layers: states to pool; None: 0.7 of the depth and the last. ranges: files of `semspec calibrate --ranges`,
    each used for the model it was made from. verify: `quick`, `full` or `off`.
    """

    graphs: tuple[str, ...] = ("cpu",)
    max_context: int | None = None
    hidden_layers: tuple[int, ...] = ()
    pooled_layers: tuple[int, ...] | None = None
    boundary: Boundary = field(default_factory=Boundary)
    ranges: tuple[Path, ...] = ()
    verify: str = "quick"

    def __post_init__(self) -> None:
        unknown = [graph for graph in self.graphs if graph not in GRAPHS]
        if unknown or "cpu" not in self.graphs or len(set(self.graphs)) != len(self.graphs):
            raise ConfigError(f"graphs must be cpu, or cpu,cuda; got {','.join(self.graphs) or 'none'}")
        if self.verify not in LEVELS:
            raise ConfigError(f"verify must be one of {', '.join(LEVELS)}, got {self.verify!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport:
    """What exporting one model gave and took."""

    name: str
    weights_bytes: int
    export_s: float
    verify_s: float
    quality: Quality | None


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
        role: _plan(checkpoints[role], request, ranges.get(role), settings)
        for role, request in requests.items()
    }
    with staged(out, force=force) as folder:
        require_space(out, sum(plan.n_bytes for plan in plans.values()))
        ids = _gate_ids(write_tokenizers(folder, checkpoints), plans)
        reports = {}
        for role, plan in plans.items():
            reports[role] = _export_model(folder / role, role, plan, ids, settings, on_progress)
        manifest = Manifest(
            models={role: _entry(requests[role], plans[role], reports[role]) for role in plans},
            boundary=settings.boundary,
            files=_list_files(folder, on_progress),
            origin=_origin(requests),
        )
        write_manifest(folder, manifest)
    return ExportReport(path=out, models=reports)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """One model, ready to be written: its weights as they will be stored, and the graphs to build."""

    name: str
    checkpoint: Checkpoint
    spec: ModelSpec
    weights: Weights
    ranges: Ranges | None
    schemes: Schemes
    graphs: Mapping[str, GraphSpec]
    n_bytes: int


def _plan(
    checkpoint: Checkpoint, request: ModelRequest, ranges: Ranges | None, settings: ExportSettings
) -> _Plan:
    spec: ModelSpec = checkpoint.spec
    weights: Weights = checkpoint
    schemes = request.schemes.informed(ranges is not None)
    check_model(spec, schemes)
    rounds = schemes.head.block_size > 0  # fp32 promises the checkpoint's own numbers, both of them
    if not spec.tied and rounds and schemes.head == schemes.embedding:
        difference = head_difference(checkpoint)
        if difference < SAME_MATRIX:
            logger.info("%s: head and embedding differ by %.3f and are stored once", request.name, difference)
            spec, weights = SharedHead.spec(spec), SharedHead(checkpoint)
    if spec.tied:
        schemes.check_tied()
    graphs = {graph: _graph_spec(spec, graph, settings) for graph in settings.graphs}
    return _Plan(
        name=request.name,
        checkpoint=checkpoint,
        spec=spec,
        weights=weights,
        ranges=ranges,
        schemes=schemes,
        graphs=graphs,
        n_bytes=_estimate_bytes(spec, schemes, settings.graphs),
    )


def _graph_spec(spec: ModelSpec, graph: str, settings: ExportSettings) -> GraphSpec:
    context = settings.max_context
    if context is None:
        context = min(DEFAULT_CONTEXT, spec.max_positions)
    if not 2 <= context <= spec.max_positions:
        raise ConfigError(
            f"max context must be between 2 and {spec.max_positions}, the positions this model was trained for, "
            f"got {context}"
        )
    pooled = settings.pooled_layers
    return GraphSpec(
        graph=graph,
        n_layers=spec.n_layers,
        n_kv_heads=spec.n_kv_heads,
        head_size=spec.head_size,
        width=spec.width,
        vocab_size=spec.vocab_size,
        max_context=context,
        pooled_layers=spec.default_pooled_layers()
        if pooled is None
        else _layers(spec, pooled, "probe layers"),
        hidden_layers=_layers(spec, settings.hidden_layers, "hidden layers"),
        activation=ACTIVATIONS[graph],
        cache=ACTIVATIONS[graph],
    )


def _layers(spec: ModelSpec, asked: tuple[int, ...], what: str) -> tuple[int, ...]:
    """State indices 0..L, ascending; negative ones count from L. Raises ConfigError listing the valid range."""
    last = spec.n_layers
    found = [index + last + 1 if index < 0 else index for index in asked]
    if any(not 0 <= index <= last for index in found) or len(set(found)) != len(found):
        raise ConfigError(
            f"{what} must be different state indices in 0..{last} (0 the embedding, {last} after the final norm) "
            f"or -{last + 1}..-1, got {', '.join(map(str, asked))}"
        )
    return tuple(sorted(found))


def _export_model(
    folder: Path,
    role: str,
    plan: _Plan,
    ids: list[int],
    settings: ExportSettings,
    on_progress: Progress | None,
) -> ModelReport:
    """Config, licence, graphs and shared weights of one model; then the gate."""
    started = time.perf_counter()
    onnx_folder = folder / "onnx"
    onnx_folder.mkdir(parents=True)
    config = {**plan.checkpoint.config, "tie_word_embeddings": plan.spec.tied}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    copy_licence(plan.checkpoint.path, folder)
    weights: Weights = _Counted(plan.weights, plan.spec, f"{role}: weights", on_progress)
    moments: Moments = no_moments
    if plan.ranges is not None:
        on_linear = _staged(f"{role}: scales", on_progress)
        folding = choose_folding(plan.spec, plan.weights, plan.ranges, plan.schemes.layers, on_linear)
        weights, moments = FoldedWeights(weights, folding), folded_moments(plan.spec, plan.ranges, folding)
    with WeightFile(onnx_folder / "weights.data") as file:
        dtypes = tuple(ACTIVATIONS[graph] for graph in settings.graphs)
        packed = PackedWeights(weights, file, plan.schemes.quantizer, dtypes, moments)
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
    )


def _verify(
    folder: Path,
    role: str,
    plan: _Plan,
    ids: list[int],
    settings: ExportSettings,
    on_progress: Progress | None,
) -> Quality:
    on_row = _staged(f"{role}: verify", on_progress)
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


def _staged(stage: str, on_progress: Progress | None) -> Callable[[int, int], None]:
    """Progress of one stage."""

    def on_step(done: int, total: int) -> None:
        if on_progress:
            on_progress(stage, done, total)

    return on_step


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


def _estimate_bytes(spec: ModelSpec, schemes: Schemes, graphs: tuple[str, ...]) -> int:
    """Size of the stored weights, close enough to refuse a disk that is too small."""
    shapes = expected_tensors(spec)
    outer = {EMBEDDING: schemes.embedding, HEAD: schemes.head}
    plain = sum(8 * np.dtype(ACTIVATIONS[graph]).itemsize for graph in graphs)  # stored in each graph's dtype
    bits = 0.0
    for name, shape in shapes.items():
        scheme = outer.get(name, schemes.layers)
        bits += float(np.prod(shape)) * (scheme.bits_per_weight if scheme.block_size else plain)
    return int(bits / 8 * 1.02) + (64 << 20)


def _entry(request: ModelRequest, plan: _Plan, report: ModelReport) -> BundleModel:
    return BundleModel(
        name=request.name,
        source={"from": request.source, "sha256": plan.checkpoint.sha256(), "licence": request.licence},
        precision=plan.schemes.describe(tied=plan.spec.tied),
        graphs=plan.graphs,
        quality={} if report.quality is None else report.quality.to_dict(),
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


def _gate_ids(tokenizer: Tokenizer, plans: Mapping[str, _Plan]) -> list[int]:
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
