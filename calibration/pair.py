"""Target and draft opened for calibration, and all that says how they write: Pair.

There are as many as threads, over the same weights: a core that decodes on its own waits for nobody (measured: two
pairs on two cores calibrated in 31 minutes, one pair on both in 37). Unlike LLM's, both engines give a row the same
bits in whatever pass it is read: what is collected does not depend on what was read before, so a run that was killed
goes on with the same bytes. It knows no files but the bundle's.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from semspec.runtime.backends import check_backend, open_backend
from semspec.runtime.bundle import ROLES, Bundle
from semspec.runtime.config import SamplingParams
from semspec.runtime.errors import CalibrationError
from semspec.runtime.model import CachedModel
from semspec.runtime.opening import check_openable, model_file
from semspec.runtime.segments import Boundary, Segmenter
from semspec.runtime.tokenizer import Tokenizer

__all__ = ["Pair", "open_pairs", "rng_for"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pair:
    """models: role -> the model. sampling: how segments are drawn, no penalties in it."""

    models: dict[str, CachedModel]
    tokenizer: Tokenizer
    segmenter: Segmenter
    sampling: SamplingParams

    def n_ids(self, role: str) -> int:
        """Ids that the model can be given and can draw: rows beyond the tokenizer's are padding."""
        return min(self.tokenizer.vocab_size, self.models[role].spec.vocab_size)

    @property
    def longest_context(self) -> int:
        """Tokens after which both models can still read the longest segment."""
        shortest = min(model.max_context for model in self.models.values())
        return shortest - self.segmenter.boundary.max_tokens


@contextmanager
def open_pairs(
    bundle: Bundle,
    *,
    sampling: SamplingParams,
    boundary: Boundary | None = None,
    backend: str = "cpu",
    threads: int | None = None,
) -> Iterator[tuple[Pair, ...]]:
    """Pairs that can work at once, each in a thread of its own. Closed at the end.

    boundary: another than the bundle's. threads: on a CPU one pair for each, None for one a core; elsewhere there is
    one pair.

    Raises CalibrationError for a bundle without a draft, BundleError, ConfigError and BackendError as LLM does.
    """
    check_backend(backend)
    if "draft" not in bundle.manifest.models:
        raise CalibrationError(
            f"{bundle.path} has no draft model, and segments are judged only where a draft writes them; export a pair"
        )
    tokenizer = Tokenizer.open(bundle.tokenizer)
    segmenter = Segmenter(boundary or bundle.manifest.boundary, tokenizer.token_bytes, tokenizer.eos_ids)
    for role in ROLES:
        check_openable(bundle, role, backend)
    n_pairs = threads or _usable_cores() if backend == "cpu" else 1
    engine = open_backend(backend, threads=1, spin=False)
    with ExitStack() as stack:
        pairs = []
        for _ in range(n_pairs):
            models = {}
            for role in ROLES:
                file, spec = model_file(bundle, role, engine)
                models[role] = stack.enter_context(CachedModel(engine, file, spec))
            pairs.append(Pair(models=models, tokenizer=tokenizer, segmenter=segmenter, sampling=sampling))
        yield tuple(pairs)


def rng_for(seed: int, *names: str | int) -> np.random.Generator:
    """Chances of their own for whatever `names` name: they do not depend on what was drawn before."""
    digest = hashlib.sha256(json.dumps([seed, *names]).encode("ascii")).digest()
    return np.random.default_rng(int.from_bytes(digest, "little"))


def _usable_cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
