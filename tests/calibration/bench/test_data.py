"""Reading problems: what is taken, and that every fault names its file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from semspec.calibration.bench.data import fingerprint, read_problems
from semspec.calibration.bench.records import Problem
from semspec.runtime.errors import CalibrationError

GOOD = '{"id": "a", "question": "1+1?", "answer": "2", "level": 3}\n'


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "data.jsonl"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_problems_are_read_in_order(tmp_path: Path) -> None:
    """Other keys and empty lines are of no concern; an answer may be absent or null."""
    path = written(
        tmp_path, GOOD + '\n{"id": "b", "question": "Why?"}\n{"id":"c","question":"ß","answer":null}'
    )
    assert read_problems(path) == [
        Problem(id="a", question="1+1?", answer="2"),
        Problem(id="b", question="Why?"),
        Problem(id="c", question="ß"),
    ]
    assert [problem.id for problem in read_problems(path, 2)] == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        (b'{"id": "\xff"}', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "must be an object"),
        ('{"question": "x"}', "'id' must be a text"),
        ('{"id": 3, "question": "x"}', "'id' must be a text"),
        ('{"id": "b", "question": " "}', "'question' must be a text"),
        ('{"id": "b", "question": "x", "answer": 2}', "'answer' must be a text"),
        ('{"id": "a", "question": "x"}', "'a' came before"),
    ],
)
def test_a_fault_names_file_and_line(tmp_path: Path, line: str | bytes, message: str) -> None:
    """A data file has thousands of lines."""
    path = written(tmp_path, GOOD.encode() + (line if isinstance(line, bytes) else line.encode()))
    with pytest.raises(CalibrationError, match=message) as caught:
        read_problems(path)
    assert f"{path}, line 2: " in str(caught.value)


def test_too_few_problems_are_refused(tmp_path: Path) -> None:
    """Ten asked for and three measured would be quoted as ten."""
    with pytest.raises(CalibrationError, match="holds 1 problems, 10 were asked for"):
        read_problems(written(tmp_path, GOOD), 10)
    with pytest.raises(CalibrationError, match="holds no problems"):
        read_problems(written(tmp_path, "\n"))
    with pytest.raises(CalibrationError, match="cannot read"):
        read_problems(tmp_path / "none.jsonl")


def test_fingerprint_tells_any_change() -> None:
    """A run is resumed and joined only where the same is asked in the same order."""
    one, two = Problem(id="a", question="1", answer="2"), Problem(id="b", question="1")
    prints = [fingerprint(problems) for problems in ([one], [two], [one, two], [two, one])]
    assert len(set(prints)) == 4 and fingerprint([one, two]) == prints[2]
    assert fingerprint([Problem(id="a", question="1", answer=None)]) != prints[0]
