"""Probes: those of a bundle opened, and the scores they give.

It knows graphs and what goes into them; it knows no training and no rule that uses a score. What lies in the files is
probe_set.py's, whose names are offered here too.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import numpy as np

from semspec.runtime.backends.base import Backend, Session, Tensor
from semspec.runtime.bundle import ROLES, Bundle
from semspec.runtime.contract import UNREADABLE, check_ports, probe_ports
from semspec.runtime.errors import BackendError, CalibrationError, ConfigError
from semspec.runtime.features import SegmentText, feature_values
from semspec.runtime.opening import probe_file
from semspec.runtime.pooled import HeldPooled
from semspec.runtime.probe_set import (
    FORMAT,
    PREDICTOR,
    PREDICTOR_FILE,
    PROBES,
    ProbeGraph,
    ProbeSet,
    RatioFacts,
    RiskPoint,
    latest_probes,
    model_hashes,
    read_probes,
    require_probes,
)
from semspec.runtime.readings import NOT_FINITE, Reading, check_states
from semspec.runtime.records import Array, Floats
from semspec.runtime.segments import Boundary

__all__ = [
    "FORMAT",
    "PREDICTOR",
    "PREDICTOR_FILE",
    "PROBES",
    "ProbeGraph",
    "ProbeSet",
    "Probes",
    "RatioFacts",
    "RiskPoint",
    "latest_probes",
    "model_hashes",
    "read_probes",
]


class Probes:
    """Opened probes. A context manager. Not for use by several threads at once."""

    def __init__(
        self,
        folder: Path,
        found: ProbeSet,
        files: Mapping[str, Path],
        widths: Mapping[str, int],
        backend: Backend,
    ) -> None:
        """files: name -> what to open for that graph. widths: role -> E. See `open`."""
        self.folder, self.set, self._backend = folder, found, backend
        self._sessions: dict[str, Session] = {}
        self._gathered: dict[str, Tensor] = {}  # on a device, states that a graph reads
        with ExitStack() as stack:
            for name, graph in found.graphs.items():
                session = backend.open(files[name])
                stack.callback(session.close)
                ports = probe_ports(len(graph.layers), widths[graph.role], len(graph.features))
                for expected, have in zip(ports, (session.inputs, session.outputs), strict=True):
                    check_ports(str(files[name]), expected, have)
                self._sessions[name] = session
            self._places = {
                name: [found.pooled_layers[graph.role].index(layer) for layer in graph.layers]
                for name, graph in found.graphs.items()
            }
            self._opened = stack.pop_all()

    @classmethod
    def open(cls, bundle: Bundle, backend: Backend, *, boundary: Boundary | None = None) -> Probes:
        """The probes that count. boundary: as in read_probes.

        Raises what read_probes raises; CalibrationError for probes made with another backend, whose states have other
        bits; BackendError for a graph that the engine refuses.
        """
        folder = require_probes(bundle)
        found = read_probes(bundle, folder, boundary=boundary)
        if found.backend not in ("", backend.name):
            raise CalibrationError(
                f"{folder} was made on backend {found.backend!r} and {backend.name!r} is in use; use the first, or "
                f"calibrate it: semspec calibrate {bundle.path} --backend {backend.name}"
            )
        widths = {
            role: next(iter(model.graphs.values())).width for role, model in bundle.manifest.models.items()
        }
        files = {
            name: probe_file(bundle, folder, name, graph.file, backend)
            for name, graph in found.graphs.items()
        }
        return cls(folder, found, files, widths, backend)

    def __enter__(self) -> Probes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the graphs. Safe to call twice."""
        self._opened.close()
        self._gathered.clear()

    @property
    def has_predictor(self) -> bool:
        """Whether `score` and `threshold` can be asked."""
        return PREDICTOR in self.set.graphs

    @property
    def has_ratio(self) -> bool:
        """Whether `ratio_scores` can be asked."""
        return ROLES[0] in self.set.graphs

    @property
    def needs_signals(self) -> bool:
        """The predictor reads signals of the target: all rows of its head are needed."""
        return self._reads("target.")

    @property
    def needs_draft_signals(self) -> bool:
        """The predictor reads signals of the draft."""
        return self._reads("draft.")

    @property
    def needs_text(self) -> bool:
        """The predictor reads the segment's text."""
        return self._reads("text.")

    @property
    def needs_target_states(self) -> bool:
        """The predictor reads pooled states of the target."""
        return self._reads_states("target")

    @property
    def needs_draft_states(self) -> bool:
        """The predictor reads pooled states of the draft."""
        return self._reads_states("draft")

    def score(self, target: Reading, draft: Reading | None, segment: SegmentText) -> float:
        """The predictor's word on a segment, in (0, 1). draft: None where `needs_draft_signals` and
        `needs_draft_states` are False. Raises ConfigError where there is no predictor, or it needs more than is given.
        """
        graph = self._graph(PREDICTOR)
        feeds: dict[str, Array | Tensor] = {}
        if graph.layers:
            reading = target if graph.role == "target" else draft
            if reading is None:
                raise ConfigError(f"the predictor reads states of the {graph.role}, which were not given")
            feeds["pooled"] = self._pooled(PREDICTOR, reading.states)
        if graph.features:
            feeds["signals"] = feature_values(
                graph.features,
                target=target.signals,
                draft=None if draft is None else draft.signals,
                segment=segment,
            )[None]
        return self._run(PREDICTOR, feeds)

    def ratio_scores(self, target_pooled: Floats | HeldPooled, draft_pooled: Floats) -> tuple[float, float]:
        """(s_T, s_D) of the own-label probes; each model's pooled states (K, E). Raises ConfigError for none."""
        pooled: dict[str, Floats | HeldPooled] = {"target": target_pooled, "draft": draft_pooled}
        found = [self._run(role, {"pooled": self._pooled(role, pooled[role])}) for role in ROLES]
        return found[0], found[1]

    def threshold(self, risk: float) -> float:
        """Keep a segment whose score is at least this. Of the largest tabulated risk that is not above `risk`.

        Raises ConfigError where there is none: 0 means exact modes.
        """
        self._graph(PREDICTOR)
        points = [point for point in self.set.risks if point.risk <= risk]
        if not points:
            known = ", ".join(f"{point.risk:g}" for point in self.set.risks)
            raise ConfigError(
                f"{self.folder} supports no risk of {risk:g}; it has {known or 'none'}: choose one of these, use an "
                f"exact mode, or calibrate with more questions"
            )
        return points[-1].threshold

    def _graph(self, name: str) -> ProbeGraph:
        if name not in self.set.graphs:
            raise ConfigError(
                f"{self.folder} has no {name if name == PREDICTOR else 'probes for the ratio'}; it has "
                f"{', '.join(self.set.names)}: calibrate the bundle, or use a mode that does without"
            )
        return self.set.graphs[name]

    def _reads(self, kind: str) -> bool:
        return self.has_predictor and any(
            name.startswith(kind) for name in self.set.graphs[PREDICTOR].features
        )

    def _reads_states(self, role: str) -> bool:
        graph = self.set.graphs.get(PREDICTOR)
        return graph is not None and bool(graph.layers) and graph.role == role

    def _pooled(self, name: str, pooled: Floats | HeldPooled) -> Array | Tensor:
        """(1, K, E) of the graph's own layers, from those of all pooled ones.

        What a device holds that the graph runs on is gathered there: nothing of it comes back but the score. Raises
        ConfigError for states of another number of layers, BackendError for those in memory that are not finite.
        """
        role, places = self._graph(name).role, self._places[name]
        n_pooled = len(self.set.pooled_layers[role])
        if len(pooled.shape) != 2 or pooled.shape[0] != n_pooled:
            raise ConfigError(f"pooled states of the {role} must be ({n_pooled}, E), got {pooled.shape}")
        if not isinstance(pooled, HeldPooled):
            return np.ascontiguousarray(pooled[places], np.float32)[None]
        if pooled.backend is not self._backend or self._backend.plans is None:
            check_states(pooled.values)
            return np.ascontiguousarray(pooled.values[places], np.float32)[None]
        if name not in self._gathered:
            self._gathered[name] = self._backend.zeros((1, len(places), pooled.shape[1]), "float32")
        pooled.copy_to(self._gathered[name], places)
        return self._gathered[name]

    def _run(self, name: str, feeds: Mapping[str, Array | Tensor]) -> float:
        score = float(self._sessions[name].run(feeds, ["score"])["score"].numpy()[0])
        if score == UNREADABLE:
            raise BackendError(NOT_FINITE)
        if not 0 <= score <= 1:  # NaN is in no range
            raise BackendError(
                f"{self.folder / self.set.graphs[name].file} computed the score {score}; calibrate again"
            )
        return score
