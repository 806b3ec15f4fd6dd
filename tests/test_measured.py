"""The README's tables of the semantic modes are what the kept answers of their runs amount to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from bench.measured import kept, markdown, read_kept, summarize_kept

ROOT = Path(__file__).resolve().parents[1]
RUNS = kept(ROOT / "tests" / "bench" / "runs")


def test_runs_are_kept() -> None:
    """Without one the checks below would hold for nothing."""
    assert RUNS


@pytest.mark.parametrize("name", RUNS, ids=lambda name: name.name)
def test_tables_in_readme_are_those_of_the_answers(name: Path) -> None:
    """A number in a table that no answer stands for was copied wrongly, or is of another run."""
    assert markdown(summarize_kept(name)) in (ROOT / "README.md").read_text("utf-8")


@pytest.mark.parametrize("name", RUNS, ids=lambda name: name.name)
def test_an_answer_that_is_missing_is_noticed(name: Path, tmp_path: Path) -> None:
    """A table of fewer answers would look as good."""
    copy = tmp_path / name.name
    copy.with_suffix(".json").write_text(name.with_suffix(".json").read_text("utf-8"), "utf-8")
    lines = name.with_suffix(".csv").read_text("utf-8").splitlines(keepends=True)
    copy.with_suffix(".csv").write_text("".join(lines[:-1]), "utf-8")
    with pytest.raises(ValueError, match=r"does not hold the answers"):
        read_kept(copy)


@pytest.mark.parametrize("name", RUNS, ids=lambda name: name.name)
def test_kept_runs_name_nothing_of_a_machine(name: Path) -> None:
    """Names of people's folders and hosts are nobody's business."""
    assert not re.search(r"[\s\"'=]/\w", name.with_suffix(".json").read_text("utf-8"))
