"""Controls: each rule by hand, in the loop, and by name."""

from __future__ import annotations

import doctest
import math
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_tokenizers
from decoding import run, start
from hypothesis import given, settings
from hypothesis import strategies as st
from judged import DRAFT, PROMPT, TARGET, V, greedy, lines, review_of, steps_of, text_of
from scripted import ScriptedModel, scattered

from semspec.calibration.bench import controls
from semspec.calibration.bench.controls import (
    CONTROLS,
    QUESTION,
    AfterExact,
    AtRandom,
    ByGrade,
    ByLogprob,
    InTopK,
    Recorder,
    measure_threshold,
    parse_control,
    threshold_for_rate,
)
from semspec.calibration.bench.modes import parse_modes
from semspec.runtime.config import SamplingParams, SpecConfig
from semspec.runtime.errors import CalibrationError, ConfigError
from semspec.runtime.llm import LLM
from semspec.runtime.records import Verdict
from semspec.runtime.stats import Ledger
from semspec.runtime.tokenizer import Tokenizer

RNG = np.random.default_rng(0)
THROWN_AWAY = Verdict(keep=0, target_writes=True)
LAW = np.log([[0.5, 0.25, 0.125, 0.125], [0.25, 0.5, 0.125, 0.125], [0.125, 0.125, 0.5, 0.25]])


def test_docstring_example_holds() -> None:
    """The worked example is executed, so it cannot drift from the code."""
    result = doctest.testmod(controls)
    assert result.attempted and not result.failed


# By chance


def test_random_keeps_its_share_of_the_tokens_whatever_the_lengths() -> None:
    """2,000 judged segments of 1 to 9 tokens. (kept - rate) * length sums to a martingale with steps of range 9 at
    most, so it leaves +-t with chance below 2 exp(-2 t^2 / (2000 * 81)): 1e-6 for t = 1084. The seed is fixed.
    """
    n_segments, longest = 2000, 9
    bound = math.sqrt(n_segments * longest**2 * math.log(2e6) / 2)
    for rate in (0.2, 0.7):
        ledger, cut = Ledger(), lines(1, longest)
        target, draft = (ScriptedModel(scattered(V, seed), max_context=60_000) for seed in (1, 2))
        for model, table in (
            (target, 3),
            (draft, 4),
        ):  # what comes next depends on the last token only: quick
            rows = np.random.default_rng(table).standard_normal((V, V))
            model.law = lambda context, rows=rows: rows[context[-1]]
        options: dict[str, Any] = {"judge": AtRandom(rate=rate), "segmenter": cut, "draft": draft}
        options |= {"max_tokens": 60_000, "temperature": 1.0, "seed": 1, "ledger": ledger}
        steps = start(target, PROMPT, vocab_size=V, **options)
        judged = (step for step in steps if step.rule != "target")
        assert len(list(islice(judged, n_segments))) == n_segments
        summary = ledger.summary()
        assert summary.num_segments == n_segments and summary.num_draft_tokens > 3 * n_segments
        assert abs(summary.num_accepted_draft_tokens - rate * summary.num_draft_tokens) < bound
        by_segment = math.sqrt(math.log(2e6) / 2 / n_segments)
        assert abs((summary.semantic_acceptance_rate or 0) - rate) < by_segment


def test_random_keeps_all_or_nothing_at_its_ends() -> None:
    """0 is the target's text, 1 the draft's after the target's first segment."""
    cut = lines()
    none, _, _ = steps_of(AtRandom(rate=0.0), cut, max_tokens=30)
    assert text_of(none) == greedy(TARGET, PROMPT, 30)
    every = text_of(steps_of(AtRandom(rate=1.0), cut, max_tokens=30)[0])
    first = cut.length(every) or 0
    assert every == [*greedy(TARGET, PROMPT, first), *greedy(DRAFT, [*PROMPT, *every[:first]], 30 - first)]


