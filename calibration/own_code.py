"""Which code this is: hashes of semspec's own modules, for results on the disk that must not outlive a change of them.

A version number tells releases apart, and nothing between them. It knows files; what depends on which is its users'.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

__all__ = ["code_sha256"]

COMMANDS = "cli.py"  # says what is done, and does none of it


def code_sha256(*modules: ModuleType) -> str:
    """Of the text of `modules`, and of all modules right inside of those that are packages, but for their commands.

    To be asked when the modules are imported: later the disk may hold other code than the one that runs.
    """
    digest = hashlib.sha256()
    for module in modules:
        for path in _files(module):
            content = path.read_bytes()
            digest.update(f"{module.__name__}/{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _files(module: ModuleType) -> Iterator[Path]:
    """In the order of names; none where there is no source."""
    if module.__file__ is None:
        return
    path = Path(module.__file__)
    if path.name == "__init__.py":
        yield from (one for one in sorted(path.parent.glob("*.py")) if one.name != COMMANDS)
    elif path.suffix == ".py":
        yield path
