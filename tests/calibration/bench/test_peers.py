"""Peers opened from a bundle, and a run with them: what is asked, what is kept, and what a lost one leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_pairs

from semspec.calibration.bench.journal import CELLS, RESULTS, read_cells
from semspec.calibration.bench.modes import parse_modes
from semspec.calibration.bench.peer_names import parse_peers
from semspec.calibration.bench.peer_notes import NOTES, read_notes
from semspec.calibration.bench.peers import open_peer
from semspec.calibration.bench.records import Problem
from semspec.calibration.bench.run import Run, run
from semspec.export.pipeline import export_pair
from semspec.runtime.config import SamplingParams
from semspec.runtime.errors import BackendError, CalibrationError, ConfigError

GREEDY = SamplingParams(max_tokens=12)
ASKED = (Problem(id="a", question="2+3?", answer="5"), Problem(id="b", question="Why?"))
MODES = "autoregressive,lossless,ngram"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair with room for the benchmark's prompts that says where it came from."""
    folder = tmp_path_factory.mktemp("pair")
    target, draft = (tiny_pairs.save_checkpoint(folder / role) for role in ("target", "draft"))
    tiny_pairs.perturb(draft, 0.002)
    requests = [replace(tiny_pairs.request(path), source=str(path)) for path in (target, draft)]
    return export_pair(*requests, folder / "bundle", tiny_pairs.settings(max_context=256)).path


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is made for peers goes to a folder of the test session, not to the user's."""
    folder = tmp_path_factory.getbasetemp() / "peer-cache"
    monkeypatch.setenv("SEMSPEC_CACHE", str(folder))
    return folder


def measure(bundle: Path, out: Path, peers: str, modes: str = MODES, **changes: Any) -> Run:
    """A small run with peers."""
    chosen = [*parse_modes(modes.split(",")), *parse_peers(peers.split(","))]
    return run(bundle, ASKED, chosen, out, GREEDY, threads=1, **changes)


