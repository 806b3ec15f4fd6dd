"""A language model that remembers its text: LanguageModel, and CachedModel on a backend's session.

Nothing above this file knows backends, dtypes or caches; nothing below it knows speculation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

import numpy as np

from semspec.runtime.backends.base import Backend, Tensor
from semspec.runtime.contract import IN_PLACE, STAYING, GraphSpec, check_ports, kv_pairs, span_of
from semspec.runtime.errors import ConfigError
from semspec.runtime.pooled import HeldPooled, Pooled
from semspec.runtime.records import Array, Floats, Forward, Ints
from semspec.runtime.rows import OUTPUTS, Outputs, Rows, TopRows

__all__ = ["CachedModel", "LanguageModel", "common_prefix"]

CHUNK = 512  # tokens in one pass: bounds the engine's temporaries over a long prompt


class LanguageModel(Protocol):
    """Something that reads tokens and says what may come next."""

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens read and remembered."""
        ...

    @property
    def length(self) -> int:
        """How many they are."""
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
        pooled: Pooled | Floats | None = None,
        hidden: Sequence[int] = (),
    ) -> Forward:
        """Read `ids` (S,) after what is remembered; what follows the wanted `rows` of these S.

        pool: (S,) weights with which rows enter the pooled sum, which starts from `pooled` (K, E) or zeros; None:
        nothing is pooled. A sum that the last pass returned (Forward.states) is taken as it lies, on a device too.
        hidden: state indices to return, all S rows.
        """
        ...

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        ...


class CachedModel:
    """A LanguageModel on one graph and its key/value cache. A context manager.

    The cache is one buffer a layer, written in place; rewinding is a number. What forward returns is reused
    by the next call. Not for use by several threads at once.

    same_bits: `cpu` only: a row has the same bits in whatever pass it is read, for which a pass over an odd number of
    rows computes one more. Who compares no bits, a draft, does without: measured 2 % of a step in blocks of
    32, 5 to 20 % in larger ones.

    n_full_rows: rows whose logits were read from the device in full, of n_rows that were asked for (on `cuda` one that
    is read brings along all rows of its pass); on `cpu`, where they are in memory, none is counted.
    """

    def __init__(self, backend: Backend, graph: Path, spec: GraphSpec, *, same_bits: bool = True) -> None:
        self.spec, self._same_bits = spec, same_bits
        self.max_context = spec.max_context
        self.tokens: list[int] = []
        self.n_rows = self.n_full_rows = 0
        self._left: list[Outputs | HeldPooled] = []  # by the last pass on the device
        self._session = backend.open(graph)
        check_ports(str(graph), spec.inputs(), self._session.inputs)
        check_ports(str(graph), spec.outputs(), self._session.outputs)
        self._backend = backend
        self._chunk = min(CHUNK, (self._session.most("input_ids") or (1, CHUNK))[1])
        self._most_rows = (self._session.most("logit_rows") or (CHUNK,))[0]
        self._rows = self._bind_cache()
        self._no_pool = np.zeros((1, len(spec.pooled_layers), spec.width), np.float32)

    def _bind_cache(self) -> Tensor | None:
        """One buffer a layer that the graph writes, or, where it only reads, all of them as one: (2 L, 1, H, C, D)."""
        spec, pairs = self.spec, kv_pairs(self.spec)
        shape = (1, spec.n_kv_heads, spec.capacity, spec.head_size)
        if spec.graph in IN_PLACE:
            for past, present in pairs:
                self._session.bind(past, present, self._backend.zeros(shape, spec.cache))
            return None
        rows = self._backend.zeros((len(pairs), *shape), spec.cache)
        for place, (past, _) in enumerate(pairs):
            self._session.bind(past, "", self._backend.part(rows, place))
        return rows

    def __enter__(self) -> CachedModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the engine and its buffers. Safe to call twice."""
        self._forget_outputs()
        self._session.close()

    @property
    def length(self) -> int:
        return len(self.tokens)

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens. Raises ConfigError when there are fewer."""
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
        """See LanguageModel.forward; wanted rows ascend.

        Raises ConfigError for no or too many tokens, ids, rows or states that are not there, and a pool of
        another length.
        """
        n_new = len(ids)
        if not 1 <= n_new <= self.max_context - self.length:
            raise ConfigError(
                f"cannot read {n_new} tokens after {self.length}: the context holds {self.max_context} "
                f"(set by --max-context at export)"
            )
        tokens = np.asarray(ids, np.int64)
        # an engine may read zeros, or from the table's end, where an id has no row
        if tokens.min() < 0 or tokens.max() >= self.spec.vocab_size:
            raise ConfigError(
                f"token ids must be in 0..{self.spec.vocab_size - 1}, got {tokens.min()}..{tokens.max()}"
            )
        missing = sorted(set(hidden) - set(self.spec.hidden_layers))
        if missing:
            raise ConfigError(
                f"hidden states {missing} are not in this graph; it has {list(self.spec.hidden_layers)} "
                f"(set by --hidden-layers at export)"
            )
        if pool is not None and pool.shape != (n_new,):
            raise ConfigError(f"pool must have a weight for each of {n_new} tokens, got shape {pool.shape}")
        wanted = _wanted(rows, n_new)
        self.n_rows += len(wanted)
        size = self._chunk if len(wanted) <= self._most_rows else min(self._chunk, self._most_rows)
        chunks = [slice(start, min(start + size, n_new)) for start in range(0, n_new, size)]
        states = Pooled(pooled) if isinstance(pooled, np.ndarray) else pooled
        parts: list[Forward] = []
        for chunk in chunks:
            part = self._pass(tokens, chunk, wanted, pool, states, hidden)
            parts.append(part if chunk is chunks[-1] else _copied(part))
            states = part.states
        return parts[0] if len(parts) == 1 else _joined(parts)

    def _pass(
        self,
        tokens: Ints,
        chunk: slice,
        wanted: Array,
        pool: Floats | None,
        states: Pooled | None,
        hidden: Sequence[int],
    ) -> Forward:
        """One run of the graph over tokens[chunk]; wanted rows outside belong to another pass."""
        inside = wanted[(wanted >= chunk.start) & (wanted < chunk.stop)]
        # a graph computes one row at least; a pass that is asked for none gives its last and drops it
        rows = inside if len(inside) else np.array([chunk.stop - 1])
        next_ids = np.append(tokens, 0)[rows + 1]  # 0: unknown
        ids = tokens[chunk]
        feeds: dict[str, Array | Tensor] = {**self._feeds(ids, rows - chunk.start, next_ids)}
        feeds["pool"] = np.zeros((1, len(ids)), np.float32) if pool is None else pool[None, chunk]
        feeds["pooled_in"] = self._no_pool if states is None else states.feed
        fetch = [*(OUTPUTS if self.spec.graph in STAYING else ["logits"])]
        fetch += [f"hidden.{index}" for index in hidden]
        if pool is not None:
            fetch.append("pooled")
        if self._rows is not None:
            fetch.append("kv_new")
        self._forget_outputs()
        found = self._session.run(feeds, fetch)
        if self._rows is not None:
            self._backend.store(found["kv_new"], self._rows, self.length)
        self.tokens += ids.tolist()
        return Forward(
            rows=self._rows_of(found, len(inside), next_ids),
            states=None if pool is None else self._states_of(found["pooled"]),
            hidden={index: _wide(found[f"hidden.{index}"]) for index in hidden},
        )

    def _rows_of(self, found: Mapping[str, Tensor], n_rows: int, next_ids: Ints) -> Rows:
        """What may follow the first n_rows rows of a pass."""
        if self.spec.graph not in STAYING:
            return Rows(_wide(found["logits"])[:n_rows])
        outputs = Outputs(found, self._backend.part, next_ids, self._count_full)
        self._left.append(outputs)
        return TopRows(outputs, range(n_rows), self.spec.vocab_size)

    def _states_of(self, found: Tensor) -> Pooled:
        if self.spec.graph not in STAYING:
            return Pooled(_wide(found))
        held = HeldPooled(found, self._backend)
        self._left.append(held)
        return held

    def _count_full(self, n_rows: int) -> None:
        self.n_full_rows += n_rows

    def _forget_outputs(self) -> None:
        """Before they are written over."""
        for left in self._left:
            left.close()
        self._left.clear()

    def _feeds(self, ids: Ints, rows: Array, next_ids: Ints) -> dict[str, Array]:
        """What a pass reads but for the pooled sum, as the graph's kind wants it."""
        index = np.dtype(self.spec.index_dtype)
        feeds: dict[str, Array] = {
            "input_ids": ids[None].astype(index),
            "past_len": np.array([self.length], index),
            "logit_rows": rows.astype(index),
        }
        if self.spec.graph == "cpu":
            feeds["spare"] = np.array([len(ids) % 2 if self._same_bits else 0], np.int64)
        else:
            feeds["next_ids"] = next_ids[None].astype(index)
        if self.spec.graph == "native":
            feeds["span"] = np.arange(span_of(self.spec, self.length + len(ids)))
        return feeds


