"""What the documents show is executed: the README's Python session, and every `--help` text.

A help text in a document is a fenced `text` block after a comment that names the command:

    <!-- semspec-export --help -->
    ```text
    Usage: semspec-export ...
    ```
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
DOCUMENTS = [README, ROOT / "runtime" / "JETSON.md"]

HELP = re.compile(r"<!-- (semspec[^>]*? --help) -->\s*```text\n(.*?)```", re.DOTALL)
SESSION = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
ENTRY = {"semspec": "main", "semspec-export": "export_main"}  # names in semspec.cli, as in pyproject


class HelpBlock(NamedTuple):
    document: str
    command: str
    text: str


BLOCKS = [
    HelpBlock(path.name, command, text)
    for path in DOCUMENTS
    for command, text in HELP.findall(path.read_text(encoding="utf-8"))
]


def run(command: list[str], cwd: Path) -> str:
    """stdout of `command`; its stderr is shown when it fails. Fixed width: help texts wrap at 80 columns."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "COLUMNS": "80", "NO_COLOR": "1", "PYTHONUTF8": "1"},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def help_text(command: str, cwd: Path) -> str:
    """What `command` prints, run as the installed script would run it."""
    program, *arguments = command.split()
    code = f"import sys; from semspec.cli import {ENTRY[program]} as main; sys.argv[0] = {program!r}; main()"
    return run([sys.executable, "-c", code, *arguments], cwd)


def test_readme_shows_the_export_command() -> None:
    """Without a block to check the check below would hold for nothing."""
    assert "semspec-export --help" in {block.command for block in BLOCKS}


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{block.document}: {block.command}")
def test_help_text_in_documents_is_the_real_one(block: HelpBlock, tmp_path: Path) -> None:
    """A copied help text goes stale with the first new option."""
    assert block.text.strip() == help_text(block.command, tmp_path).strip()


def test_readme_python_session_runs(smollm2_bundle: Path, tmp_path: Path) -> None:
    """The first thing a person copies must work, as a file, in a folder that has a bundle named `bundle`."""
    sessions = SESSION.findall(README.read_text(encoding="utf-8"))
    assert sessions, "README.md has no python block"
    (tmp_path / "bundle").symlink_to(smollm2_bundle, target_is_directory=True)
    (tmp_path / "session.py").write_text("\n".join(sessions), encoding="utf-8")
    assert run([sys.executable, "-W", "error", "session.py"], tmp_path).strip(), "the session prints nothing"


def test_links_to_files_in_documents_exist() -> None:
    """A map that names a file that is gone misleads."""
    missing = [
        f"{path.name}: {target}"
        for path in DOCUMENTS
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
        if not (path.parent / target).exists()
    ]
    assert not missing


def test_no_row_of_a_table_comes_from_a_double() -> None:
    """Doubles call themselves and their release `double`: they have no speed and no numbers of an engine."""
    rows = [
        line for path in DOCUMENTS for line in path.read_text(encoding="utf-8").splitlines() if "|" in line
    ]
    assert rows and not [row for row in rows if re.search(r"\bdoubles?\b", row, re.IGNORECASE)]


def test_make_targets_in_readme_exist() -> None:
    """The two commands of the README are its first promise."""
    named = set(re.findall(r"(?:`|^)make ([a-z][a-z-]*)", README.read_text(encoding="utf-8"), re.MULTILINE))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert {"demo", "test"} <= named and named <= targets
