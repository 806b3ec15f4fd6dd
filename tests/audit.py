"""Which files a piece of code touches, by the interpreter's own audit hook: what is done, not what is said."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_lists: list[list[Path]] = []


@contextmanager
def files_opened() -> Iterator[list[Path]]:
    """Everything opened and every folder listed from Python in this process, in order, while it lasts."""
    opened: list[Path] = []
    _lists.append(opened)
    try:
        yield opened
    finally:
        _lists.remove(opened)


def _listen(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir") and isinstance(arguments[0], str):
        for opened in _lists:
            opened.append(Path(arguments[0]))


sys.addaudithook(_listen)  # once, when imported: a hook cannot be taken back
