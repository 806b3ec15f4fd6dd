"""`semspec calibrate --ranges` as a user runs it."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import commands
import pytest
import tiny_pairs

from semspec.export.checkpoint import open_checkpoint
from semspec.export.ranges import read_ranges


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_pairs.save_checkpoint(tmp_path_factory.mktemp("calibrate") / "tiny")


def test_ranges_are_written_and_told(tiny: Path, tmp_path: Path) -> None:
    """Progress and time left on stderr, one JSON line on stdout; neither torch nor an engine is needed."""
    done = commands.run(
        "semspec", "calibrate", "--target", tiny, "--ranges", "r", "--tokens", 900, "--json",
        cwd=tmp_path, without=["torch", "transformers", "onnx", "onnxruntime", "safetensors"],
    )  # fmt: skip
    assert done.status == 0, done
    line = json.loads(done.out)
    found = read_ranges(tmp_path / "r", open_checkpoint(tiny))
    assert line["ranges"] == "r" and line["tokens"] == found.tokens and 600 < found.tokens <= 900
    assert found.model == "tiny" and line["peak_mib"] > 0
    assert "s left" in done.err and f"r is ready: {found.tokens} tokens" in done.err


def test_a_text_of_ones_own(tiny: Path, tmp_path: Path) -> None:
    """Its ids are what the file holds."""
    (tmp_path / "own.txt").write_text("abc " * 100)
    done = commands.run(
        "semspec", "calibrate", "--target", tiny, "--ranges", "r", "--text", "own.txt", cwd=tmp_path
    )
    assert done.status == 0 and not done.out, done
    windows = read_ranges(tmp_path / "r", open_checkpoint(tiny)).windows
    assert [len(window) for window in windows] == [256, 44] and windows[0][:3] == (256, 99, 32)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--ranges", "there"], 2, "there exists; give another file, or --force"),
        (["--ranges", "none/r"], 2, "none is not a folder"),
        (["--ranges", "r", "--tokens", "5"], 2, "at least 128 tokens, got 5"),
        (["--ranges", "r", "--text", "none"], 1, "none: no such file"),
        (["--ranges", "r", "--text", "there"], 1, "the text has 5 tokens; at least 128 are needed"),
        (["--ranges", "r", "--target", "./none"], 1, "no such file or folder: ./none"),
        ([], 2, "Missing option '--ranges'"),
    ],
)
def test_a_fault_is_one_line(
    tiny: Path, tmp_path: Path, arguments: list[str], status: int, message: str
) -> None:
    """And nothing is written."""
    (tmp_path / "there").write_text("mine!")
    done = commands.run("semspec", "calibrate", "--target", tiny, *arguments, cwd=tmp_path)
    assert done.status == status and message in done.err and "Traceback" not in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_an_interrupted_run_goes_on(tiny: Path, tmp_path: Path) -> None:
    """Ctrl-C leaves no file, and the same command gives the one that an uninterrupted run gives."""
    given = ("calibrate", "--target", tiny, "--ranges", "r", "--tokens", 3000)
    with commands.start("semspec", *given, cwd=tmp_path) as process:
        assert process.stderr is not None
        for line in process.stderr:
            words = line.replace(b",", b"").split()
            if words[0] == b"reading:" and int(words[1]) > 0.4 * int(words[3]):
                process.send_signal(signal.SIGINT)
                break
        status = commands.finish(process).status
    if status == 130:  # else it was quicker than the signal
        assert not (tmp_path / "r").exists() and (tmp_path / ".r.partial").is_dir()
        assert commands.run("semspec", *given, cwd=tmp_path).status == 0
    whole = commands.run("semspec", *given[:3], "--ranges", "w", *given[5:], cwd=tmp_path)
    assert whole.status == 0
    assert (tmp_path / "r").read_bytes() == (tmp_path / "w").read_bytes()
