"""From a bundle to plans: what is built, what is found again, what is refused, and what a broken build leaves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import contract_graphs
import pytest
import rtx
import tiny_pairs
import tiny_probes

from semspec.export.engines import worker
from semspec.export.engines.build import BuildReport, BuildRequest, build_plans
from semspec.export.engines.profiles import BuildSizes
from semspec.runtime.bundle import Bundle, sha256_of
from semspec.runtime.errors import BackendError, BundleError, ConfigError
from semspec.runtime.plans import PLANS_FILE, check_plan_file, find_plan, read_plan_sets

ENGINE = "tensorrt-rtx"


def built(bundle: Path, *capabilities: str, **changes: object) -> BuildReport:
    request = BuildRequest(engine=ENGINE, capabilities=capabilities or ("8.6", "8.9"), **changes)  # type: ignore[arg-type]
    return build_plans(bundle, request)


def fresh(report: BuildReport) -> list[str]:
    """What was compiled and not found."""
    return [f"{plan.home}/{plan.graph}" for plan in report.plans if plan.compiled]


@pytest.fixture(scope="module")
def engine_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pair whose graphs for TensorRT came from the exporter: fp16, and int8 with activations in bf16."""
    from semspec.export.pipeline import export_pair

    folder = tmp_path_factory.mktemp("engine-pair")
    requests = [
        tiny_pairs.request(tiny_pairs.save_checkpoint(folder / role, seed=seed), name=role)
        for seed, role in enumerate(("target", "draft"))
    ]
    requests[1] = replace(requests[1], engine="int8+bf16")
    return export_pair(*requests, folder / "bundle", tiny_pairs.settings(graphs=("cpu", "native"))).path


