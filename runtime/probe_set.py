"""ProbeSet: what calibration left in a bundle, read and held against the bundle's models.

    probes/<n>/    predictor.json (ProbeSet), the graphs it names, the report

Folders appear whole, by a rename; the highest number counts, and one that is damaged or belongs to something else is
an error, never passed over. It knows files and records; opening the graphs is probes.py's.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from semspec.runtime.bundle import MANIFEST, ROLES, Bundle, Manifest, inside, sha256_of
from semspec.runtime.errors import BundleError, CalibrationError
from semspec.runtime.external import check_external_data
from semspec.runtime.features import check_features
from semspec.runtime.segments import Boundary
from semspec.runtime.typed import plain, read_typed, shown

__all__ = [
    "FORMAT",
    "PREDICTOR",
    "PREDICTOR_FILE",
    "PROBES",
    "RISKS_OF",
    "ProbeGraph",
    "ProbeSet",
    "RatioFacts",
    "RiskPoint",
    "identity_of",
    "latest_probes",
    "model_hashes",
    "read_probes",
    "require_probes",
]

FORMAT = 1
PROBES = "probes"
PREDICTOR = "predictor"
PREDICTOR_FILE = "predictor.json"
GRAPH_NAMES = (PREDICTOR, *ROLES)
RISKS_OF = ("meaning", "answer")
MOST_BYTES = 4 << 20  # of predictor.json; a larger one is not ours
_NUMBER = re.compile(r"[1-9]\d{0,8}")
_FILE = re.compile(r"[A-Za-z0-9_-]+\.onnx")
_AGAIN = "calibrate it: semspec calibrate"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeGraph:
    """A graph beside predictor.json.

    role: whose states it reads. layers: state indices, ascending, () for none. features: of features.FEATURES, () for
    none. Raises ValueError for what no probe can be.
    """

    file: str
    role: str
    layers: tuple[int, ...]
    features: tuple[str, ...]
    size: int
    sha256: str

    def __post_init__(self) -> None:
        if not _FILE.fullmatch(self.file):
            raise ValueError(
                f"a probe graph's file must be a plain name ending in .onnx, found {shown(self.file)}"
            )
        if self.role not in ROLES:
            raise ValueError(f"a probe's role must be one of {', '.join(ROLES)}, found {shown(self.role)}")
        if list(self.layers) != sorted(set(self.layers)) or min(self.layers, default=0) < 0:
            raise ValueError(
                f"a probe's layers must be ascending state indices, found {shown(list(self.layers))}"
            )
        if not self.layers and not self.features:
            raise ValueError(f"{self.file} reads neither states nor features")
        check_features(self.features)


@dataclass(frozen=True, slots=True, kw_only=True)
class RiskPoint:
    """A line of the risk table: keep a segment whose score is at least `threshold`.

    risk: what it was made for. coverage: share of drafted tokens kept. observed: share of the kept segments that
    ProbeSet.risk_of tells; upper: its one-sided 95 % bound, at most `risk`. All on questions that the predictor did not
    learn from.
    """

    risk: float
    threshold: float
    coverage: float
    observed: float
    upper: float

    def __post_init__(self) -> None:
        for name in ("risk", "threshold", "coverage", "observed", "upper"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} of a risk must be in 0..1, found {getattr(self, name)}")
        if self.upper > self.risk:
            raise ValueError(f"the bound {self.upper} of a risk is above the risk {self.risk}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioFacts:
    """How the published rule fared on held-out questions: mean_acceptance, of min(1, s_T / s_D), against the overlap
    sum of min(mu_T, mu_D) over sampled classes, which it estimates."""

    mean_acceptance: float
    overlap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSet:
    """What predictor.json says.

    graphs: `predictor`, whose score the thresholds belong to, and `target` with `draft`, the two own-label probes of
    the ratio; at least one of both. risks: ascending. risk_of: what of the kept segments they count: `meaning`, those
    that no sample of the target is equivalent to; `answer`, those that spoil the answer. ratio: None where it was not
    measured. boundary: of the segments learnt from. models: role -> file -> sha256, as the manifest lists them;
    pooled_layers: role -> layers. backend: whose states were learnt from. temperature, top_p: of the segments that
    risks are about. For probes trained elsewhere, of which nobody knows, backend is "" and the others are None.
    Raises ValueError for what does not go together.
    """

    format: int
    graphs: Mapping[str, ProbeGraph]
    risks: tuple[RiskPoint, ...]
    ratio: RatioFacts | None = None
    boundary: Boundary
    models: Mapping[str, Mapping[str, str]]
    pooled_layers: Mapping[str, tuple[int, ...]]
    backend: str
    temperature: float | None
    top_p: float | None
    risk_of: str = field(default=RISKS_OF[0], metadata={"left_out_by_default": True})

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"format {self.format}, this semspec reads {FORMAT}: calibrate again")
        if unknown := sorted(set(self.graphs) - set(GRAPH_NAMES)):
            raise ValueError(f"unknown graph {shown(unknown[0])}; known: {', '.join(GRAPH_NAMES)}")
        if not self.models.keys() == self.pooled_layers.keys() <= set(ROLES):
            raise ValueError("models and pooled_layers must be of the same roles, target and draft")
        pair = [role for role in ROLES if role in self.graphs]
        if len(pair) == 1 or not self.graphs:
            raise ValueError(
                f"graphs must be {PREDICTOR}, or target and draft, or all, found {', '.join(self.graphs)}"
            )
        for role in pair:
            graph = self.graphs[role]
            if graph.role != role or graph.features or not graph.layers:
                raise ValueError(
                    f"the ratio's graph {role!r} must read states of the {role}, and nothing else"
                )
        if self.risk_of not in RISKS_OF:
            raise ValueError(f"risk_of must be one of {', '.join(RISKS_OF)}, found {shown(self.risk_of)}")
        if self.risks and PREDICTOR not in self.graphs:
            raise ValueError(f"risks belong to a {PREDICTOR}, and there is none")
        if [point.risk for point in self.risks] != sorted({point.risk for point in self.risks}):
            raise ValueError("risks must ascend")
        for name, graph in self.graphs.items():
            if missing := set(graph.layers) - set(self.pooled_layers.get(graph.role, ())):
                raise ValueError(
                    f"graph {name!r} reads state {min(missing)} of the {graph.role}, which is not pooled"
                )

    @property
    def names(self) -> tuple[str, ...]:
        """Of its graphs: the predictor, the target's, the draft's."""
        return tuple(name for name in GRAPH_NAMES if name in self.graphs)

    def to_json(self) -> str:
        """The text of predictor.json: the same set gives the same bytes."""
        return json.dumps(plain(self), indent=2, sort_keys=True, allow_nan=False) + "\n"


def model_hashes(manifest: Manifest) -> dict[str, dict[str, str]]:
    """Role -> file -> sha256, of all that belongs to a model: what a ProbeSet remembers of its bundle."""
    return {
        role: {name: entry.sha256 for name, entry in manifest.files.items() if name.startswith(f"{role}/")}
        for role in manifest.models
    }


def latest_probes(bundle: Bundle) -> Path | None:
    """The folder that counts, not looked into; None where the bundle was never calibrated. Raises BundleError for one
    that cannot be listed or that lies outside."""
    folder = inside(bundle.path, PROBES)
    try:
        numbers = [int(path.name) for path in folder.iterdir() if _NUMBER.fullmatch(path.name)]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BundleError(f"{folder} cannot be read: {error.strerror}") from error
    return inside(bundle.path, f"{PROBES}/{max(numbers)}") if numbers else None


def identity_of(bundle: Bundle) -> str:
    """sha256 that names all a bundle decodes with: of its manifest, and of the probes that count where there are some.

    Raises BundleError for probes that are damaged; OSError for files that cannot be read."""
    manifest, folder = sha256_of(bundle.path / MANIFEST), latest_probes(bundle)
    if folder is None:
        return manifest
    predictor = sha256_of(inside(folder, PREDICTOR_FILE))
    return hashlib.sha256(f"{manifest}\n{predictor}\n".encode("ascii")).hexdigest()


def read_probes(bundle: Bundle, folder: Path | None = None, *, boundary: Boundary | None = None) -> ProbeSet:
    """The set that counts, or that of another of the bundle's folders; files and fit checked, no graph opened.

    boundary: of the segments that it will score, None for the bundle's.
    Raises CalibrationError: there are none, or they belong to other models, layers or segments than the bundle's;
    BundleError: a file that is missing, damaged, or outside the folder.
    """
    folder = folder or require_probes(bundle)
    try:
        found = _read_set(folder)
        for graph in found.graphs.values():
            _check_file(folder, graph)
    except OSError as error:
        raise BundleError(
            f"{folder} cannot be read: {error.strerror} ({shown(str(error.filename))})"
        ) from error
    _check_fit(bundle, folder, found, boundary or bundle.manifest.boundary)
    return found


def require_probes(bundle: Bundle) -> Path:
    """latest_probes, where it matters. Raises CalibrationError where there are none."""
    folder = latest_probes(bundle)
    if folder is None:
        raise CalibrationError(f"{bundle.path} has no probes; {_AGAIN} {bundle.path}")
    return folder


def _read_set(folder: Path) -> ProbeSet:
    file = inside(folder, PREDICTOR_FILE)
    if not file.is_file():
        raise BundleError(f"{folder} has no {PREDICTOR_FILE}; remove the folder, or calibrate again")
    if file.stat().st_size > MOST_BYTES:
        raise BundleError(f"{file} is larger than {MOST_BYTES} bytes: not one of ours")
    try:
        found: ProbeSet = read_typed(ProbeSet, json.loads(file.read_text(encoding="utf-8")), "predictor")
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{file} is damaged ({error}); calibrate again") from None
    return found


def _check_file(folder: Path, graph: ProbeGraph) -> None:
    """Inside, of the promised size and content, and whole in itself: hashes are always checked, it is small."""
    path = inside(folder, graph.file)
    if not path.is_file():
        raise BundleError(
            f"{path} is missing: {graph.size} bytes expected; copy the whole bundle, or calibrate again"
        )
    if (size := path.stat().st_size) != graph.size:
        raise BundleError(
            f"{path} has {size} bytes, {graph.size} expected; copy the whole bundle, or calibrate again"
        )
    if (sha256 := sha256_of(path)) != graph.sha256:
        raise BundleError(
            f"{path} was changed: sha256 {sha256}, expected {shown(graph.sha256)}; calibrate again"
        )
    if names := check_external_data(path):
        raise BundleError(
            f"{path} keeps weights in {shown(min(names))}, and a probe has them inside; calibrate again"
        )


def _check_fit(bundle: Bundle, folder: Path, found: ProbeSet, boundary: Boundary) -> None:
    """These models, states and segments are those that the probes learnt from. Raises CalibrationError."""
    again = f"{_AGAIN} {bundle.path}"
    if found.boundary != boundary:
        raise CalibrationError(
            f"{folder} was made for segments that end at {shown(str(found.boundary))}, and these end at "
            f"{shown(str(boundary))}; {again}"
        )
    ours = model_hashes(bundle.manifest)
    for role, theirs in found.models.items():
        if role not in ours:
            raise CalibrationError(f"{folder} was made with a {role} model and the bundle has none; {again}")
        for name in sorted(theirs.keys() | ours[role].keys()):
            if theirs.get(name) != ours[role].get(name):
                raise CalibrationError(
                    f"{folder} was made with another {role}: {shown(name)} had sha256 "
                    f"{shown(theirs.get(name, 'none'))}, here {shown(ours[role].get(name, 'none'))}; {again}"
                )
        pooled = bundle.model(role).graphs["cpu"].pooled_layers
        if found.pooled_layers[role] != pooled:
            raise CalibrationError(
                f"{folder} was made with states {list(found.pooled_layers[role])} of the {role} pooled, the bundle "
                f"pools {list(pooled)}; {again}"
            )
