"""The rules of the house, read from syntax trees: who imports whom, who prints, how long things get."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("models", "runtime", "export", "calibration")  # imports point left only
FILES = sorted(path.relative_to(ROOT) for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))

# A library of the outside world, and the files (or folders) that may name it.
OWNERS: dict[str, tuple[str, ...]] = {
    "cuda": ("runtime/backends/cuda.py",),
    "onnxruntime": ("runtime/backends/ort.py",),
    "tensorrt": ("runtime/backends/trt.py", "export/engines/"),
    "tensorrt_rtx": ("runtime/backends/trt.py", "export/engines/"),
    "torch": ("calibration/",),
    "transformers": ("calibration/",),
}


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse((ROOT / file).read_text(encoding="utf-8"))


def layer_of_module(name: str) -> str:
    """`semspec.export.sources` -> export; `semspec` itself and `semspec.cli` are the runtime's api folder."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LAYERS else "runtime"


def imports(node: ast.AST) -> Iterator[str]:
    """Names of what `node` and all inside it import; `from a import b` counts as `a.b`."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Import):
            yield from (alias.name for alias in inner.names)
        elif isinstance(inner, ast.ImportFrom):
            yield from (f"{'.' * inner.level}{inner.module or ''}.{alias.name}" for alias in inner.names)


def imports_when_loaded(module: ast.Module) -> Iterator[str]:
    """Imports outside functions: what importing the file imports."""
    pending: list[ast.AST] = [module]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imports(node)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            pending.extend(ast.iter_child_nodes(node))


def test_files_are_found() -> None:
    """An empty list would make every rule below hold."""
    assert {file.parts[0] for file in FILES} == set(LAYERS)


@pytest.mark.parametrize("file", FILES, ids=str)
def test_imports_are_absolute_and_point_left(file: Path) -> None:
    """models <- runtime <- export <- calibration. A cli.py composes: any layer, but inside functions only."""
    module = tree(file)
    names = list(imports_when_loaded(module) if file.name == "cli.py" else imports(module))
    assert not [name for name in names if name.startswith(".")], "imports are absolute: semspec.x"
    right = LAYERS[LAYERS.index(file.parts[0]) + 1 :]
    ours = [name for name in names if name.split(".")[0] == "semspec"]
    assert not [name for name in ours if layer_of_module(name) in right]


@pytest.mark.parametrize("file", FILES, ids=str)
def test_outside_libraries_are_named_by_their_owners_only(file: Path) -> None:
    """One file knows an engine; torch and transformers never reach a device."""
    roots = {name.split(".")[0] for name in imports(tree(file))}
    strangers = [
        library
        for library, owners in OWNERS.items()
        if library in roots and not any(file.as_posix().startswith(owner) for owner in owners)
    ]
    assert not strangers


@pytest.mark.parametrize("file", [file for file in FILES if file.name != "cli.py"], ids=str)
def test_only_cli_files_print(file: Path) -> None:
    """A library that prints cannot be embedded: `print`, click.echo, rich and sys.stdout belong to cli.py."""
    forbidden = {"print", "click.echo", "click.secho", "sys.stdout.write", "rich.print", "Console"}
    called = {ast.unparse(node.func) for node in ast.walk(tree(file)) if isinstance(node, ast.Call)}
    assert not called & forbidden
    assert not {name for name in imports(tree(file)) if name.split(".")[0] in ("click", "rich")}


@pytest.mark.parametrize("file", FILES, ids=str)
def test_files_and_functions_stay_short(file: Path) -> None:
    """At most 400 lines a file and 60 a function: what does not fit in a head is split."""
    lines = (ROOT / file).read_text(encoding="utf-8").count("\n")
    long = {
        node.name: (node.end_lineno or 0) - node.lineno + 1
        for node in ast.walk(tree(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > 60
    }
    assert lines <= 400 and not long


@pytest.mark.parametrize("file", FILES, ids=str)
def test_every_module_says_what_it_is_and_lists_its_names(file: Path) -> None:
    """The first line of a file is its reason to be; `__all__` is what others may use (sorted by ruff)."""
    module = tree(file)
    targets = {ast.unparse(node.targets[0]) for node in module.body if isinstance(node, ast.Assign)}
    assert ast.get_docstring(module)
    assert "__all__" in targets or file.name == "__init__.py"
