"""A segment read in one pass, plainly: what trees of shared passes and running engines are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from semspec.runtime.model import LanguageModel, common_prefix
from semspec.runtime.readings import Reading, read_signals

__all__ = ["read_segment"]


def read_segment(model: LanguageModel, context: Sequence[int], ids: Sequence[int], *, n_ids: int) -> Reading:
    """What `model` makes of `ids` after `context`, over the rows that predict them, of logits cut to `n_ids`.

    The model is left with the context, all but its last token.
    """
    *known, last = context
    model.rewind(common_prefix(model.tokens, known))
    if len(known) > model.length:
        model.forward(known[model.length :], rows=())
    given = [last, *ids[:-1]]
    found = model.forward(given, rows=range(len(given)), pool=np.ones(len(given), np.float32))
    assert found.pooled is not None  # asked for
    pooled, signals = found.pooled / np.float32(len(ids)), read_signals(found.rows.cut(n_ids), ids)
    model.rewind(len(known))
    return Reading(pooled=pooled, signals=signals)
