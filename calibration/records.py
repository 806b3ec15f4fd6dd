"""The nouns of semantic calibration: what was read, and what was said there.

What a model made of a segment is runtime/readings.py's, since the runtime reads the same.
Frozen, without behaviour; who makes and who uses them says so. Arrays are numpy and belong to nobody else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from semspec.runtime.readings import Reading

__all__ = ["Context", "Sample"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """A text that segments follow.

    id: unique. question: id of the question it is about; folds and bootstraps group by it. ids: all tokens so far, the
    last of them pending. answer: the question's right answer, None where nobody knows it. written_by: whose segments
    follow the prompt: `target`, `mixed`, or `nobody`.
    """

    id: str
    question: str
    ids: tuple[int, ...]
    answer: str | None
    written_by: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """A segment that one model wrote in a context.

    author: `target` or `draft`. greedy: whether by arg-max. ids: (n,), the boundary or stop token included. readings:
    role -> Reading; the author's always, of a draft's segment also the target's, teacher-forced.
    """

    context: str
    author: str
    greedy: bool
    ids: tuple[int, ...]
    text: str
    readings: Mapping[str, Reading]
