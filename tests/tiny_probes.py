"""Probes of a tiny pair's own sizes, with weights drawn at random, as calibration would leave them in a bundle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from semspec.export.probe_graph import Dense, ProbeWeights, Scaling, StateBranch, add_probe_graph
from semspec.runtime.bundle import ROLES, Bundle
from semspec.runtime.probes import (
    FORMAT,
    PREDICTOR,
    PREDICTOR_FILE,
    PROBES,
    ProbeSet,
    RatioFacts,
    RiskPoint,
    model_hashes,
)
from semspec.runtime.records import Floats

RISKS = (
    RiskPoint(risk=0.05, threshold=0.8, coverage=0.3, observed=0.01, upper=0.04),
    RiskPoint(risk=0.2, threshold=0.5, coverage=0.7, observed=0.1, upper=0.19),
)
RATIO = RatioFacts(mean_acceptance=0.9, overlap=0.7)


def rows(*shape: int, seed: int = 0, size: float = 2.0) -> Floats:
    """Normal numbers."""
    values: Floats = (size * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)
    return values


def plain_mlp(*sizes: int) -> dict[str, Floats]:
    """Tensors of a probe from elsewhere, sizes from its input to its one output."""
    return {
        f"fc.{i}.{part}": rows(*shape, seed=i, size=0.5)
        for i, (into, out) in enumerate(pairwise(sizes))
        for part, shape in (("weight", (out, into)), ("bias", (out,)))
    }


def branch(width: int, *hidden: int, seed: int = 0, center: float = 1.0) -> StateBranch:
    """An MLP over states of `width`; without hidden layers a linear probe."""
    rng = np.random.default_rng(seed)
    sizes = (width, *hidden, 1)

    def draw(*shape: int) -> Floats:
        values: Floats = (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
        return values

    layers = tuple(Dense(weight=draw(out, into), bias=draw(out)) for into, out in pairwise(sizes))
    return StateBranch(center=np.full(width, center, np.float32), layers=layers)


def probe(
    width: int,
    n_layers: int = 1,
    n_features: int = 0,
    *,
    hidden: Sequence[int] = (),
    scaling: Scaling | None = None,
    seed: int = 0,
) -> ProbeWeights:
    """A probe with a branch for each of n_layers states, and n_features."""
    rng = np.random.default_rng([seed, 1])
    return ProbeWeights(
        states=tuple(branch(width, *hidden, seed=seed + place) for place in range(n_layers)),
        weights=rng.standard_normal(n_features).astype(np.float32),
        centers=rng.standard_normal(n_features).astype(np.float32),
        bias=0.25,
        scaling=scaling or Scaling(),
    )


def add_probes(
    bundle: Path,
    *,
    layers: Sequence[int] = (),
    features: Sequence[str] = ("target.mean_logprob", "text.capped"),
    predictor: bool = True,
    ratio: bool | RatioFacts = True,
    number: int = 1,
    scaling: Scaling | None = None,
    **changes: Any,
) -> Path:
    """Write probes/<number> into a bundle with a pair: the predictor over target states `layers` and `features`, and
    the two probes of the ratio over each model's last state. changes: of the ProbeSet. Returns the folder."""
    manifest = Bundle.open(bundle).manifest
    folder = bundle / PROBES / str(number)
    folder.mkdir(parents=True)
    specs = {role: manifest.models[role].graphs["cpu"] for role in ROLES}
    graphs = {}
    if predictor:
        weights = probe(specs["target"].width, len(layers), len(features), scaling=scaling)
        graphs[PREDICTOR] = add_probe_graph(
            folder, PREDICTOR, weights, role="target", layers=layers, features=features
        )
    for role, spec in specs.items():
        if ratio:
            weights = probe(spec.width, hidden=(8, 4), seed=len(role))
            graphs[role] = add_probe_graph(folder, role, weights, role=role, layers=spec.pooled_layers[-1:])
    found = ProbeSet(
        format=FORMAT,
        graphs=graphs,
        risks=RISKS if predictor else (),
        ratio=ratio if isinstance(ratio, RatioFacts) else RATIO if ratio else None,
        boundary=manifest.boundary,
        models=model_hashes(manifest),
        pooled_layers={role: spec.pooled_layers for role, spec in specs.items()},
        backend="cpu",
        temperature=0.6,
        top_p=0.95,
    )
    (folder / PREDICTOR_FILE).write_text(replace(found, **changes).to_json(), encoding="utf-8")
    return folder
