"""The download cache on disk: where a verified file lives, who may write it, whether there is room.

It knows folders, locks and checksums; it does not know recipes, packages or the network. Layout:

    <root>/files/<sha256>/<name>           a finished file; appears by one rename, after its hash was checked
    <root>/files/<sha256>/<name>.sha256    the mark "checked when created", in the format of sha256sum
    <root>/partial/<sha256>/               what an unfinished download has so far; removed when it is finished
    <root>/locks/<sha256>.lock             one writer a file; left behind empty on purpose

<root> is $SEMSPEC_CACHE, else $XDG_CACHE_HOME/semspec, else ~/.cache/semspec. Hub downloads are not here:
huggingface_hub keeps its own cache. Everything below <root> may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

from semspec.runtime.errors import SourceError
from semspec.runtime.records import Progress

__all__ = ["CHUNK_BYTES", "CachedFile", "cache_root", "os_error", "require_space"]

CHUNK_BYTES = 1 << 20
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_LOCK_BUSY = {errno.EACCES, errno.EAGAIN, errno.EDEADLK}
_POLL_S = 0.2

log = logging.getLogger(__name__)


def cache_root() -> Path:
    """The cache folder of this user, absolute; not created. Raises SourceError if no home folder is known."""
    chosen = os.environ.get("SEMSPEC_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    xdg = Path(os.environ.get("XDG_CACHE_HOME") or "")
    if xdg.is_absolute():  # the XDG specification says that a relative value is to be ignored
        return xdg / "semspec"
    try:
        return Path.home() / ".cache" / "semspec"
    except RuntimeError as error:
        raise SourceError(
            f"no home folder to cache downloads in ({error}); set SEMSPEC_CACHE to a folder"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedFile:
    """One file of the cache, known by its hash before it is there.

    `find` and `commit` trust a finished file by its size and its mark; the hash is computed once, by `commit`
    (or by `find` if a crash came between the rename and the mark). Not guaranteed: that a file which someone
    changed in place afterwards, keeping its size, is noticed.
    """

    root: Path
    name: str
    size: int
    sha256: str

    @property
    def path(self) -> Path:
        """Where the finished file is, or will be."""
        return self.root / "files" / self.sha256 / self.name

    @property
    def mark(self) -> Path:
        """The file that says that the hash was checked."""
        return self.path.with_name(f"{self.name}.sha256")

    @property
    def partial(self) -> Path:
        """The folder of the unfinished download."""
        return self.root / "partial" / self.sha256

    def find(self) -> Path | None:
        """The finished file, or None. Needs neither a lock nor a writable cache."""
        try:
            found_bytes = self.path.stat().st_size
        except OSError:
            return None
        if found_bytes != self.size:
            log.warning("%s has %d bytes, not %d: it will be made again", self.path, found_bytes, self.size)
            return None
        if self.mark.is_file():
            return self.path
        if _sha256(self.path) != self.sha256:
            log.warning("%s is not what its hash says: it will be made again", self.path)
            return None
        with contextlib.suppress(OSError):  # a read-only cache is hashed each time
            self._write_mark()
        return self.path

    def commit(self, joined: Path, on_progress: Progress | None = None) -> Path:
        """Check `joined` (on the same disk), rename it into place, remove the partial folder.

        Raises SourceError on another size or hash; then the partial folder is gone, so that the next run
        starts afresh instead of failing in the same way.
        """
        found_bytes = joined.stat().st_size
        if found_bytes != self.size:
            self.refuse(f"{self.size} bytes", f"{found_bytes} bytes")
        found = _sha256(joined, on_progress, f"verify {self.name}")
        if found != self.sha256:
            self.refuse(f"sha256 {self.sha256}", found)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        joined.replace(self.path)
        self._write_mark()
        shutil.rmtree(self.partial)
        return self.path

    def refuse(self, expected: str, found: str) -> NoReturn:
        """Remove the partial folder and raise the SourceError that says what was wrong with it."""
        shutil.rmtree(self.partial)
        raise SourceError(
            f"{self.name}: expected {expected}, found {found}; the download was removed: run again, "
            "and if that finds the same, the packages have changed: use another source"
        )

    @contextlib.contextmanager
    def locked(self, on_progress: Progress | None = None) -> Iterator[None]:
        """Hold the right to write this file; wait for a run that has it, reporting the stage "waiting".

        The operating system drops the lock when its holder ends, however it ends. Raises SourceError where
        the cache cannot be written or its disk knows no locks.
        """
        folder = self.root / "locks"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.partial.parent.mkdir(parents=True, exist_ok=True)
            handle = (folder / f"{self.sha256}.lock").open("a+b")
        except OSError as error:
            raise os_error(error, self.root) from error
        with handle:
            while not self._try_lock(handle):
                if on_progress:
                    on_progress(f"waiting for another run that downloads {self.name}", 0, 0)
                time.sleep(_POLL_S)
            yield

    def _try_lock(self, handle: IO[bytes]) -> bool:
        try:
            _lock(handle)
        except OSError as error:
            if error.errno in _LOCK_BUSY:
                return False
            raise SourceError(
                f"cannot lock files in the download cache {self.root} ({error.strerror}); "
                "set SEMSPEC_CACHE to a folder on a local disk"
            ) from error
        return True

    def _write_mark(self) -> None:
        self.mark.write_text(f"{self.sha256}  {self.name}\n", encoding="utf-8")


def require_space(folder: Path, needed_bytes: int) -> None:
    """Raise SourceError unless the disk of `folder` (which exists) has `needed_bytes` free.

    A check made beforehand: another program may still fill the disk, and a quota is not seen.
    """
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise SourceError(
            f"the download needs {_mib(needed_bytes)} free in {folder}, found {_mib(free_bytes)}; "
            "free some space or set SEMSPEC_CACHE to a folder on a larger disk"
        )


def os_error(error: OSError, root: Path) -> SourceError:
    """What went wrong with the cache at `root`, as a one-line SourceError that names SEMSPEC_CACHE."""
    if error.errno in _NO_ROOM:
        return SourceError(
            f"no space left for the download in {root} ({error.strerror}); "
            "free some space or set SEMSPEC_CACHE to a folder on a larger disk"
        )
    where = error.filename or root
    return SourceError(
        f"the download cache cannot be used: {where}: {error.strerror or error}; "
        "set SEMSPEC_CACHE to a folder you can write to"
    )


def _sha256(path: Path, on_progress: Progress | None = None, stage: str = "") -> str:
    digest, done_bytes, total_bytes = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            done_bytes += len(chunk)
            if on_progress:
                on_progress(stage, done_bytes, total_bytes)
    return digest.hexdigest()


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / (1 << 20):,.0f} MiB"


if sys.platform == "win32":
    import msvcrt

    def _lock(handle: IO[bytes]) -> None:
        handle.seek(0)
        msvcrt.locking(handle.fileno(), msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _lock(handle: IO[bytes]) -> None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
