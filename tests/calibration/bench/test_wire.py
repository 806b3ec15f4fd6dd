"""Another process on a wire: answers, and every way in which it can fail to give one. Real processes, small ones."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from semspec.calibration.bench.wire import Wire, last_line
from semspec.runtime.errors import BackendError

ECHO = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    print(json.dumps({"ok": True, **asked}), flush=True)
"""
LIMIT_S = 60.0


def wire(code: str, folder: Path) -> Wire:
    """A Python process that runs `code`, called echo."""
    return Wire("echo", [sys.executable, "-c", code], {"SEEN": "yes"}, folder)


def test_questions_are_answered_in_turn(tmp_path: Path) -> None:
    """Also ones that are larger than a pipe holds."""
    with wire(ECHO, tmp_path) as other:
        for number in (1, 100_000):
            ids = list(range(number))
            assert other.ask("say", limit_s=LIMIT_S, ids=ids) == {"ok": True, "op": "say", "ids": ids}


def test_a_process_has_its_folder_and_variables(tmp_path: Path) -> None:
    """Workers rely on both."""
    code = "import json, os; input(); print(json.dumps({'ok': True, 'at': os.getcwd(), 'seen': os.environ['SEEN']}))"
    with wire(code, tmp_path) as other:
        found = other.ask("where", limit_s=LIMIT_S)
    assert Path(found["at"]).samefile(tmp_path) and found["seen"] == "yes"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "input(); raise RuntimeError('no room')",
            "ended with status 1 at 'go'; it last said: RuntimeError: no room",
        ),
        ("import sys; sys.exit(3)", r"ended with status 3 at 'go'; it last said: \(nothing\)"),
        ("import os, sys; input(); os.kill(os.getpid(), 9)", "ended of signal SIGKILL"),
        ("input(); print('hello')", "answered something else than JSON"),
        ("input(); print('[1]')", "answered something else than JSON"),
        ("input(); print('[' * 100000)", "answered something else than JSON"),
        (
            """input(); print('{"ok": false, "error": "ValueError: odd"}')""",
            "failed at 'go': ValueError: odd",
        ),
    ],
)
def test_a_process_that_fails_is_one_error_with_its_name(code: str, message: str, tmp_path: Path) -> None:
    """One line, whatever happened; its last words say what."""
    with wire(code, tmp_path) as other, pytest.raises(BackendError, match=f"^peer echo {message}"):
        other.ask("go", limit_s=LIMIT_S)


def test_a_process_that_hangs_is_ended(tmp_path: Path) -> None:
    """A benchmark of hours must not wait for ever; the process is gone afterwards."""
    code = "import sys, time; print('thinking', file=sys.stderr, flush=True); time.sleep(600)"
    with wire(code, tmp_path) as other:
        with pytest.raises(
            BackendError, match=r"did not answer 'go' within 2 s and was ended; it last said: thinking"
        ):
            other.ask("go", limit_s=2.0)
        with pytest.raises(BackendError, match="ended of signal SIGKILL"):
            other.ask("go", limit_s=LIMIT_S)


def test_a_process_that_was_killed_while_waiting_is_noticed(tmp_path: Path) -> None:
    """The system may take it for its memory between two answers."""
    with wire(ECHO, tmp_path) as other:
        other.ask("go", limit_s=LIMIT_S)
        os.kill(other.pid, signal.SIGKILL)
        with pytest.raises(BackendError, match="ended of signal SIGKILL at 'go'"):
            other.ask("go", limit_s=LIMIT_S)


def test_closing_ends_the_process(tmp_path: Path) -> None:
    """No worker outlives the run, and closing twice does nothing."""
    other = wire(ECHO, tmp_path)
    other.ask("go", limit_s=LIMIT_S)
    other.close()
    other.close()
    with pytest.raises(ProcessLookupError):
        os.kill(other.pid, 0)
    with pytest.raises(BackendError, match="closed"):
        other.ask("go", limit_s=LIMIT_S)


def test_last_words_fit_a_line() -> None:
    """A library's log is not ours to trust: no control characters, no page of text."""
    assert last_line(b"first\n\x1b[31mred\x07\n\n  \n") == "?[31mred?"
    assert len(last_line(b"x" * 5000)) == 300 and last_line(b"\n") == "(nothing)"
    assert last_line(b"\xff broken") == "\ufffd broken"
