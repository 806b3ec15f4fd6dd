"""The graph contract: name, dtype and shape of every graph input and output, and how graphs differ.

One table, PORTS. Exporters build graphs to it, backends open graphs against it, tests compare both with it.
Letters are those of records.py; C = max_context + 1, the extra row taking what `spare` throws away.

Graphs: `cpu` and `cuda` (dialect ort), `native`, `primitive`.

What every graph promises: several new tokens on a cache give the logits of one at a time; no row influences
an earlier row; rewinding is passing a smaller `past_len`. On `cpu` these hold to the bit for logits and hidden
states, for B = 1 and `spare` as below; a batch of single steps has `spare` 0 and other bits. `pooled` is a sum
whose rounding depends on how the text is cut; GPU graphs promise no bits at all.

A CPU graph has no lse, entropy or top ids: the logits are in memory already, and computing them in the graph was
slower (V = 151,936, milliseconds a row: 0.8-0.9 in the graph, 0.16 for lse and entropy and 0.29 for a sampled token
in numpy, 0.01 for a greedy one).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from semspec.runtime.errors import BundleError, ConfigError
from semspec.runtime.records import TensorSpec

__all__ = [
    "GRAPHS",
    "IN_PLACE",
    "PORTS",
    "PROBE_PORTS",
    "SPAN_STEP",
    "STAYING",
    "UNREADABLE",
    "GraphSpec",
    "Port",
    "check_ports",
    "kv_pairs",
    "probe_ports",
    "span_of",
]

GRAPHS = ("cpu", "cuda", "native", "primitive")
TOP_IDS = 64  # candidates returned by top_logits and top_ids
UNREADABLE = -1.0  # no score
SPAN_STEP = 256  # cache rows by which what attention reads grows

ALL = frozenset(GRAPHS)
CPU, CUDA, NATIVE, PRIMITIVE = (frozenset({name}) for name in GRAPHS)
FLOATS = ("float32", "float16", "bfloat16")
# A manifest is a stranger's: these keep a number in it from filling the memory. No model comes near.
MOST = {
    "n_layers": 4096,
    "n_kv_heads": 4096,
    "head_size": 1 << 16,
    "width": 1 << 20,
    "vocab_size": 1 << 24,
    "max_context": 1 << 28,
}
IN_PLACE = ALL - PRIMITIVE  # graphs that write the cache themselves
SIGNALS = ALL - CPU  # a CPU graph has the logits in memory already: see PORTS
STAYING = SIGNALS  # graphs whose outputs stay on the device until they are read


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One row of the contract.

    dtype: a numpy name, `index` (int64, int32 in `primitive`), `cache` or `activation` (GraphSpec decides).
    shape: letters, or TOP_IDS. each: `layer` or `hidden` where {i} runs over layers or hidden layers asked for.
    """

    name: str
    output: bool
    dtype: str
    shape: tuple[int | str, ...]
    graphs: frozenset[str] = ALL
    each: str = ""
    note: str = ""


def _in(
    name: str, dtype: str, *shape: int | str, graphs: frozenset[str] = ALL, each: str = "", note: str
) -> Port:
    return Port(name=name, output=False, dtype=dtype, shape=shape, graphs=graphs, each=each, note=note)


def _out(
    name: str, dtype: str, *shape: int | str, graphs: frozenset[str] = ALL, each: str = "", note: str
) -> Port:
    return Port(name=name, output=True, dtype=dtype, shape=shape, graphs=graphs, each=each, note=note)


