"""An output folder that appears whole or not at all.

Everything is written to `.<name>.partial` beside the output and renamed when it is complete. What a killed
run left there is removed by the next one; a run that is still alive is left in peace, and the second refused.

    .out.partial          being filled, locked by its process
    .out.replaced-<pid>   a former out, from the moment before the new one takes its name until it is removed

Between the two renames of a replacement there is no `out`. A run killed there leaves the former one under its
other name, and the next run to the same output puts it back before it does anything else.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from semspec.runtime.bundle import MANIFEST
from semspec.runtime.errors import BundleError

__all__ = ["check_free", "require_space", "staged"]

logger = logging.getLogger(__name__)

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_PERMISSION = {errno.EACCES, errno.EPERM, errno.EROFS}


@contextlib.contextmanager
def staged(out: Path, *, force: bool = False, mark: str = MANIFEST) -> Iterator[Path]:
    """A folder to fill; renamed to `out` on success, removed on any failure or interruption.

    force: replace an existing `out`, which stays as it is until the new one is complete; only a bundle or an
    empty folder is replaced. mark: the file that tells a folder of ours. Where `out` is a link, what it names is meant.

    Raises BundleError: `out` exists, its parent does not or cannot be written, another run is filling it, or
    the disk is full.
    """
    try:
        out = out.resolve()  # a link stays and what it names is replaced; `..` has no name to rename to
    except (OSError, RuntimeError) as error:  # a loop of links
        raise BundleError(f"{out} leads nowhere ({error}); choose another --out") from None
    check_free(out, force, mark)
    partial = out.with_name(f".{out.name}.partial")
    lock = _claim(partial)
    try:
        _restore(out)
        check_free(out, force, mark)
        yield partial
        check_free(out, force, mark)
        _replace(partial, out)
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise BundleError(
                f"no space left on the disk of {out}; free some, or choose another --out"
            ) from error
        if error.errno in _NO_PERMISSION:
            raise _refused(out.parent, error) from error
        raise
    finally:
        if _is_at(lock, partial):  # once renamed, the path may be another run's
            shutil.rmtree(partial, ignore_errors=True)
        os.close(lock)


def require_space(out: Path, n_bytes: int) -> None:
    """Refuse before the work what would not fit after it. Raises BundleError naming both numbers."""
    free = shutil.disk_usage(out.absolute().parent).free
    if free < n_bytes:
        raise BundleError(
            f"{out} needs about {n_bytes >> 20} MiB and its disk has {free >> 20} MiB free; "
            f"free some, or choose another --out"
        )


def check_free(out: Path, force: bool, mark: str = MANIFEST) -> None:
    """`out` can take a new bundle: there is none, or one that may be replaced, in a folder. Raises BundleError."""
    if not out.parent.is_dir():
        raise BundleError(f"{out.parent} is not a folder; make it first, or choose another --out")
    if not os.path.lexists(out):
        return
    if not force:
        raise BundleError(f"{out} exists; choose another --out, or --force to replace it")
    if not (out.is_dir() and ((out / mark).is_file() or not any(out.iterdir()))):
        raise BundleError(
            f"{out} is no bundle (it has no {mark}), and only a bundle is replaced by --force; "
            f"choose another --out, or remove it yourself"
        )


def _claim(partial: Path) -> int:
    """Make the folder ours, empty and locked; the lock goes with the process, however it ends."""
    try:
        while True:
            partial.mkdir(exist_ok=True)
            lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            if not _lock(lock):
                os.close(lock)
                raise BundleError(f"another run is writing {partial}; wait for it, or choose another --out")
            if _is_at(lock, partial):
                break
            os.close(lock)  # its owner renamed or removed the folder between our two calls
        for left_over in partial.iterdir():
            _remove(left_over)
    except OSError as error:
        raise _refused(partial.parent, error) from error
    return lock


def _lock(folder: int) -> bool:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(folder: int, path: Path) -> bool:
    """Whether an open folder is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(folder), path.lstat())
    except FileNotFoundError:
        return False


def _restore(out: Path) -> None:
    """Clear up after runs that were killed while they replaced `out`."""
    prefix = f".{out.name}.replaced-"
    for former in sorted(path for path in out.parent.iterdir() if path.name.startswith(prefix)):
        if os.path.lexists(out):
            _remove(former)
        else:
            logger.warning("%s was lost by a run that was killed; it is back", out)
            former.rename(out)


def _replace(partial: Path, out: Path) -> None:
    """Rename; an existing `out` is moved aside first, put back on failure, and removed last."""
    if not os.path.lexists(out):
        partial.rename(out)
        return
    former = out.with_name(f".{out.name}.replaced-{os.getpid()}")
    try:
        out.rename(former)
        partial.rename(out)
    except BaseException:
        if os.path.lexists(former) and not os.path.lexists(out):
            former.rename(out)
        raise
    _remove(former)


def _remove(path: Path) -> None:
    """A file, a link, or a folder with all in it; what another run is removing as well is no fault."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _refused(folder: Path, error: OSError) -> BundleError:
    return BundleError(f"cannot write to {folder} ({error.strerror}); choose another --out")
