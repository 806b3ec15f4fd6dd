"""A probe as weights, as a graph and in numpy: states and features in, a score in (0, 1) out.

    logit = w . (features - center) + sum over layers of MLP(state - center) + bias
    score = a sigmoid of logit / temperature, or a line through knots; then clipped; UNREADABLE for states that are no
            numbers

The graph is checked against numpy before anybody uses it. It knows no training and no bundle.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import numpy as np
import numpy.typing as npt

from semspec.export.rows import StoredTensor, quoted, read_rows
from semspec.export.safetensors_file import read_safetensors_header, read_safetensors_metadata
from semspec.export.writer import DTYPES, GraphBuilder
from semspec.runtime.backends.base import Backend
from semspec.runtime.bundle import sha256_of
from semspec.runtime.contract import UNREADABLE, check_ports, probe_ports
from semspec.runtime.errors import BundleError, SourceError
from semspec.runtime.probes import ProbeGraph
from semspec.runtime.records import Array, Floats

__all__ = [
    "CLIP",
    "Dense",
    "ProbeFile",
    "ProbeWeights",
    "Scaling",
    "StateBranch",
    "add_probe_graph",
    "check_probe_graph",
    "read_probe_file",
    "run_probe",
    "write_probe_graph",
]

CLIP = 1e-6  # no score is surer than this
TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dense:
    """weight: (out, in); bias: (out,)."""

    weight: Floats
    bias: Floats

    def __post_init__(self) -> None:
        if self.weight.ndim != 2 or self.bias.shape != self.weight.shape[:1] or 0 in self.weight.shape:
            raise ValueError(
                f"a layer has weight (out, in) and bias (out,), found {_shapes(self.weight, self.bias)}"
            )
        _require_finite(self.weight, self.bias)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateBranch:
    """An MLP over one pooled layer's mean state (E,), ReLU between its layers, one number at the end.

    center: (E,) is taken off first; a deviation is folded into the first layer's weight. One layer: a linear probe.
    """

    center: Floats
    layers: tuple[Dense, ...]

    def __post_init__(self) -> None:
        sizes = [self.center.size, *(layer.bias.size for layer in self.layers)]
        inputs = [layer.weight.shape[1] for layer in self.layers]
        if self.center.ndim != 1 or not self.layers or inputs != sizes[:-1] or sizes[-1] != 1:
            raise ValueError(
                f"layers of a probe must fit on each other and end in 1, found {inputs} -> {sizes[1:]}"
            )
        _require_finite(self.center)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """From logit to score: the sigmoid of logit / temperature; with knots, the line through (knots, values) over
    logit / temperature instead, level beyond its ends. knots ascend, values in 0..1 do not descend."""

    temperature: float = 1.0
    knots: tuple[float, ...] = ()
    values: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature must be above 0, got {self.temperature}")
        if len(self.knots) != len(self.values) or len(self.knots) == 1:
            raise ValueError(
                f"knots need a value each, and two of them, got {len(self.knots)}, {len(self.values)}"
            )
        narrow = np.asarray(self.knots, np.float32)
        if not (np.diff(narrow) > 0).all() or not np.isfinite(narrow).all():
            raise ValueError("knots must ascend, in single precision too")
        if not (np.diff(self.values) >= 0).all() or not all(0 <= value <= 1 for value in self.values):
            raise ValueError("values must lie in 0..1 and not descend")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProbeWeights:
    """All of a probe. states: a branch for each pooled layer it reads, in their order. weights, centers: (F,) of the
    features, in theirs. Raises ValueError for parts that do not fit."""

    states: tuple[StateBranch, ...] = ()
    weights: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    centers: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    bias: float = 0.0
    scaling: Scaling = field(default_factory=Scaling)

    def __post_init__(self) -> None:
        if self.weights.ndim != 1 or self.weights.shape != self.centers.shape:
            raise ValueError(
                f"features have a weight and a center each, found {_shapes(self.weights, self.centers)}"
            )
        if not self.states and not self.weights.size:
            raise ValueError("a probe reads states or features")
        if len({branch.center.size for branch in self.states}) > 1:
            raise ValueError("all states of a probe have one width")
        _require_finite(self.weights, self.centers, np.float32(self.bias))

    @property
    def shape(self) -> tuple[int, int, int]:
        """(K, E, F); E is 0 without states."""
        return len(self.states), self.states[0].center.size if self.states else 0, self.weights.size


def run_probe(weights: ProbeWeights, pooled: Floats | None = None, signals: Floats | None = None) -> Floats:
    """Scores (B,) of pooled (B, K, E) and signals (B, F), each given where there are some; summed in double precision.

    A flat feature with center 2, weight 1 and bias 0: the score of 2 is a half.

    >>> weights = ProbeWeights(weights=np.ones(1, np.float32), centers=np.full(1, 2, np.float32))
    >>> run_probe(weights, signals=np.array([[2], [200]], np.float32))
    array([0.5     , 0.999999], dtype=float32)
    """
    n_pooled, width, n_signals = weights.shape
    logit = np.array([np.float32(weights.bias)], np.float64)
    if n_pooled:
        pooled = _given(pooled, "pooled", (n_pooled, width))
        for place, branch in enumerate(weights.states):
            logit = logit + _run_branch(branch, pooled[:, place].astype(np.float64))
    if n_signals:
        signals = _given(signals, "signals", (n_signals,))
        logit = logit + (signals.astype(np.float64) - weights.centers) @ weights.weights.astype(np.float64)
    return np.clip(_scale(weights.scaling, logit), CLIP, 1 - CLIP).astype(np.float32)


def write_probe_graph(path: Path, weights: ProbeWeights) -> None:
    """A file of its own, weights inside, by contract.probe_ports; the same weights give the same bytes.

    Raises FileExistsError and OSError as the disk gives them.
    """
    inputs, outputs = probe_ports(*weights.shape)
    graph = GraphBuilder("probe")
    graph.inputs(inputs)
    parts = [_state_logit(graph, place, branch) for place, branch in enumerate(weights.states)]
    bias = graph.constant("bias", np.array([weights.bias], np.float32))
    if weights.weights.size:
        centered = _centered(graph, "signals", "signals", weights.centers)
        matrix = graph.constant("signals.weight", weights.weights[None].astype(np.float32))
        parts.append(graph.node("Gemm", [centered, matrix], "signals.logit", transB=1))
    total = bias
    for number, part in enumerate(parts):
        total = graph.node("Add", [total, part], f"sum.{number}")
    temperature = graph.constant("temperature", np.array([weights.scaling.temperature], np.float32))
    scaled = graph.node("Div", [total, temperature], "scaled")  # (B, 1)
    score = _score(graph, scaled, weights.scaling)
    low, high = (graph.constant(f"clip.{value:g}", np.array(value, np.float32)) for value in (CLIP, 1 - CLIP))
    clipped = graph.node("Clip", [score, low, high], "clipped")
    axis = graph.constant("1", np.array([1], np.int64))
    graph.node("Squeeze", [clipped, axis], "score" if not weights.states else "score.all")
    if weights.states:
        _refuse_unreadable(graph, "score.all")
    graph.outputs(outputs)
    graph.save(path, {"graph": "probe", "semspec": metadata.version("semspec")})


def check_probe_graph(
    backend: Backend,
    path: Path,
    weights: ProbeWeights,
    pooled: Floats | None = None,
    signals: Floats | None = None,
) -> float:
    """Run the graph on rows as they are met (at most a few hundred), one by one and all at once; the largest difference
    from run_probe. Raises BundleError above 1e-5, or for another graph; BackendError where the engine refuses."""
    expected = run_probe(weights, pooled, signals)
    feeds: dict[str, Array] = {}
    if weights.states and pooled is not None:
        feeds["pooled"] = np.ascontiguousarray(pooled, np.float32)
    if weights.weights.size and signals is not None:
        feeds["signals"] = np.ascontiguousarray(signals, np.float32)
    session = backend.open(path)
    try:
        for ports, found in zip(probe_ports(*weights.shape), (session.inputs, session.outputs), strict=True):
            check_ports(str(path), ports, found)
        scores = [session.run(feeds, ["score"])["score"].numpy().copy()]
        for row in range(len(expected)):
            one = {name: values[row : row + 1] for name, values in feeds.items()}
            scores.append(session.run(one, ["score"])["score"].numpy().copy())
    finally:
        session.close()
    together, apart = scores[0], np.concatenate(scores[1:])
    worst = float(max(np.abs(together - expected).max(), np.abs(apart - expected).max()))
    if not worst <= TOLERANCE:  # NaN is not
        raise BundleError(
            f"{path} differs from the probe it was made of by {worst:.2g}, at most {TOLERANCE:g}: report it"
        )
    return worst


def add_probe_graph(
    folder: Path,
    name: str,
    weights: ProbeWeights,
    *,
    role: str,
    layers: Sequence[int] = (),
    features: Sequence[str] = (),
) -> ProbeGraph:
    """Write `name`.onnx into `folder` and say what it is. layers, features: what its inputs are, in their order.

    Raises ValueError where they are not as many as the weights read.
    """
    n_pooled, _, n_signals = weights.shape
    if (len(layers), len(features)) != (n_pooled, n_signals):
        raise ValueError(
            f"{name} reads {n_pooled} layers and {n_signals} features, named {len(layers)}, {len(features)}"
        )
    path = folder / f"{name}.onnx"
    write_probe_graph(path, weights)
    return ProbeGraph(
        file=path.name,
        role=role,
        layers=tuple(layers),
        features=tuple(features),
        size=path.stat().st_size,
        sha256=sha256_of(path),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProbeFile:
    """A probe that was trained elsewhere. layer: the state index that its file names, None where it names none."""

    weights: ProbeWeights
    layer: int | None


def read_probe_file(path: Path) -> ProbeFile:
    """A plain MLP over one mean state: tensors fc.0.weight (out, in), fc.0.bias (out,), fc.1.. and so on to one output,
    ReLU between them, a sigmoid at the end; metadata `layer` may say which state it reads.

    Raises SourceError: not safetensors, other tensors, sizes that do not fit on each other, numbers that are
    not finite.
    """
    tensors = read_safetensors_header(path)
    count = len(tensors) // 2
    expected = [f"fc.{i}.{part}" for i in range(count) for part in ("bias", "weight")]
    if not count or sorted(tensors) != sorted(expected):
        stranger = next((name for name in sorted(tensors) if name not in expected), "nothing else")
        raise SourceError(
            f"{path}: a probe has the tensors fc.0.weight, fc.0.bias, fc.1.weight and so on; found {len(tensors)} "
            f"tensors, with {quoted(stranger)}; rename them"
        )
    try:
        layers = tuple(_dense(tensors[f"fc.{i}.weight"], tensors[f"fc.{i}.bias"]) for i in range(count))
        width = layers[0].weight.shape[1]
        branch = StateBranch(center=np.zeros(width, np.float32), layers=layers)
    except ValueError as error:
        raise SourceError(f"{path}: {error}") from None
    return ProbeFile(weights=ProbeWeights(states=(branch,)), layer=_named_layer(path))


def _dense(weight: StoredTensor, bias: StoredTensor) -> Dense:
    if len(weight.shape) != 2 or len(bias.shape) != 1:
        raise ValueError(
            f"{weight.name} must have 2 dimensions and {bias.name} 1, found {weight.shape}, {bias.shape}"
        )
    return Dense(weight=read_rows(weight), bias=read_rows(bias))


def _named_layer(path: Path) -> int | None:
    named = read_safetensors_metadata(path).get("layer")
    if named is None:
        return None
    if not re.fullmatch(r"-?\d{1,6}", named):
        raise SourceError(f"{path}: metadata 'layer' must be a state index, found {quoted(named)}")
    return int(named)


def _run_branch(branch: StateBranch, states: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """(B,) from (B, E)."""
    x = states - branch.center
    for place, layer in enumerate(branch.layers):
        x = (np.maximum(x, 0) if place else x) @ layer.weight.astype(np.float64).T + layer.bias
    return x[:, 0]


def _scale(scaling: Scaling, logit: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    scaled = logit / np.float32(scaling.temperature)
    if not scaling.knots:
        return np.asarray(1 / (1 + np.exp(-np.clip(scaled, -80, 80))))
    knots, starts, values, slopes = _pieces(scaling)
    piece = np.searchsorted(knots, scaled, side="right")
    return np.asarray(values[piece] + slopes[piece] * (scaled - starts[piece]), np.float64)


def _pieces(scaling: Scaling) -> tuple[Floats, Floats, Floats, Floats]:
    """knots (M,), and of the M + 1 pieces between and beyond them: where it starts, its value there, its slope. A level
    piece gives its value to the bit, in any precision: thresholds may lie on it."""
    knots, values = np.asarray(scaling.knots, np.float32), np.asarray(scaling.values, np.float32)
    rises = np.diff(values.astype(np.float64)) / np.diff(knots.astype(np.float64))
    slopes = np.concatenate([[0], rises, [0]]).astype(np.float32)
    return knots, np.concatenate([knots[:1], knots]), np.concatenate([values[:1], values]), slopes


def _state_logit(graph: GraphBuilder, place: int, branch: StateBranch) -> str:
    """(B, 1)."""
    name = f"states.{place}"
    index = graph.constant(f"{name}.place", np.array(place, np.int64))
    x = _centered(graph, name, graph.node("Gather", ["pooled", index], name, axis=1), branch.center)
    for number, layer in enumerate(branch.layers):
        inner = f"{name}.fc.{number}"
        if number:
            x = graph.node("Relu", [x], f"{inner}.relu")
        weight = graph.constant(f"{inner}.weight", layer.weight.astype(np.float32))
        bias = graph.constant(f"{inner}.bias", layer.bias.astype(np.float32))
        x = graph.node("Gemm", [x, weight, bias], inner, transB=1)
    return x


def _centered(graph: GraphBuilder, name: str, x: str, center: Floats) -> str:
    if not center.any():
        return x
    return graph.node(
        "Sub", [x, graph.constant(f"{name}.center", center.astype(np.float32))], f"{name}.centered"
    )


def _refuse_unreadable(graph: GraphBuilder, score: str) -> None:
    """`score` (B,) where all states are numbers. An engine may give the larger of 0 and NaN as 0, and states that stay
    on a device are looked at by nobody else."""
    most = graph.constant("most", np.array(np.finfo(np.float32).max, np.float32))
    usable = graph.node("LessOrEqual", [graph.node("Abs", ["pooled"], "sizes"), most], "usable")
    counted = graph.node("Cast", [usable], "usable.counted", to=DTYPES["float32"])
    axes = graph.constant("1, 2", np.array([1, 2], np.int64))
    least = graph.node("ReduceMin", [counted, axes], "usable.least", keepdims=0)
    half = graph.constant("half", np.array(0.5, np.float32))
    whole = graph.node("Greater", [least, half], "usable.all")
    none = graph.constant("unreadable", np.array(UNREADABLE, np.float32))
    graph.node("Where", [whole, score, none], "score")


def _score(graph: GraphBuilder, scaled: str, scaling: Scaling) -> str:
    """(B, 1)."""
    if not scaling.knots:
        return graph.node("Sigmoid", [scaled], "probability")
    knots, *tables = _pieces(scaling)
    reached = graph.node("GreaterOrEqual", [scaled, graph.constant("knots", knots)], "reached")
    counted = graph.node("Cast", [reached], "counted", to=DTYPES["int64"])
    piece = graph.node(
        "ReduceSum", [counted, graph.constant("1", np.array([1], np.int64))], "piece", keepdims=1
    )
    start, value, slope = (
        graph.node("Gather", [graph.constant(f"pieces.{name}", table), piece], f"piece.{name}")
        for name, table in zip(("start", "value", "slope"), tables, strict=True)
    )
    beyond = graph.node("Sub", [scaled, start], "beyond")
    return graph.node("Add", [value, graph.node("Mul", [slope, beyond], "rise")], "probability")


def _given(values: Floats | None, name: str, shape: tuple[int, ...]) -> Floats:
    if values is None or values.shape[1:] != shape:
        found = "nothing" if values is None else str(values.shape)
        raise ValueError(f"{name} must be (B, {', '.join(map(str, shape))}), got {found}")
    return values


def _require_finite(*arrays: Array | np.float32) -> None:
    if not all(np.isfinite(array).all() for array in arrays):
        raise ValueError("a probe's numbers must be finite")


def _shapes(*arrays: Array) -> str:
    return ", ".join(str(array.shape) for array in arrays)
