"""Bundles with "plans" for the doubles in doubles/, and programs run over them: no GPU, no engine, no speed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tiny_pairs
import tiny_probes

from semspec.export.engines.profiles import PROBE_PROFILES, BuildSizes, Profiles, make_profiles
from semspec.export.pipeline import export_pair
from semspec.runtime.bundle import ROLES, Bundle, sha256_of
from semspec.runtime.plans import FORMAT, PLANS, PLANS_FILE, PlanFile, PlanSet
from semspec.runtime.segments import Boundary

DOUBLES = Path(__file__).parent / "doubles"
ENGINE, VERSION, CAPABILITY = "tensorrt-rtx", "0.0.double", "8.6"
SIZES = BuildSizes(chunk=64, rows=16)
MEMORY = {"target": 4096, "draft": 16384}  # what the target worked in has to grow for the draft
BOUNDARY = Boundary(kind="newline", min_tokens=1, max_tokens=6)


def _has_bindings() -> bool:
    return find_spec("cuda") is not None and find_spec("cuda.bindings") is not None


needs_doubles = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None or not _has_bindings(),
    reason="needs Linux, a C compiler and cuda-bindings",
)


def make_driver(folder: Path, fails: int = 0) -> Path:
    """The double of the driver, compiled into `folder`; fails: what its cuInit answers."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["cc", "-shared", "-fPIC", f"-DFAILS={fails}", "-o", str(folder / "libcuda.so.1")]
    subprocess.run([*command, str(DOUBLES / "driver.c"), "-ldl"], check=True)
    return folder


def run(driver: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """A Python over the doubles."""
    paths = [str(DOUBLES), *filter(None, [os.environ.get("PYTHONPATH")])]
    changes = {"LD_LIBRARY_PATH": str(driver), "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **changes}
    return subprocess.run(
        [sys.executable, *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=300
    )


def play(driver: Path, bundle: Path, backends: str = ENGINE, *mutations: str) -> dict[str, Any]:
    """What doubles/play.py prints."""
    return _read(run(driver, DOUBLES / "play.py", bundle, backends, *mutations))


def play_scores(driver: Path, bundle: Path, backends: str = ENGINE, *mutations: str) -> dict[str, Any]:
    """What doubles/scores.py prints."""
    return _read(run(driver, DOUBLES / "scores.py", bundle, backends, *mutations))


def run_passes(driver: Path, bundle: Path, backend: str, plan: Path | None = None) -> dict[str, Any]:
    """What doubles/passes.py prints; `told`: what it logged."""
    done = run(driver, DOUBLES / "passes.py", bundle, backend, *filter(None, [plan]))
    return {**_read(done), "told": done.stderr}


def _read(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def make_pair(folder: Path, layers: Sequence[int] = ()) -> Path:
    """A tiny pair in fp32 with graphs for TensorRT and probes; the draft is the target with noise.

    layers: states that the predictor reads.
    """
    requests = []
    for role in ROLES:
        path = tiny_pairs.save_checkpoint(folder / role, seed=1, max_position_embeddings=1024)
        requests.append(replace(tiny_pairs.request(path, name=role), engine="fp32"))
    tiny_pairs.perturb(folder / "draft", 0.3)
    graphs = ("cpu", "native", "primitive")
    settings = tiny_pairs.settings(graphs=graphs, max_context=700, hidden_layers=(0, -1), boundary=BOUNDARY)
    bundle = export_pair(*requests, folder / "bundle", settings).path
    tiny_probes.add_probes(bundle, features=("target.mean_logprob",), layers=layers, backend="")
    return bundle


def with_plans(bundle: Path, out: Path, graph: str, **changes: Any) -> Path:
    """A copy of the bundle with "plans" of one graph, and of the probes. changes: of the PlanSets."""
    shutil.copytree(bundle, out)
    add_plans(out, graph, **changes)
    probes = {path.stem: path.name for path in (out / "probes" / "1").glob("*.onnx")}
    _add(Bundle.open(out), "probes/1", probes, PROBE_PROFILES, changes)
    return out


def add_plans(bundle: Path, graph: str, **changes: Any) -> None:
    """The same of both models, in the bundle itself."""
    opened = Bundle.open(bundle)
    for role in ROLES:
        profiles = make_profiles(opened.model(role).graphs[graph], SIZES)
        _add(opened, role, {graph: f"onnx/{graph}.onnx"}, profiles, changes)


def _add(
    bundle: Bundle, home: str, files: dict[str, str], profiles: Profiles, changes: dict[str, Any]
) -> None:
    folder = bundle.path / home / PLANS / next(iter(files))
    folder.mkdir(parents=True)
    plans = {}
    for name, file in files.items():
        graph, plan = bundle.path / home / file, folder / f"{name}.plan"
        content = {"graph": str(graph), "profiles": list(profiles.values()), "memory": MEMORY.get(home, 256)}
        plan.write_text(json.dumps(content))
        plans[name] = PlanFile(
            file=plan.name,
            sources={f"{home}/{file}": sha256_of(graph)},
            precision="fp32",
            profiles=profiles,
            key="0" * 64,
            size=plan.stat().st_size,
            sha256=sha256_of(plan),
        )
    own = {"engine": ENGINE, "version": VERSION, "capabilities": (CAPABILITY,), "device": ""}
    found = PlanSet(format=FORMAT, plans=plans, **{**own, **changes})
    (folder / PLANS_FILE).write_text(found.to_json(), encoding="utf-8")
