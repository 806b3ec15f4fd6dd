"""A tiny pair with room for the benchmark's prompts, and problems that fit it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_pairs

QUESTIONS = {
    "sum": ("2+3?", "5"),
    "product": ("2*3?", "6"),
    "letter": ("A or B?", "B"),
    "open": ("Why?", None),
}


@pytest.fixture(scope="session")
def bench_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pair of tiny_pair with 256 tokens of context: a prompt in bytes takes about 110 of them."""
    from semspec.export.pipeline import export_pair

    folder = tmp_path_factory.mktemp("bench-pair")
    target = tiny_pairs.save_checkpoint(folder / "target")
    draft = tiny_pairs.perturb(tiny_pairs.save_checkpoint(folder / "draft"), 0.002)
    requests = tiny_pairs.request(target), tiny_pairs.request(draft)
    return export_pair(*requests, folder / "bundle", tiny_pairs.settings(max_context=256)).path


@pytest.fixture(scope="session")
def short_pair(bench_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same pair with segments of at most 6 tokens."""
    return tiny_pairs.bound(
        bench_pair, tmp_path_factory.mktemp("short") / "bundle", min_tokens=2, max_tokens=6
    )


@pytest.fixture(scope="session")
def data_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four problems, one of them without a known answer."""
    path = tmp_path_factory.mktemp("data") / "problems.jsonl"
    rows = [
        {"id": name, "question": question, "answer": answer} for name, (question, answer) in QUESTIONS.items()
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
