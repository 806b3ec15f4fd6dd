"""LLM with several segments a round: engines that return states, the same bits in fewer passes, what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_pairs
from commands import one_line, run
from numpy.testing import assert_array_equal
from one_pass import read_segment
from tiny_probes import add_probes

from semspec import LLM, ConfigError, SamplingParams, SpecConfig
from semspec.export.pipeline import export_pair
from semspec.export.probe_graph import Scaling
from semspec.runtime.features import FEATURES, segment_text
from semspec.runtime.probes import Probes

POOLED = (2, 3)  # of tiny models
PARAMS = SamplingParams(max_tokens=60, ignore_eos=True, seed=7)
SAMPLED = replace(PARAMS, temperature=0.6, top_p=0.95)
SEMANTIC = SpecConfig(mode="semantic", risk=0.2)
COMBINED = SpecConfig(mode="combined", risk=0.2, adaptive="off")  # tiny random models are never sure
PAPER = SpecConfig(mode="semantic", preset="paper")
ALL = (SEMANTIC, COMBINED, PAPER)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pair whose target returns the states it pools, with segments of 3 to 7 tokens and probes that read all."""
    folder = tmp_path_factory.mktemp("states")
    target = tiny_pairs.save_checkpoint(folder / "target")
    draft = tiny_pairs.perturb(tiny_pairs.save_checkpoint(folder / "draft"), 0.002)
    requests = tiny_pairs.request(target), tiny_pairs.request(draft)
    settings = tiny_pairs.settings(hidden_layers=POOLED)
    pair = export_pair(*requests, folder / "pair", settings).path
    found = tiny_pairs.bound(pair, folder / "bundle", min_tokens=3, max_tokens=7)
    add_probes(found, layers=(3,), features=FEATURES, scaling=Scaling(knots=(-15.0, -9.0), values=(0.0, 1.0)))
    return found


@pytest.fixture(scope="module")
def tiny(bundle: Path) -> Iterator[LLM]:
    with LLM(bundle, threads=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def fresh(bundle: Path) -> Iterator[LLM]:
    """The same models, for passes of their own."""
    with LLM(bundle, threads=1) as llm:
        yield llm


@pytest.mark.parametrize("spec", ALL, ids=str)
def test_the_text_is_that_of_one_segment_at_a_time(tiny: LLM, spec: SpecConfig) -> None:
    """A row has the same bits in a longer pass, and a segment's states do not depend on what else was read: tokens and
    verdicts are the same at temperature 0, from fewer passes of the target."""
    for prompt in ("hello", "ab ab ab"):
        one, many = (tiny.generate(prompt, PARAMS, spec=replace(spec, max_segments=n)) for n in (1, 3))
        assert (many.token_ids, many.text) == (one.token_ids, one.text)
        for ours, theirs in zip(many.judged, one.judged, strict=True):
            assert replace(ours, figures={}) == replace(theirs, figures={})
            assert ours.figures == pytest.approx(theirs.figures, abs=1e-4)
        assert many.stats.num_segments == one.stats.num_segments
        if any(judged.n_kept == judged.n_drafted for judged in one.judged[:-1]):
            assert many.stats.num_rounds < one.stats.num_rounds


@pytest.mark.parametrize("spec", [SEMANTIC, PAPER], ids=str)
def test_scores_and_memories_are_those_of_passes_of_their_own(
    tiny: LLM, fresh: LLM, spec: SpecConfig
) -> None:
    """D42, D43: of a later segment too, and after every round to the bit; between its steps the target has read on."""
    probes: Probes = tiny._requests._open_probes(spec)
    ids, n_later, cut = tiny.tokenizer.encode("hello"), 0, tiny._requests._segmenter(())
    n_ids = tiny.tokenizer.vocab_size
    assert fresh.draft is not None
    for delta in tiny.stream("hello", SAMPLED, spec=replace(spec, max_segments=3)):
        judged = delta.judged
        if judged is not None and judged.reason in ("score", "ratio") and judged.n_kept == judged.n_drafted:
            target, draft = (
                read_segment(model, ids, delta.token_ids, n_ids=n_ids)
                for model in (fresh.target, fresh.draft)
            )
            if spec is PAPER:
                expected = probes.ratio_scores(target.pooled, draft.pooled)
                found = judged.figures["s_target"], judged.figures["s_draft"]
            else:
                expected = (
                    probes.score(target, draft, segment_text(tiny.tokenizer, ids, delta.token_ids, cut)),
                )
                found = (judged.figures["score"],)
            assert found == pytest.approx(expected, abs=1e-4)
            n_later += "target" not in judged.ms  # whose pass is told with the first segment of a round
        ids += delta.token_ids
        model, other = tiny.target, fresh.target
        if model.tokens == ids[:-1]:
            other.rewind(0)
            ours, theirs = model.forward(ids[-1:]).logits[0].copy(), other.forward(ids).logits[0]
            assert_array_equal(ours, theirs)
            model.rewind(len(ids) - 1)
        else:
            assert model.tokens[: len(ids)] == ids
    assert n_later > 0 and model.tokens == ids[:-1]


def test_a_stream_may_be_left_between_two_segments(tiny: LLM) -> None:
    """The next answer is that of a fresh one, whatever had been read."""
    spec = replace(PAPER, max_segments=3)
    expected = tiny.generate("hello", PARAMS, spec=SpecConfig(mode="autoregressive"))
    for n in range(1, 12):
        left = tiny.stream("hello", PARAMS, spec=spec)
        for _ in range(n):
            next(left)
        assert tiny.generate("hello", PARAMS, spec=SpecConfig()).token_ids == expected.token_ids
        with pytest.raises(ConfigError, match="another request"):
            next(left)


def test_a_target_that_returns_no_states_is_refused_where_they_are_read(
    tiny_pair: Path, tmp_path: Path
) -> None:
    """With the layers to export; a predictor that reads none needs none."""
    for name, layers, ratio, spec in (
        ("states", (3,), False, SEMANTIC),
        ("ratio", (), True, PAPER),
        ("none", (), False, COMBINED),
    ):
        copy = tiny_pairs.bound(tiny_pair, tmp_path / name, min_tokens=3, max_tokens=7)
        add_probes(copy, layers=layers, ratio=ratio)
        if name == "none":
            with LLM(copy, spec=replace(spec, max_segments=3), threads=1) as llm:
                assert llm.generate("hello", PARAMS).judged
            continue
        with pytest.raises(ConfigError) as caught:
            LLM(copy, spec=replace(spec, max_segments=2))
        message = str(caught.value)
        assert "--hidden-layers 2,3" in message and "max_segments at 1" in message and "\n" not in message
        LLM(copy, spec=spec, threads=1).close()
        shutil.rmtree(copy)


def test_the_command_takes_the_number_of_segments(bundle: Path, tiny: LLM, tmp_path: Path) -> None:
    """The same answer as from Python; a number that is none is a usage error."""
    options: tuple[Any, ...] = ("generate", bundle, "hello", "--raw", "--mode", "combined", "--risk", "0.2")
    options += ("--adaptive", "off", "--temperature", "0", "--max-tokens", "60", "--max-segments")
    found = json.loads(run("semspec", *options, "3", "--json", cwd=tmp_path).out)
    answer = tiny.generate(
        "hello",
        replace(tiny.default_sampling, temperature=0.0, max_tokens=60),
        spec=replace(COMBINED, max_segments=3),
    )
    assert found["token_ids"] == list(answer.token_ids)
    assert found["stats"]["num_rounds"] == answer.stats.num_rounds
    assert "max_segments must be a whole number" in one_line(run("semspec", *options, "0", cwd=tmp_path), 2)
