"""The process of a peer, with transformers and tiny checkpoints: its answers are those of the weights it was given."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_pairs

from semspec.calibration.bench.originals import make_hf, quiet_environment
from semspec.calibration.bench.wire import Wire
from semspec.calibration.bench.workers.serve import serve
from semspec.export.pipeline import export_pair
from semspec.runtime.bundle import Bundle
from semspec.runtime.config import SamplingParams, SpecConfig
from semspec.runtime.errors import BackendError
from semspec.runtime.llm import LLM

LIMIT_S = 300.0
PROMPT = list(b"What is a tiny model?")
ASKED: dict[str, Any] = {
    "ids": PROMPT,
    "max_tokens": 24,
    "stop_ids": [],
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "seed": 0,
    "n_draft": 3,
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A pair in fp32 that says where it came from; the draft is right often. No rows beyond the tokenizer's ids: we
    never write those, and peers do."""
    folder = tmp_path_factory.mktemp("pair")
    target, draft = (
        tiny_pairs.save_checkpoint(folder / role, vocab_size=260) for role in ("target", "draft")
    )
    tiny_pairs.perturb(draft, 0.002)
    requests = [replace(tiny_pairs.request(path), source=str(path)) for path in (target, draft)]
    return Bundle.open(export_pair(*requests, folder / "bundle", tiny_pairs.settings()).path)