@pytest.fixture(scope="module")
def plain_pair(tiny_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pair with hand-made graphs, alike for both models; to be copied before it is changed."""
    return contract_graphs.graft(tiny_pair, tmp_path_factory.mktemp("plain-pair") / "bundle")


@rtx.needs_rtx
def test_target_draft_and_probes_are_built(engine_pair: Path, tmp_path: Path) -> None:
    """The whole of a calibrated pair as it was exported, found again by whoever opens it."""
    bundle = shutil.copytree(engine_pair, tmp_path / "bundle")
    tiny_probes.add_probes(bundle)
    report = built(bundle)
    assert fresh(report) == [
        "target/native",
        "draft/native",
        *(f"probes/1/{n}" for n in ("predictor", "target", "draft")),
    ]
    opened = Bundle.open(bundle, verify=True)
    for plan in report.plans:
        path, _ = find_plan(
            opened,
            plan.home,
            plan.graph,
            engine=ENGINE,
            version=report.version,
            capability="8.9",
            verify=True,
        )
        assert path == plan.path and path.stat().st_size == plan.size
        assert (
            plan.compiled and plan.compiled.peak_bytes < plan.need.build
        )  # what was told before bounds what it took
    assert [plan.precision for plan in report.plans] == ["fp16", "int8", "fp32", "fp32", "fp32"]
    assert not [path for path in bundle.rglob("*") if "partial" in path.name or "replaced" in path.name]


@rtx.needs_rtx
def test_second_build_gives_the_same_bytes(plain_pair: Path, tmp_path: Path) -> None:
    """Promised everywhere, because nothing is compiled twice."""
    bundle = shutil.copytree(plain_pair, tmp_path / "bundle")
    built(bundle)
    first = {path: (sha256_of(path), path.stat().st_ino) for path in bundle.rglob("*.plan")}
    assert fresh(built(bundle)) == []
    assert first == {path: (sha256_of(path), path.stat().st_ino) for path in bundle.rglob("*.plan")} != {}


@rtx.needs_rtx
@rtx.needs_turns
def test_bundles_alike_get_plans_alike_wherever_they_lie(plain_pair: Path, tmp_path: Path) -> None:
    """Compiled apart, from paths of other lengths: what is shipped can be checked by building it again. The compiler
    orders by addresses and threads, so unaided they often differ."""
    plans = []
    for name in ("b", "another-bundle-of-the-same-models"):
        bundle = shutil.copytree(plain_pair, tmp_path / name)
        assert fresh(built(bundle))
        plans.append({path.relative_to(bundle): sha256_of(path) for path in bundle.rglob("*.plan")})
    assert plans[0] == plans[1] != {}


@rtx.needs_turns
def test_turns_come_to_an_end() -> None:
    """A thread that waits for another without sleeping would hold the core for good: they are ended from outside."""
    takes = "import os, time; os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)); print(flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", f"{takes}; time.sleep(99)"], stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdout.readline()
        assert os.sched_getscheduler(other.pid) == os.SCHED_FIFO
        worker._calm(other.pid)
        assert os.sched_getscheduler(other.pid) == os.SCHED_BATCH
        other.kill()


@rtx.needs_rtx
def test_a_build_that_takes_too_long_goes_on_without_turns(
    plain_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends as ever."""
    monkeypatch.setattr(worker, "PATIENCE", 0.3)
    assert fresh(built(shutil.copytree(plain_pair, tmp_path / "bundle")))


@rtx.needs_rtx
def test_calibrating_again_rebuilds_the_probes_alone(plain_pair: Path, tmp_path: Path) -> None:
    """Plans are reused by content: the models did not change, the new probes are others; equal ones are found too."""
    bundle = shutil.copytree(plain_pair, tmp_path / "bundle")
    tiny_probes.add_probes(bundle)
    assert fresh(built(bundle))[0] == "target/native"
    assert fresh(built(bundle)) == []
    tiny_probes.add_probes(bundle, number=2, features=("target.mean_logprob",))
    assert fresh(built(bundle)) == ["probes/2/predictor"]
    kept = read_plan_sets(Bundle.open(bundle), "probes/2").values()
    assert {name for found in kept for name in found.plans} == {"predictor", "target", "draft"}


@rtx.needs_rtx
def test_equal_models_share_a_plan_and_other_devices_do_not(plain_pair: Path, tmp_path: Path) -> None:
    """A plan is what it was made of: graph, weights, devices and sizes, not its role or its name."""
    bundle = shutil.copytree(plain_pair, tmp_path / "bundle")
    assert fresh(built(bundle)) == ["target/native"]
    assert fresh(built(bundle, "8.6")) == ["target/native"]
    assert fresh(built(bundle, sizes=BuildSizes(chunk=64))) == ["target/native"]
    with (bundle / "target" / "plans").joinpath("mine.txt").open("w") as file:
        file.write("x")
    with pytest.raises(BundleError, match=r"mine.txt has no plans.json"):
        built(bundle)


@rtx.needs_rtx
def test_damaged_plan_is_built_again(plain_pair: Path, tmp_path: Path) -> None:
    """A plan that was cut short, or changed in place, is no plan (D38)."""
    bundle = shutil.copytree(plain_pair, tmp_path / "bundle")
    report = built(bundle)
    plans, version = report.plans, report.version
    good = plans[0].path.read_bytes()
    for damaged in (good[:-1], b"x" + good[1:]):
        for plan in plans:
            plan.path.unlink()
            plan.path.write_bytes(damaged)
        assert fresh(built(bundle)) == ["target/native"]
        found = find_plan(
            Bundle.open(bundle), "target", "native", engine=ENGINE, version=version, capability="8.6"
        )
        check_plan_file(found[0].parent, found[1], verify=True)


@rtx.needs_rtx
def test_changed_weights_are_noticed_before_the_build(plain_pair: Path, tmp_path: Path) -> None:
    """A swapped data file of equal size loads in silence (D35)."""
    bundle = shutil.copytree(plain_pair, tmp_path / "bundle")
    data = bundle / "target" / "onnx" / "native.data"
    data.write_bytes(bytes(data.stat().st_size))
    with pytest.raises(BundleError, match=r"native\.data was changed: sha256"):
        built(bundle)
    assert not (bundle / "target" / "plans").exists()


@rtx.needs_rtx
def test_forbidden_precision_is_refused_before_any_work(tiny_pair: Path, tmp_path: Path) -> None:
    """D41: the table speaks first, and nothing is left behind."""
    bundle = contract_graphs.graft(tiny_pair, tmp_path / "bundle", "fp8")
    with pytest.raises(ConfigError, match=r"target native is in fp8, which needs compute capability 8\.9"):
        built(bundle, "8.6", "12.0")
    assert not (bundle / "target" / "plans").exists()


@rtx.needs_rtx
@pytest.mark.parametrize(
    ("capabilities", "changes", "message"),
    [
        (("8.7",), {}, r"builds for compute capability 7\.5, 8\.0, .*not 8\.7; use --backend tensorrt"),
        (
            ("8.6",),
            {"graph": "primitive"},
            "it has cpu, native, needed: primitive",
        ),
        (("8.6",), {"graph": "cuda"}, "graph of plans must be one of native, primitive, got 'cuda'"),
    ],
)
def test_requests_that_cannot_be_met(
    plain_pair: Path, capabilities: tuple[str, ...], changes: dict[str, object], message: str
) -> None:
    """Said before anything is compiled, with what would do."""
    with pytest.raises(ConfigError, match=message):
        built(plain_pair, *capabilities, **changes)


@rtx.needs_rtx
def test_bundle_without_such_graphs_is_refused(tiny_pair: Path) -> None:
    """The command that makes them is named."""
    with pytest.raises(ConfigError, match="export again with --graphs cpu,native"):
        built(tiny_pair)


@pytest.mark.skipif(find_spec("tensorrt") is not None, reason="TensorRT is installed")
def test_missing_engine_is_one_line() -> None:
    """No silent change of engine: the pip command, and on Jetson where it comes from."""
    with pytest.raises(BackendError, match=r"cannot be imported .* pip install 'semspec\[tensorrt\]'"):
        build_plans(Path("nowhere"), BuildRequest(engine="tensorrt"))
    with pytest.raises(
        ConfigError, match="backend of plans must be one of tensorrt, tensorrt-rtx, got 'cpu'"
    ):
        build_plans(Path("nowhere"), BuildRequest(engine="cpu"))


# what may happen to the process that compiles


def broken_worker(folder: Path, script: str) -> str:
    """A Python that runs `script` in place of what it is asked for."""
    file = folder / "python"
    file.write_text(f"#!{sys.executable}\nimport os, signal, sys\n{script}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return str(file)


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by the system, most likely for want of memory"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "broke with status -11: it said nothing"),
        ("sys.exit('no driver')", "broke with status 1: no driver"),
    ],
)
def test_end_of_the_compiling_process_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    """An engine that is killed, or crashes, must not take the application with it (D41)."""
    monkeypatch.setattr(sys, "executable", broken_worker(tmp_path, script))
    with pytest.raises(BackendError, match=message):
        worker.compile_apart(rtx.job(tmp_path / "native.onnx", None, tmp_path / "plan"))


