"""Segments as one model writes or reads them, and what it makes of them: ids in, Written and Reading out.

Several samples of one context share the passes over what they have in common: a tree of tokens, walked depth first, the
cache rewound at every fork. Each sample draws from chances of its own, so it is the one that would have been written
alone. Half of eight samples of a small model are alike, and most begin alike (measured): no batch is needed, and states
and logits are those of the graph's single steps. It knows no text and no files.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from semspec.runtime.config import SamplingParams
from semspec.runtime.model import LanguageModel, common_prefix
from semspec.runtime.readings import Reading, Row, TokenSignals, sum_up
from semspec.runtime.records import Floats
from semspec.runtime.sampling import sample, warp
from semspec.runtime.segments import Segment, Segmenter

__all__ = ["Written", "read_segment", "write_segments"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Written:
    """A segment and what its author made of it."""

    ids: tuple[int, ...]
    reading: Reading


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Node:
    """A begun segment that some samples have in common. pooled: the sum over the rows so far, None for none."""

    ids: tuple[int, ...]
    tokens: tuple[TokenSignals, ...]
    pooled: Floats | None
    segment: Segment
    samples: tuple[int, ...]


def write_segments(
    model: LanguageModel,
    context: Sequence[int],
    rngs: Sequence[np.random.Generator | None],
    *,
    segmenter: Segmenter,
    sampling: SamplingParams,
    n_ids: int,
) -> list[Written]:
    """One segment after `context` for each of `rngs`, drawn with `sampling` from its chances; None: the greedy one.

    Pooled and signals are over the rows that predicted its tokens: the one of the context's last token and those of all
    tokens but the segment's last. n_ids: ids that can be drawn. The model is left with the context, all but its last
    token. Equal segments have one and the same Reading. Raises ConfigError where the context and a segment are longer
    than what the model can remember, BackendError for logits that cannot be used.
    """
    start = _recall(model, context)
    found: list[Written | None] = [None] * len(rngs)
    root = _Node(ids=(), tokens=(), pooled=None, segment=segmenter.begin(), samples=tuple(range(len(rngs))))
    stack = [root]
    while stack:
        node = stack.pop()
        model.rewind(start + len(node.ids))
        last = node.ids[-1] if node.ids else context[-1]
        passed = model.forward([last], pool=np.ones(1, np.float32), pooled=node.pooled)
        assert passed.pooled is not None  # asked for
        row, pooled = Row(passed.logits[0, :n_ids]), passed.pooled.copy()
        for token, samples in _draw(row, node.samples, rngs, sampling).items():
            segment = copy.copy(node.segment)
            ids, tokens = (*node.ids, token), (*node.tokens, row.of(token))
            if segment.push(token):
                written = Written(ids=ids, reading=_reading(pooled, tokens))
                for index in samples:
                    found[index] = written
            else:
                stack.append(_Node(ids=ids, tokens=tokens, pooled=pooled, segment=segment, samples=samples))
    model.rewind(start)
    return [written for written in found if written is not None]


def read_segment(model: LanguageModel, context: Sequence[int], ids: Sequence[int], *, n_ids: int) -> Reading:
    """What the model makes of a segment that another one wrote: one pass, over the rows that predict its tokens.

    The model is left with the context, all but its last token. Raises as write_segments.
    """
    start = _recall(model, context)
    given = [context[-1], *ids[:-1]]
    passed = model.forward(given, rows=range(len(given)), pool=np.ones(len(given), np.float32))
    assert passed.pooled is not None  # asked for
    tokens = [Row(logits[:n_ids]).of(token) for logits, token in zip(passed.logits, ids, strict=True)]
    reading = _reading(passed.pooled, tokens)
    model.rewind(start)
    return reading


def _recall(model: LanguageModel, context: Sequence[int]) -> int:
    """Bring the model to the context, all but its last token; how many tokens that is."""
    *known, _ = context
    model.rewind(common_prefix(model.tokens, known))
    if len(known) > model.length:
        model.forward(known[model.length :], rows=())
    return len(known)


def _draw(
    row: Row,
    samples: Sequence[int],
    rngs: Sequence[np.random.Generator | None],
    sampling: SamplingParams,
) -> dict[int, tuple[int, ...]]:
    """Next token -> the samples that go on with it."""
    drawn: dict[int, tuple[int, ...]] = {}
    law = None
    for index in samples:
        rng = rngs[index]
        if rng is None:
            token = row.best
        else:
            law = warp(row.logits, sampling) if law is None else law
            token = sample(law, rng)
        drawn[token] = (*drawn.get(token, ()), index)
    return drawn


def _reading(pooled: Floats, tokens: Sequence[TokenSignals]) -> Reading:
    return Reading(pooled=pooled / np.float32(len(tokens)), signals=sum_up(tokens))
