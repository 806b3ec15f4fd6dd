"""`semspec bench` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import commands
import pytest

SMALL = ("--max-tokens", 16, "--modes", "autoregressive,ngram", "--temperature", 0, "--threads", 1)


def test_bench_prints_a_table_and_writes_the_folder(
    bench_pair: Path, data_file: Path, tmp_path: Path
) -> None:
    """The table on stdout, all else on stderr."""
    done = commands.run(
        "semspec", "bench", bench_pair, "--data", data_file, "--out", "out", *SMALL, cwd=tmp_path
    )
    assert done.status == 0, done
    assert "autoregressive" in done.out and "ngram" in done.out and "exact" in done.out
    assert "measuring: 8 of 8" in done.err and "report.html" in done.err
    files = {"run.json", "cells.jsonl", "results.json", "report.html", "divergences.jsonl"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == files


def test_shards_are_measured_apart_and_joined(bench_pair: Path, data_file: Path, tmp_path: Path) -> None:
    """The ids of every cell are those of the run that was never split."""
    given = ("bench", bench_pair, "--data", data_file, *SMALL, "--json")
    for out, shard in (("whole", "1/1"), ("one", "1/2"), ("two", "2/2")):
        assert commands.run("semspec", *given, "--out", out, "--shard", shard, cwd=tmp_path).status == 0
    done = commands.run("semspec", "bench", "join", "one", "two", "--out", "joined", "--json", cwd=tmp_path)
    line = json.loads(done.out)
    assert done.status == 0 and line["out"] == "joined" and [row["n"] for row in line["rows"]] == [4, 4]
    found = {}
    for out in ("whole", "joined"):
        content = json.loads((tmp_path / out / "results.json").read_text("utf-8"))
        found[out] = [
            (result["cell"], result["token_ids"], result["correct"]) for result in content["results"]
        ]
    assert found["joined"] == found["whole"] and len(found["whole"]) == 8
    assert (tmp_path / "joined" / "report.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--data", "none.jsonl"], 1, "cannot read none.jsonl"),
        (["--problems", "9"], 1, "holds 4 problems, 9 were asked for"),
        (["--modes", "fast"], 2, "unknown mode 'fast'"),
        (["--temperature", "-1"], 2, "temperature must be"),
        (["--shard", "3/2"], 2, "from 1 to n"),
    ],
)
def test_a_fault_is_one_line(
    bench_pair: Path, data_file: Path, tmp_path: Path, arguments: list[str], status: int, message: str
) -> None:
    """And nothing is written."""
    given = ["bench", bench_pair, "--data", data_file, "--out", "out", *SMALL, *arguments]
    assert message in commands.one_line(commands.run("semspec", *given, cwd=tmp_path), status)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [[], ["--help"], ["run", "--help"], ["join", "--help"]])
def test_help_is_there(tmp_path: Path, arguments: list[str]) -> None:
    """`bench` alone is a question too."""
    done = commands.run("semspec", "bench", *arguments, cwd=tmp_path)
    assert "Usage: semspec bench" in done.out + done.err and done.status == (0 if arguments else 2)


@pytest.mark.parametrize("shard", ["2", "1/x", "/", "1/2/3", "²/3"])
def test_a_shard_that_is_none_is_refused(tmp_path: Path, shard: str) -> None:
    """A usage error, with what is expected."""
    done = commands.run("semspec", "bench", "x", "--data", "x", "--out", "x", "--shard", shard, cwd=tmp_path)
    assert done.status == 2 and "expected i/n as in 1/4" in done.err


@pytest.mark.parametrize("library", ["math_verify", "matplotlib"])
def test_a_missing_extra_names_its_pip_command(
    bench_pair: Path, data_file: Path, tmp_path: Path, library: str
) -> None:
    """Before anything is measured."""
    given = ["bench", bench_pair, "--data", data_file, "--out", "out", *SMALL]
    line = commands.one_line(commands.run("semspec", *given, cwd=tmp_path, without=[library]), 1)
    assert "pip install 'semspec[bench]'" in line and not list(tmp_path.iterdir())


def test_importing_the_benchmark_needs_the_base_only(tmp_path: Path) -> None:
    """Extras are imported by the functions that use them."""
    extras = ["math_verify", "matplotlib", "sympy", "onnx", "onnxruntime", "torch", "transformers"]
    code = (
        f"import sys, pkgutil, importlib; sys.modules.update(dict.fromkeys({extras!r}))\n"
        "import semspec.calibration.cli, semspec.calibration.bench as b\n"
        "for found in pkgutil.iter_modules(b.__path__): importlib.import_module(f'{b.__name__}.{found.name}')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
