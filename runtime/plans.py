"""Plans: engines compiled for one release and some devices, as they lie in a bundle, and which of them may be loaded.

    target/plans/<name>/        plans.json (PlanSet) and native.plan or primitive.plan
    probes/<n>/plans/<name>/    plans.json and a plan for each graph of the probes

Folders appear whole, by a rename, and list themselves, as probes do: the manifest stays as it was exported. Their names
are for people; what plans.json says counts. It knows files and records and no engine: everything that makes a plan
unusable is found here, before an engine is asked to read it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from semspec.runtime.bundle import Bundle, inside, sha256_of
from semspec.runtime.errors import BackendError, BundleError
from semspec.runtime.typed import plain, read_typed, shown

__all__ = [
    "ENGINES",
    "FORMAT",
    "PLANS",
    "PLANS_FILE",
    "PlanFile",
    "PlanSet",
    "build_command",
    "check_plan_file",
    "find_plan",
    "plan_folder_name",
    "read_plan_sets",
]

FORMAT = 1
PLANS = "plans"
PLANS_FILE = "plans.json"
ENGINES = ("tensorrt", "tensorrt-rtx")
MOST_BYTES = 4 << 20  # of plans.json; a larger one is not ours
_FILE = re.compile(r"[A-Za-z0-9_-]+\.plan")
_CAPABILITY = re.compile(r"[1-9]\d?\.\d")
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """One plan.

    file: beside plans.json. sources: path in the bundle -> sha256, of the graph it was compiled from and of all that
    the graph reads. precision: of that graph. profiles: name -> letter -> (least, tuned for, most) of each size that a
    call sets. key: of all that decides its content; plans with equal keys are the same plan. Raises ValueError for
    what no plan can be.
    """

    file: str
    sources: Mapping[str, str]
    precision: str
    profiles: Mapping[str, Mapping[str, tuple[int, ...]]]
    key: str
    size: int
    sha256: str

    def __post_init__(self) -> None:
        if not _FILE.fullmatch(self.file):
            raise ValueError(f"a plan's file must be a plain name ending in .plan, found {shown(self.file)}")
        if self.size < 1 or not _HASH.fullmatch(self.sha256) or not self.sources or not self.profiles:
            raise ValueError(f"{self.file} must have a size, a sha256, sources and profiles")
        for profile in self.profiles.values():
            for letter, sizes in profile.items():
                if len(sizes) != 3 or list(sizes) != sorted(sizes) or sizes[0] < 1:
                    raise ValueError(
                        f"{self.file}: sizes of {shown(letter)} must ascend from 1, found {list(sizes)}"
                    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSet:
    """What plans.json says: plans by graph name, all for one engine.

    engine, version: what compiled them, and the only release that reads them. capabilities: compute capabilities they
    run on, such as 8.6, ascending. device: the name of the GPU they were compiled on, "" where on none.
    """

    format: int
    engine: str
    version: str
    capabilities: tuple[str, ...]
    device: str
    plans: Mapping[str, PlanFile]

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"format {self.format}, this semspec reads {FORMAT}: build again")
        if self.engine not in ENGINES:
            raise ValueError(f"engine must be one of {', '.join(ENGINES)}, found {shown(self.engine)}")
        wrong = [text for text in self.capabilities if not _CAPABILITY.fullmatch(text)]
        if wrong or not self.capabilities:
            raise ValueError(f"capabilities must be such as 8.6, found {shown(list(self.capabilities))}")
        if not self.plans:
            raise ValueError("there must be a plan at least")

    def to_json(self) -> str:
        """The text of plans.json: the same set gives the same bytes."""
        return json.dumps(plain(self), indent=2, sort_keys=True) + "\n"

    def __str__(self) -> str:
        return f"{self.engine} {self.version} on {', '.join(self.capabilities)}"


def plan_folder_name(engine: str, version: str, capabilities: Sequence[str]) -> str:
    """Where a set is put: tensorrt-rtx-1.7.1.116-sm86-89.

    >>> plan_folder_name("tensorrt-rtx", "1.7.1.116", ["8.6", "12.0"])
    'tensorrt-rtx-1.7.1.116-sm86-120'
    """
    return f"{engine}-{version}-sm{'-'.join(text.replace('.', '') for text in capabilities)}"


def build_command(bundle: Path, engine: str, capability: str = "") -> str:
    """What to type for a plan of `bundle`."""
    command = f"semspec build {bundle} --backend {engine}"
    return (
        f"{command} --sm {capability.replace('.', '')}"
        if engine == "tensorrt-rtx" and capability
        else command
    )


def read_plan_sets(bundle: Bundle, home: str) -> dict[Path, PlanSet]:
    """Folder -> what it has, of all plan folders of `home`: `target`, `draft` or `probes/<n>`.

    Raises BundleError for a folder that is damaged or leads out of the bundle: none is passed over.
    """
    try:
        folder = inside(bundle.path, f"{home}/{PLANS}")
        if not folder.is_dir():
            return {}
        names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
        folders = [inside(bundle.path, f"{home}/{PLANS}/{name}") for name in names]
        return {path: _read_set(path) for path in folders}
    except OSError as error:
        raise BundleError(
            f"{bundle.path / home / PLANS} cannot be read: {error.strerror} ({shown(str(error.filename))})"
        ) from error


def find_plan(
    bundle: Bundle, home: str, graph: str, *, engine: str, version: str, capability: str, verify: bool = False
) -> tuple[Path, PlanFile]:
    """The plan of a graph for this engine, release and compute capability (such as 8.6), and what is said of it.

    Of several the one for the fewest devices. verify: check its hash as well, which costs seconds a gigabyte.
    Raises BackendError where none fits, naming those there are; BundleError for a damaged one, and for one that was
    compiled from other weights than the bundle's.
    """
    sets = read_plan_sets(bundle, home)
    fitting = {
        folder: found
        for folder, found in sets.items()
        if (found.engine, found.version) == (engine, version)
        and capability in found.capabilities
        and graph in found.plans
    }
    command = build_command(bundle.path, engine, capability)
    if not fitting:
        there = "; ".join(f"{', '.join(found.plans)} for {found}" for found in sets.values())
        raise BackendError(
            f"{bundle.path} has no plan of {home}'s graph {graph!r} for {engine} {version} on compute capability "
            f"{capability}; it has {there or 'none'}: build it with: {command}"
        )
    folder = min(fitting, key=lambda path: (len(fitting[path].capabilities), path.name))
    plan = fitting[folder].plans[graph]
    check_plan_file(folder, plan, verify=verify, command=command)
    _check_sources(bundle, folder, plan, command)
    return folder / plan.file, plan


def check_plan_file(folder: Path, plan: PlanFile, *, verify: bool, command: str = "semspec build") -> None:
    """Inside, of the promised size and, on request, content. command: what makes it again. Raises BundleError."""
    path = inside(folder, plan.file)
    again = f"copy the whole bundle, or remove this folder and build again: {command}"
    if not path.is_file():
        raise BundleError(f"{path} is missing: {plan.size} bytes expected; {again}")
    if (size := path.stat().st_size) != plan.size:
        raise BundleError(f"{path} has {size} bytes, {plan.size} expected; {again}")
    if verify and (found := sha256_of(path)) != plan.sha256:
        raise BundleError(f"{path} was changed: sha256 {found}, expected {plan.sha256}; {again}")


def _read_set(folder: Path) -> PlanSet:
    file = inside(folder, PLANS_FILE)
    again = "remove the folder, or build it again with semspec build"
    if not file.is_file():
        raise BundleError(f"{folder} has no {PLANS_FILE}; {again}")
    if file.stat().st_size > MOST_BYTES:
        raise BundleError(f"{file} is larger than {MOST_BYTES} bytes: not one of ours")
    try:
        found: PlanSet = read_typed(PlanSet, json.loads(file.read_text(encoding="utf-8")), "plans")
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{file} is damaged ({error}); {again}") from None
    return found


def _check_sources(bundle: Bundle, folder: Path, plan: PlanFile, command: str) -> None:
    """What the plan was compiled from is what the bundle has: by the manifest for models; graphs of probes are checked
    by whoever reads them, and named here only where they are gone. Raises BundleError."""
    for name, sha256 in plan.sources.items():
        entry = bundle.manifest.files.get(name)
        found = entry.sha256 if entry else _hash_of(bundle, name)
        if found != sha256:
            raise BundleError(
                f"{folder / plan.file} was compiled from another {shown(name)}: sha256 {sha256}, here "
                f"{shown(found)}; build again: {command}"
            )


def _hash_of(bundle: Bundle, name: str) -> str:
    path = inside(bundle.path, name)
    return sha256_of(path) if path.is_file() else "none"
