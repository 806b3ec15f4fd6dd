"""The folder of a run that is written file by file: run.json says what it is of, and one process at a time writes it;
and the work folder that has it among others.

It knows locks, names and run.json's text; what the files hold is its users'.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from semspec.calibration.bench.journal import RUN, lock_folder, write_once
from semspec.runtime.errors import CalibrationError, ConfigError
from semspec.runtime.typed import shown

__all__ = ["WorkFolder", "begin_run", "unwritable"]


def begin_run(
    folder: Path,
    text: str,
    *,
    whose: str,
    stores: Callable[[str], object],
    left_over: Callable[[str], object],
    check: Callable[[], None],
) -> int:
    """Lock `folder`, made if it is missing, for the run that `text` describes; the lock, to be closed at the end.

    stores, left_over: whether a name is of a result, or of one whose writing was cut off. check: called where there are
    results; raises where they are of another run. whose: `the collection`, for messages.
    Raises ConfigError for a folder of something else, CalibrationError for one that another process is writing, and
    one that cannot be written; what `check` raises.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(folder)
    except OSError as error:
        raise unwritable(folder, error) from None
    try:
        names = sorted(path.name for path in folder.iterdir())
        ours = (RUN, f"{RUN}.partial")
        strangers = [name for name in names if not (name in ours or stores(name) or left_over(name))]
        if strangers:
            raise ConfigError(f"{folder} holds {shown(strangers[0])}; give {whose} a folder of its own")
        if any(stores(name) for name in names):
            check()
        else:
            (folder / RUN).unlink(missing_ok=True)  # there is no result of it
            write_once(folder / RUN, text)
    except OSError as error:
        os.close(lock)
        raise unwritable(folder / RUN, error) from None
    except BaseException:
        os.close(lock)
        raise
    return lock


class WorkFolder:
    """A folder of several steps' results, made if it is missing, for this process alone. A context manager; what stays
    empty goes.

    ours: of the names that may lie in it. Raises ConfigError for a folder of something else, CalibrationError for one
    that another process uses, and one that cannot be.
    """

    def __init__(self, folder: Path, ours: re.Pattern[str]) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            strangers = sorted(path.name for path in folder.iterdir() if not ours.fullmatch(path.name))
        except OSError as error:
            raise CalibrationError(
                f"{folder} cannot be used: {error.strerror or error}; give another --work"
            ) from None
        if strangers:
            raise ConfigError(f"{folder} holds {shown(strangers[0])}; give a --work folder of its own")
        self._lock = lock_folder(folder, other="--work")

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)
        inside = [path for path in self._folder.iterdir() if path.is_dir()]
        for folder in (*inside, self._folder):
            if not any(folder.iterdir()):
                folder.rmdir()


def unwritable(path: Path, error: OSError) -> CalibrationError:
    """The error for a file or folder that the system refuses."""
    return CalibrationError(
        f"{path}: cannot be written: {error.strerror or error}; repair that and run the same command again"
    )
