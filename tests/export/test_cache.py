"""The download cache: where it is, what it trusts, who may write."""

from __future__ import annotations

import errno
import hashlib
import logging
from pathlib import Path

import pytest

from semspec.export.cache import CachedFile, cache_root, os_error, require_space
from semspec.runtime.errors import SourceError

DATA = b"some weights"


@pytest.fixture
def file(tmp_path: Path) -> CachedFile:
    """A file that the cache does not have yet."""
    return CachedFile(root=tmp_path, name="m.gguf", size=len(DATA), sha256=hashlib.sha256(DATA).hexdigest())


def joined(file: CachedFile, data: bytes = DATA) -> Path:
    file.partial.mkdir(parents=True)
    path = file.partial / "joined"
    path.write_bytes(data)
    return path


def test_the_folder_is_ours_then_xdg_then_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order users know; a relative XDG value is ignored, as its specification says."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("SEMSPEC_CACHE", str(tmp_path / "ours"))
    assert cache_root() == tmp_path / "ours"
    monkeypatch.setenv("SEMSPEC_CACHE", "")
    assert cache_root() == tmp_path / "xdg" / "semspec"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_root() == tmp_path / "home" / ".cache" / "semspec"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == tmp_path / "home" / ".cache" / "semspec"
    assert not list(tmp_path.iterdir())


def test_a_relative_setting_means_one_folder_for_the_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path is absolute, so changing the working folder later does not move the cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SEMSPEC_CACHE", "here")
    assert cache_root() == tmp_path / "here"


def test_a_committed_file_is_found_by_size_and_mark(file: CachedFile) -> None:
    """1 GB is hashed when it is created, not at every start."""
    assert file.find() is None
    assert file.commit(joined(file)) == file.path
    assert file.find() == file.path
    assert not file.partial.exists()
    file.path.write_bytes(bytes(len(DATA)))  # the stated limit: a change that keeps the size is not seen
    assert file.find() == file.path


def test_a_crash_between_rename_and_mark_costs_a_hash_not_a_download(file: CachedFile) -> None:
    """Without its mark a file is hashed, and marked if it is right."""
    file.commit(joined(file))
    file.mark.unlink()
    assert file.find() == file.path
    assert file.mark.is_file()


@pytest.mark.parametrize("data", [DATA[:-1], bytes(len(DATA))])
def test_a_damaged_file_is_made_again_and_that_is_said(
    file: CachedFile, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """A cut file is never used, nor other bytes that nobody marked; the log says why it is downloaded."""
    file.path.parent.mkdir(parents=True)
    file.path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert file.find() is None
    assert "it will be made again" in caplog.text
    assert file.commit(joined(file)) == file.path
    assert file.path.read_bytes() == DATA


@pytest.mark.parametrize("data", [DATA + b"!", bytes(len(DATA))])
def test_wrong_bytes_are_never_committed(file: CachedFile, data: bytes) -> None:
    """The file appears only after its check; what failed is gone, so that a rerun is a fresh start."""
    with pytest.raises(SourceError, match=r"m\.gguf: expected .*, found .*run again"):
        file.commit(joined(file, data))
    assert not file.path.exists()
    assert not file.partial.exists()


def test_the_lock_ends_with_its_block(file: CachedFile) -> None:
    """A failure inside must not block the next run of the same process."""
    with pytest.raises(KeyboardInterrupt), file.locked():
        raise KeyboardInterrupt
    with file.locked(lambda *_: pytest.fail("the lock was still held")):
        pass


def test_a_cache_that_cannot_be_made_names_the_variable(tmp_path: Path) -> None:
    """D48: read-only homes are common on servers; a file in the way fails the same way for root, too."""
    (tmp_path / "file").write_text("not a folder")
    file = CachedFile(root=tmp_path / "file", name="m.gguf", size=1, sha256="0" * 64)
    with (
        pytest.raises(SourceError, match=r"download cache cannot be used: .*set SEMSPEC_CACHE"),
        file.locked(),
    ):
        pytest.fail("there is no cache to write to")


def test_room_is_checked_in_bytes(tmp_path: Path) -> None:
    """What fits passes, what cannot fit names both numbers."""
    require_space(tmp_path, 1)
    with pytest.raises(SourceError, match=r"needs 953,674,316,406 MiB free .* found [\d,]+ MiB"):
        require_space(tmp_path, 10**18)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_a_quota_and_a_limit_read_the_same(tmp_path: Path, code: int) -> None:
    """Three ways in which a system says no room; the repair is one."""
    assert "no space left" in str(os_error(OSError(code, "said the system"), tmp_path))