def test_rules_meet_the_same_chances() -> None:
    """The segments that random:0.3 keeps, random:0.6 keeps too: their i-th numbers are the same, at any temperature."""
    kept: dict[float, list[bool]] = {}
    for rate in (0.3, 0.6):
        steps, _, _ = steps_of(
            AtRandom(rate=rate), lines(), max_tokens=60, temperature=1.0, seed=4, context=128
        )
        kept[rate] = [step.n_from_draft > 0 for step in steps if step.rule.startswith("random")]
    pairs = list(zip(kept[0.3], kept[0.6], strict=False))
    assert all(high or not low for low, high in pairs) and len({*pairs}) == 3


# By what the target says


def test_logprob_compares_the_mean_of_the_targets_own_law() -> None:
    """Of the drafted tokens, each at its place; temperature and filters do not enter, the row behind the draft neither.

    Ids 0 and 1 have chances 0.5 and 0.5: mean ln 0.5. Ids 1 and 0: 0.25 each. Longer segments are not worse.
    """
    for ids, mean in (((0, 1), math.log(0.5)), ((1, 0), math.log(0.25)), ((0,), math.log(0.5))):
        for params in ({}, {"temperature": 0.3, "top_k": 1}, {"frequency_penalty": 2.0}):
            review = review_of(LAW[: len(ids) + 1], ids, **params)
            assert ByLogprob(least=mean - 1e-6).judge(review, RNG) == Verdict(keep=len(ids))
            assert ByLogprob(least=mean + 1e-6).judge(review, RNG) == THROWN_AWAY
    certain = review_of([[900.0, 0.0], [0.0, 0.0]], [0])
    assert ByLogprob(least=0.0).judge(certain, RNG) == Verdict(keep=1)


def test_topk_keeps_up_to_the_first_token_that_is_not_among_the_likeliest() -> None:
    """The target's own token follows, also behind a draft that is kept whole. Ties: the lower id is likelier."""
    # ranks by id:  row 0: 0 1 2 3    row 1: 1 0 2 3    row 2: 2 3 0 1
    for k, ids, keep, extra in (
        (1, (0, 1), 2, 2),
        (1, (0, 0), 1, 1),
        (1, (1, 1), 0, 0),
        (2, (1, 0), 2, 2),
        (2, (1, 2), 1, 1),
        (3, (2, 2), 2, 2),
        (3, (3, 1), 0, 0),
        (4, (3, 3), 2, 2),
    ):
        assert InTopK(k=k).judge(review_of(LAW, ids), RNG) == Verdict(keep=keep, extra=extra)


@pytest.mark.parametrize("gamma", [1, 2, 4, 7])
def test_top_1_is_the_exact_rule_at_temperature_0(gamma: int) -> None:
    """Token for token, draft for draft; only its promise differs."""
    for seed in range(5):
        close = lambda context, seed=seed: TARGET(context) + 1.5 * scattered(V, 9 + seed)(context)  # noqa: E731
        found = []
        for judge in (None, InTopK(k=1)):
            ledger = Ledger()
            ids, reason = run(
                ScriptedModel(TARGET),
                PROMPT,
                vocab_size=V,
                draft=ScriptedModel(close),
                gamma=gamma,
                judge=judge,
                segmenter=lines(),
                max_tokens=50,
                ledger=ledger,
            )
            summary = ledger.summary()
            found.append((ids, reason, summary.num_rounds, summary.acceptance_lengths))
        assert found[0] == found[1]
        assert found[0][0] == greedy(TARGET, PROMPT, 50)
        assert len(found[0][3]) > 1  # something was kept


def test_topk_keeps_more_where_more_is_allowed() -> None:
    """And all of it is lossy, which the exact rule's are not."""
    kept = []
    for k in (1, 2, 3, V):
        ledger = Ledger()
        steps, _, _ = steps_of(InTopK(k=k), lines(), max_tokens=60, gamma=3, ledger=ledger, context=128)
        kept.append(ledger.summary().draft_acceptance_rate or 0)
        assert sum(step.n_lossy for step in steps) == ledger.summary().num_accepted_draft_tokens
    assert kept == sorted(kept) and kept[0] < kept[1] and kept[-1] == 1


