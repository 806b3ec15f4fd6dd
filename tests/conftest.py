"""Fixtures shared by all tests: the real small model, fetched once through semspec's own sources."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file: a real model with a real tokenizer (98 MB, cached)."""
    from semspec.export.recipes import load_recipe
    from semspec.export.sources import fetch

    return fetch(load_recipe("smollm2-135m").target)
