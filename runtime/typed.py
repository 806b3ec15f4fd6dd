"""JSON values as frozen dataclasses, held against their annotations: what was written is what is read back.

It knows str, int, float, Any, `tuple[X, ...]`, `Mapping[str, X]`, dataclasses of these, and each of them `| None`.
What a record itself refuses (numbers out of range) it says in its own words.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

__all__ = ["plain", "read_typed", "shown"]

_WORDS = {str: "text", int: "a whole number", float: "a number", tuple: "a list", Mapping: "an object"}


def read_typed(kind: Any, value: Any, where: str) -> Any:
    """`value`, as json.loads gave it, as a `kind`; `where` names it in errors. A true is not a number.

    Raises ValueError: a key that is missing or unknown, a value of another type, or what a record refuses.

    >>> read_typed(tuple[int, ...], [1, 2], "layers")
    (1, 2)
    """
    origin = get_origin(kind)
    if kind is Any:
        return value
    if origin is UnionType:  # of one type and None
        (some,) = set(get_args(kind)) - {NoneType}
        return None if value is None else read_typed(some, value, where)
    if dataclasses.is_dataclass(kind):
        return _read_record(kind, _of(value, dict, Mapping, where), where)
    if origin is Mapping:
        return {
            key: read_typed(get_args(kind)[1], item, f"{where}.{shown(key)[1:-1]}")
            for key, item in _of(value, dict, Mapping, where).items()
        }
    if origin is tuple:
        items = enumerate(_of(value, list, tuple, where))
        return tuple(read_typed(get_args(kind)[0], item, f"{where}[{i}]") for i, item in items)
    if kind is float and type(value) is int and abs(value) < 1 << 53:  # what a float holds exactly
        return float(value)
    return _of(value, kind, kind, where)


def plain(value: Any) -> Any:
    """A record as json.dumps takes it, the inverse of read_typed.

    A field whose metadata has `left_out_by_default` is left out at its default: it came later than the format, and
    what was written before it keeps its bytes, its fingerprints and its readers.
    """
    if dataclasses.is_dataclass(value):
        return {
            field.name: plain(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if not (field.metadata.get("left_out_by_default") and getattr(value, field.name) == field.default)
        }
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (tuple, list)) else value


def shown(value: object) -> str:
    """A stranger's value, quoted, on one line of at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:76]}...'"


def _read_record(kind: Any, value: Mapping[str, Any], where: str) -> Any:
    hints, fields = get_type_hints(kind), {field.name: field for field in dataclasses.fields(kind)}
    for key in value:
        if key not in fields:
            raise ValueError(f"{where} has the unknown key {shown(key)}; known: {', '.join(fields)}")
    for key, field in fields.items():
        optional = (
            field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        )
        if key not in value and not optional:
            raise ValueError(f"{where} lacks {key!r}")
    return kind(**{key: read_typed(hints[key], item, f"{where}.{key}") for key, item in value.items()})


def _of(value: Any, kind: type, word: Any, where: str) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{where} must be {_WORDS[word]}, found {shown(value)}")
    return value
