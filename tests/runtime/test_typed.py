"""JSON as records: what is written is read back, anything else is one line with its place."""

from __future__ import annotations

import doctest
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pytest

from semspec.runtime import typed
from semspec.runtime.typed import read_typed, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    count: int
    layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    name: str
    inner: Mapping[str, Inner]
    extra: Any = None
    other: Inner | None = None
    share: float | None = None


def test_the_example_holds() -> None:
    """The docstring's numbers."""
    assert doctest.testmod(typed).failed == 0


def test_a_record_comes_back_from_its_json() -> None:
    """Tuples become lists and tuples again; records in mappings too."""
    record = Outer(name="é", inner={"a": Inner(count=1, layers=(1, 2))}, extra=[1.5, {"x": None}])
    assert read_typed(Outer, json.loads(json.dumps(asdict(record))), "file") == record
    assert read_typed(tuple[float, ...], [1, -0.5], "file") == (1.0, -0.5)
    assert read_typed(Outer, {"name": "", "inner": {}}, "file") == Outer(name="", inner={})
    record = Outer(name="", inner={}, other=Inner(count=1), share=0.5)
    assert read_typed(Outer, json.loads(json.dumps(asdict(record))), "file") == record


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "file must be an object, found []"),
        ({}, "file lacks 'name'"),
        ({"name": "a"}, "file lacks 'inner'"),
        ({"name": 1, "inner": {}}, "file.name must be text, found 1"),
        ({"name": "a", "inner": []}, "file.inner must be an object, found []"),
        (
            {"name": "a", "inner": {"b": {"count": True}}},
            "file.inner.b.count must be a whole number, found True",
        ),
        (
            {"name": "a", "inner": {"b": {"count": 1.0}}},
            "file.inner.b.count must be a whole number, found 1.0",
        ),
        (
            {"name": "a", "inner": {"b": {"count": 1, "layers": [1, "2"]}}},
            "file.inner.b.layers[1] must be a whole number, found '2'",
        ),
        (
            {"name": "a", "inner": {}, "x\n": 1},
            r"file has the unknown key 'x\n'; known: name, inner, extra, other, share",
        ),
        ({"name": "a", "inner": {}, "other": {}}, "file.other lacks 'count'"),
        ({"name": "a", "inner": {}, "share": "1"}, "file.share must be a number, found '1'"),
    ],
    ids=str,
)
def test_a_wrong_value_is_named_with_its_place(value: Any, message: str) -> None:
    """A person finds the line; a true is not a 1."""
    with pytest.raises(ValueError) as caught:
        read_typed(Outer, value, "file")
    assert str(caught.value) == message


def test_a_strangers_value_stays_one_short_line() -> None:
    """It goes into a terminal."""
    assert shown("a\n\x1b[31m") == r"'a\n\x1b[31m'"
    assert len(shown("x" * 10_000)) == 80


@pytest.mark.parametrize("value", [True, "1", None, 10**400])
def test_what_is_no_float_is_refused(value: object) -> None:
    """Whole numbers are, where a float holds them; one of 400 digits must not end in an OverflowError."""
    with pytest.raises(ValueError, match="size must be a number, found"):
        read_typed(float, value, "size")
