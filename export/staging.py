"""An output folder that appears whole or not at all.

Everything is written to `.<name>.partial` beside the output and renamed when it is complete. What a killed
run left there is removed by the next one; a run that is still alive is left in peace, and the second refused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from semspec.runtime.errors import BundleError

__all__ = ["require_space", "staged"]

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextlib.contextmanager
def staged(out: Path, *, force: bool = False) -> Iterator[Path]:
    """A folder to fill; renamed to `out` on success, removed on any failure or interruption.

    force: replace an existing `out`, which stays as it is until the new one is complete. Raises BundleError:
    `out` exists, its parent does not or cannot be written, another run is filling it, or the disk is full.
    """
    out = out.absolute()
    if os.path.lexists(out) and not force:
        raise BundleError(f"{out} exists; choose another --out, or --force to replace it")
    if not out.parent.is_dir():
        raise BundleError(f"{out.parent} is not a folder; make it first, or choose another --out")
    partial = out.with_name(f".{out.name}.partial")
    try:
        lock = _claim(partial)
        try:
            yield partial
            _replace(partial, out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            os.close(lock)
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise BundleError(
                f"no space left on the disk of {out}; free some, or choose another --out"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise BundleError(
                f"cannot write {out.parent} ({error.strerror}); choose another --out"
            ) from error
        raise


def require_space(out: Path, n_bytes: int) -> None:
    """Refuse before the work what would not fit after it. Raises BundleError naming both numbers."""
    free = shutil.disk_usage(out.absolute().parent).free
    if free < n_bytes:
        raise BundleError(
            f"{out} needs about {n_bytes >> 20} MiB and its disk has {free >> 20} MiB free; "
            f"free some, or choose another --out"
        )


def _claim(partial: Path) -> int:
    """Make the folder ours, empty and locked; the lock goes with the process, however it ends."""
    while True:
        partial.mkdir(exist_ok=True)
        lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise BundleError(
                f"another run is writing {partial}; wait for it, or choose another --out"
            ) from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), partial.stat()):
                break
        os.close(lock)  # its owner renamed or removed the folder between our two calls
    for left_over in partial.iterdir():
        shutil.rmtree(left_over) if left_over.is_dir() else left_over.unlink()
    return lock


def _replace(partial: Path, out: Path) -> None:
    """Rename; an existing folder is moved aside first and removed last."""
    if not os.path.lexists(out):
        partial.rename(out)
        return
    old = out.with_name(f".{out.name}.replaced-{os.getpid()}")
    out.rename(old)
    try:
        partial.rename(out)
    except OSError:
        old.rename(out)
        raise
    shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
