"""run.sh on a machine without a GPU: it says so, ends well, and no step's end is another's.

In the place of cuda-bindings, which both TensorRT backends import, stands a module that hangs or dies; `cpu` is itself.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from semspec.export.engines.device import find_device

RUN = Path(__file__).with_name("run.sh")
SIZES = ["1", "2", "4", "8", "16", "32", "64", "128"]
HANGS = "import time\ntime.sleep(600)\n"
DIES = "import os\nos.abort()\n"

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("bash") or find_device() is not None,
    reason="needs Linux, bash and a machine without an NVIDIA GPU",
)


class Ran(NamedTuple):
    status: int
    lines: list[str]
    summary: dict[str, Any]
    left: list[Path]


def command(*arguments: str, work: Path) -> list[str]:
    return ["bash", str(RUN), "--work", str(work), *arguments]


def environment(folder: Path, **modules: str) -> dict[str, str]:
    """With modules that are found before installed ones of their names. One thread: the suite has several workers."""
    for name, code in modules.items():
        (folder / f"{name}.py").write_text(code, encoding="utf-8")
    own = {"PYTHON": sys.executable, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    if os.environ.get("PYTHONPATH"):
        own["PYTHONPATH"] += os.pathsep + os.environ["PYTHONPATH"]
    return {**os.environ, **own}


def run(folder: Path, *arguments: str, **modules: str) -> Ran:
    work = folder / "work"
    work.mkdir()
    done = subprocess.run(
        command(*arguments, work=work),
        env=environment(folder, **modules),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert lines, done.stderr
    return Ran(done.returncode, lines, json.loads(lines[-1]), list(work.iterdir()))


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Nothing to measure with, and an engine that hangs, for a sixth of 36 seconds."""
    return run(tmp_path_factory.mktemp("bare"), "--backends", "tensorrt-rtx", "--limit", "36", cuda=HANGS)


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """On the CPU, behind an engine that dies."""
    folder = tmp_path_factory.mktemp("tried")
    sizes = ("--precisions", "int4", "--shapes", "none tiny-draft tiny", "--seconds", "0.01")
    return run(folder, "--backends", "tensorrt cuda cpu", *sizes, cuda=DIES)


def test_without_a_gpu_it_says_so_and_ends_well(bare: Ran) -> None:
    """A machine is asked first, and often has none."""
    assert bare.status == 0 and bare.summary["gpu"] is None
    assert bare.lines[0].startswith("no GPU: there is no NVIDIA driver on this machine")
    assert bare.summary["timings"] == bare.summary["agreement"] == bare.summary["predictions"] == []
    assert bare.summary["machine"]["cores"] >= 1


def test_each_backend_has_its_own_reason(bare: Ran, tried: Ran) -> None:
    """Missing, hanging and dying are three things."""
    cuda = tried.summary["backends"]["cuda"]
    assert not cuda["opens"] and cuda["why"]
    states = {name: step["state"] for name, step in (bare.summary["steps"] | tried.summary["steps"]).items()}
    assert states["opens/tensorrt-rtx"] == "out of time"
    assert states["opens/tensorrt"] == "died"
    assert tried.summary["backends"]["cpu"]["opens"] and states["opens/cpu"] == "done"


