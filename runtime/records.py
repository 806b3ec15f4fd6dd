"""The nouns that pass between phases, and the letters their shapes are written in.

    B batch                S tokens in a call        R rows wanted         n draft tokens
    V vocabulary           E width                   L layers              H key/value heads
    D head size            C cache capacity          T cache rows read     K pooled layers
    F signals of a probe

Records are frozen; what changes lives in caches and ledgers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Array", "Floats", "Forward", "Ints", "Progress", "Step", "TensorSpec"]

Array: TypeAlias = npt.NDArray[Any]
Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]

Progress: TypeAlias = Callable[[str, int, int], None]
"""on_progress(stage, done, total): called often, must be quick; total 0 means unknown."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, numpy dtype name and shape of a graph input or output; a letter stands for a size set by the call."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """What one pass of a model returned. Arrays may be reused by the model's next call: copy what must last.

    logits: (R, V) of the rows asked for. pooled: (K, E), the running sum of the pooled layers' states, or None
    where nothing was pooled. hidden: state index -> (S, E).
    """

    logits: Floats
    pooled: Floats | None = None
    hidden: Mapping[int, Floats] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One round of the decoding loop: the ids it committed, and on the last one why it is the last.

    finish_reason: `stop` (an end id), `length` (max_tokens or the context), None while there is more.
    """

    ids: tuple[int, ...]
    finish_reason: str | None = None
