"""Recipes: known pairs and single models, each one TOML file in models/recipes/.

A recipe names where the models come from (with hashes), in which precisions they are exported and where a
segment of theirs ends. This file reads and checks recipes; it fetches nothing (sources.py does).
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias, TypeVar

from semspec.export.quantize import BLOCK_SIZES, SCHEMES
from semspec.runtime.errors import ConfigError, SourceError
from semspec.runtime.segments import Boundary

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "HubSource",
    "PrecisionNames",
    "Recipe",
    "RecipeModel",
    "WheelPart",
    "WheelsSource",
    "load_recipe",
    "recipe_names",
]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9][\w./-]*", re.ASCII)
_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(\{nn?\})?", re.ASCII)
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.!+]*", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_FILE = re.compile(r"[\w][\w .+-]*", re.ASCII)

_TOML_TYPES = {"str": str, "str | None": str, "int": int}  # by annotation; an int is not a bool here

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionNames:
    """The precisions of layers, head and embedding by name; packing.Precision.choose makes schemes of them.

    block_size: weights that share a scale in the layers.
    """

    layers: str
    head: str
    embedding: str
    block_size: int

    def __post_init__(self) -> None:
        for field in ("layers", "head", "embedding"):
            _one_of(field, getattr(self, field), SCHEMES)
        _one_of("block_size", self.block_size, BLOCK_SIZES)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSource:
    """A repository `org/name` on a model hub at a revision: its safetensors, or its one GGUF `file`."""

    id: str
    revision: str = "main"
    file: str | None = None

    def __post_init__(self) -> None:
        _matches("id", self.id, _HUB_ID, "org/name")
        _matches("revision", self.revision, _REVISION, "a branch, tag or commit")
        if ".." in self.id or ".." in self.revision:
            raise SourceError(f"a hub id and revision have no '..', got {self.id}@{self.revision}")
        if self.file is not None:
            _inside("file", self.file)
            if not self.file.endswith(".gguf"):
                raise SourceError(f"only a .gguf file can be named in a hub repository, got {self.file!r}")

    def __str__(self) -> str:
        return f"{self.id}{f'/{self.file}' if self.file else ''}@{self.revision}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelPart:
    """One data wheel: `package==version`, and the member in it that holds the bytes."""

    package: str
    version: str
    member: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelsSource:
    """A file cut into `parts` data wheels on a Python package index, in join order 1..parts.

    `{n}` (1, 2, .. 10) and `{nn}` (01, 02, .. 10) in `package` and `member` are the number of the part.
    size: bytes of the joined file; sha256: of the joined file.
    """

    package: str
    version: str
    parts: int
    member: str
    file: str
    size: int
    sha256: str

    def __post_init__(self) -> None:
        _matches("package", self.package, _PACKAGE, "a package name, {n} or {nn} at its end")
        _matches("version", self.version, _VERSION, "an exact version")
        _matches("file", self.file, _FILE, "a file name without a path")
        _matches("sha256", self.sha256, _SHA256, "64 lower-case hex digits")
        _inside("member", self.member)
        if self.parts < 1 or self.size < 1:
            raise SourceError(f"parts and size must be at least 1, got {self.parts} and {self.size}")
        if self.parts > 1 and "{n" not in self.package:
            raise SourceError(f"package {self.package!r} needs {{n}} or {{nn}}: there are {self.parts} parts")

    def __str__(self) -> str:
        return f"{self.file} ({self.package}=={self.version}, {self.parts} part{'s' * (self.parts > 1)})"

    def part(self, number: int) -> WheelPart:
        """The wheel of part 1..parts."""
        package, member = (
            text.replace("{nn}", f"{number:02d}").replace("{n}", str(number))
            for text in (self.package, self.member)
        )
        return WheelPart(package=package, version=self.version, member=member)


ModelSource: TypeAlias = "HubSource | WheelsSource"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeModel:
    """One model of a recipe; `sources` in order of preference, at most one of a kind."""

    name: str
    licence: str
    precision: PrecisionNames
    sources: tuple[ModelSource, ...]

    def __post_init__(self) -> None:
        kinds = [type(source) for source in self.sources]
        if not kinds or len(set(kinds)) != len(kinds):
            raise SourceError(f"{self.name}: needs one or two sources of different kinds, got {len(kinds)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A target, or a target with a draft that fits it. `note` is what the user must know ("not run")."""

    name: str
    title: str
    boundary: Boundary
    target: RecipeModel
    draft: RecipeModel | None = None
    note: str = ""