def make_wheel(folder: Path, name: str, tag: str, module: str, code: str) -> None:
    """A wheel of one module."""
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-{tag}.whl", "w") as wheel:
        wheel.writestr(f"{module}.py", code)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_wheels_come_before_what_is_installed(tmp_path: Path) -> None:
    """One that is for another machine is left out, and the others are installed all the same."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    make_wheel(wheels, "stub", "py3-none-any", "cuda", "raise ImportError('of the wheel')\n")
    make_wheel(wheels, "other", "cp27-cp27m-win32", "other", "")
    ran = run(tmp_path, "--wheels", str(wheels), "--backends", "tensorrt", cuda=DIES)
    assert ran.status == 0 and ran.left == []
    assert "(of the wheel)" in ran.summary["backends"]["tensorrt"]["why"]


def test_a_step_that_breaks_leaves_the_others(tried: Ran) -> None:
    """A day with a GPU is too short to begin again. What broke shows in the status; what was refused has a reason."""
    steps = tried.summary["steps"]
    assert tried.status == 1
    assert "shape must be one of" in steps["times/cpu/int4/none"]["why"]
    assert steps["times/cpu/int4/none"]["state"] == "refused"
    done = ("agrees/cpu/cpu/int4", "times/cpu/int4/tiny-draft", "times/cpu/int4/tiny")
    assert [steps[name]["state"] for name in done] == ["done"] * 3


def test_cpu_agrees_with_itself(tried: Ran) -> None:
    """The same code that asks a GPU."""
    (one,) = tried.summary["agreement"]
    assert one["wrong"] == "" and len(one["answers"]) == 6
    assert all(way["different"] == 0 for way in one["models"]["cpu"].values())
    assert not [answer for answer in one["answers"] if "margin" in answer]


def test_passes_and_drafts_are_timed(tried: Ran) -> None:
    """All sizes, all rows and one; a pair is predicted from them, under the name of what ran."""
    assert [one["shape"] for one in tried.summary["timings"]] == ["tiny-draft", "tiny"]
    for one in tried.summary["timings"]:
        assert one["backend"] == one["graph"] == "cpu" and one["precision"] == "int4 block 32"
        assert list(one["passes"]) == SIZES and list(one["one_row"]) == SIZES[1:]
        figures = [*one["passes"].values(), *one["one_row"].values(), one["drafted"], one["prompt"]]
        assert all(0 < figure["least"] <= figure["ms"] <= figure["most"] for figure in figures)
        assert min(figure["runs"] for figure in figures) >= 5
    (pair,) = tried.summary["predictions"]
    assert (pair["target"], pair["draft"]) == ("tiny", "tiny-draft") and pair["c"] > 0
    assert list(pair["exact"]) == list(pair["segments"]) == ["0.6", "0.7", "0.8", "0.9"]


def test_tables_say_what_they_are_of(tried: Ran) -> None:
    """A person may look at the table alone."""
    text = "\n".join(tried.lines[:-1])
    assert "backend cpu is this machine's processor: it says nothing of a GPU" in text
    assert "nothing of it was run" in text and "random weights" in text


def test_nothing_is_left_behind(bare: Ran, tried: Ran) -> None:
    """A 32B-shaped graph is 17 GB."""
    assert bare.left == tried.left == []


def test_interrupted_it_ends_its_step_and_leaves_nothing(tmp_path: Path) -> None:
    """The GPU must be free when the prompt is back."""
    work = tmp_path / "work"
    work.mkdir()
    hangs = f"import os\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n{HANGS}"
    with subprocess.Popen(
        command("--backends", "tensorrt-rtx", work=work),
        env=environment(tmp_path, cuda=hangs),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        pid = wait_for(tmp_path / "pid")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 130
    assert not list(work.iterdir())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def wait_for(path: Path) -> int:
    for _ in range(600):
        if path.is_file() and (text := path.read_text(encoding="utf-8")):
            return int(text)
        time.sleep(0.05)
    raise AssertionError(f"{path} was not written")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shape", "7B"], "unknown argument --shape"),
        (["--limit"], "--limit needs a value"),
        (["--limit", "8m"], "--limit must be a whole number of seconds, got '8m'"),
        (["--limit", "5"], "--limit must be at least 30 seconds, got 5"),
        (["--wheels", "nowhere"], "--wheels must be a folder, got 'nowhere'"),
    ],
)
def test_wrong_usage_is_status_2(tmp_path: Path, arguments: list[str], said: str) -> None:
    """At once, before anything is installed or measured."""
    done = subprocess.run(
        command(*arguments, work=tmp_path), capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 2 and f"run.sh: {said}" in done.stderr and "--backends" in done.stderr
    assert not done.stdout and not list(tmp_path.iterdir())
