"""The plans that a bundle has already, found by what they were made of and never by name."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from semspec.export.engines.works import Work
from semspec.runtime.bundle import Bundle
from semspec.runtime.errors import BundleError
from semspec.runtime.plans import PlanFile, check_plan_file, read_plan_sets
from semspec.runtime.probe_set import PROBES

__all__ = ["Shelf", "plan_key"]

BUILDER = 1  # raised when the same graph gives another plan


def plan_key(work: Work, engine: str, version: str, capabilities: Sequence[str], device: str) -> str:
    """Hex digest of all that decides the content of a plan: graph and weights, engine and release, what it is compiled
    for, and for which sizes. Where the graph lies and what it is called is not part of it."""
    content = {
        "builder": BUILDER,
        "sources": sorted(work.sources.values()),
        "profiles": work.profiles,
        "engine": [engine, version, device],
        "capabilities": list(capabilities),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelf:
    """plans: key -> where such plans lie, and what is said of each; the first found first."""

    plans: dict[str, dict[Path, PlanFile]]

    @classmethod
    def of(cls, bundle: Bundle) -> Shelf:
        """All plans of a bundle whose files are there with their size: of models, and of probes of any number.

        Raises BundleError for a folder that is damaged; a plan whose file is cut short is no plan, and built again.
        """
        homes = [*bundle.manifest.models]
        probes = bundle.path / PROBES
        if probes.is_dir():
            homes += [f"{PROBES}/{path.name}" for path in sorted(probes.iterdir()) if path.is_dir()]
        plans: dict[str, dict[Path, PlanFile]] = {}
        for home in homes:
            for folder, found in read_plan_sets(bundle, home).items():
                for plan in found.plans.values():
                    if _is_whole(folder, plan):
                        plans.setdefault(plan.key, {})[folder] = plan
        return cls(plans=plans)

    def has(self, key: str) -> bool:
        """Whether there is such a plan."""
        return key in self.plans

    def at(self, key: str, folder: Path) -> PlanFile | None:
        """The plan of `folder` with this key."""
        return self.plans.get(key, {}).get(folder)

    def take(self, key: str, out: Path) -> PlanFile:
        """Put the plan at `out`: the same bytes under another name where the disk allows it, else a copy."""
        folder, plan = next(iter(self.plans[key].items()))
        try:
            os.link(folder / plan.file, out)
        except OSError:
            shutil.copyfile(folder / plan.file, out)
        return plan

    def put(self, folder: Path, plan: PlanFile) -> None:
        """A plan that was just written."""
        self.plans.setdefault(plan.key, {})[folder] = plan


def _is_whole(folder: Path, plan: PlanFile) -> bool:
    try:
        check_plan_file(folder, plan, verify=True)
    except BundleError:
        return False
    return True
