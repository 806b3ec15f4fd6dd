"""Which backend opens a bundle where NVIDIA has no engine: the CPU, and why no other. Plans: backends/test_trt.py."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from semspec import LLM
from semspec.runtime.bundle import Bundle
from semspec.runtime.errors import BackendError, BundleError
from semspec.runtime.opening import check_openable, open_engine
from semspec.runtime.plans import PLANS, PLANS_FILE


def test_cpu_is_taken_where_nothing_else_is(tiny_bundle: Path) -> None:
    """And each of the others has its reason."""
    with LLM(tiny_bundle, backend="auto", threads=1) as llm:
        assert llm.backend == "cpu"
        reasons = llm.backend_why.split("; not ")
    assert [reason.partition(":")[0].removeprefix("not ") for reason in reasons] == [
        "tensorrt",
        "tensorrt-rtx",
        "cuda",
    ]
    assert "it has none; build it with: semspec build" in reasons[1]
    assert reasons[2].endswith("has no such graph of its target")


def test_asking_for_one_never_gives_another(tiny_bundle: Path) -> None:
    """And has no reason to tell."""
    bundle = Bundle.open(tiny_bundle)
    assert open_engine(bundle, ["target"], "cpu", threads=1, spin=False)[1] == ""
    with pytest.raises(BackendError, match="no plan of its target for tensorrt-rtx: it has none; build it"):
        open_engine(bundle, ["target"], "tensorrt-rtx", threads=1, spin=False)
    with pytest.raises(BundleError, match="has no 'cuda' graph of its target"):
        check_openable(bundle, "target", "cuda")


def test_damaged_plans_are_no_reason_to_take_another(tiny_bundle: Path, tmp_path: Path) -> None:
    """Whoever built plans and finds the CPU at work would look for the fault elsewhere."""
    shutil.copytree(tiny_bundle, tmp_path / "bundle")
    folder = tmp_path / "bundle" / "target" / PLANS / "mine"
    folder.mkdir(parents=True)
    (folder / PLANS_FILE).write_text("{")
    with pytest.raises(BundleError, match=r"plans\.json is damaged"):
        LLM(tmp_path / "bundle", backend="auto")
