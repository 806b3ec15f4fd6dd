"""`semspec build`, run as a command on what a device has: the base packages and the engine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import contract_graphs
import pytest
import rtx
import tiny_pairs
from commands import one_line, run

EXPORTER = ("onnx", "onnxruntime", "torch", "transformers", "safetensors", "gguf", "ml_dtypes")


@pytest.fixture(scope="module")
def bundle(tiny_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return contract_graphs.graft(tiny_pair, tmp_path_factory.mktemp("cli") / "bundle", "int8")


@rtx.needs_rtx
def test_build_needs_the_engine_and_no_exporter(bundle: Path, tmp_path: Path) -> None:
    """No onnx, no checkpoint, no other engine; progress, times and memory on stderr, one JSON line on stdout."""
    shutil.copytree(bundle, tmp_path / "pair")
    arguments = ("build", "pair", "--backend", "tensorrt-rtx", "--sm", "86,120", "--json")
    done = run("semspec", *arguments, cwd=tmp_path, without=EXPORTER)
    assert done.status == 0, done.err
    report = json.loads(done.out)
    assert report["capabilities"] == ["8.6", "12.0"] and [plan["home"] for plan in report["plans"]] == [
        "target",
        "draft",
    ]
    assert "target: native plan, in about 0.4 GiB of memory\n" in done.err
    assert "target: native plan in int8, " in done.err and " MiB peak memory; runs in about " in done.err
    assert "draft: native plan in int8, " in done.err and "there already; runs in about " in done.err
    again = run("semspec", *arguments, cwd=tmp_path, without=EXPORTER)
    assert [plan["compiled"] for plan in json.loads(again.out)["plans"]] == [None, None]


def test_missing_engine_is_one_line(tmp_path: Path) -> None:
    """Where it does not install, the command says so and how to get it."""
    done = run(
        "semspec",
        "build",
        "pair",
        "--backend",
        "tensorrt-rtx",
        "--sm",
        "86",
        cwd=tmp_path,
        without=["tensorrt_rtx"],
    )
    assert "install it with: pip install 'semspec[rtx]'" in one_line(done, 1)


def test_wrong_capability_is_a_usage_error(tmp_path: Path) -> None:
    """Status 2, as every wrong setting."""
    done = run("semspec", "build", "pair", "--backend", "tensorrt-rtx", "--sm", "ampere", cwd=tmp_path)
    assert "compute capabilities must be numbers such as 86,89,120" in one_line(done, 2)


@rtx.needs_rtx
def test_export_builds_plans_on_request(tmp_path: Path) -> None:
    """One command from a checkpoint to plans; the graph that the engine reads is added by itself."""
    tiny_pairs.save_checkpoint(tmp_path / "tiny")
    arguments = ("--target", "tiny", "--out", "bundle", "--max-context", 128, "--engine-precision", "fp16")
    wanted = ("--verify", "off", "--backend", "tensorrt-rtx", "--sm", "89", "--json")
    done = run("semspec-export", *arguments, *wanted, cwd=tmp_path)
    assert done.status == 0, done.err
    (plan,) = json.loads(done.out)["plans"]["plans"]
    assert (plan["home"], plan["graph"], plan["precision"]) == ("target", "native", "fp16")
    assert (tmp_path / plan["path"]).is_file()


@rtx.needs_rtx
def test_export_refuses_what_the_devices_cannot_run(tmp_path: Path) -> None:
    """Before the models are even looked for."""
    arguments = (
        "--target",
        "nowhere",
        "--out",
        "bundle",
        "--engine-precision",
        "fp8",
        "--graphs",
        "cpu,native",
    )
    done = run("semspec-export", *arguments, "--backend", "tensorrt-rtx", "--sm", "86", cwd=tmp_path)
    assert "--engine-precision is in fp8, which needs compute capability 8.9 or above" in one_line(done, 2)


def test_capabilities_without_an_engine_are_refused(tmp_path: Path) -> None:
    """An option that would be ignored is a misunderstanding."""
    done = run("semspec-export", "--target", "nowhere", "--out", "bundle", "--sm", "86", cwd=tmp_path)
    assert "--sm says what to compile plans for: add --backend" in one_line(done, 2)
