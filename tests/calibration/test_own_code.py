"""Which code made a result: the same text gives the same hash, and nothing else does."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from semspec.calibration.own_code import code_sha256


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    folder = tmp_path / "pack_of_four"
    (folder / "inner").mkdir(parents=True)
    for name in ("__init__", "one", "cli", "inner/deep"):
        (folder / f"{name}.py").write_text(f"# {name}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("pack_of_four")
    for name in [name for name in sys.modules if name.startswith("pack_of_four")]:
        del sys.modules[name]


def test_a_change_of_any_module_shows(package: ModuleType) -> None:
    """A result of the code before it is not taken for one of this code."""
    folder = Path(str(package.__file__)).parent
    before = code_sha256(package)
    assert before == code_sha256(package) and len(before) == 64
    (folder / "one.py").write_text("# two\n", encoding="utf-8")
    changed = code_sha256(package)
    (folder / "two.py").write_text("", encoding="utf-8")
    assert len({before, changed, code_sha256(package)}) == 3


def test_commands_and_inner_packages_do_not_count(package: ModuleType) -> None:
    """Hours of learning are not done again for a word of help."""
    folder = Path(str(package.__file__)).parent
    before = code_sha256(package)
    for name in ("cli.py", "inner/deep.py"):
        (folder / name).write_text("# changed\n", encoding="utf-8")
    assert code_sha256(package) == before


def test_a_single_module_counts_alone(package: ModuleType) -> None:
    """What a relation said depends on few files."""
    one = importlib.import_module("pack_of_four.one")
    folder, before = Path(str(package.__file__)).parent, code_sha256(one)
    (folder / "__init__.py").write_text("# changed\n", encoding="utf-8")
    assert code_sha256(one) == before
    (folder / "one.py").write_text("# changed\n", encoding="utf-8")
    assert code_sha256(one) != before