PORTS: tuple[Port, ...] = (
    _in("input_ids", "index", "B", "S", note="new tokens"),
    _in("past_len", "index", "B", note="valid rows in the cache before this call; positions and mask follow"),
    _in("logit_rows", "index", "R", note="which of the S rows get logits"),
    _in("pool", "float32", "B", "S", note="weight of each row in the pooled sum"),
    _in("pooled_in", "float32", "B", "K", "E", note="the sum so far; zeros at a segment's start"),
    _in("spare", "int64", 1, graphs=CPU, note="1 where S is odd: rows are computed in pairs"),
    _in("span", "int64", "T", graphs=NATIVE, note="cache rows read: 0..T-1; see span_of"),
    _in("next_ids", "index", "B", "R", graphs=SIGNALS, note="token that follows each wanted row; 0 unknown"),
    _in("kv.{i}.key", "cache", "B", "H", "C", "D", each="layer", note="keys, rotated"),
    _in("kv.{i}.value", "cache", "B", "H", "C", "D", each="layer", note="values"),
    _out("logits", "activation", "B", "R", "V", note="of the wanted rows"),
    _out("pooled", "float32", "B", "K", "E", note="pooled_in + pool . states"),
    _out("lse", "float32", "B", "R", graphs=SIGNALS, note="log of the sum of exponentials of the logits"),
    _out("entropy", "float32", "B", "R", graphs=SIGNALS, note="nats, at temperature 1"),
    _out("next_logits", "float32", "B", "R", graphs=SIGNALS, note="logit of next_ids"),
    _out("top_logits", "float32", "B", "R", TOP_IDS, graphs=SIGNALS, note="largest logits, descending"),
    _out("top_ids", "index", "B", "R", TOP_IDS, graphs=SIGNALS, note="their ids"),
    _out(
        "hidden.{i}",
        "activation",
        "B",
        "S",
        "E",
        each="hidden",
        note="state i; i = L is after the final norm",
    ),
    _out(
        "kv_out.{i}.key",
        "cache",
        "B",
        "H",
        "C",
        "D",
        graphs=IN_PLACE,
        each="layer",
        note="kv.{i}.key, same memory",
    ),
    _out("kv_out.{i}.value", "cache", "B", "H", "C", "D", graphs=IN_PLACE, each="layer", note="kv.{i}.value"),
    _out(
        "kv_new",
        "cache",
        "2L",
        "B",
        "H",
        "S",
        "D",
        graphs=PRIMITIVE,
        note="new rows; the runtime stores them",
    ),
)

