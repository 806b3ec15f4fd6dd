"""Names of peers, and what is said where one is not installed."""

from __future__ import annotations

from pathlib import Path

import commands
import pytest

from semspec.calibration.bench.peer_names import (
    PEERS,
    PeerKind,
    PeerName,
    check_installed,
    parse_peer,
    parse_peers,
)
from semspec.runtime.errors import ConfigError


def test_names_are_read_and_written_alike() -> None:
    """A name is a key in the journal: one peer, one spelling."""
    assert [str(parse_peer(name)) for name in (*PEERS, "llama-lookup:08", " genai-draft:16")] == [
        *PEERS,
        "llama-lookup:8",
        "genai-draft:16",
    ]
    assert parse_peer("transformers-lookup:3").n_draft == 3 and parse_peer("transformers").n_draft is None


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["vllm"], "unknown peer 'vllm'; known: genai, "),
        ([""], "unknown peer"),
        (["genai:4"], "a draft length is a whole number after a peer that drafts"),
        (["genai-draft:17"], "genai-draft 1 to 16"),
        (["llama-lookup:0"], "draft length"),
        (["llama-lookup:"], "draft length"),
        (["llama-lookup:٣"], "draft length"),
        (["llama", "llama"], "llama is named twice"),
        (["llama-lookup:4", "llama-lookup:04"], "named twice"),
    ],
)
def test_what_is_no_peer_is_refused(names: list[str], message: str) -> None:
    """Before anything is opened or exported."""
    with pytest.raises(ConfigError, match=message):
        parse_peers(names)


def test_a_peer_is_neither_exact_nor_lossy() -> None:
    """It rounds the same weights in its own way: it promises nothing about our tokens, and breaks no promise."""
    for mode in parse_peers(list(PEERS)):
        assert mode.peer and not mode.exact and not mode.lossy


def test_a_missing_package_is_said_with_its_command() -> None:
    """The one line that a user needs, whichever of the packages lacks."""
    kind = PeerKind(name="x", library="x", modules={"json": "json", "no_such_module": "no-such-package"})
    with pytest.raises(
        ConfigError, match=r"the peer x:2 needs no-such-package; .*: pip install no-such-package$"
    ):
        check_installed([PeerName(kind=kind, n_draft=2)])


def test_a_run_without_the_package_of_a_peer_ends_at_once(
    bench_pair: Path, data_file: Path, tmp_path: Path
) -> None:
    """Status 2 and one line, before anything is exported or measured; and nothing of it is imported."""
    arguments = ["bench", bench_pair, "--data", data_file, "--out", "out", "--peers", "llama-lookup:4"]
    done = commands.run("semspec", *arguments, cwd=tmp_path, without=["llama_cpp"])
    line = commands.one_line(done, 2)
    assert line.endswith(
        "the peer llama-lookup:4 needs llama-cpp-python; install it with: pip install llama-cpp-python"
    )
    assert not (tmp_path / "out" / "cells.jsonl").read_bytes()