def recipe_names() -> list[str]:
    """The names that load_recipe knows, sorted."""
    files = resources.files("semspec.models").joinpath("recipes").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def load_recipe(name: str) -> Recipe:
    """Read the recipe of that name, or the file if `name` ends in .toml.

    Raises SourceError for an unknown name (listing the known), TOML that cannot be read, a missing or unknown
    key and a value out of range.
    """
    if name.endswith(".toml"):
        try:
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SourceError(f"recipe file {name} cannot be read: {error}") from error
        return _parse(Path(name).stem, text)
    known = recipe_names()
    if name not in known:
        raise SourceError(f"unknown recipe {name!r}; known: {', '.join(known)}; or the path of a .toml file")
    file = resources.files("semspec.models").joinpath("recipes", f"{name}.toml")
    return _parse(name, file.read_text(encoding="utf-8"))


def _parse(name: str, text: str) -> Recipe:
    try:
        table = tomllib.loads(text)
        if "boundary" in table:
            table["boundary"] = _record(Boundary, "boundary", _with_ids(table["boundary"]))
        for role in ("target", "draft"):
            if role in table:
                table[role] = _model(role, table[role])
        if "name" in table:
            raise SourceError("the name of a recipe is the name of its file, not a key")
        return _record(Recipe, "top level", {"name": name, **table})
    except tomllib.TOMLDecodeError as error:
        raise SourceError(f"recipe {name}: not valid TOML: {error}") from error
    except (SourceError, ConfigError) as error:
        raise SourceError(f"recipe {name}: {error}") from error


def _with_ids(table: object) -> Mapping[str, Any]:
    """A boundary's ids, a list in TOML, as the tuple they are."""
    fields = dict(_table("boundary", table))
    if "ids" in fields:
        ids = fields["ids"]
        if not isinstance(ids, list) or any(type(token) is not int for token in ids):
            raise SourceError(f"boundary: ids must be a list of token ids, got {ids!r}")
        fields["ids"] = tuple(ids)
    return fields


def _model(role: str, table: object) -> RecipeModel:
    fields = dict(_table(role, table))
    if "precision" in fields:
        fields["precision"] = _record(PrecisionNames, f"{role}.precision", fields["precision"])
    if not isinstance(fields.get("sources"), list):
        raise SourceError(f"[[{role}.sources]] is missing: a list of tables of kind hub or wheels")
    fields["sources"] = tuple(_source(f"{role}.sources", item) for item in fields["sources"])
    return _record(RecipeModel, role, fields)


def _source(where: str, table: object) -> ModelSource:
    fields = dict(_table(where, table))
    kind = fields.pop("kind", None)
    if kind == "hub":
        return _record(HubSource, where, fields)
    if kind == "wheels":
        return _record(WheelsSource, where, fields)
    raise SourceError(f"{where}: kind must be hub or wheels, got {kind!r}")


def _record(cls: type[T], where: str, table: object) -> T:
    """Make the record: every key known, none missing, each of its type; nested records pass through."""
    values = _table(where, table)
    known = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if unknown := sorted(set(values) - set(known)):
        raise SourceError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(known)}")
    for key, field in known.items():
        if key not in values:
            if field.default is dataclasses.MISSING:
                raise SourceError(f"{where}: key {key!r} is missing")
            continue
        wanted = _TOML_TYPES.get(str(field.type))
        if wanted and type(values[key]) is not wanted:
            raise SourceError(f"{where}: {key} must be of type {wanted.__name__}, got {values[key]!r}")
    return cls(**values)


def _table(where: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise SourceError(f"{where} must be a table, got {value!r}")
    return value


def _one_of(field: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise SourceError(f"{field} must be one of {', '.join(map(str, allowed))}, got {value!r}")


def _matches(field: str, value: str, pattern: re.Pattern[str], meaning: str) -> None:
    if not pattern.fullmatch(value):
        raise SourceError(f"{field} must be {meaning}, got {value!r}")


def _inside(field: str, path: str) -> None:
    """A relative POSIX path that stays where it starts."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\\" in path or "\0" in path:
        raise SourceError(f"{field} must be a relative path without '..', got {path!r}")