@rtx.needs_rtx
def test_interrupted_build_leaves_nothing(plain_pair: Path, tmp_path: Path) -> None:
    """Ctrl-C ends the compiling process too; what was there before stays, and the next build succeeds."""
    bundle = shutil.copytree(plain_pair, tmp_path / "bundle")

    def interrupt(stage: str, done: int, total: int) -> None:
        if done > 1:
            os.kill(os.getpid(), signal.SIGINT)

    request = BuildRequest(engine=ENGINE, capabilities=("8.6",))
    with pytest.raises(KeyboardInterrupt):
        build_plans(bundle, request, interrupt)
    assert not list((bundle / "target" / "plans").iterdir())
    assert fresh(build_plans(bundle, request)) == ["target/native"]


@rtx.needs_rtx
def test_record_says_what_the_plan_was_made_of(plain_pair: Path, tmp_path: Path) -> None:
    """D38: engine, release, capabilities, precision, sizes and the hash of every source stand beside the plan."""
    bundle = shutil.copytree(plain_pair, tmp_path / "bundle")
    folder = built(bundle).plans[0].path.parent
    record = json.loads((folder / PLANS_FILE).read_text(encoding="utf-8"))
    assert folder.name == f"{ENGINE}-{record['version']}-sm86-89"
    plan = record["plans"]["native"]
    assert (record["engine"], record["capabilities"], plan["precision"]) == (ENGINE, ["8.6", "8.9"], "fp16")
    assert plan["profiles"]["block"]["S"] == [1, 32, 512]
    manifest = Bundle.open(bundle).manifest.files
    assert plan["sources"] == {name: manifest[name].sha256 for name in plan["sources"]}
    assert set(plan["sources"]) == {"target/onnx/native.onnx", "target/onnx/native.data"}
