"""Hub downloads with the real client against a small server on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

import pytest

COMMIT = "c" * 40
MODEL = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"",
    "LICENSE": b"MIT",
    "README.md": b"text",
    "modeling_evil.py": b"raise SystemExit",
    "pytorch_model.bin": b"pickle",
    "training_args.pt": b"pickle",
    "consolidated.safetensors": b"the weights again",
    "onnx/config.json": b"{}",
    "original/model.safetensors": b"the weights again",
}
REPOSITORIES = {
    "org/model": MODEL,
    "org/pickles": {"config.json": b"{}", "pytorch_model.bin": b"pickle"},
    "org/quants": {"sub/m.gguf": b"GGUF", "other.gguf": b"GGUF too"},
}


class Hub(BaseHTTPRequestHandler):
    """The requests that a download makes: the list of a repository (two forms), HEAD and GET of a file."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        parts = urlsplit(self.path).path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self.answer_list("/".join(parts[2:4]), parts[5] if len(parts) > 5 else "main", parts[4] == "tree")
        else:
            self.answer_file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))

    do_HEAD = do_GET

    def answer_list(self, name: str, revision: str, as_tree: bool) -> None:
        if name == "org/gated":
            return self.fail(403, "GatedRepo")
        if name not in REPOSITORIES:
            return self.fail(404, "RepoNotFound")
        if revision not in ("main", COMMIT):
            return self.fail(404, "RevisionNotFound")
        siblings = [{"rfilename": file} for file in REPOSITORIES[name]]
        tree = [
            {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for file, data in REPOSITORIES[name].items()
        ]
        body = tree if as_tree else {"id": name, "sha": COMMIT, "siblings": siblings}
        return self.answer(json.dumps(body).encode(), {"Content-Type": "application/json"})

    def answer_file(self, name: str, revision: str, file: str) -> None:
        data = REPOSITORIES.get(name, {}).get(file)
        if data is None:
            return self.fail(404, "EntryNotFound")
        return self.answer(data, {"ETag": f'"{hashlib.sha256(data).hexdigest()}"'})

    def answer(self, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(200)
        for key, value in {"Content-Length": str(len(body)), "X-Repo-Commit": COMMIT, **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def fail(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output quiet."""


@pytest.fixture
def hub() -> Iterator[str]:
    """The address of a hub with REPOSITORIES; Hub.asked lists what was requested."""
    Hub.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def fetch_all(home: Path, endpoint: str, *texts: str, **variables: str) -> list[str]:
    """What each source becomes, or its error; a new process, for the variables are read on import."""
    code = (
        "import sys\n"
        "from semspec.export.sources import fetch, parse_source\n"
        "from semspec.runtime.errors import SourceError\n"
        "for text in sys.argv[1:]:\n"
        "    try: print(fetch(parse_source(text)))\n"
        "    except SourceError as error: print('error:', error)\n"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env = {
        **kept,
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        **variables,
    }
    run = subprocess.run(
        [sys.executable, "-c", code, *texts], env=env, capture_output=True, text=True, timeout=120, cwd=home
    )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert len(lines) == len(texts), run.stdout
    return lines


def test_only_data_files_are_asked_for(hub: str, tmp_path: Path) -> None:
    """D53: no Python, no pickle, no second copy of the weights; afterwards the folder is there offline."""
    (folder,) = fetch_all(tmp_path, hub, "org/model")
    found = sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))
    assert found == ["LICENSE", "chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]
    asked = " ".join(Hub.asked)
    for name in (
        "modeling_evil.py",
        "pytorch_model.bin",
        "training_args.pt",
        "consolidated",
        "onnx",
        "original",
    ):
        assert name not in asked

    Hub.asked.clear()
    assert fetch_all(tmp_path, hub, "org/model", HF_HUB_OFFLINE="1") == [folder]
    assert Hub.asked == []


def test_one_gguf_file_of_a_repository(hub: str, tmp_path: Path) -> None:
    """Repositories of GGUF files hold many precisions: exactly the one that was named arrives."""
    (path,) = fetch_all(tmp_path, hub, "hub:org/quants/sub/m.gguf")
    assert Path(path).read_bytes() == b"GGUF"
    assert not any("other.gguf" in asked for asked in Hub.asked)


def test_what_a_hub_refuses_is_one_line_with_the_repair(hub: str, tmp_path: Path) -> None:
    """Each refusal is told apart from the others; none is a traceback."""
    lines = fetch_all(
        tmp_path,
        hub,
        "org/nothing",
        "org/model@v9",
        "org/gated",
        "org/pickles",
        "hub:org/quants/none.gguf",
    )
    for line, words in zip(
        lines,
        ["no such repository", "no such revision", "accept the licence", "no safetensors", "no such file"],
        strict=True,
    ):
        assert line.startswith("error: org/")
        assert words in line


def test_no_hub_and_nothing_cached(tmp_path: Path) -> None:
    """D47: with HF_HUB_OFFLINE, and where nothing answers, the line says what to check."""
    nowhere = "http://127.0.0.1:1"
    for variables in ({}, {"HF_HUB_OFFLINE": "1"}):
        for line in fetch_all(tmp_path, nowhere, "org/model", "hub:org/quants/sub/m.gguf", **variables):
            assert "not in the local hub cache, and the hub cannot be reached" in line
