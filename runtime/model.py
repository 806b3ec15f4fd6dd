"""A language model that remembers its text: LanguageModel, and CachedModel on a backend's session.

Nothing above this file knows backends, dtypes or caches; nothing below it knows speculation.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

import numpy as np

from semspec.runtime.backends.base import Backend
from semspec.runtime.contract import GraphSpec, check_ports, kv_pairs
from semspec.runtime.errors import ConfigError
from semspec.runtime.records import Array, Floats, Forward

__all__ = ["CachedModel", "LanguageModel"]

CHUNK = 512  # tokens in one pass: bounds the engine's temporaries over a long prompt


class LanguageModel(Protocol):
    """Something that reads tokens and says what may come next."""

    @property
    def length(self) -> int:
        """Tokens read and remembered."""
        ...

    @property
    def max_context(self) -> int:
        """Most tokens it can remember."""
        ...

    def forward(
        self,
        ids: Sequence[int],
        *,
        rows: Sequence[int] = (-1,),
        pool: Floats | None = None,
        pooled: Floats | None = None,
        hidden: Sequence[int] = (),
    ) -> Forward:
        """Read `ids` (S,) after what is remembered; logits of the wanted `rows` of these S.

        pool: (S,) weights with which rows enter the pooled sum, which starts from `pooled` (K, E) or zeros;
        None: nothing is pooled. hidden: state indices to return, all S rows.
        """
        ...

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        ...


class CachedModel:
    """A LanguageModel on one graph and its key/value cache. A context manager.

    The cache is one buffer a layer, written in place; rewinding is a number. What forward returns is reused
    by the next call. Not for use by several threads at once.
    """

    def __init__(self, backend: Backend, graph: Path, spec: GraphSpec) -> None:
        self.spec, self.length = spec, 0
        self.max_context = spec.max_context
        self._session = backend.open(graph)
        check_ports(str(graph), spec.inputs(), self._session.inputs)
        check_ports(str(graph), spec.outputs(), self._session.outputs)
        shape = (1, spec.n_kv_heads, spec.capacity, spec.head_size)
        for past, present in kv_pairs(spec):
            self._session.bind(past, present, backend.zeros(shape, spec.cache))
        self._no_pool = np.zeros((1, len(spec.pooled_layers), spec.width), np.float32)

    def __enter__(self) -> CachedModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the engine and its buffers. Safe to call twice."""
        self._session.close()

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens. Raises ConfigError when there are fewer."""
        if not 0 <= length <= self.length:
            raise ConfigError(f"cannot rewind to {length} tokens: the model remembers {self.length}")
        self.length = length

    def forward(
        self,
        ids: Sequence[int],
        *,
        rows: Sequence[int] = (-1,),
        pool: Floats | None = None,
        pooled: Floats | None = None,
        hidden: Sequence[int] = (),
    ) -> Forward:
        """See LanguageModel.forward; wanted rows ascend.

        Raises ConfigError for no or too many tokens, and for states the graph does not return.
        """
        n_new = len(ids)
        if not 1 <= n_new <= self.max_context - self.length:
            raise ConfigError(
                f"cannot read {n_new} tokens after {self.length}: the context holds {self.max_context} "
                f"(set by --max-context at export)"
            )
        missing = sorted(set(hidden) - set(self.spec.hidden_layers))
        if missing:
            raise ConfigError(
                f"hidden states {missing} are not in this graph; it has {list(self.spec.hidden_layers)} "
                f"(set by --hidden-layers at export)"
            )
        wanted = np.arange(n_new)[np.asarray(rows, np.int64)]
        chunks = [slice(start, min(start + CHUNK, n_new)) for start in range(0, n_new, CHUNK)]
        parts: list[Forward] = []
        for chunk in chunks:
            part = self._pass(
                ids[chunk], wanted - chunk.start, pool if pool is None else pool[chunk], pooled, hidden
            )
            parts.append(part if len(chunks) == 1 else _copied(part))
            pooled = parts[-1].pooled
        return parts[0] if len(parts) == 1 else _joined(parts)

    def _pass(
        self,
        ids: Sequence[int],
        wanted: Array,
        pool: Floats | None,
        pooled: Floats | None,
        hidden: Sequence[int],
    ) -> Forward:
        """One run of the graph; wanted rows outside these ids belong to another pass."""
        n_new = len(ids)
        inside = wanted[(wanted >= 0) & (wanted < n_new)]
        # a graph computes one row at least; a pass that is asked for none gives its last and drops it
        rows = inside if len(inside) else np.array([n_new - 1])
        feeds: dict[str, Array] = {
            "input_ids": np.asarray(ids, np.int64)[None],
            "past_len": np.array([self.length], np.int64),
            "logit_rows": rows.astype(np.int64),
            "pool": np.zeros((1, n_new), np.float32) if pool is None else pool[None],
            "pooled_in": self._no_pool if pooled is None else pooled[None],
            "spare": np.array([n_new % 2], np.int64),
        }
        fetch = ["logits", *(f"hidden.{index}" for index in hidden)]
        if pool is not None:
            fetch.append("pooled")
        found = self._session.run(feeds, fetch)
        self.length += n_new
        logits = found["logits"].numpy()[0, : len(inside)]
        return Forward(
            logits=logits,
            pooled=None if pool is None else found["pooled"].numpy()[0],
            hidden={index: found[f"hidden.{index}"].numpy()[0] for index in hidden},
        )


def _copied(part: Forward) -> Forward:
    return Forward(
        logits=part.logits.copy(),
        pooled=None if part.pooled is None else part.pooled.copy(),
        hidden={index: state.copy() for index, state in part.hidden.items()},
    )


def _joined(parts: Sequence[Forward]) -> Forward:
    """Passes over consecutive pieces of one text as one; the pooled sum of the last holds all."""
    return Forward(
        logits=np.concatenate([part.logits for part in parts]),
        pooled=parts[-1].pooled,
        hidden={index: np.concatenate([part.hidden[index] for part in parts]) for index in parts[0].hidden},
    )
