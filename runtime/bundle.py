"""Bundles on disk: the manifest semspec.json, what it promises about the files, and where each thing lies.

Opening checks the format number, that every file is there with its size, and that nothing leads out of the
folder; hashes are checked on request, since they cost seconds a gigabyte. Nothing in a bundle is executed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from semspec.runtime.contract import GraphSpec
from semspec.runtime.errors import BundleError
from semspec.runtime.external import check_external_data
from semspec.runtime.segments import Boundary
from semspec.runtime.tokenizer import CHAT_TEMPLATE, CONFIG, GENERATION_CONFIG, TOKENIZER
from semspec.runtime.typed import plain, read_typed, shown

__all__ = [
    "FORMAT",
    "MANIFEST",
    "ROLES",
    "Bundle",
    "BundleModel",
    "FileEntry",
    "Manifest",
    "WeightClass",
    "sha256_of",
    "write_manifest",
]

FORMAT = 1
MANIFEST = "semspec.json"
ROLES = ("target", "draft")
TOKENIZER_FILES = (TOKENIZER, CONFIG, GENERATION_CONFIG)
MANIFEST_BYTES = 16 << 20  # a larger one is not ours


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """Size in bytes and sha256 of one file."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightClass:
    """What became of one kind of matrix, over all layers.

    schemes: scheme -> matrices stored so. n_bytes: scales and zero points included. error: root of the mean square
    that rounding adds, relative; of the `outputs` on the ranges' text, or of the `weights` where no ranges were given.
    """

    schemes: Mapping[str, int]
    n_weights: int
    n_bytes: int
    error: float
    error_of: str

    def __post_init__(self) -> None:
        if min(self.n_weights, self.n_bytes) < 1 or not self.schemes:
            raise ValueError("weights must have at least one matrix, one weight and one byte a kind")


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleModel:
    """One model of a bundle.

    name: for people. source: where its weights came from, with their sha256. precision: class of weights ->
    scheme. graphs: name -> the sizes it was built with. quality: the gate's figures, empty where it was off. weights:
    what became of each kind of matrix; empty where it was not counted.
    """

    name: str
    source: Mapping[str, str]
    precision: Mapping[str, str]
    graphs: Mapping[str, GraphSpec]
    quality: Mapping[str, Any] = field(default_factory=dict)
    weights: Mapping[str, WeightClass] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What semspec.json says. files: path inside the bundle -> entry; the manifest itself is not listed."""

    models: Mapping[str, BundleModel]
    boundary: Boundary
    files: Mapping[str, FileEntry]
    origin: Mapping[str, Any]

    def to_json(self) -> str:
        """The text of semspec.json: the same manifest gives the same bytes."""
        content = {"format": FORMAT, **plain(self)}
        return json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


class Bundle:
    """An opened bundle."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest

    @classmethod
    def open(cls, path: Path, *, verify: bool = False) -> Bundle:
        """Read and check a bundle. verify: check every hash as well.

        Raises BundleError: no bundle, unknown format, a file that is missing, of another size or content, or
        that lies outside the folder. Files that the manifest does not list are not looked at; nothing of
        the bundle is ever read from one, but probes, which list themselves (probe_set.py).
        """
        try:
            manifest = _read_manifest(path)
            for name, entry in manifest.files.items():
                _check_file(path, name, entry, verify)
            bundle = cls(path, manifest)
            for role, model in manifest.models.items():
                for graph in model.graphs:
                    bundle._check_data(role, graph)
            if (bundle.tokenizer / CHAT_TEMPLATE).exists():
                bundle._require_listed(f"tokenizer/{CHAT_TEMPLATE}")
        except OSError as error:
            raise BundleError(
                f"{path} cannot be read: {error.strerror} ({shown(str(error.filename))})"
            ) from error
        return bundle

    @property
    def tokenizer(self) -> Path:
        """The folder of tokenizer files."""
        return self.path / "tokenizer"

    def model(self, role: str) -> BundleModel:
        """The target or the draft. Raises BundleError when the bundle has none."""
        if role not in self.manifest.models:
            raise BundleError(f"{self.path} has no {role}; it has {', '.join(self.manifest.models)}")
        return self.manifest.models[role]

    def graph_file(self, role: str, graph: str) -> Path:
        """The graph of one model. Raises BundleError when it was not exported."""
        model = self.model(role)
        if graph not in model.graphs:
            raise BundleError(
                f"{self.path} has no {graph!r} graph of its {role}; it has {', '.join(model.graphs)}: "
                f"export again with --graphs {','.join((*model.graphs, graph))}"
            )
        return self.path / graph_path(role, graph)

    def _check_data(self, role: str, graph: str) -> None:
        for name in check_external_data(self.graph_file(role, graph)):
            self._require_listed(f"{role}/onnx/{name}")

    def _require_listed(self, name: str) -> None:
        """What is read has an entry, so its size and hash are known."""
        if name not in self.manifest.files:
            raise BundleError(
                f"{self.path / MANIFEST} does not list {shown(name)}, which belongs to the bundle; "
                f"export the bundle again"
            )


