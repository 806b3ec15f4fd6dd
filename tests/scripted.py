"""ScriptedModel: a LanguageModel whose every answer is known beforehand, for tests of all that decodes.

It keeps the contract of LanguageModel to the letter, the inconvenient parts too: what forward returned is
spoilt (NaN) by the next call, a context is never exceeded, rows ascend. It remembers how it was called.

    chain(table)         what comes next depends on the last token: laws that can be worked out by hand
    scattered(size)      what comes next depends on every token: a token too many or too few in a cache shows
    lambda context: ...  anything else
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from semspec.runtime.errors import ConfigError
from semspec.runtime.pooled import Pooled
from semspec.runtime.records import Floats, Forward
from semspec.runtime.rows import Rows

Law: TypeAlias = Callable[[tuple[int, ...]], npt.ArrayLike]
"""Everything read so far -> logits (V,) of what comes next."""


def chain(table: npt.ArrayLike) -> Law:
    """table: (V, V), row i the logits of what follows token i.

    >>> law = chain([[0, 9], [9, 0]])
    >>> ScriptedModel(law).forward([0, 1, 0]).logits.tolist()
    [[0.0, 9.0]]
    """
    rows = np.asarray(table, np.float32)
    return lambda context: rows[context[-1]]


def scattered(vocab_size: int, seed: int = 0, spread: float = 3.0) -> Law:
    """Normal logits of deviation `spread`, others for every context and seed."""
    return lambda context: spread * np.random.default_rng((seed, *context)).standard_normal(vocab_size)


def place_and_id(context: tuple[int, ...]) -> Floats:
    """State (K, E) = (1, 2) of the last row: how many tokens it has read, and the last of them."""
    return np.array([[len(context), context[-1]]], np.float32)


@dataclass(kw_only=True)
class ScriptedModel:
    """law: see above. state: everything read -> (K, E); it is what is pooled, and hidden[k] is its row k.

    calls: for each forward, the tokens remembered before it and the ids it was given.
    """

    law: Law = field(kw_only=False)
    max_context: int = 64
    state: Callable[[tuple[int, ...]], Floats] = place_and_id
    tokens: list[int] = field(default_factory=list, init=False)
    calls: list[tuple[int, tuple[int, ...]]] = field(default_factory=list, init=False)
    _lent: list[Floats] = field(default_factory=list, init=False)

    @property
    def length(self) -> int:
        return len(self.tokens)

    def rewind(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise ConfigError(f"cannot rewind to {length} tokens: the model remembers {self.length}")
        del self.tokens[length:]

    def forward(
        self,
        ids: Sequence[int],
        *,
        rows: Sequence[int] = (-1,),
        pool: Floats | None = None,
        pooled: Pooled | Floats | None = None,
        hidden: Sequence[int] = (),
    ) -> Forward:
        if not 1 <= len(ids) <= self.max_context - self.length:
            raise ConfigError(
                f"cannot read {len(ids)} tokens after {self.length}: at most {self.max_context}"
            )
        self.calls.append((self.length, tuple(ids)))
        contexts = [(*self.tokens, *ids[: row + 1]) for row in range(len(ids))]
        wanted = [range(len(ids))[row] for row in rows]
        assert wanted == sorted(wanted), "rows ascend"
        self.tokens.extend(ids)
        states = np.array([self.state(context) for context in contexts], np.float32)  # (S, K, E)
        vocab_size = np.size(self.law(contexts[0]))
        logits = np.array([self.law(contexts[row]) for row in wanted], np.float32).reshape(-1, vocab_size)
        total = None if pool is None else np.einsum("s,ske->ke", pool, states).astype(np.float32)
        if total is not None and pooled is not None:
            total += pooled.values if isinstance(pooled, Pooled) else pooled
        sums = None if total is None else Pooled(total)
        found = Forward(rows=Rows(logits), states=sums, hidden={k: states[:, k].copy() for k in hidden})
        self._spoil()
        self._lent = [logits, *found.hidden.values(), *([] if total is None else [total])]
        return found

    def _spoil(self) -> None:
        for array in self._lent:
            array.fill(np.nan)
