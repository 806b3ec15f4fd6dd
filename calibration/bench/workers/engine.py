"""What every peer's library is asked to do: Ask, Counts, Engine. It knows no library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from semspec.runtime.records import Floats

__all__ = ["Ask", "Counts", "Engine", "Opening", "read_ask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """How to open a peer. model: what it reads, a file or folder; draft: the same of its draft model, if it has one.

    drafts: `model`, `ngram` or None for plain decoding. threads: of the processor. max_context: most tokens of a
    prompt and its answer together. dtype: of weights where the library leaves a choice, None for the faster one.
    """

    model: str
    draft: str | None
    drafts: str | None
    threads: int
    max_context: int
    dtype: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One answer, wanted. stop_ids end it; the one that does is its last. n_draft: most tokens of a draft, None for
    the library's own default. temperature 0 is greedy; top_k 0 and top_p 1 are off."""

    ids: tuple[int, ...]
    max_tokens: int
    stop_ids: tuple[int, ...]
    temperature: float
    top_k: int
    top_p: float
    seed: int
    n_draft: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What a library tells of its last answer, None where it does not.

    rounds: passes of the target after the prompt; drafted, accepted: tokens of drafts.
    """

    rounds: int | None = None
    drafted: int | None = None
    accepted: int | None = None


class Engine(Protocol):
    """A library with a model open. Nothing of an answer is remembered in the next."""

    def versions(self) -> Mapping[str, str]:
        """Packages and what else a speed depends on."""

    def forget(self) -> None:
        """Drop what the last answer left in memory; outside the clock."""

    def generate(self, ask: Ask, on_first: Callable[[], None]) -> list[int]:
        """Ids of the answer; on_first is called when the first is known."""

    def counts(self) -> Counts:
        """Of the last answer."""

    def logits(self, ids: Sequence[int]) -> Floats:
        """(S, V): row i is what follows ids[: i + 1]."""


def read_ask(fields: Mapping[str, Any]) -> Ask:
    """An Ask as it came over the wire."""
    return Ask(**{**fields, "ids": tuple(fields["ids"]), "stop_ids": tuple(fields["stop_ids"])})
