"""What a run measures, in which order, and what on: Settings, Origin, plan_cells. It knows run.json's content only."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from semspec.calibration.bench.modes import parse_modes
from semspec.calibration.bench.peer_names import parse_peers
from semspec.calibration.bench.records import Cell, Mode
from semspec.runtime.errors import ConfigError
from semspec.runtime.typed import read_typed, shown

__all__ = ["FORMAT", "Origin", "Settings", "check_same", "plan_cells"]

FORMAT = 2  # 1 knew no lossy tokens and no peers


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the shards of one run have in common.

    bundle_sha256: of the manifest, which lists the hash of every other file, and of the probes
    (probe_set.identity_of). models: role -> name and precisions. problems: ids, in order; problems_sha256: of all that
    is asked. seeds: answers to a problem; repeats: measurements of each. sampling: fields of SamplingParams. threads:
    None for one a core. modes are ours, peers are other engines.
    """

    bundle_sha256: str
    models: Mapping[str, Mapping[str, str]]
    problems_sha256: str
    problems: tuple[str, ...]
    modes: tuple[str, ...]
    seeds: int
    repeats: int
    sampling: Mapping[str, Any]
    instruction: str
    backend: str
    threads: Any
    peers: tuple[str, ...] = ()

    def every_mode(self) -> list[Mode]:
        """Our modes, then peers. Raises ConfigError for a name that is neither."""
        return [*parse_modes(self.modes), *parse_peers(self.peers)]

    @property
    def greedy(self) -> bool:
        """Temperature 0: exact modes must give the target's very tokens."""
        return bool(self.sampling.get("temperature") == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What run.json says. started: UTC. shard: (i, n), (1, 1) for a whole run. machines: one, or one for each shard
    that was joined."""

    format: int
    started: str
    settings: Settings
    shard: tuple[int, ...]
    machines: tuple[Mapping[str, Any], ...]

    def to_json(self) -> str:
        """The text of run.json."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Origin:
        """Raises ValueError for a text that to_json did not write."""
        try:
            origin: Origin = read_typed(cls, json.loads(text), "run")
        except RecursionError:
            raise ValueError("nested too deeply") from None
        if origin.format != FORMAT:
            raise ValueError(f"format {origin.format}, this version reads {FORMAT}")
        if len(origin.shard) != 2 or not 1 <= origin.shard[0] <= origin.shard[1]:
            raise ValueError(f"shard {origin.shard}")
        return origin


def plan_cells(settings: Settings, shard: tuple[int, ...] = (1, 1)) -> Iterator[Cell]:
    """Cells in the order they are measured; which mode comes first changes from one group to the next.

    The shards of a plan are its cells, each once, in the order of the whole plan: problems are dealt like cards.
    """
    index, count = shard
    modes = [mode.name for mode in settings.every_mode()]
    for number, problem in enumerate(settings.problems):
        if number % count != index - 1:
            continue
        for seed in range(settings.seeds):
            for repeat in range(settings.repeats):
                turn = ((number * settings.seeds + seed) * settings.repeats + repeat) % len(modes)
                for mode in [*modes[turn:], *modes[:turn]]:
                    yield Cell(problem=problem, seed=seed, repeat=repeat, mode=mode)


def check_same(what: str, found: Any, wanted: Any) -> None:
    """Of two records of one kind: raise ConfigError naming the first thing in which `wanted` differs; when it started
    does not matter."""
    ours, theirs = _leaves(asdict(wanted)), _leaves(asdict(found))
    for key in sorted(ours.keys() | theirs.keys()):
        was, now = theirs.get(key), ours.get(key)
        if was != now and key != "started":
            raise ConfigError(f"{what}: {key} is {shown(was)} there and {shown(now)} here")


def _leaves(content: Any, name: str = "") -> dict[str, Any]:
    """Values of nested objects by dotted name; what holds nothing counts."""
    if not isinstance(content, dict) or not content:
        return {name: list(content) if isinstance(content, tuple) else content}
    prefix = f"{name}." if name else ""
    return {
        key: leaf
        for part, value in content.items()
        for key, leaf in _leaves(value, f"{prefix}{part}").items()
    }
