"""The installed package is the whole project, offers what it says, and stays light."""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import semspec

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LAYERS = ("models", "runtime", "export", "calibration")
FILES = sorted(path.relative_to(ROOT) for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))


def module_name(file: Path) -> str:
    """runtime/sampling.py -> semspec.runtime.sampling; runtime/api/cli.py -> semspec.cli."""
    parts = ["semspec", *file.with_suffix("").parts]
    if parts[1:3] == ["runtime", "api"]:
        del parts[1:3]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("file", FILES, ids=str)
def test_every_file_is_importable_by_its_installed_name(file: Path) -> None:
    """A sub-package missing from pyproject is silently absent from the wheel; this is what notices."""
    module = importlib.import_module(module_name(file))
    installed = Path(str(module.__file__))
    assert installed.read_bytes() == (ROOT / file).read_bytes(), (
        "installed code is stale: pip install . again"
    )


def test_every_sub_folder_is_named_in_pyproject() -> None:
    """The same guard from the other side: an editable install hides a forgotten line."""
    packages = {module_name(file) for file in FILES if file.name == "__init__.py"}
    assert packages == set(PYPROJECT["tool"]["setuptools"]["packages"])


def test_every_folder_with_code_is_a_package() -> None:
    """A folder without __init__.py is not installed at all."""
    assert not [file for file in FILES if not (ROOT / file).with_name("__init__.py").exists()]


def test_package_data_is_installed() -> None:
    """Recipes and other data are found beside the installed code, not in the checkout."""
    for package, patterns in PYPROJECT["tool"]["setuptools"]["package-data"].items():
        folder = Path(str(importlib.import_module(package).__file__)).parent
        source = ROOT / PYPROJECT["tool"]["setuptools"]["package-dir"][package]
        wanted = {path.relative_to(source) for pattern in patterns for path in source.glob(pattern)}
        assert not [name for name in wanted if not (folder / name).is_file()]


def test_nothing_is_installed_under_a_generic_name() -> None:
    """`export` or `models` at the top of site-packages would collide with anything."""
    files = importlib.metadata.files("semspec") or []
    assert not [file for file in files if file.parts[0] in (*LAYERS, "tests")]


def test_version_is_the_installed_one() -> None:
    """Two version numbers would drift."""
    assert semspec.__version__ == importlib.metadata.version("semspec") == PYPROJECT["project"]["version"]


def test_commands_of_pyproject_can_be_loaded() -> None:
    """A renamed function breaks the installed script and no other test."""
    for target in PYPROJECT["project"]["scripts"].values():
        module, function = target.split(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_public_names_are_listed_and_exist() -> None:
    """`__all__` is the promise: each name exists, none twice, and no public class or function is left out."""
    names = semspec.__all__
    assert len(set(names)) == len(names) and all(hasattr(semspec, name) for name in names)
    offered = {
        name
        for name, value in vars(semspec).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("semspec.")
    }
    assert offered <= set(names)


def loaded_by(code: str) -> set[str]:
    """Top-level names in sys.modules of a fresh interpreter after `code`."""
    probe = f"{code}\nimport sys; print(*{{name.split('.')[0] for name in sys.modules}})"
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_runtime_does_not_load_what_a_device_lacks() -> None:
    """The embedded runtime is numpy and one engine, and the engine is loaded when a bundle is opened."""
    modules = [module_name(file) for file in FILES if file.parts[0] in ("models", "runtime")]
    modules = [name for name in modules if not name.startswith("semspec.runtime.backends.")]
    loaded = loaded_by("\n".join(f"import {name}" for name in modules))
    assert "semspec" in loaded
    assert not loaded & {"torch", "onnx", "transformers", "onnxruntime", "tensorrt", "gguf", "safetensors"}


def test_import_semspec_is_light() -> None:
    """`import semspec` in an application must not pay for commands, templates or engines."""
    assert not loaded_by("import semspec") & {"torch", "onnx", "transformers", "onnxruntime", "click", "rich"}
