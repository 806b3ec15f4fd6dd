"""A program that runs passes of the models of a bundle over the doubles, and tells which were recorded and launched.

    passes.py BUNDLE BACKEND [PLAN]     prints one JSON line. PLAN: opened for the target instead of the bundle's

Counts are of the double of the driver: graphs that exist, and launches so far.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorrt

from semspec.runtime.backends import open_backend, trt
from semspec.runtime.bundle import Bundle
from semspec.runtime.model import CachedModel
from semspec.runtime.opening import model_file
from semspec.runtime.records import Floats

TEXT = list(range(5, 21))
driver = ctypes.CDLL("libcuda.so.1")


def read(model: CachedModel, n_tokens: int) -> tuple[list[int], Floats]:
    """Graphs and launches after `n_tokens` were read by a model that remembers nothing, and the last state."""
    model.rewind(0)
    layer = model.spec.hidden_layers[-1]
    states = model.forward(TEXT[:n_tokens], hidden=[layer]).hidden[layer].copy()
    return [driver.double_graphs(), driver.double_launches()], states


def repeated(model: CachedModel) -> dict[str, Any]:
    """One token, four times; then four tokens one by one, of which the first is the same."""
    found = [read(model, 1) for _ in range(4)]
    model.rewind(0)
    layer = model.spec.hidden_layers[-1]
    single = [model.forward([token], hidden=[layer]).hidden[layer].copy() for token in TEXT[:4]]
    together = read(model, 4)[1]
    return {
        "counts": [count for count, _ in found],
        "alike": all(np.array_equal(states, found[0][1]) for _, states in found),
        "away": float(np.abs(np.concatenate(single) - together).max()),
    }


def bounded(model: CachedModel) -> list[int]:
    """How many graphs there were while more shapes came round than are kept in mind, and in the end one of these."""
    trt.MOST_GRAPHS = 3
    kept = [read(model, n)[0][0] for n in (5, 5, 6, 6, 7, 7, 8, 8)]
    trt.MOST_GRAPHS = 32
    return kept


def grown(target: CachedModel, draft: CachedModel) -> dict[str, Any]:
    """Where passes worked, and launches: three of the target, one of the draft, two more of the target."""
    places, launches = [], []
    for model, n_tokens in [*3 * [(target, 1)], (draft, 2), *2 * [(target, 1)]]:
        launches.append(read(model, n_tokens)[0][1])
        places.append(tensorrt.WORKED[-1])
    names = {place: name for name, place in zip("ab", dict.fromkeys(places), strict=False)}
    return {
        "places": "".join(names.get(place, "?") for place in places),
        "launches": [count - launches[0] for count in launches],
    }


def main() -> None:
    bundle = Bundle.open(Path(sys.argv[1]))
    backend = open_backend(sys.argv[2])
    plan, spec = model_file(bundle, "target", backend)
    if len(sys.argv) > 3:
        plan = Path(sys.argv[3])
    line: dict[str, Any] = {}
    counts = getattr(backend.trt, "COUNTS", {})  # type: ignore[attr-defined]
    with (
        CachedModel(backend, plan, spec) as target,
        CachedModel(backend, *model_file(bundle, "draft", backend)) as draft,
    ):
        line["repeated"] = repeated(target)
        line["engine"] = dict(counts)
        line["bounded"] = bounded(target)
        line["grown"] = grown(target, draft)
        line["graphs"] = target._session.graphs  # type: ignore[attr-defined]
    line["left"] = driver.double_graphs()
    sys.stdout.write(json.dumps(line))


if __name__ == "__main__":
    main()
