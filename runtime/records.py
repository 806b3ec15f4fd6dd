"""The nouns that pass between phases, and the letters their shapes are written in.

    B batch                S tokens in a call        R rows wanted         n draft tokens
    V vocabulary           E width                   L layers              H key/value heads
    D head size            C cache capacity          T cache rows read     K pooled layers
    F signals of a probe

Records are frozen; what changes lives in caches and ledgers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Array", "Floats", "Ints", "Progress"]

Array: TypeAlias = npt.NDArray[Any]
Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]

Progress: TypeAlias = Callable[[str, int, int], None]
"""on_progress(stage, done, total): called often, must be quick; total 0 means unknown."""
