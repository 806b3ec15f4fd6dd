"""The nouns of a benchmark: Problem, Mode, Cell, Result. It knows their JSON; it knows no file, model or clock."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol

from semspec.runtime.config import SpecConfig
from semspec.runtime.judging import Judge
from semspec.runtime.tokenizer import Tokenizer

__all__ = ["PLAIN", "Cell", "Control", "Mode", "Problem", "Result"]

PLAIN = "autoregressive"
"""The mode that speeds and tokens of the others are held against."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A question and, where it is known, its answer. kind: of questions that are made alike, such as those of one
    template: who saw one has seen something of the others."""

    id: str
    question: str
    answer: str | None = None
    kind: str | None = None


class Control(Protocol):
    """What a mode gives its requests to judge drafts by; equal ones judge alike."""

    def prepare(self, tokenizer: Tokenizer) -> Judge:
        """The judge for texts of this tokenizer."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """A way to decode. exact: its answers follow the target's own law, and are its very tokens where greedy. spec: None
    for a peer, another engine with its own numbers of the same weights. control: where the spec's mode is `judged`, by
    whom."""

    name: str
    exact: bool
    spec: SpecConfig | None
    control: Control | None = None

    @property
    def peer(self) -> bool:
        """Another engine than ours."""
        return self.spec is None

    @property
    def lossy(self) -> bool:
        """Ours, and not exact."""
        return not self.exact and not self.peer


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Cell:
    """What one measurement is of. Cells sort by problem, seed, repeat, mode."""

    problem: str
    seed: int
    repeat: int
    mode: str

    def __str__(self) -> str:
        return f"{self.problem}/{self.mode}/{self.seed}/{self.repeat}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one measurement gave.

    token_ids: the answer's, its end token included. correct: None where the data has no answer. seconds: from
    the chat message to the last token, with nothing remembered of an earlier one. ttft_ms, tpot_ms, phase_ms and
    the counts are the request's Summary; n_from_draft: generated tokens that the draft wrote; n_lossy: those that need
    not follow the target's law. Counts are None where a peer does not tell. peak_mib: most memory the process that
    answered had held by then, in MiB, models and all.
    """

    cell: Cell
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    correct: bool | None
    seconds: float
    prompt_tokens: int
    generated_tokens: int
    ttft_ms: float | None
    tpot_ms: float | None
    phase_ms: Mapping[str, float]
    num_rounds: int | None
    num_draft_tokens: int | None
    num_accepted_draft_tokens: int | None
    n_from_draft: int | None
    n_lossy: int = 0
    peak_mib: float

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the whole time, prompt included."""
        return self.generated_tokens / self.seconds

    def to_json(self) -> str:
        """One line without its end; the same result gives the same text."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> Result:
        """Raises ValueError for a line that to_json did not write."""
        try:
            value: Any = json.loads(line)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        found = _checked(value, {**_FIELDS, "cell": _is_object})
        cell = Cell(**_checked(found.pop("cell"), _CELL))
        ids = tuple(found.pop("token_ids"))
        return cls(cell=cell, token_ids=ids, **found)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_count_or_none(value: Any) -> bool:
    return value is None or _is_count(value)


def _is_time(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and value >= 0


def _is_duration(value: Any) -> bool:
    return _is_time(value) and value > 0


def _is_time_or_none(value: Any) -> bool:
    return value is None or _is_time(value)


def _is_flag_or_none(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(_is_count(item) for item in value)


def _are_times(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_time(item) for item in value.values())


_CHECKS: Mapping[str, Callable[[Any], bool]] = {
    "str": _is_text,
    "int": _is_count,
    "int | None": _is_count_or_none,
    "float": _is_time,
    "float | None": _is_time_or_none,
    "bool | None": _is_flag_or_none,
    "tuple[int, ...]": _are_ids,
    "Mapping[str, float]": _are_times,
    "Cell": _is_object,
}
_CELL = {field.name: _CHECKS[str(field.type)] for field in fields(Cell)}
_FIELDS = {field.name: _CHECKS[str(field.type)] for field in fields(Result)} | {"seconds": _is_duration}


def _checked(value: Any, known: Mapping[str, Callable[[Any], bool]]) -> dict[str, Any]:
    """`value` as keyword arguments: every known key, no other, each of its kind."""
    if not isinstance(value, dict) or value.keys() != known.keys():
        raise ValueError(f"must be an object with the keys {', '.join(known)}")
    wrong = [key for key, check in known.items() if not check(value[key])]
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: value of another kind")
    return dict(value)