PROBE_PORTS: tuple[Port, ...] = (
    _in("pooled", "float32", "B", "K", "E", note="mean state of each pooled layer over a segment"),
    _in("signals", "float32", "B", "F", note="free numbers of the same pass"),
    _out(
        "score",
        "float32",
        "B",
        note="estimated probability that the model says something meaning this; UNREADABLE: a state is no number",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSpec:
    """The sizes a graph was built with: everything the contract needs to become concrete.

    activation: dtype of logits and hidden states; cache: dtype of keys and values. Raises ConfigError: a
    size, a layer or a dtype that no graph has.
    """

    graph: str
    n_layers: int
    n_kv_heads: int
    head_size: int
    width: int
    vocab_size: int
    max_context: int
    pooled_layers: tuple[int, ...]
    hidden_layers: tuple[int, ...] = ()
    activation: str = "float32"
    cache: str = "float32"

    def __post_init__(self) -> None:
        if self.graph not in GRAPHS:
            raise ConfigError(f"graph must be one of {', '.join(GRAPHS)}, got {self.graph!r}")
        for name, most in MOST.items():
            if not 1 <= getattr(self, name) <= most:
                raise ConfigError(f"{name} must be between 1 and {most}, got {getattr(self, name)}")
        for name in ("pooled_layers", "hidden_layers"):
            layers = getattr(self, name)
            if list(layers) != sorted(set(layers) & set(range(self.n_layers + 1))):
                raise ConfigError(
                    f"{name} must be ascending state indices in 0..{self.n_layers}, got {list(layers)}"
                )
        if not self.pooled_layers:
            raise ConfigError("pooled_layers must name one state at least: a graph has the output `pooled`")
        for name in ("activation", "cache"):
            if getattr(self, name) not in FLOATS:
                raise ConfigError(f"{name} must be one of {', '.join(FLOATS)}, got {getattr(self, name)!r}")

    @property
    def capacity(self) -> int:
        """C: rows of a cache buffer."""
        return self.max_context + 1

    @property
    def index_dtype(self) -> str:
        """dtype of ids, lengths and row numbers."""
        return "int32" if self.graph == "primitive" else "int64"

    def inputs(self) -> tuple[TensorSpec, ...]:
        """Every input of the graph, in the contract's order."""
        return tuple(spec for port in PORTS if not port.output for spec in self._expand(port))

    def outputs(self) -> tuple[TensorSpec, ...]:
        """Every output of the graph, in the contract's order."""
        return tuple(spec for port in PORTS if port.output for spec in self._expand(port))

    def _expand(self, port: Port) -> Iterator[TensorSpec]:
        if self.graph not in port.graphs:
            return
        indices = {"": (0,), "layer": range(self.n_layers), "hidden": self.hidden_layers}[port.each]
        sizes: dict[int | str, int] = {
            "H": self.n_kv_heads,
            "D": self.head_size,
            "E": self.width,
            "V": self.vocab_size,
            "C": self.capacity,
            "K": len(self.pooled_layers),
            "2L": 2 * self.n_layers,
            TOP_IDS: min(TOP_IDS, self.vocab_size),
        }
        dtypes = {
            "index": self.index_dtype,
            "cache": self.cache,
            "activation": self.activation,
        }
        shape = tuple(sizes.get(size, size) for size in port.shape)
        for i in indices:
            yield TensorSpec(port.name.format(i=i), dtypes.get(port.dtype, port.dtype), shape)


def kv_pairs(spec: GraphSpec) -> tuple[tuple[str, str], ...]:
    """(input, output) names that share one cache buffer, layer by layer, key before value.

    The output is empty where the graph only reads its cache: the runtime writes `kv_new` into it.
    """
    names = [f"{i}.{part}" for i in range(spec.n_layers) for part in ("key", "value")]
    writes = spec.graph in IN_PLACE
    return tuple((f"kv.{name}", f"kv_out.{name}" if writes else "") for name in names)


def span_of(spec: GraphSpec, length: int) -> int:
    """T for a cache of `length` rows, new ones included: SPAN_STEP or a multiple, or C where that is less.

    Few sizes of T mean few shapes that an engine prepares for.
    """
    return min(-(-length // SPAN_STEP) * SPAN_STEP, spec.capacity)


def probe_ports(
    n_pooled: int, width: int, n_signals: int
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Inputs and outputs of a probe graph for K pooled layers of width E and F signals.

    Where there are none of one kind, that input is left out.
    """
    sizes: dict[int | str, int] = {"K": n_pooled, "E": width, "F": n_signals}

    def concrete(output: bool) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(port.name, port.dtype, tuple(sizes.get(size, size) for size in port.shape))
            for port in PROBE_PORTS
            if port.output is output and 0 not in (sizes.get(size, size) for size in port.shape)
        )

    return concrete(False), concrete(True)


def check_ports(path: str, expected: tuple[TensorSpec, ...], found: tuple[TensorSpec, ...]) -> None:
    """Refuse a graph whose inputs or outputs are not the contract's; all differences are named at once.

    A size of -1 that was found is one that a compiled plan has no name for: it may be any. Raises BundleError.
    """
    want, have = {spec.name: spec for spec in expected}, {spec.name: spec for spec in found}
    differences = [f"lacks {name}" for name in want.keys() - have.keys()]
    differences += [f"has unknown {name}" for name in have.keys() - want.keys()]
    differences += [
        f"{name} is {have[name].dtype}{list(have[name].shape)}, expected {want[name].dtype}{list(want[name].shape)}"
        for name in want.keys() & have.keys()
        if not _agree(want[name], have[name])
    ]
    if differences:
        raise BundleError(
            f"{path} does not follow the graph contract: {'; '.join(sorted(differences))}; export again"
        )


def _agree(want: TensorSpec, have: TensorSpec) -> bool:
    sizes = zip(want.shape, have.shape, strict=False)
    return (
        want.dtype == have.dtype
        and len(want.shape) == len(have.shape)
        and all(found in (size, -1) for size, found in sizes)
    )
