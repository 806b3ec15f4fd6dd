"""peers.json beside a run: which versions the peers were, and what their own exports cost. It knows JSON and a file.

No measurement is in it, so it is not a part of what a resumed or joined run must agree on; run.json has the versions
of packages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from semspec.calibration.bench.peers import Peer
from semspec.runtime.errors import CalibrationError

__all__ = ["NOTES", "join_notes", "note_peers", "read_notes"]

NOTES = "peers.json"


def note_peers(out: Path, peers: Sequence[Peer]) -> None:
    """Add the peers to the file, made where there is one to note."""
    if not peers:
        return
    notes = dict(read_notes(out))
    for peer in peers:
        made = None if peer.made is None else asdict(peer.made)
        notes[peer.name.kind.name] = {**peer.versions, **({} if made is None else {"export": made})}
    _write(out, notes)


def join_notes(out: Path, shards: Sequence[Path]) -> None:
    """Write what the shards of a run noted; of a peer that several noted, the first one's."""
    _write(out, {name: note for shard in reversed(shards) for name, note in read_notes(shard).items()})


def read_notes(out: Path) -> Mapping[str, Any]:
    """What the file says, nothing where there is none. Raises CalibrationError for a damaged one."""
    path = out / NOTES
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise CalibrationError(f"{path} is damaged; remove it: no measurement is in it")
    return found


def _write(out: Path, notes: Mapping[str, Any]) -> None:
    if not notes:
        return
    unfinished = out / f"{NOTES}.partial"
    unfinished.write_text(json.dumps(notes, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    unfinished.replace(out / NOTES)
