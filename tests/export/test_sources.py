"""What a user may write as a source, and that local ones stay local."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import NoReturn

import pytest

from semspec.export.recipes import HubSource, WheelsSource, load_recipe
from semspec.export.sources import LocalSource, choose_source, fetch, parse_source
from semspec.runtime.errors import ConfigError, SourceError


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any attempt to resolve a name or to connect is a failure of the test."""

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        pytest.fail(f"a connection was attempted: {args}")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Relative paths in these tests mean this folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("offline", [None, "1"])
def test_local_sources_open_no_connection(
    in_empty_folder: Path, monkeypatch: pytest.MonkeyPatch, offline: str | None
) -> None:
    """D47: a folder and a GGUF file are taken as they are, with HF_HUB_OFFLINE and without."""
    if offline:
        monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    else:
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    (in_empty_folder / "org" / "model").mkdir(parents=True)
    (in_empty_folder / "m.gguf").write_bytes(b"GGUF")
    for text in ("org/model", "./org/model", ".", str(in_empty_folder / "org"), "m.gguf"):
        assert parse_source(text) == LocalSource(path=Path(text))
        assert fetch(parse_source(text)) == Path(text)


@pytest.mark.usefixtures("no_network", "in_empty_folder")
@pytest.mark.parametrize(
    "text",
    [
        "./modle",
        "../modle",
        "/no/such",
        "~/no-such-folder",
        "~no-such-user/x",
        "modle",
        "a/b/c",
        "a/b.gguf",
        "m.gguf",
        "-x/y",
        "a\\b",
        pytest.param("x" * 5000, id="too long for any disk"),
    ],
)
def test_a_mistyped_path_is_said_at_once(text: str) -> None:
    """D47: what looks like a path, or like nothing known, never becomes a hub request or a time-out."""
    with pytest.raises(SourceError, match="no such file or folder: "):
        parse_source(text)


@pytest.mark.usefixtures("in_empty_folder")
def test_hub_ids() -> None:
    """One slash is a hub id, a revision follows @; one file needs the word hub, for it looks like a path."""
    assert parse_source("org/name") == HubSource(id="org/name", revision="main")
    assert parse_source("Qwen/Qwen2.5-0.5B@refs/pr/1") == HubSource(
        id="Qwen/Qwen2.5-0.5B", revision="refs/pr/1"
    )
    assert parse_source("hub:org/name@v1") == HubSource(id="org/name", revision="v1")
    assert parse_source("hub:org/name/sub/m.gguf@v1") == HubSource(
        id="org/name", revision="v1", file="sub/m.gguf"
    )
    with pytest.raises(SourceError, match=r"written hub:org/name/m\.gguf"):
        parse_source("org/name/m.gguf")
    for wrong in (
        "hub:name",
        "hub:org/..",
        "hub:org/name/m.bin",
        "hub:org/name/../m.gguf",
        "hub:org/name@-x",
        "",
    ):
        with pytest.raises(SourceError):
            parse_source(wrong)


@pytest.mark.usefixtures("in_empty_folder")
def test_recipes_as_sources(in_empty_folder: Path) -> None:
    """A recipe's name stands for its target; a folder of that name wins unless `recipe:` says otherwise."""
    pair = load_recipe("qwen2.5-coder")
    assert parse_source("smollm2-135m") == load_recipe("smollm2-135m").target
    assert parse_source("recipe:qwen2.5-coder") == pair.target
    assert parse_source("recipe:qwen2.5-coder/draft") == pair.draft
    with pytest.raises(SourceError, match="recipe smollm2-135m has no draft"):
        parse_source("recipe:smollm2-135m/draft")
    with pytest.raises(SourceError, match="unknown recipe 'nope'; known: "):
        parse_source("recipe:nope")
    with pytest.raises(SourceError, match="a target and a draft"):
        parse_source("recipe:qwen2.5-coder/drfat")
    (in_empty_folder / "smollm2-135m").mkdir()
    assert parse_source("smollm2-135m") == LocalSource(path=Path("smollm2-135m"))
    assert parse_source("recipe:smollm2-135m") == load_recipe("smollm2-135m").target


def test_a_file_that_is_not_gguf_is_refused(in_empty_folder: Path) -> None:
    """D53: a pickle is never a source."""
    (in_empty_folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(SourceError, match=r"pytorch_model\.bin is neither a folder .* nor a \.gguf file"):
        parse_source("pytorch_model.bin")


@pytest.mark.usefixtures("no_network")
def test_the_preferred_kind_is_taken_or_refused_never_replaced() -> None:
    """Another source of a model holds other bits, so there is no silent fallback between them."""
    model = load_recipe("smollm2-135m").target
    assert isinstance(choose_source(model), WheelsSource)
    assert isinstance(choose_source(model, "hub"), HubSource)
    with pytest.raises(SourceError, match="QwQ-32B has no source of kind 'wheels'; it has: hub"):
        fetch(load_recipe("qwq-32b").target, prefer="wheels")
    with pytest.raises(ConfigError, match="unknown kind of source 'pip'; known: hub, wheels"):
        choose_source(model, "pip")


def test_a_local_path_that_vanished_is_named(tmp_path: Path) -> None:
    """Between parsing and fetching a folder may go."""
    with pytest.raises(SourceError, match=r"no such file or folder: .*gone"):
        fetch(LocalSource(path=tmp_path / "gone"))
