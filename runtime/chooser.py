"""Chooser: what the next token is drawn from, after everything that changes the logits.

Order: padding cut off, penalties, processors, then warp (temperature, top-k, top-p, min-p). It remembers the
tokens that count, and can take them back, so a drafted block is judged place by place with its own history.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from semspec.runtime.config import SamplingParams
from semspec.runtime.errors import ConfigError
from semspec.runtime.readings import Row
from semspec.runtime.records import Floats, Law
from semspec.runtime.sampling import warp

__all__ = ["Chooser", "Processor", "check_processors"]


@runtime_checkable
class Processor(Protocol):
    """Changes logits as the text grows: a grammar, a ban, a bias."""

    def mask(self, logits: Floats) -> Floats:
        """New logits (V,) for the next token; -inf forbids. The argument is read-only."""
        ...

    def accept(self, token: int) -> None:
        """The text grew by this token."""
        ...

    def rollback(self, n: int) -> None:
        """The last n accepted tokens were taken back."""
        ...


class Chooser:
    """The law of the next token of one request; target and draft are chosen from by the same one.

    vocab_size: ids that can be drawn; rows beyond are padding, ids that a model lacks have no chance there.
    prompt: counts for the repetition penalty only; presence and frequency look at generated tokens, as elsewhere.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        prompt: Sequence[int],
        processors: Sequence[Processor] = (),
    ) -> None:
        self.params, self.vocab_size, self.processors = params, vocab_size, tuple(processors)
        self._penalized = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (
            1,
            0,
            0,
        )
        self._prompt = np.unique(np.asarray(prompt, np.int64)) if self._penalized else np.empty(0, np.int64)
        self._prompt = self._prompt[self._prompt < vocab_size]
        self._generated: list[int] = []
        self._counts: Counter[int] = Counter()

    def logits(self, logits: Floats) -> Floats:
        """Logits after padding, penalties and processors, before temperature: (vocab_size,)."""
        cropped = logits[: self.vocab_size]
        if cropped.size < self.vocab_size:  # a draft that knows fewer ids
            cropped = np.pad(cropped, (0, self.vocab_size - cropped.size), constant_values=-np.inf)
        if self._penalized:
            cropped = self._penalize(cropped)
        for processor in self.processors:
            cropped = _masked(processor, cropped)
        return cropped

    def law(self, logits: Floats) -> Law:
        """The law the next token is drawn from. logits: (V,), left as it is."""
        return warp(self.logits(logits), self.params)

    def law_of(self, row: Row) -> Law:
        """The same of a row, of `vocab_size` ids at most. All of its logits are read where something changes them, or
        where less does not tell the law."""
        short = None if self._penalized or self.processors else row.short_law(self.params)
        return self.law(row.logits) if short is None else short

    def accept(self, token: int) -> None:
        """The text grew by this token."""
        self._generated.append(token)
        self._counts[token] += 1
        for processor in self.processors:
            processor.accept(token)

    def rollback(self, n: int) -> None:
        """Take the last n accepted tokens back."""
        for _ in range(n):
            token = self._generated.pop()
            self._counts[token] -= 1
            if not self._counts[token]:
                del self._counts[token]
        if n:
            for processor in self.processors:
                processor.rollback(n)

    def _penalize(self, logits: Floats) -> Floats:
        """Repetition divides a seen id's logit (multiplies a negative one); presence and frequency subtract."""
        params = self.params
        logits = logits.copy()
        written = np.fromiter(self._counts.keys(), np.int64, len(self._counts))
        counts = np.fromiter(self._counts.values(), np.float32, len(self._counts))
        seen = np.union1d(written, self._prompt)
        values = logits[seen]
        scale = np.float32(params.repetition_penalty)
        logits[seen] = np.where(values > 0, values / scale, values * scale)
        logits[written] -= np.float32(params.presence_penalty) + np.float32(params.frequency_penalty) * counts
        return logits


def _masked(processor: Processor, logits: Floats) -> Floats:
    """What the processor makes of logits. Raises ConfigError where nothing can be drawn from that."""
    given = logits.view()
    given.flags.writeable = False  # the engine's own memory: others read it after this
    masked = processor.mask(given)
    name = type(processor).__name__
    if np.shape(masked) != logits.shape:
        raise ConfigError(
            f"{name}.mask must return {logits.size} logits, as given; got shape {np.shape(masked)}"
        )
    if masked.max() == -np.inf and logits.max() > -np.inf:
        raise ConfigError(
            f"{name}.mask forbids every token; let it allow an end token where nothing may follow"
        )
    return masked


def check_processors(processors: Sequence[object], *, speculative: bool) -> None:
    """Refuse what cannot follow a text, or cannot take tokens back where speculation needs it.

    Raises ConfigError naming the class and the missing method.
    """
    needed = ("mask", "accept", "rollback") if speculative else ("mask", "accept")
    for processor in processors:
        missing = [name for name in needed if not callable(getattr(processor, name, None))]
        if missing:
            why = "a processor has mask(logits), accept(token) and rollback(n)"
            if missing[0] == "rollback":
                why = "speculative modes take drafted tokens back; add it, or use mode 'autoregressive'"
            raise ConfigError(f"processor {type(processor).__name__} has no method {missing[0]}: {why}")