# By the target's grade


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A token a byte."""
    folder = tmp_path_factory.mktemp("letters")
    return Tokenizer.open(tiny_tokenizers.save(folder, tiny_tokenizers.add_bos(tiny_tokenizers.byte_level())))


def grading(*chances: float) -> ScriptedModel:
    """Says a digit with these chances; what is not a digit is likelier still."""

    def law(context: tuple[int, ...]) -> np.ndarray[Any, Any]:
        logits = np.full(260, -50.0)
        logits[48:58] = np.log(chances)
        logits[65] = 9.0
        return logits

    return ScriptedModel(law, max_context=400)


def test_a_grade_is_the_mean_digit_under_the_targets_chances(letters: Tokenizer) -> None:
    """Of the ten digits alone: 7 and 9 with equal chances are an 8, however likely another token is."""
    for chances, grade in (
        ([1e-9] * 7 + [0.5, 1e-9, 0.5], 8.0),
        ([0.1] * 10, 4.5),
        ([1 - 9e-9, *[1e-9] * 9], 0.0),
    ):
        target = grading(*chances)
        review = review_of(np.zeros((3, 260)), [97, 98], target=target)
        for least, kept in ((grade - 1e-3, True), (grade + 1e-3, False)):
            verdict = ByGrade(least=least).prepare(letters).judge(review, RNG)
            assert verdict == (Verdict(keep=2) if kept else THROWN_AWAY)
        assert target.tokens == [] and {ids for _, ids in target.calls} == {(*QUESTION.encode(), 32)}


def test_a_digit_must_be_a_token(tmp_path: Path) -> None:
    """Else the last piece of a digit would be taken for it."""
    tokenizer = Tokenizer.open(tiny_tokenizers.save(tmp_path, tiny_tokenizers.words("a", "b")))
    with pytest.raises(CalibrationError, match="a token for each digit"):
        ByGrade(least=7).prepare(tokenizer)


def test_no_room_to_ask_is_no_grade(letters: Tokenizer) -> None:
    """What was not judged is not kept."""
    target = grading(*[1e-9] * 9, 1.0)
    target.max_context = 20
    review = review_of(np.zeros((2, 260)), [97], target=target)
    assert ByGrade(least=0).prepare(letters).judge(review, RNG) == THROWN_AWAY
    assert target.calls == []


# Thresholds


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    st.lists(st.tuples(st.integers(-20, 0), st.integers(1, 60)), min_size=1, max_size=12),
    st.floats(0, 1),
)
def test_a_threshold_keeps_the_share_nearest_to_the_rate(pairs: list[tuple[int, int]], rate: float) -> None:
    """Of all shares that a threshold can keep; segments with one value stay together."""
    segments = [(value / 8, n) for value, n in pairs]
    total = sum(n for _, n in segments)

    def share(least: float) -> float:
        return sum(n for value, n in segments if value >= least) / total

    reachable = [share(value) for value, _ in segments] + [0.0]
    found = share(threshold_for_rate(segments, rate))
    assert abs(found - rate) == pytest.approx(min(abs(one - rate) for one in reachable), abs=1e-12)


def test_a_threshold_needs_segments_and_a_rate() -> None:
    """No silent 0."""
    for segments, rate in (([], 0.5), ([(-1.0, 3)], 1.1), ([(-1.0, 3)], -0.1), ([(-1.0, 3)], math.nan)):
        with pytest.raises(CalibrationError, match="a rate between 0 and 1"):
            threshold_for_rate(segments, rate)


def test_a_recorder_changes_nothing_and_sees_all() -> None:
    """What the threshold is found on is what was drafted."""
    ledger, recorder = Ledger(), Recorder(AtRandom(rate=0.5))
    noted, _, _ = steps_of(recorder, lines(), max_tokens=50, seed=1, ledger=ledger)
    silent, _, _ = steps_of(AtRandom(rate=0.5), lines(), max_tokens=50, seed=1)
    assert noted == silent
    assert sum(n for _, n in recorder.seen) == ledger.summary().num_draft_tokens
    assert all(value < 0 for value, _ in recorder.seen)


def test_a_measured_threshold_keeps_about_that_rate(short_pair: Path) -> None:
    """On the problems it was measured on, with other words before each segment: 0.25 more or less."""
    chats = [[{"role": "user", "content": f"{number}?"}] for number in range(12)]
    sampling = SamplingParams(max_tokens=60, ignore_eos=True, seed=1)
    with LLM(short_pair, threads=1) as llm:
        least = measure_threshold(llm, chats, sampling, 0.5)
        spec, judge = SpecConfig(mode="judged"), ByLogprob(least=least)
        answers = [llm.chat(chat, sampling, spec=spec, judge=judge).stats for chat in chats]
    kept = sum(one.num_accepted_draft_tokens for one in answers)
    assert 0.25 < kept / sum(one.num_draft_tokens for one in answers) < 0.75


# Names


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("random:0.7", "random:0.7"),
        ("random:0.70", "random:0.7"),
        ("random:1", "random:1"),
        ("random:0.123456789", "random:0.123456789"),
        ("logprob:-0.15", "logprob:-0.15"),
        ("logprob:-0", "logprob:0"),
        ("specreason", "specreason:7"),
        ("specreason:6.5", "specreason:6.5"),
        ("topk:2", "topk:2:4"),
        ("topk:02:8", "topk:2:8"),
        ("draft-alone", "draft-alone"),
    ],
)
def test_names_are_read_back_as_what_was_measured(name: str, canonical: str) -> None:
    """A run is resumed by its modes' names: to the last digit, and the same mode has one name."""
    mode = parse_control(name)
    assert mode is not None and mode.name == canonical and not mode.exact
    assert parse_control(canonical) == mode
    assert parse_modes(["autoregressive", canonical])[1] == mode