@pytest.fixture(scope="module")
def measured(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run with a plain and an assisted peer, in two draft lengths."""
    peers = "transformers,transformers-assisted:2,transformers-assisted:5"
    with pytest.MonkeyPatch.context() as patch:  # as `cache`, which is for one test at a time
        patch.setenv("SEMSPEC_CACHE", str(tmp_path_factory.getbasetemp() / "peer-cache"))
        return measure(pair, tmp_path_factory.mktemp("run") / "out", peers)


def test_a_run_has_a_row_for_each_peer(measured: Run) -> None:
    """Held against our plain decoding; what a peer does not tell is blank, not 0."""
    rows = {row.mode: row for row in measured.table.rows}
    assert list(rows) == [
        *MODES.split(","),
        "transformers",
        "transformers-assisted:2",
        "transformers-assisted:5",
    ]
    plain, assisted = rows["transformers"], rows["transformers-assisted:2"]
    assert plain.promise == assisted.promise == "peer" and plain.divergences is None
    assert plain.acceptance is plain.tokens_per_pass is plain.draft_share is plain.lossy_share is None
    assert plain.speed_ratio is not None and plain.speed_ratio.value > 0
    assert plain.accuracy is not None and plain.n == 2
    assert assisted.tokens_per_pass is not None and assisted.tokens_per_pass >= 1
    assert assisted.draft_share is not None and assisted.acceptance is not None
    assert (plain.peak_mib or 0) > 1 and rows["ngram"].peak_mib is None


def test_draft_lengths_of_a_peer_are_kept_apart(measured: Run) -> None:
    """One process serves them all; a longer draft drafts more."""
    drafted: Counter[str] = Counter()
    for result in measured.results:
        drafted[result.cell.mode] += result.num_draft_tokens or 0
    assert drafted["transformers-assisted:2"] > 0 and drafted["transformers"] == 0


def test_versions_are_recorded(measured: Run) -> None:
    """Packages in the origin, what else a speed depends on beside it."""
    machine = measured.origin.machines[0]
    assert {"torch", "transformers"} <= machine.keys()
    assert measured.origin.settings.peers[0] == "transformers"
    assert read_notes(measured.folder)["transformers"]["dtype"] in ("float32", "bfloat16")


def test_a_finished_run_needs_its_peers_no_more(measured: Run, pair: Path, tmp_path: Path) -> None:
    """Rerun where none is installed any more: nothing is opened, nothing changes."""
    files = {name: (measured.folder / name).read_bytes() for name in (CELLS, RESULTS, NOTES)}
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from pathlib import Path\n"
        "from semspec.calibration.bench.modes import parse_modes\n"
        "from semspec.calibration.bench.peer_names import parse_peers\n"
        "from semspec.calibration.bench.records import Problem\n"
        "from semspec.calibration.bench.run import run\n"
        "from semspec.runtime.config import SamplingParams\n"
        f"modes = [*parse_modes({MODES.split(',')!r}), *parse_peers({measured.origin.settings.peers!r})]\n"
        f"run(Path({str(pair)!r}), {ASKED!r}, modes, Path({str(measured.folder)!r}), {GREEDY!r}, threads=1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {name: (measured.folder / name).read_bytes() for name in files} == files


def test_a_run_goes_on_with_the_cells_of_a_peer(measured: Run, pair: Path, tmp_path: Path) -> None:
    """Killed before its last cells: they are measured, the others are not measured again."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "run.json").write_bytes((measured.folder / "run.json").read_bytes())
    kept = [
        line
        for line in (measured.folder / CELLS).read_bytes().splitlines(keepends=True)
        if json.loads(line)["cell"]["mode"] != "transformers" or json.loads(line)["cell"]["problem"] == "a"
    ]
    (out / CELLS).write_bytes(b"".join(kept))
    done = measure(pair, out, ",".join(measured.origin.settings.peers))
    assert (out / CELLS).read_bytes().startswith(b"".join(kept))
    cells = read_cells(out / CELLS)
    assert len(cells) == len({one.cell for one in cells}) == len(measured.results) == len(kept) + 1
    assert {one.cell: one.token_ids for one in done.results} == {
        one.cell: one.token_ids for one in measured.results
    }
    with pytest.raises(ConfigError, match=r"settings\.peers is .* there"):
        measure(pair, out, "transformers")


def test_a_peer_that_dies_is_named_and_nothing_is_lost(pair: Path) -> None:
    """The error says which process it was; the caller's own is none the worse."""
    with open_peer("transformers", pair, threads=1) as peer:
        first = peer.generate([65, 66, 67], GREEDY)
        assert first == replace(
            peer.generate([65, 66, 67], GREEDY), seconds=first.seconds, ttft_s=first.ttft_s
        )
        with pytest.raises(ConfigError, match="peers are not asked for min_p"):
            peer.generate([65], replace(GREEDY, min_p=0.1))
        os.kill(peer.pid, signal.SIGKILL)
        with pytest.raises(
            BackendError, match="peer transformers ended of signal SIGKILL at 'generate'; it last said"
        ):
            peer.generate([65], GREEDY)


@pytest.mark.parametrize(
    ("peer", "message"),
    [("transformers-assisted", "drafts with a model and .* has no draft"), ("nobody", "unknown peer")],
)
def test_a_peer_that_does_not_fit_is_refused(tiny_bundle: Path, peer: str, message: str) -> None:
    """Before a process is started."""
    with pytest.raises(ConfigError, match=message), open_peer(peer, tiny_bundle):
        pass


def test_peers_are_not_held_against_another_device(pair: Path, tmp_path: Path) -> None:
    """Their times would be of the CPU, ours of a GPU."""
    with pytest.raises(ConfigError, match="peers run on the CPU, and --backend is cuda"):
        measure(pair, tmp_path / "out", "transformers", backend="cuda")


def test_damaged_notes_are_named(tmp_path: Path) -> None:
    """Nothing measured is in them, and the message says so."""
    (tmp_path / NOTES).write_text("[]", "utf-8")
    with pytest.raises(CalibrationError, match="no measurement is in it"):
        read_notes(tmp_path)