def graph_path(role: str, graph: str) -> str:
    """Where a graph lies inside a bundle."""
    return f"{role}/onnx/{graph}.onnx"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write semspec.json, the last file of a bundle."""
    # what cannot be written in UTF-8, a file name of other bytes, becomes JSON's own \\u escape
    (folder / MANIFEST).write_bytes(manifest.to_json().encode("utf-8", "backslashreplace"))


def sha256_of(path: Path) -> str:
    """Hex digest of a file, read by blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _read_manifest(path: Path) -> Manifest:
    file = inside(path, MANIFEST)
    if not file.is_file():
        raise BundleError(
            f"{path} is not a bundle: it has no {MANIFEST}; make one with semspec-export --out {path}"
        )
    if file.stat().st_size > MANIFEST_BYTES:
        raise BundleError(f"{file} is larger than {MANIFEST_BYTES} bytes: not a manifest of ours")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{file} is not readable JSON ({error}); export the bundle again") from None
    found = content.pop("format", None) if isinstance(content, dict) else None
    if type(found) is not int or found != FORMAT:
        raise BundleError(
            f"{file} has format {shown(found)}; this semspec reads format {FORMAT}: export the bundle again, "
            f"or install the semspec that wrote it"
        )
    try:
        manifest: Manifest = read_typed(Manifest, content, "manifest")
        _check_manifest(manifest)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{file} is damaged ({error}); export the bundle again") from None
    return manifest


def _check_manifest(manifest: Manifest) -> None:
    """What its types do not say. Raises ValueError."""
    models = manifest.models
    if "target" not in models or set(models) - set(ROLES):
        raise ValueError(
            f"models must be a target and at most a draft, found {shown(', '.join(models) or 'none')}"
        )
    for role, model in models.items():
        if "cpu" not in model.graphs:
            raise ValueError(f"the {role} lacks its graph 'cpu', which every bundle has")
        for name, graph in model.graphs.items():
            if name != graph.graph:
                raise ValueError(f"the {role}'s graph {shown(name)} says that it is {shown(graph.graph)}")
    needed = {graph_path(role, graph) for role, model in models.items() for graph in model.graphs}
    needed |= {f"tokenizer/{name}" for name in TOKENIZER_FILES}
    if missing := sorted(needed - manifest.files.keys()):
        raise ValueError(f"files must list {', '.join(missing)}")


def _check_file(folder: Path, name: str, entry: FileEntry, verify: bool) -> None:
    """One file of the manifest: inside the folder, regular, of the promised size and, on request, content."""
    path = inside(folder, name)
    if not path.is_file():
        raise BundleError(
            f"{path} is missing: {entry.size} bytes expected; copy the whole bundle or export it again"
        )
    size = path.stat().st_size
    if size != entry.size:
        raise BundleError(
            f"{path} has {size} bytes, {entry.size} expected; copy the whole bundle or export it again"
        )
    if verify and (found := sha256_of(path)) != entry.sha256:
        raise BundleError(
            f"{path} was changed: sha256 {found}, expected {shown(entry.sha256)}; export the bundle again"
        )


def inside(folder: Path, name: str) -> Path:
    """The path of `name` in `folder`. Raises BundleError for one that leads out, links included."""
    pure = PurePosixPath(name)
    if (
        pure.is_absolute()
        or not pure.parts
        or ".." in pure.parts
        or ":" in pure.parts[0]
        or any(character == "\\" or character < " " for character in name)
    ):
        raise BundleError(
            f"{folder / MANIFEST} names {shown(name)}, which leads out of the bundle; refuse this bundle"
        )
    path = folder.joinpath(*pure.parts)
    try:
        stays = path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):  # a loop of links, a name that no file can have
        raise BundleError(
            f"{folder / MANIFEST} names {shown(name)}, which cannot be a file of the bundle; refuse this bundle"
        ) from None
    if not stays:
        raise BundleError(f"{path} is a link that leads out of the bundle; refuse this bundle")
    return path
