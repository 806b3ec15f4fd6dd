"""Fixtures shared by all tests: the real small model, fetched once through semspec's own sources, and its bundle."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest


def pytest_configure() -> None:
    """What a shell starts in the background ignores Ctrl-C, and so would every command that a test interrupts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file: a real model with a real tokenizer (98 MB, cached)."""
    from semspec.export.recipes import load_recipe
    from semspec.export.sources import fetch

    return fetch(load_recipe("smollm2-135m").target)


@pytest.fixture(scope="session")
def smollm2_bundle(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 alone, exported at the defaults (int4) and through the quick gate: a real bundle, to be read only."""
    from semspec.export.packing import Schemes
    from semspec.export.pipeline import export_pair
    from semspec.export.plan import ExportSettings, ModelRequest

    out = tmp_path_factory.mktemp("smollm2") / "bundle"
    request = ModelRequest(
        path=smollm2_gguf,
        name="SmolLM2-135M-Instruct",
        source="smollm2-135m",
        schemes=Schemes.choose("int4"),
        licence="apache-2.0",
    )
    return export_pair(request, None, out, ExportSettings()).path


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model over bytes (fp32, 128 tokens of context, states 0 and 3): quick, and odd in what it writes."""
    import tiny_pairs

    from semspec.export.pipeline import export_pair

    folder = tmp_path_factory.mktemp("tiny")
    checkpoint = tiny_pairs.save_checkpoint(folder / "checkpoint")
    settings = tiny_pairs.settings(hidden_layers=(0, -1))
    return export_pair(tiny_pairs.request(checkpoint), None, folder / "bundle", settings).path


@pytest.fixture(scope="session")
def smollm2_pair(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 in int8 with itself in int4 as its draft: a real pair that agrees often, but not always."""
    import tiny_pairs

    from semspec.export.pipeline import export_pair
    from semspec.export.plan import ExportSettings

    target, draft = (tiny_pairs.request(smollm2_gguf, precision) for precision in ("int8", "int4"))
    out = tmp_path_factory.mktemp("smollm2-pair") / "bundle"
    return export_pair(target, draft, out, ExportSettings(verify="off")).path


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of tiny_bundle with a perturbed copy of it as its draft: most of the drafted tokens are kept."""
    import tiny_pairs

    from semspec.export.pipeline import export_pair

    folder = tmp_path_factory.mktemp("tiny-pair")
    target = tiny_pairs.save_checkpoint(folder / "target")
    draft = tiny_pairs.perturb(tiny_pairs.save_checkpoint(folder / "draft"), 0.002)
    requests = tiny_pairs.request(target), tiny_pairs.request(draft)
    return export_pair(*requests, folder / "bundle", tiny_pairs.settings()).path
