"""Rows: what may follow each place of a pass that was asked for, read as far as somebody looks.

    Rows       logits in memory: those of the CPU
    TopRows    of a graph that leaves its outputs on a device: each row is answered from its likeliest ids where that
               is exact (top.py), and its V logits are copied where it is not

A row is answered the same either way, but for rounding. It knows the outputs of one pass; it knows no text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import numpy as np

from semspec.runtime.backends.base import Tensor
from semspec.runtime.config import SamplingParams
from semspec.runtime.errors import ConfigError
from semspec.runtime.readings import Row, TokenSignals
from semspec.runtime.records import Array, Floats, Law
from semspec.runtime.top import Top

__all__ = ["OUTPUTS", "Outputs", "Rows", "TopRows"]

OUTPUTS = ("logits", "lse", "entropy", "next_logits", "top_logits", "top_ids")


class Rows(Sequence[Row]):
    """R rows of V logits each. Of use until the model's next pass: `copy` what must last."""

    def __init__(self, logits: Floats) -> None:
        self._logits = logits

    @property
    def logits(self) -> Floats:
        """(R, V): all of every row."""
        return self._logits

    @property
    def n_ids(self) -> int:
        """V."""
        return int(self._logits.shape[1])

    def __len__(self) -> int:
        return len(self._logits)

    def __getitem__(self, place: int) -> Row:  # type: ignore[override]
        return Row(self._logits[place])

    def cut(self, n_ids: int) -> Rows:
        """The same rows, of the first n_ids ids at most: what is behind them is padding."""
        return Rows(self._logits[:, :n_ids])

    def part(self, start: int, end: int) -> Rows:
        """Rows start..end - 1."""
        return Rows(self._logits[start:end])

    def copy(self) -> Rows:
        """Every row in full, for good."""
        return Rows(self.logits.copy())


class Outputs:
    """What a pass left on the device about its rows; each output, and each row of logits, is copied when first read.

    found: by name, (1, R, ..) of each of OUTPUTS. part: Backend.part. next_ids: (R,), what next_logits are of.
    on_full: told of every row that is copied in full.
    """

    def __init__(
        self,
        found: Mapping[str, Tensor],
        part: Callable[[Tensor, int], Tensor],
        next_ids: Array,
        on_full: Callable[[int], None],
    ) -> None:
        self.next_ids, self.size = next_ids, found["logits"].shape[-1]
        self._found = {name: found[name] for name in OUTPUTS}
        self._part, self._on_full = part, on_full
        self._read: dict[str, Array] = {}
        self._rows: dict[int, Floats] = {}
        self._text: Tensor | None = None  # (R, V): the logits of the one text

    def read(self, name: str) -> Array:
        """(R, ..) of one output."""
        if name not in self._read:
            self._read[name] = self._tensor(name).numpy()[0]
        return self._read[name]

    def all_logits(self) -> Floats:
        """(R, V)."""
        if "logits" not in self._read:
            self._read["logits"] = self._tensor("logits").numpy()[0].astype(np.float32, copy=False)
            self._on_full(len(self.next_ids))
        return self._read["logits"]

    def logits(self, place: int) -> Floats:
        """(V,) of one row."""
        if "logits" in self._read:
            row: Floats = self._read["logits"][place]
            return row
        if place not in self._rows:
            if self._text is None:
                self._text = self._part(self._tensor("logits"), 0)
            self._rows[place] = self._part(self._text, place).numpy().astype(np.float32, copy=False)
            self._on_full(1)
        return self._rows[place]

    def close(self) -> None:
        """The model reads on, over all of it."""
        for kept in (self._found, self._read, self._rows):
            kept.clear()
        self._text = None

    def _tensor(self, name: str) -> Tensor:
        if name not in self._found:
            raise ConfigError(
                "what a pass says of its rows is gone with the model's next pass; copy what must last"
            )
        return self._found[name]


class TopRows(Rows):
    """Rows `places` of a pass whose outputs are on a device, of the first n_ids ids."""

    def __init__(self, outputs: Outputs, places: range, n_ids: int) -> None:
        self._outputs, self._places, self._n_ids = outputs, places, n_ids

    @property
    def logits(self) -> Floats:
        """(R, n_ids): copied from the device, with those of the pass's other rows."""
        if not self._places:
            return np.zeros((0, self._n_ids), np.float32)
        return self._outputs.all_logits()[self._places.start : self._places.stop, : self._n_ids]

    @property
    def n_ids(self) -> int:
        return self._n_ids

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, place: int) -> Row:  # type: ignore[override]
        return _TopRow(self._outputs, self._places[place], self._n_ids)

    def cut(self, n_ids: int) -> Rows:
        return TopRows(self._outputs, self._places, min(n_ids, self._n_ids))

    def part(self, start: int, end: int) -> Rows:
        return TopRows(self._outputs, self._places[start:end], self._n_ids)


class _TopRow(Row):
    """One of TopRows: what its likeliest ids do not tell is asked of the row in full."""

    def __init__(self, outputs: Outputs, place: int, n_ids: int) -> None:
        self._outputs, self._place, self._n_ids = outputs, place, n_ids

    @cached_property
    def _top(self) -> Top:
        return Top(
            self._outputs.read("top_logits")[self._place],
            self._outputs.read("top_ids")[self._place],
            self._number("lse"),
            size=self._outputs.size,
            n_ids=self._n_ids,
        )

    @property
    def logits(self) -> Floats:
        return self._outputs.logits(self._place)[: self._n_ids]

    @cached_property
    def best(self) -> int:
        found = self._top.best
        return super().best if found is None else found

    @cached_property
    def top_chance(self) -> float:
        found = None if self._top.best is None else self._logprob(self._top.best)
        return super().top_chance if found is None else math.exp(found)

    def short_law(self, params: SamplingParams) -> Law | None:
        return self._top.law(params)

    def of(self, token: int) -> TokenSignals:
        found, entropy = self._logprob(token), self._number("entropy")
        if found is None or not math.isfinite(entropy):
            return super().of(token)
        return TokenSignals(found, entropy, token == self.best)

    def logprob(self, token: int) -> float:
        found = self._logprob(token)
        return super().logprob(token) if found is None else found

    def is_among(self, token: int, n: int) -> bool:
        found = self._top.is_among(token, n)
        return super().is_among(token, n) if found is None else found

    def _logprob(self, token: int) -> float | None:
        total, value = self._top.log_total, self._top.value(token)
        if value is None and token == self._outputs.next_ids[self._place]:
            value = self._number("next_logits")
        return None if total is None or value is None else value - total

    def _number(self, output: str) -> float:
        return float(self._outputs.read(output)[self._place])
