"""Findings of any run become a summary and tables: of killed steps, cut lines, a machine where nothing imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gpu.findings import Findings, NotHere, not_here, read_findings, run_step
from gpu.summary import broken, summarize
from gpu.tables import write_tables

DEVICE = {"name": "GPU X", "capability": "9.0", "n_bytes": 8 << 30, "shared": False}


def ended(step: str, status: int) -> dict[str, Any]:
    return {"step": step, "exit": status, "seconds": 3}


def timed(backend: str, shape: str, ms: float) -> list[dict[str, Any]]:
    step = f"times/{backend}/int4/{shape}"
    about = {"backend": backend, "asked": "int4", "precision": "int4/128", "shape": shape, "graph": "native"}
    passes = [
        {"step": step, "size": size, "rows": size, "a_pass": {"ms": ms + 0.01 * size}} for size in (1, 2, 32)
    ]
    return [{"step": step, **about, "past": 512}, *passes, {"step": step, "drafted": {"ms": ms}}]


@pytest.mark.parametrize(
    ("status", "state", "breaks"),
    [
        (0, "done", False),
        (1, "failed", True),
        (3, "refused", False),
        (99, "not begun", False),
        (124, "out of time", False),
        (137, "died", True),
        (139, "died", True),
    ],
)
def test_exit_statuses_are_told_apart(status: int, state: str, breaks: bool) -> None:
    """Too slow for the day is no fault; dying of a signal is."""
    summary = summarize([{"step": "machine", "device": DEVICE}, ended("times/x/int4/7B", status)])
    assert summary["steps"]["times/x/int4/7B"]["state"] == state
    assert broken(summary) is breaks
    assert (state in write_tables(summary)) is (state != "done")


def test_pairs_are_predicted_within_one_backend() -> None:
    """The cost of one engine's draft says nothing of another engine's target."""
    findings = [
        *timed("cuda", "1.5B", 4.0),
        *timed("cuda", "0.5B", 1.0),
        *timed("tensorrt", "7B", 9.0),
    ]
    summary = summarize(findings)
    assert [(one["backend"], one["target"], one["draft"]) for one in summary["predictions"]] == [
        ("cuda", "1.5B", "0.5B")
    ]
    assert summary["predictions"][0]["c"] == pytest.approx(1 / 4.01, rel=1e-5)
    text = write_tables(summary)
    assert "1.5B/0.5B" in text and "nothing of it was run" in text and "no GPU" not in text


def test_a_killed_step_keeps_what_it_had() -> None:
    """Half of the sizes are figures too, but nothing is predicted from them."""
    half = timed("cuda", "0.5B", 1.0)[:3]
    summary = summarize([*half, *timed("cuda", "1.5B", 4.0), ended("times/cuda/int4/0.5B", 124)])
    assert len(summary["timings"]) == 2 and not summary["predictions"]
    assert set(summary["timings"][0]["passes"]) == {"1", "2"}
    assert "drafted" in write_tables(summary)


def test_a_backend_that_disagrees_is_seen_at_once() -> None:
    """It must not hide among figures."""
    rows = {"rows": 4, "kl": 0.5, "different": 2, "margin": 1.5, "gap": 2.0}
    one: dict[str, Any] = {
        "step": "agrees/cuda/cuda/fp16",
        "backend": "cuda",
        "graph": "cuda",
        "precision": "fp16",
    }
    one |= {
        "wrong": "pieces: 0.5 nats from itself",
        "models": {"cpu": {"one pass": rows}, "itself": {"pieces": rows}},
    }
    summary = summarize([one | {"answers": [{"margin": 0.5}, {}]}, ended("agrees/cuda/cuda/fp16", 0)])
    assert broken(summary)
    text = write_tables(summary)
    assert "NO" in text and "pieces: 0.5 nats" in text and "4 of 8" in text and "1 of 2, by 0.5" in text


def test_findings_survive_a_line_cut_short(tmp_path: Path) -> None:
    """A step is killed while it writes; the next one writes on."""
    path = tmp_path / "findings"
    path.write_text('{"step": "one", "half', encoding="utf-8")
    Findings(path, "two").add(value=1)
    first, second = read_findings(path)
    assert "cut short" in first["failed"] and second == {"step": "two", "value": 1}
    assert broken(summarize([first, second]))


def test_numbers_that_json_lacks_are_refused(tmp_path: Path) -> None:
    """The last line of the script is read by programs."""
    path = tmp_path / "findings"
    path.touch()
    with pytest.raises(ValueError):
        Findings(path, "one").add(ms=float("nan"))
    assert read_findings(path) == []


def test_what_stops_a_step_is_found(tmp_path: Path) -> None:
    """A reason why not here is one thing, any other error a failure, and is raised."""
    path = tmp_path / "findings"

    def refuse(findings: Findings) -> None:
        with not_here(OSError):
            raise OSError("no such engine")

    def fail(findings: Findings) -> None:
        findings.add(before=True)
        raise ZeroDivisionError("first line\nsecond")

    assert run_step(Findings(path, "one"), refuse) == "no such engine"
    with pytest.raises(ZeroDivisionError):
        run_step(Findings(path, "two"), fail)
    with pytest.raises(NotHere), not_here(OSError):
        raise NotHere("as it is")
    assert [{**finding} for finding in read_findings(path)] == [
        {"step": "one", "refused": "no such engine"},
        {"step": "two", "before": True},
        {"step": "two", "failed": "ZeroDivisionError: first line"},
    ]


def test_report_needs_nothing_of_the_project(tmp_path: Path) -> None:
    """Where numpy or semspec cannot be imported, a person wants to read just that."""
    path = tmp_path / "findings"
    tests = Path(__file__).resolve().parents[1]
    block = "import runpy, sys; sys.modules.update(semspec=None, numpy=None)"
    command = [sys.executable, "-c", f"{block}; runpy.run_module('gpu', run_name='__main__')"]
    status = []
    for arguments in (["machine", "--findings", str(path)], ["report", "--findings", str(path)]):
        done = subprocess.run(
            [*command, *arguments], cwd=tests, capture_output=True, text=True, timeout=60, check=False
        )
        status.append(done.returncode)
    assert status == [1, 1], done.stderr
    assert "what GPU is here is not known: semspec cannot be imported here" in done.stdout
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["gpu"] is None and summary["steps"]["machine"]["state"] == "failed"
