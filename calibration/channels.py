"""Statistics of what one linear reads, gathered block of rows by block of rows, in memory that rows do not fill.

Knows arrays. Does not know models, texts or files.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from semspec.export.quantize import MOMENT_SPAN
from semspec.export.ranges import PERCENTILES, LinearRanges
from semspec.runtime.records import Floats

__all__ = ["ChannelStatistics"]

Doubles = npt.NDArray[np.float64]


class ChannelStatistics:
    """Rows (S, E) come in by `add`; `finish` gives the statistics of all of them.

    n_rows: how many will come. The same rows in the same blocks give the same bits. Memory: 2 % of all values.
    """

    def __init__(self, n_rows: int, width: int) -> None:
        self.n_rows, self.n_seen = n_rows, 0
        self._abs_max: Floats = np.zeros(width, np.float32)
        self._sums: Doubles = np.zeros((2, width))  # of |x| and x
        n_spans = -(-width // MOMENT_SPAN)
        self._moments: Doubles = np.zeros((n_spans, MOMENT_SPAN, MOMENT_SPAN))
        self._by_channel = _Largest(n_rows, np.empty((0, width), np.float32))
        self._overall = _Largest(n_rows * width, np.empty(0, np.float32))

    def add(self, x: Floats) -> None:
        """One more block of rows, (S, E)."""
        size = np.abs(x)
        self.n_seen += len(x)
        np.maximum(self._abs_max, size.max(axis=0, initial=0), out=self._abs_max)
        for total, values in zip(self._sums, (size, x), strict=True):
            total += values.sum(axis=0, dtype=np.float64)
        for span, total in enumerate(self._moments):
            part = x[:, span * MOMENT_SPAN : (span + 1) * MOMENT_SPAN]
            total[: part.shape[1], : part.shape[1]] += part.T @ part
        self._by_channel.add(size)
        self._overall.add(size.reshape(-1))

    def finish(self) -> LinearRanges:
        """Raises ValueError where other than n_rows rows have come."""
        if self.n_seen != self.n_rows:
            raise ValueError(f"{self.n_seen} rows have come and {self.n_rows} were promised")
        mean_abs, mean = (self._sums / self.n_rows).astype(np.float32)
        return LinearRanges(
            abs_max=self._abs_max,
            mean_abs=mean_abs,
            mean=mean,
            moments=_symmetric(self._moments / self.n_rows).astype(np.float32),
            channel_percentiles=self._by_channel.percentiles(),
            percentiles=self._overall.percentiles(),
        )


def _symmetric(moments: Doubles) -> Doubles:
    """Products of fp32 need not be symmetric to the last bit."""
    return (moments + np.swapaxes(moments, 1, 2)) / 2


class _Largest:
    """The largest values along the first axis, as many as the lowest percentile of `total` values needs."""

    def __init__(self, total: int, kept: Floats) -> None:
        self.ranks = [_from_the_top(total, percentile) for percentile in PERCENTILES]
        self.kept = kept

    def add(self, values: Floats) -> None:
        n_kept = max(self.ranks)
        if self.kept.ndim == 1 and len(self.kept) == n_kept:
            values = values[
                values > self.kept[0]
            ]  # most are not, and partitioning them would cost ten times more
        values = np.concatenate((self.kept, values))
        if len(values) > n_kept:
            values = np.partition(values, len(values) - n_kept, axis=0)[-n_kept:].copy()
        self.kept = values  # once full, its least is first

    def percentiles(self) -> Floats:
        """One row a percentile."""
        values = np.sort(self.kept, axis=0)
        return np.stack([values[-rank] for rank in self.ranks])


def _from_the_top(total: int, percentile: float) -> int:
    """Which of `total` values, counted from the largest, is the percentile: the least not below q % of them.

    >>> _from_the_top(1000, 99.0), _from_the_top(1000, 99.9), _from_the_top(50, 99.0)
    (11, 2, 1)
    """
    hundredths = round(percentile * 100)
    return total + 1 - -(-total * hundredths // 10_000)
