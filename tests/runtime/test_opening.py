"""Which backend opens a bundle where NVIDIA has no engine: the CPU, and why no other. Plans: backends/test_trt.py."""

from __future__ import annotations

import shutil
from pathlib import Path

import onnxruntime
import pytest
from tiny_pairs import request, save_checkpoint, settings

from semspec import LLM
from semspec.export.pipeline import export_pair
from semspec.runtime.backends import ort
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


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with the graph of ONNX Runtime's CUDA."""
    folder = tmp_path_factory.mktemp("portable")
    target = request(save_checkpoint(folder / "model", max_position_embeddings=64), "int4")
    return export_pair(target, None, folder / "bundle", settings(graphs=("cpu", "cuda"), max_context=32)).path


def test_cuda_is_taken_before_the_cpu_where_it_has_a_device(
    portable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if this build had CUDA and this machine a GPU; first as if it had none: then the CPU, and why."""
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this build of onnxruntime has CUDA")
    monkeypatch.setitem(ort.PROVIDERS, "cuda", "CPUExecutionProvider")
    with LLM(portable, backend="auto", threads=1) as llm:
        assert llm.backend == "cpu" and "; not cuda: backend 'cuda' finds no device" in llm.backend_why
    monkeypatch.setattr(ort.OrtBackend, "zeros", lambda self, shape, dtype: None)
    engine, why = open_engine(Bundle.open(portable), ["target"], "auto", threads=1, spin=False)
    assert engine.name == "cuda"
    assert why.startswith("cuda fits; not tensorrt: ") and "; not tensorrt-rtx: " in why


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