@pytest.fixture(scope="module")
def worker(pair: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    """transformers with a draft model, in fp32, open."""
    work = tmp_path_factory.mktemp("work")
    target, draft = (make_hf(pair, role, work) for role in ("target", "draft"))
    command = [sys.executable, "-m", "semspec.calibration.bench.workers.serve", "transformers"]
    with Wire("transformers", command, quiet_environment(), work) as wire:
        found = wire.ask(
            "open",
            limit_s=LIMIT_S,
            model=str(target),
            draft=str(draft),
            drafts="model",
            threads=1,
            max_context=128,
            dtype="float32",
        )
        assert found["versions"]["dtype"] == "float32" and found["peak_mib"] > 1
        yield wire


@pytest.fixture(scope="module")
def looking_up(pair: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    """The same target, whose drafts are n-grams of the prompt and the answer."""
    work = tmp_path_factory.mktemp("lookup")
    command = [sys.executable, "-m", "semspec.calibration.bench.workers.serve", "transformers"]
    with Wire("transformers", command, quiet_environment(), work) as wire:
        model = str(make_hf(pair, "target", work))
        opening = {"threads": 1, "max_context": 128, "dtype": "float32"}
        wire.ask("open", limit_s=LIMIT_S, model=model, draft=None, drafts="ngram", **opening)
        yield wire


@pytest.fixture(scope="module")
def ours(pair: Bundle) -> tuple[int, ...]:
    """What our own plain decoding says."""
    with LLM(pair.path, spec=SpecConfig(mode="autoregressive"), threads=1) as llm:
        return llm.generate(PROMPT, SamplingParams(max_tokens=24, ignore_eos=True)).token_ids


def test_assisted_generation_says_what_we_say(worker: Wire, ours: tuple[int, ...]) -> None:
    """The same fp32 weights: another answer would mean other weights, another prompt or another end."""
    found = worker.ask("generate", limit_s=LIMIT_S, **ASKED)
    assert tuple(found["ids"]) == ours and found["finish_reason"] == "length"
    assert 0 < found["ttft_s"] <= found["seconds"]
    assert 0 < found["rounds"] < 24 and found["drafted"] >= found["accepted"] > 0


def foretelling(pair: Bundle) -> list[int]:
    """A prompt that ends with two ids which it holds before, followed there by what the model says next: by trial."""
    with LLM(pair.path, spec=SpecConfig(mode="autoregressive"), threads=1) as llm:
        for first in range(1, 8):
            for foretold in range(256):
                ids = [*PROMPT, first, 0, foretold, *PROMPT, first, 0]
                llm.target.rewind(0)
                if llm.target.forward(ids, rows=[len(ids) - 1]).logits[0].argmax() == foretold:
                    return ids
    raise AssertionError("no id tells of itself: take another seed")


def test_look_up_says_what_we_say_and_counts_what_it_drafted(
    looking_up: Wire, worker: Wire, pair: Bundle
) -> None:
    """Asked for what the prompt foretells, so that a draft is right: tokens add up, as each pass keeps its right drafts
    and adds one; a longer draft drafts more."""
    asked = {
        **ASKED,
        "ids": foretelling(pair),
        "stop_ids": [259],
    }  # look-up wants a stop id; nobody says this one
    plain = worker.ask("generate", limit_s=LIMIT_S, **asked)["ids"]
    short, long, default = (
        looking_up.ask("generate", limit_s=LIMIT_S, **{**asked, "n_draft": n}) for n in (1, 4, None)
    )
    for found in (short, long, default):
        assert found["ids"] == plain and found["rounds"] + found["accepted"] == 24
        assert found["drafted"] >= found["accepted"] > 0
    assert short["drafted"] < long["drafted"] <= default["drafted"]


def test_an_answer_ends_where_it_was_told_to(worker: Wire, ours: tuple[int, ...]) -> None:
    """The stop id is the last one, as ours; a limit cuts what a draft had beyond it."""
    stop = ours[10]
    first = ours.index(stop)
    found = worker.ask("generate", limit_s=LIMIT_S, **{**ASKED, "stop_ids": [stop]})
    assert tuple(found["ids"]) == ours[: first + 1] and found["finish_reason"] == "stop"
    found = worker.ask("generate", limit_s=LIMIT_S, **{**ASKED, "max_tokens": 5})
    assert tuple(found["ids"]) == ours[:5] and found["finish_reason"] == "length"


def test_the_same_seed_gives_the_same_answer(worker: Wire) -> None:
    """And another one another: nothing of an earlier answer is left in it."""
    sampled = {**ASKED, "temperature": 1.0, "top_p": 0.95}
    first, again, other = (
        worker.ask("generate", limit_s=LIMIT_S, **{**sampled, "seed": seed})["ids"] for seed in (1, 1, 2)
    )
    assert first == again != other


def test_logits_of_every_row_are_those_of_the_target(worker: Wire, pair: Bundle, tmp_path: Path) -> None:
    """Held against our engine's: rows in order, the target's and not the draft's."""
    assert worker.ask("forget", limit_s=LIMIT_S) == {"ok": True}
    worker.ask("logits", limit_s=LIMIT_S, ids=PROMPT, out=str(tmp_path / "rows.npy"))
    found = np.load(tmp_path / "rows.npy")
    with LLM(pair.path, spec=SpecConfig(mode="autoregressive"), threads=1) as llm:
        rows = llm.target.forward(PROMPT, rows=range(len(PROMPT))).logits
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, rows[:, : found.shape[1]], atol=1e-4)


def test_a_wrong_question_is_answered_and_the_next_one_too(worker: Wire, ours: tuple[int, ...]) -> None:
    """What a library raises is told on the wire; the worker lives on."""
    with pytest.raises(BackendError, match="peer transformers failed at 'generate': TypeError"):
        worker.ask("generate", limit_s=LIMIT_S, **ASKED, colour="red")
    with pytest.raises(BackendError, match="unknown question 'dance'"):
        worker.ask("dance", limit_s=LIMIT_S)
    assert tuple(worker.ask("generate", limit_s=LIMIT_S, **ASKED)["ids"]) == ours


def test_questions_before_the_first_are_refused() -> None:
    """Nothing is open yet, and a line that is no JSON ends nothing."""
    answers = io.StringIO()
    serve("transformers", io.StringIO('{"op": "forget"}\nnot JSON\n'), answers)
    found = [json.loads(line) for line in answers.getvalue().splitlines()]
    assert [one["ok"] for one in found] == [False, False] and "before 'open'" in found[0]["error"]
