"""An output folder appears whole or not at all: signals, crashes, full disks, two runs at once (D49).

Linux and macOS only: the lock is flock's, and `fcntl` does not exist on Windows, where export is not offered.
The signals are sent by the exporting process to itself at a named moment, so no test waits or guesses.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_pairs import request, save_checkpoint, settings, tree

from semspec.export import staging
from semspec.export.pipeline import export_pair
from semspec.export.staging import staged
from semspec.runtime.bundle import MANIFEST, Bundle
from semspec.runtime.errors import BundleError

# Exports in processes of its own, one for each case on stdin, started by fork so that imports are paid once.
# A case may die of a signal at a moment, wait there for a line on stdin, or have a limit on the size of its files.
EXPORTER = """
import json, os, resource, signal, sys
from pathlib import Path
from semspec.export.packing import Schemes
from semspec.export.pipeline import export_pair
from semspec.export.plan import ExportSettings, ModelRequest
from semspec.runtime.errors import BundleError

def export(source, out, force=False, moment=None, signal=None, limit=None):
    reached = []

    def reach(*event):
        if list(event) == moment and not reached:
            reached.append(event)
            if signal is None:
                os.write(1, b"reached\\n")
                sys.stdin.readline()
            else:
                os.kill(os.getpid(), signal)

    def listen(event, arguments):
        if event == "open" and isinstance(arguments[0], str) and arguments[2] & os.O_CREAT:
            reach("write", Path(arguments[0]).name)
        elif event == "os.rename":
            reach("rename", Path(arguments[1]).name)

    sys.addaudithook(listen)
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    request = ModelRequest(path=Path(source), name="tiny", source="tiny", schemes=Schemes.choose("fp32"))
    verify = "quick" if moment and moment[0] == "progress" else "off"
    settings = ExportSettings(max_context=128, verify=verify)
    on_progress = lambda stage, done, total: reach("progress", stage)
    export_pair(request, None, Path(out), settings, force=force, on_progress=on_progress)

def run(case):
    try:
        export(**case)
    except BundleError as error:
        os.write(1, f"{error}\\n".encode())  # at once: others write here too
        return 1
    except KeyboardInterrupt:
        return 130
    return 0

children = []
for case in json.loads(sys.stdin.readline()):
    child = os.fork()
    if not child:
        os._exit(run(case))
    children.append(child)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
print(json.dumps(codes))
"""

MOMENTS = (
    ("write", "tokenizer.json"),
    ("write", "weights.data"),
    ("progress", "target: verify"),
    ("write", MANIFEST),
    ("rename", "out"),
)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)


def start(cases: list[dict[str, Any]]) -> subprocess.Popen[str]:
    """An exporter that works on `cases` at once; its answers come on stdout, the exit codes last."""
    process = subprocess.Popen(
        [sys.executable, "-c", EXPORTER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(cases, default=str) + "\n")
    process.stdin.flush()
    return process


def finish(process: subprocess.Popen[str]) -> tuple[list[int], list[str]]:
    """Exit codes, and the lines that were printed before them."""
    out, err = process.communicate("\n", timeout=120)
    *lines, codes = out.splitlines()
    assert "Traceback" not in err, err
    return json.loads(codes), lines


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("source") / "tiny")


@pytest.fixture(scope="module")
def former(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that is unlike the one to be made."""
    out = tmp_path_factory.mktemp("former") / "out"
    return export_pair(request(checkpoint, "int8", name="former"), None, out, settings()).path


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def fill(folder: Path, text: str = "new") -> None:
    """The least that counts as a bundle."""
    (folder / "deep").mkdir()
    (folder / "deep" / "file").write_text(text)
    (folder / MANIFEST).write_text(text)


def test_a_bundle_appears_at_its_end(tmp_path: Path) -> None:
    """Until then there is nothing at its name, and afterwards nothing beside it."""
    with staged(tmp_path / "out") as folder:
        fill(folder)
        assert names(tmp_path) == {".out.partial"}
    assert names(tmp_path) == {"out"} and tree(tmp_path / "out") == {"deep/file": b"new", MANIFEST: b"new"}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failure_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    """Whatever ends the work; the error itself comes through."""
    with pytest.raises(error), staged(tmp_path / "out") as folder:
        fill(folder)
        raise error
    assert not names(tmp_path)


def test_an_output_that_exists_is_refused_or_replaced(tmp_path: Path) -> None:
    """Without force it is refused before any work; with force it stays until the new one is complete."""
    with staged(tmp_path / "out") as folder:
        fill(folder, "old")
    with (
        pytest.raises(BundleError, match="out exists; choose another --out, or --force"),
        staged(tmp_path / "out"),
    ):
        pytest.fail("the work began")
    with pytest.raises(ZeroDivisionError), staged(tmp_path / "out", force=True):
        _ = 1 / 0
    assert names(tmp_path) == {"out"} and tree(tmp_path / "out")[MANIFEST] == b"old"
    with staged(tmp_path / "out", force=True) as folder:
        fill(folder)
        assert tree(tmp_path / "out")[MANIFEST] == b"old"
    assert names(tmp_path) == {"out"} and tree(tmp_path / "out") == {"deep/file": b"new", MANIFEST: b"new"}


