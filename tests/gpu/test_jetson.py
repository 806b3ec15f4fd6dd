"""The Jetson page: marked as what it is, and its commands are those there are."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "runtime" / "JETSON.md").read_text(encoding="utf-8")
SOURCES = ("export/cli.py", "export/engines/cli.py", "runtime/cli.py", "tests/gpu/run.sh")


def test_page_says_that_nothing_of_it_was_run() -> None:
    """Before anything else: no Jetson was at hand."""
    assert "**Nothing on this page was run on a Jetson.**" in "\n".join(PAGE.splitlines()[:4])


def test_options_on_the_page_exist() -> None:
    """A renamed option would be found by the first person with a device, and by nobody else."""
    sources = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in SOURCES)
    lines = [line for line in PAGE.splitlines() if re.search(r"semspec(-export)? |run\.sh", line)]
    options = {
        option
        for line in lines
        if not line.startswith(("sudo", "python3 -m venv"))
        for option in re.findall(r"--[a-z][a-z-]+", line)
    }
    assert {"--backend", "--graphs", "--ignore-memory", "--limit"} <= options
    assert not [option for option in options if option not in sources]