@pytest.mark.parametrize(
    "name",
    [
        "random",
        "random:",
        "random:x",
        "random:1.1",
        "random:-0.1",
        "random:nan",
        "random:0.5:4",
        "logprob",
        "logprob:0.1",
        "logprob:-inf",
        "specreason:10",
        "specreason:7:1",
        "topk",
        "topk:0",
        "topk:1.5",
        "topk:2:0",
        "topk:²",
        "draft-alone:4",
    ],
)
def test_numbers_that_mean_nothing_are_refused(name: str) -> None:
    """In a line that shows how it is written."""
    with pytest.raises(ConfigError, match=r"is not a control; written as random:0\.7"):
        parse_control(name)


def test_other_names_are_none_of_ours() -> None:
    """modes.py asks us first."""
    assert parse_control("lossless:8") is None and parse_control("") is None
    combined = {f"{kind}-{rule}" for kind in ("combined", "combined-whole") for rule in ("random", "logprob")}
    assert set(CONTROLS) == {"random", "logprob", "topk", "specreason", "draft-alone"} | combined
    topk = parse_control("topk:2:8")
    assert topk is not None and topk.spec == SpecConfig(mode="judged", draft="model", num_draft_tokens=8)
    with pytest.raises(ConfigError, match="named twice"):
        parse_modes(["random:0.5", "random:0.50"])
    assert (
        len(parse_modes(["random:0.5", "random:0.6", "logprob:-0.5", "specreason:5", "topk:2", "topk:3"]))
        == 6
    )


# After the exact rule


def test_combined_controls_keep_what_is_exact_and_ask_their_rule_about_the_rest(letters: Tokenizer) -> None:
    """What `combined` asks its probes is asked here of chance: with rate 0 nothing is lossy, with 1 all of a draft
    stays, and what the exact rule had not kept is counted as lossy."""
    review = review_of(LAW, (0, 3))
    exact = review.exact()
    never = AfterExact(rule=AtRandom(rate=0)).prepare(letters).judge(review, RNG)
    always = AfterExact(rule=AtRandom(rate=1)).prepare(letters).judge(review, RNG)
    assert exact.keep < 2
    assert (never.keep, never.n_exact, never.extra, never.target_writes) == (
        exact.keep,
        exact.keep,
        exact.extra,
        True,
    )
    assert (always.keep, always.n_exact, always.extra) == (2, exact.keep, None)
