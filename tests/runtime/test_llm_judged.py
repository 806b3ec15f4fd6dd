"""LLM with judges on real engines: memories to the bit, the draft alone, and what does not fit together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_pairs
from decoding import Says, keeping
from numpy.testing import assert_allclose

from semspec import LLM, BundleError, ConfigError, SamplingParams, SpecConfig
from semspec.runtime.model import CachedModel
from semspec.runtime.records import Floats, Verdict
from semspec.runtime.review import Review

PLAIN = SpecConfig(mode="autoregressive")
JUDGED = SpecConfig(mode="judged")
ALONE = SpecConfig(mode="draft-alone")
PARAMS = SamplingParams(max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def short(tiny_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny pair with segments of at most 7 tokens."""
    folder = tmp_path_factory.mktemp("short") / "bundle"
    return tiny_pairs.bound(tiny_pair, folder, min_tokens=3, max_tokens=7)


@pytest.fixture(scope="module")
def tiny(short: Path) -> Iterator[LLM]:
    with LLM(short, threads=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def fresh(short: Path) -> Iterator[LLM]:
    """The same models, for runs over a whole text."""
    with LLM(short, threads=1) as llm:
        yield llm


def next_logits(model: CachedModel, ids: list[int]) -> Floats:
    """Logits after `ids`, which begin with what the model remembers; its memory is left as it was."""
    known = model.length
    logits = model.forward(ids[known:]).logits[0].copy()
    model.rewind(known)
    return logits


@pytest.mark.parametrize("decisions", [(True,), (False,), (True, False), (False, True, True)])
def test_caches_say_what_a_fresh_run_says_after_every_step(
    tiny: LLM, fresh: LLM, decisions: tuple[bool, ...]
) -> None:
    """Both models, after segments kept, thrown away and written by the target: only the pending token is new. The
    target to the bit; the draft, which rounds a lone row otherwise, within 1e-4."""
    assert tiny.draft is not None and fresh.draft is not None
    ids = tiny.tokenizer.encode("hello")
    rejected = kept = 0
    for delta in tiny.stream("hello", PARAMS, spec=JUDGED, judge=keeping(*decisions)):
        ids += delta.token_ids
        kept += delta.n_from_draft > 0
        rejected += delta.rule == "says" and not delta.n_from_draft
        assert tiny.target.tokens == ids[:-1]
        assert tiny.draft.tokens == ids[: tiny.draft.length] and tiny.draft.length < len(ids)
        for model, other, atol in ((tiny.target, fresh.target, 0), (tiny.draft, fresh.draft, 1e-4)):
            other.rewind(0)
            assert_allclose(next_logits(model, ids), next_logits(other, ids), rtol=0, atol=atol)
    assert (kept > 0, rejected > 0) == (True in decisions, False in decisions)


def test_refused_by_all_it_is_plain_decoding_and_kept_by_all_it_is_another_text(tiny: LLM) -> None:
    """The two ends of the dial, on one bundle."""
    plain = tiny.generate("hello", PARAMS, spec=PLAIN)
    none = tiny.generate("hello", PARAMS, spec=JUDGED, judge=keeping(False))
    assert (none.text, none.token_ids, none.finish_reason) == (
        plain.text,
        plain.token_ids,
        plain.finish_reason,
    )
    assert none.stats.lossy_token_fraction == 0 and none.stats.num_segments > 0
    every = tiny.generate("hello", PARAMS, spec=JUDGED, judge=keeping(True))
    assert every.stats.semantic_acceptance_rate == every.stats.draft_acceptance_rate == 1
    assert (every.stats.lossy_token_fraction or 0) > 0.4


def test_a_question_changes_no_bit(tiny: LLM) -> None:
    """Rewound, the cache is as it was: text and log-probabilities are those of a judge that does not ask."""
    question = tiny.tokenizer.encode("and?")
    params = SamplingParams(max_tokens=60, ignore_eos=True, logprobs=True)

    def asks(review: Review, rng: np.random.Generator) -> Verdict:
        assert review.ask(question) is not None
        return Verdict(keep=len(review.ids)) if len(review.ids) % 2 else Verdict(keep=0, target_writes=True)

    def silent(review: Review, rng: np.random.Generator) -> Verdict:
        return Verdict(keep=len(review.ids)) if len(review.ids) % 2 else Verdict(keep=0, target_writes=True)

    one, other = (
        tiny.generate("hello", params, spec=JUDGED, judge=Says(verdict=verdict)) for verdict in (asks, silent)
    )
    assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)
    assert one.stats.num_rounds == other.stats.num_rounds + one.stats.num_segments


