"""Relations by name, and the journal that keeps what they said."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from semspec.calibration.equivalence import Bools, Equivalence, Exact, Numbers
from semspec.calibration.relations import Asked, Relation, open_relation
from semspec.runtime.errors import CalibrationError, ConfigError, SourceError

QUESTIONS = (["3 + 4 = 7", "7", "3+4 = 7."], ["a"], [], ["\ud800 cut", "$x$", "a"])


class Counted:
    """Counts what it is asked."""

    name = "exact"

    def __init__(self) -> None:
        self.n = 0

    def related(self, texts: Sequence[str]) -> Bools:
        self.n += 1
        return Exact().related(texts)


def ask(relation: Equivalence, path: Path, questions: Sequence[Sequence[str]] = QUESTIONS) -> list[Bools]:
    with Asked(relation, path) as asked:
        assert asked.name == relation.name
        return [asked.related(texts) for texts in questions]


def test_what_was_asked_is_not_asked_again(tmp_path: Path) -> None:
    """A neural relation takes minutes over a collection: a run that was killed asks only what is left. Torn lines are
    asked again, and the file ends with the same bytes."""
    path, counted = tmp_path / "asked.jsonl", Counted()
    first = ask(counted, path)
    whole = path.read_bytes()
    assert counted.n == len(QUESTIONS)
    again = ask(counted, path)
    assert counted.n == len(QUESTIONS) and path.read_bytes() == whole
    for cut in (len(whole) - 3, whole.index(b"\n") + 20, 5, 0):
        path.write_bytes(whole[:cut])
        torn = ask(Counted(), path)
        assert path.read_bytes() == whole
        for one, other, third in zip(first, again, torn, strict=True):
            assert np.array_equal(one, other) and np.array_equal(one, third) and one.dtype == third.dtype


def test_a_damaged_journal_is_named_with_its_line(tmp_path: Path) -> None:
    """Answers that somebody changed are not believed."""
    path = tmp_path / "asked.jsonl"
    ask(Counted(), path)
    whole = path.read_bytes()
    for damaged in (b"{}\n", b"[1, 2]\n", b'["key", ["01"]]\n', b"\xff\n"):
        path.write_bytes(whole + damaged)
        with pytest.raises(CalibrationError, match=r"asked\.jsonl, line 5 is damaged; remove the file"):
            ask(Counted(), path)
    with pytest.raises(CalibrationError, match="cannot be written"):
        ask(Counted(), tmp_path / "none" / "asked.jsonl")


def test_relations_that_need_no_encoder_open_by_name() -> None:
    """Numbers are the default."""
    with open_relation(Relation()) as relation:
        assert isinstance(relation, Numbers)
    with open_relation(Relation(name="exact")) as relation:
        assert isinstance(relation, Exact)
    assert Relation().describe() == {"name": "numbers"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "same"}, "equivalence must be one of exact, numbers, embed, nli, got 'same'"),
        ({"name": "nli"}, "nli reads with an encoder, and none was named"),
        ({"encoder": "a/b"}, "numbers reads without an encoder"),
        (
            {"name": "nli", "encoder": "a/b", "limit": 0.5},
            "a limit and a pooling go with embed, not with nli",
        ),
        ({"name": "embed", "encoder": "a/b"}, "the limit of a/b is not known"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], message: str) -> None:
    """A limit that was fitted for one encoder says nothing of another."""
    with pytest.raises(ConfigError, match=message):
        Relation(**settings)


def test_an_encoder_that_is_not_there_is_told_before_collecting(tmp_path: Path) -> None:
    """describe is asked first."""
    relation = Relation(name="embed", encoder=str(tmp_path / "all-MiniLM-L6-v2"))
    with pytest.raises(SourceError, match="no such"):
        relation.describe()
