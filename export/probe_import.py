"""Probes that were trained elsewhere, taken into a bundle: probes/1 with the two graphs of the published ratio.

There is no predictor in it and no threshold, for nobody measured them. That such a probe belongs to its model is its
owner's word: only width and state are checked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from semspec.export.plan import ModelRequest, Plan
from semspec.export.probe_graph import ProbeFile, ProbeWeights, add_probe_graph, check_probe_graph
from semspec.runtime.backends import open_backend
from semspec.runtime.bundle import ROLES, Manifest
from semspec.runtime.errors import ConfigError, SourceError
from semspec.runtime.probes import FORMAT, PREDICTOR_FILE, PROBES, ProbeSet, model_hashes

__all__ = ["MatchedProbe", "check_pair", "match_probes", "write_probes"]

GATE_ROWS = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MatchedProbe:
    """layer: the state it reads, 0..L. pooled_layers: all that the model's graphs pool."""

    weights: ProbeWeights
    layer: int
    pooled_layers: tuple[int, ...]


def check_pair(given: Collection[str], roles: Collection[str]) -> None:
    """given: roles with a probe; roles: with a model. Raises ConfigError for probes that are not of both models."""
    if given and not set(given) == set(roles) == set(ROLES):
        raise ConfigError(
            "probes are compared with each other: give --target-probe and --draft-probe, and both models, or none"
        )


def match_probes(requests: Mapping[str, ModelRequest], plans: Mapping[str, Plan]) -> dict[str, MatchedProbe]:
    """Role -> its probe, held against its model; empty where none were given.

    Raises ConfigError for one without the other and a state that is not pooled, SourceError for another width.
    """
    probes = {role: request.probe for role, request in requests.items() if request.probe is not None}
    check_pair(probes, requests)
    return {role: _match(role, probe, plans[role]) for role, probe in probes.items()}


def write_probes(
    folder: Path, probes: Mapping[str, MatchedProbe], manifest: Manifest, *, verify: bool
) -> None:
    """Into the bundle `folder`, beside the models that `manifest` lists. verify: hold the graphs against numpy.

    Raises BundleError for a graph that computes something else, BackendError without an engine.
    """
    place = folder / PROBES / "1"
    place.mkdir(parents=True)
    graphs = {}
    for role, probe in probes.items():
        graphs[role] = add_probe_graph(place, role, probe.weights, role=role, layers=(probe.layer,))
        if verify:
            states = np.random.default_rng(0).standard_normal((GATE_ROWS, *probe.weights.shape[:2]))
            check_probe_graph(
                open_backend("cpu"), place / graphs[role].file, probe.weights, states.astype(np.float32)
            )
    found = ProbeSet(
        format=FORMAT,
        graphs=graphs,
        risks=(),
        boundary=manifest.boundary,
        models=model_hashes(manifest),
        pooled_layers={role: probe.pooled_layers for role, probe in probes.items()},
        backend="",
        temperature=None,
        top_p=None,
    )
    (place / PREDICTOR_FILE).write_text(found.to_json(), encoding="utf-8")


def _match(role: str, probe: ProbeFile, plan: Plan) -> MatchedProbe:
    graph = plan.graphs["cpu"]
    layer = graph.n_layers if probe.layer is None else probe.layer
    layer += (graph.n_layers + 1) * (layer < 0)
    width = probe.weights.shape[1]
    if width != graph.width:
        raise SourceError(
            f"the {role}'s probe reads states of width {width}, and {plan.name} has width {graph.width}; give the "
            f"probe of this model"
        )
    if layer not in graph.pooled_layers:
        raise ConfigError(
            f"the {role}'s probe reads state {layer}, and states {', '.join(map(str, graph.pooled_layers))} of "
            f"{graph.n_layers} are pooled; name it in --probe-layers"
        )
    return MatchedProbe(weights=probe.weights, layer=layer, pooled_layers=graph.pooled_layers)