def test_force_replaces_bundles_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--out ~ --force` must not cost a home folder; an empty folder is nobody's loss."""
    (tmp_path / "home" / "photos").mkdir(parents=True)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "gone").symlink_to("/nonexistent/folder")
    monkeypatch.chdir(tmp_path / "home")
    for out in (tmp_path / "home", tmp_path / "file", Path(), Path(".."), Path("/")):
        with (
            pytest.raises(BundleError, match="only a bundle is replaced by --force"),
            staged(out, force=True),
        ):
            pytest.fail("the work began")
    with (
        pytest.raises(BundleError, match="is not a folder; make it first"),
        staged(tmp_path / "gone", force=True),
    ):
        pytest.fail("the work began")
    assert names(tmp_path) == {"home", "file", "gone"} and names(tmp_path / "home") == {"photos"}
    with staged(tmp_path / "home" / "photos", force=True) as folder:
        fill(folder)
    assert tree(tmp_path / "home" / "photos")[MANIFEST] == b"new"


def test_a_link_stays_and_what_it_names_is_replaced(tmp_path: Path) -> None:
    """`latest -> v1` is a way to keep bundles on another disk; the new one lands there too."""
    (tmp_path / "disk").mkdir()
    with staged(tmp_path / "disk" / "v1") as folder:
        fill(folder, "old")
    (tmp_path / "latest").symlink_to("disk/v1")
    with staged(tmp_path / "latest", force=True) as folder:
        fill(folder)
    assert (tmp_path / "latest").is_symlink() and tree(tmp_path / "disk" / "v1")[MANIFEST] == b"new"
    assert names(tmp_path / "disk") == {"v1"}


def test_a_loop_of_links_is_one_line(tmp_path: Path) -> None:
    """Python up to 3.12 raises a RuntimeError for it, later ones see a path that exists."""
    (tmp_path / "out").symlink_to("out")
    with pytest.raises(BundleError, match="choose another --out"), staged(tmp_path / "out"):
        pytest.fail("the work began")


def test_what_appeared_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    """An export takes minutes; who made the folder in between did not say --force."""
    with pytest.raises(BundleError, match="out exists"), staged(tmp_path / "out") as folder:
        fill(folder)
        (tmp_path / "out").mkdir()
        fill(tmp_path / "out", "theirs")
    assert names(tmp_path) == {"out"} and tree(tmp_path / "out")[MANIFEST] == b"theirs"


@pytest.mark.parametrize("parent", ["gone", "file", "gone/deeper"])
def test_a_parent_that_is_no_folder_is_named(tmp_path: Path, parent: str) -> None:
    """Folders are not made in passing: a mistyped path would become a tree."""
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(BundleError, match=rf"{parent} is not a folder; make it first"),
        staged(tmp_path / parent / "out"),
    ):
        pytest.fail("the work began")
    assert names(tmp_path) == {"file"}


def test_left_overs_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    """No cleaning by hand; and a link among them is removed, not followed."""
    partial = tmp_path / ".out.partial"
    (partial / "target").mkdir(parents=True)
    (partial / "target" / "weights.data").write_bytes(b"half")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "1.jpg").write_bytes(b"mine")
    (partial / "link").symlink_to(tmp_path / "photos")
    with staged(tmp_path / "out") as folder:
        assert not names(folder)
        fill(folder)
    assert names(tmp_path) == {"out", "photos"} and names(tmp_path / "photos") == {"1.jpg"}


@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_stranger_in_the_place_of_the_partial_folder(tmp_path: Path, kind: str) -> None:
    """In a shared folder the name is known: a link there must not make us empty the folder behind it."""
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "1.jpg").write_bytes(b"mine")
    partial = tmp_path / ".out.partial"
    partial.symlink_to(tmp_path / "photos") if kind == "link" else partial.write_text("")
    with pytest.raises(BundleError, match="cannot write to"), staged(tmp_path / "out"):
        pytest.fail("the work began")
    assert names(tmp_path) == {"photos", ".out.partial"} and names(tmp_path / "photos") == {"1.jpg"}


def test_a_run_killed_between_its_two_renames_loses_nothing(tmp_path: Path) -> None:
    """The former bundle is put back by the next run, even by one that is then refused or fails."""
    lost = tmp_path / ".out.replaced-123"
    lost.mkdir()
    fill(lost, "former")
    with pytest.raises(BundleError, match="out exists"), staged(tmp_path / "out"):
        pytest.fail("the work began")
    assert names(tmp_path) == {"out"} and tree(tmp_path / "out")[MANIFEST] == b"former"
    lost.mkdir()  # and one killed after its second rename
    with staged(tmp_path / "out", force=True) as folder:
        fill(folder)
    assert names(tmp_path) == {"out"} and tree(tmp_path / "out")[MANIFEST] == b"new"


def test_the_next_runs_folder_is_not_ours_to_clear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once renamed, `.out.partial` may be another run's; clearing up by path would empty it."""
    replace = staging._replace

    def replace_and_be_overtaken(partial: Path, out: Path) -> None:
        replace(partial, out)
        partial.mkdir()
        (partial / "theirs").write_text("")

    monkeypatch.setattr(staging, "_replace", replace_and_be_overtaken)
    with staged(tmp_path / "out") as folder:
        fill(folder)
    assert names(tmp_path) == {"out", ".out.partial"} and names(tmp_path / ".out.partial") == {"theirs"}


def test_a_name_too_long_for_the_disk_is_one_line(tmp_path: Path) -> None:
    """The partial folder's name is longer than the output's."""
    with (
        pytest.raises(BundleError, match=r"cannot write to .* \(File name too long\)"),
        staged(tmp_path / ("x" * 250)),
    ):
        pytest.fail("the work began")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_parent_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    """A mounted image, another user's folder."""
    tmp_path.chmod(0o500)
    try:
        with (
            pytest.raises(BundleError, match=r"cannot write to .*; choose another --out"),
            staged(tmp_path / "out"),
        ):
            pytest.fail("the work began")
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize("force", [False, True], ids=["fresh", "force"])
def test_signals_leave_no_bundle_or_the_former_one(
    checkpoint: Path, former: Path, tmp_path: Path, force: bool
) -> None:
    """D49: three signals at five moments each; then the same export again, with no cleaning in between."""
    cases = []
    for moment in MOMENTS:
        for number in SIGNALS:
            out = tmp_path / f"{moment[1].replace(' ', '')}-{number}" / "out"
            out.parent.mkdir()
            if force:
                shutil.copytree(former, out)
            cases.append(
                {"source": checkpoint, "out": out, "force": force, "moment": moment, "signal": number}
            )
    codes, lines = finish(start(cases))
    assert not lines
    assert codes == [130 if case["signal"] == signal.SIGINT else -case["signal"] for case in cases]
    for case in cases:
        out, killed = Path(case["out"]), case["signal"] != signal.SIGINT
        if force and killed and case["moment"][0] == "rename":  # between the two renames: nothing is there
            (kept,) = (path for path in out.parent.iterdir() if ".replaced-" in path.name)
            assert not out.exists() and tree(kept) == tree(former)
        else:
            assert tree(out) == tree(former) if force else not out.exists()
        assert killed or names(out.parent) == ({"out"} if force else set())
        again = export_pair(request(checkpoint, name="again"), None, out, settings(), force=force).path
        assert Bundle.open(again, verify=True).model("target").name == "again"
        assert names(out.parent) == {"out"}


def test_a_second_run_is_refused_while_the_first_is_alive(checkpoint: Path, tmp_path: Path) -> None:
    """D49: their files must not mix, and the first must not notice."""
    out = tmp_path / "out"
    process = start([{"source": checkpoint, "out": out, "moment": ("write", MANIFEST)}])
    assert process.stdout is not None and process.stdout.readline() == "reached\n"
    for force in (False, True):
        with pytest.raises(BundleError, match=r"another run is writing .*\.out\.partial; wait for it"):
            export_pair(request(checkpoint), None, out, settings(), force=force)
    assert finish(process) == ([0], [])
    assert Bundle.open(out, verify=True).model("target").name == "tiny" and names(tmp_path) == {"out"}


@pytest.mark.parametrize("force", [False, True], ids=["fresh", "force"])
def test_of_many_runs_at_once_winners_are_whole(checkpoint: Path, tmp_path: Path, force: bool) -> None:
    """D49: every run ends well or is refused in one line, and what is there in the end is one whole bundle."""
    out = tmp_path / "out"
    codes, lines = finish(start([{"source": checkpoint, "out": out, "force": force}] * 6))
    assert set(codes) <= {0, 1} and len(lines) == codes.count(1)
    assert codes.count(0) == 1 or (force and codes.count(0) > 1)
    assert not [line for line in lines if "another run is writing" not in line and "out exists" not in line]
    Bundle.open(out, verify=True)
    assert names(tmp_path) == {"out"}


def test_too_little_room_is_said_before_the_work(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour of work must not end at the last file; both numbers are named."""
    usage: Callable[[Any], Any] = lambda path: shutil._ntuple_diskusage(1 << 30, 1 << 30, 5 << 20)  # noqa: E731
    monkeypatch.setattr(shutil, "disk_usage", usage)
    with pytest.raises(BundleError, match=r"out needs about \d+ MiB and its disk has 5 MiB free"):
        export_pair(request(checkpoint), None, tmp_path / "out", settings())
    assert not names(tmp_path)


@pytest.mark.parametrize("limit", [100, 20_000, 300_000], ids=["tokenizer", "graph", "weights"])
def test_a_disk_that_fills_up_is_one_line(checkpoint: Path, former: Path, tmp_path: Path, limit: int) -> None:
    """A real failed write, in the file that is the first to be too large; a former bundle survives it."""
    out = Path(shutil.copytree(former, tmp_path / "out"))
    codes, lines = finish(start([{"source": checkpoint, "out": out, "force": True, "limit": limit}]))
    assert codes == [1]
    assert lines == [f"no space left on the disk of {out}; free some, or choose another --out"]
    assert names(tmp_path) == {"out"} and tree(out) == tree(former)
