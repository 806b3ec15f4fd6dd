"""Problems from a file: one JSON object a line with `id`, `question` and, where known, `answer`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from semspec.calibration.bench.records import Problem
from semspec.runtime.errors import CalibrationError

__all__ = ["fingerprint", "question_sha256", "read_problems"]


def read_problems(path: Path, limit: int | None = None) -> list[Problem]:
    """The first `limit` problems of the file, None for all. Other keys of a line are left alone, empty lines too.

    Raises CalibrationError, with file and line, for what is not a problem, an id that came before, and a file with
    fewer than `limit` problems or none.
    """
    problems: dict[str, Problem] = {}
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if limit is not None and len(problems) == limit:
                    break
                if not line.strip():
                    continue
                problem = _problem(line, f"{path}, line {number}")
                if problem.id in problems:
                    raise CalibrationError(
                        f"{path}, line {number}: the id {problem.id!r} came before; ids differ"
                    )
                problems[problem.id] = problem
    except OSError as error:
        raise CalibrationError(f"cannot read {path}: {error.strerror}; give a JSONL file") from None
    if not problems:
        raise CalibrationError(f"{path} holds no problems")
    if limit is not None and len(problems) < limit:
        raise CalibrationError(f"{path} holds {len(problems)} problems, {limit} were asked for")
    return list(problems.values())


def fingerprint(problems: Sequence[Problem]) -> str:
    """sha256 of what is asked and expected, in this order; the file they came from does not matter."""
    rows = [[problem.id, problem.question, problem.answer] for problem in problems]
    return hashlib.sha256(json.dumps(rows).encode("ascii")).hexdigest()


def question_sha256(problem: Problem) -> str:
    """sha256 of what is asked, by which it is known again under another id; white space does not matter."""
    return hashlib.sha256(" ".join(problem.question.split()).encode("utf-8")).hexdigest()


def _problem(line: bytes, where: str) -> Problem:
    try:
        value: Any = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CalibrationError(f"{where}: not JSON in UTF-8 ({error})") from None
    if not isinstance(value, dict):
        raise CalibrationError(f"{where}: must be an object with id, question and answer")
    for key in ("id", "question"):
        if not isinstance(value.get(key), str) or not value[key].strip():
            raise CalibrationError(f"{where}: {key!r} must be a text that says something")
    answer = value.get("answer")
    if answer is not None and (not isinstance(answer, str) or not answer.strip()):
        raise CalibrationError(f"{where}: 'answer' must be a text that says something, or absent")
    return Problem(id=value["id"], question=value["question"], answer=answer)