def _wanted(rows: Sequence[int], n_new: int) -> Array:
    """Rows as ascending indices from 0. Raises ConfigError."""
    wanted = np.asarray(rows, np.int64)
    wanted = np.where(wanted < 0, wanted + n_new, wanted)
    if np.any((wanted < 0) | (wanted >= n_new)) or np.any(wanted[1:] < wanted[:-1]):
        raise ConfigError(f"rows must ascend within 0..{n_new - 1} (or -{n_new}..-1), got {list(rows)}")
    return wanted


def _wide(tensor: Tensor) -> Floats:
    """The only text's values in fp32: the memory itself where it is fp32 already."""
    values: Floats = tensor.numpy()[0].astype(np.float32, copy=False)
    return values


def common_prefix(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many tokens two texts share from their start.

    >>> common_prefix([5, 8, 2], [5, 8, 9, 1])
    2
    """
    for n, (our, their) in enumerate(zip(ours, theirs, strict=False)):
        if our != their:
            return n
    return min(len(ours), len(theirs))


def _copied(part: Forward) -> Forward:
    """All but the pooled sum, from which the next pass goes on."""
    return Forward(
        rows=part.rows.copy(),
        hidden={index: state.copy() for index, state in part.hidden.items()},
    )


def _joined(parts: Sequence[Forward]) -> Forward:
    """Passes over consecutive pieces of one text as one; the pooled sum of the last holds all."""
    asked = [part.rows for part in parts if len(part.rows)] or [parts[-1].rows]
    return Forward(
        rows=asked[0] if len(asked) == 1 else Rows(np.concatenate([rows.logits for rows in asked])),
        states=parts[-1].states,
        hidden={index: np.concatenate([part.hidden[index] for part in parts]) for index in parts[0].hidden},
    )