def test_segments_are_those_of_the_bundle(tiny: LLM) -> None:
    """Every draft is one segment by the manifest's boundary, cut by the end of the answer only."""
    boundary = tiny.bundle.manifest.boundary
    lengths: list[int] = []

    def verdict(review: Review, rng: np.random.Generator) -> Verdict:
        lines = tiny.tokenizer.decode(review.ids[boundary.min_tokens - 1 : -1])
        assert "\n" not in lines
        lengths.append(len(review.ids))
        return Verdict(keep=len(review.ids))

    tiny.generate(
        "hello", SamplingParams(max_tokens=100, ignore_eos=True), spec=JUDGED, judge=Says(verdict=verdict)
    )
    assert lengths and all(boundary.min_tokens <= n <= boundary.max_tokens for n in lengths[:-1])


class EveryThirdIsANewline:
    """The first token of every three is a newline, no other is."""

    def __init__(self) -> None:
        self.n = 0

    def mask(self, logits: Floats) -> Floats:
        changed = np.full_like(logits, -np.inf)
        newline, others = slice(10, 11), slice(11, None)
        kept = others if self.n % 3 else newline
        changed[kept] = logits[kept]
        return changed

    def accept(self, token: int) -> None:
        self.n += 1

    def rollback(self, n: int) -> None:
        self.n -= n


def test_the_draft_model_stops_where_the_segment_does(tiny: LLM) -> None:
    """It has not read the segment's last token, and has not been asked for one behind it."""
    assert tiny.draft is not None
    draft, lengths = tiny.draft, list[int]()

    def verdict(review: Review, rng: np.random.Generator) -> Verdict:
        assert tuple(draft.tokens[-len(review.ids) + 1 :]) == review.ids[:-1]
        assert draft.length == tiny.target.length - 1
        lengths.append(len(review.ids))
        return Verdict(keep=len(review.ids))

    judge, processor = Says(verdict=verdict), EveryThirdIsANewline()
    tiny.generate("hello", PARAMS, spec=JUDGED, judge=judge, processors=[processor])
    assert set(lengths[:-1]) == {3} and processor.n == 60


def test_the_draft_alone_writes_what_it_writes_as_a_target(tiny: LLM) -> None:
    """Its own greedy text; all of it the draft's and lossy, and the target is not asked."""
    assert tiny.draft is not None
    tiny.target.rewind(0)
    ids = tiny.tokenizer.encode("hello")
    expected: list[int] = []
    while len(expected) < 60:
        tiny.draft.rewind(0)
        logits = tiny.draft.forward([*ids, *expected]).logits[0, : tiny.tokenizer.vocab_size]
        expected.append(int(np.argmax(logits)))
    answer = tiny.generate("hello", PARAMS, spec=ALONE)
    assert list(answer.token_ids) == expected
    assert tiny.target.length == 0
    assert (answer.stats.lossy_token_fraction, answer.stats.num_rounds) == (1.0, 0)
    deltas = list(tiny.stream("hello", PARAMS, spec=ALONE))
    assert {(delta.rule, delta.n_from_draft, delta.n_lossy) for delta in deltas} == {("draft", 1, 1)}


def test_same_seed_same_text(tiny: LLM) -> None:
    """Decisions by chance, tokens by chance. 60 tokens of more than a bit: other seeds agree once in 2^60."""

    def coin(review: Review, rng: np.random.Generator) -> Verdict:
        return Verdict(keep=len(review.ids)) if rng.random() < 0.5 else Verdict(keep=0, target_writes=True)

    texts = []
    for seed in (1, 1, 2):
        params = SamplingParams(max_tokens=60, ignore_eos=True, temperature=1.0, seed=seed)
        texts.append(tiny.generate("hello", params, spec=JUDGED, judge=Says(verdict=coin)).token_ids)
    assert texts[0] == texts[1] != texts[2]


