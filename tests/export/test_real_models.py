"""The 0.5B from its recipe to an answer: size, quality and equality of what people really export. Minutes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import run

from semspec import LLM, SamplingParams, SpecConfig

pytestmark = pytest.mark.slow

MIB = 2**20


@pytest.fixture(scope="module")
def coder_bundle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    """Qwen2.5-Coder-0.5B at the default precisions through the real command, with the full gate."""
    out = tmp_path_factory.mktemp("coder") / "bundle"
    options = ["--target", "qwen2.5-coder-0.5b", "--out", str(out), "--verify", "full", "--json"]
    done = run("semspec-export", *options, cwd=out.parent)
    assert done.status == 0, done.err
    return out, json.loads(done.out.splitlines()[-1])["models"]["target"]


def test_default_int4_of_the_small_coder_is_small_and_good(
    coder_bundle: tuple[Path, dict[str, object]],
) -> None:
    """400 MiB at 8k context, head and embedding stored once; KL of a clip search, not of plain rounding (0.09)."""
    _, report = coder_bundle
    quality = report["quality"]
    assert isinstance(quality, dict)
    assert isinstance(report["weights_bytes"], int)
    assert report["weights_bytes"] < 400 * MIB
    assert quality["tokens"] == 512
    assert quality["kl"] < 0.055
    assert quality["top1"] > 0.87


def test_small_coder_drafts_change_nothing(coder_bundle: tuple[Path, dict[str, object]]) -> None:
    """Edits repeat their prompt, so n-grams are accepted often; the ids are still those of plain decoding."""
    path, _ = coder_bundle
    code = "def area(width, height):\n    return width * height\n"
    messages = [{"role": "user", "content": f"Add a docstring to this function and repeat it:\n{code}"}]
    params = SamplingParams(max_tokens=96)
    with LLM(path) as llm:
        drafted = llm.chat(messages, params)
        plain = llm.chat(messages, params, spec=SpecConfig(mode="autoregressive"))
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.num_accepted_draft_tokens > 0