def test_chats_and_streams_take_a_judge(tiny: LLM) -> None:
    """All four ways to ask, one rule."""
    chat = [{"role": "user", "content": "hello"}]
    whole = tiny.chat(chat, PARAMS, spec=JUDGED, judge=keeping(True, False))
    pieces = list(tiny.stream_chat(chat, PARAMS, spec=JUDGED, judge=keeping(True, False)))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert sum(piece.n_lossy for piece in pieces) == whole.stats.num_lossy_tokens > 0


def test_a_judge_of_tokens_may_look_at_ngrams(tiny: LLM) -> None:
    """They have no segments, but tokens that can be judged; a judge of segments is told so."""

    def verdict(review: Review, rng: np.random.Generator) -> Verdict:
        assert all(law.probs.tolist() == [1.0] for law in review.q)
        return Verdict(keep=0, extra=int(np.argmax(review.logits[0])))

    ngram = SpecConfig(mode="judged", draft="ngram", num_draft_tokens=3)
    judge = Says(verdict=verdict, segments=False)
    plain = tiny.generate("abcabcabc", PARAMS, spec=PLAIN)
    answer = tiny.generate("abcabcabc", PARAMS, spec=ngram, judge=judge)
    assert answer.token_ids == plain.token_ids and answer.stats.num_drafts
    with pytest.raises(ConfigError, match="n-grams draft no segments"):
        tiny.generate("hello", PARAMS, spec=ngram, judge=keeping(True))


def test_what_does_not_fit_together_is_refused_before_anything_is_computed(tiny: LLM) -> None:
    """Judge and mode go together."""
    before = list(tiny.target.tokens)
    for spec, judge in (
        (JUDGED, None),
        (PLAIN, keeping(True)),
        (None, keeping(True)),
        (ALONE, keeping(True)),
    ):
        with pytest.raises(ConfigError, match="judge"):
            tiny.generate("other", PARAMS, spec=spec, judge=judge)
    wrong: Any = object()
    with pytest.raises(ConfigError, match="judge object has no name"):
        tiny.generate("other", PARAMS, spec=JUDGED, judge=wrong)
    assert tiny.target.tokens == before


def test_a_judge_of_segments_may_have_them_drafted_as_combined_has(tiny: LLM) -> None:
    """Stopped where the draft is unsure, such a part is judged by the exact rule alone: the judge, which would keep
    anything, is never asked by models that are never sure, and the answer is the target's."""
    spec = SpecConfig(mode="judged", adaptive="confidence", min_confidence=1, exact_inside=True)
    judge = keeping(True)
    answer = tiny.generate("hello", PARAMS, spec=spec, judge=judge)
    assert answer.token_ids == tiny.generate("hello", PARAMS, spec=PLAIN).token_ids
    assert answer.stats.num_draft_tokens and not answer.stats.num_lossy_tokens
    whole = tiny.generate("hello", PARAMS, spec=replace(spec, min_confidence=0), judge=judge)
    assert whole.stats.num_lossy_tokens > 0


@pytest.mark.parametrize("setting", [{"adaptive": "confidence"}, {"exact_inside": True}], ids=str)
def test_settings_of_segments_are_refused_with_a_judge_of_tokens(tiny: LLM, setting: dict[str, Any]) -> None:
    """Nothing would look at them."""
    judge = keeping(True, segments=False)
    with pytest.raises(ConfigError, match=f"{next(iter(setting))} is of segments, and judge .* takes none"):
        tiny.generate("hello", PARAMS, spec=SpecConfig(mode="judged", **setting), judge=judge)


def test_a_draft_model_that_is_not_there_is_an_error(tiny_bundle: Path, tiny_pair: Path) -> None:
    """Never n-grams in its place, whether the bundle lacks it or it was not opened."""
    for spec in (JUDGED, ALONE):
        with pytest.raises(BundleError, match="has no draft"):
            LLM(tiny_bundle, spec=spec)
    with LLM(tiny_pair, spec=PLAIN, threads=1) as llm:
        for spec, judge in product((JUDGED,), (keeping(True), keeping(True, segments=False))):
            with pytest.raises(ConfigError, match="draft model is not open"):
                llm.generate("hello", spec=spec, judge=judge)
        with pytest.raises(ConfigError, match="draft model is not open"):
            llm.generate("hello", spec=ALONE)
