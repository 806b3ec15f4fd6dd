"""Speculation at temperature 0: the target's own tokens, and memories that agree with the text after every round.

The models are real graphs of a tiny llama (fp32) where an engine has a say, scripted ones elsewhere. Equal logits
means equal bits: on the CPU a text gives the same ones however it was cut (test_ort_bits).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoding import Stub, habits, run, start
from graphs import ArrayWeights, build_graph, tiny_variant
from numpy.testing import assert_array_equal
from scripted import ScriptedModel, scattered

from semspec.runtime.acceptance import RULES
from semspec.runtime.drafting import NgramDrafter
from semspec.runtime.errors import BackendError
from semspec.runtime.model import CachedModel
from semspec.runtime.records import Floats
from semspec.runtime.stats import Ledger

V = 99
NOISE = 0.007  # of the deviation of each weight: about 70 % of the drafted tokens are kept
PROMPTS = {n: np.random.default_rng(n).integers(0, V, n).tolist() for n in (1, 2, 17)}
RULE = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A target, its perturbed copy, and both once more for fresh runs over a whole text."""

    target: CachedModel
    draft: CachedModel
    fresh_target: CachedModel
    fresh_draft: CachedModel


def noisy(weights: ArrayWeights, deviation: float) -> ArrayWeights:
    rng = np.random.default_rng(5)
    changed = {
        name: (array + deviation * array.std() * rng.standard_normal(array.shape)).astype(np.float32)
        for name, array in weights.arrays.items()
    }
    return ArrayWeights(changed)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    _, spec, weights = tiny_variant("llama-default-untied")
    target = build_graph(folder / "target", weights, spec)
    draft = build_graph(folder / "draft", noisy(weights, NOISE), spec)
    models = target.open(), draft.open(), target.open(), draft.open()
    yield Pair(target=models[0], draft=models[1], fresh_target=models[2], fresh_draft=models[3])
    for model in models:
        model.close()


def next_logits(model: CachedModel, ids: Sequence[int], *, fresh: bool) -> Floats:
    """Logits after `ids`, the model's memory of them used or forgotten first, and left as it was."""
    known = 0 if fresh else model.length
    model.rewind(known)
    logits = model.forward(ids[known:]).logits[0].copy()
    model.rewind(known)
    return logits


def check_memories(pair: Pair, committed: Sequence[int]) -> None:
    """The invariant of the loop, tokens first, then what the caches say of them."""
    assert pair.target.tokens == committed[:-1]
    assert pair.draft.tokens == committed[: pair.draft.length] and pair.draft.length < len(committed)
    for model, fresh in ((pair.target, pair.fresh_target), (pair.draft, pair.fresh_draft)):
        assert_array_equal(
            next_logits(model, committed, fresh=False), next_logits(fresh, committed, fresh=True)
        )


# The same tokens


@pytest.mark.parametrize("n_prompt", PROMPTS)
@pytest.mark.parametrize("habit", habits([0], V))
def test_any_drafter_leaves_the_tokens_as_they_are(pair: Pair, habit: str, n_prompt: int) -> None:
    """D04: no draft can be bad enough to change the text, to skip a check or to double a token at a boundary."""
    prompt = PROMPTS[n_prompt]
    plain = run(pair.target, prompt, vocab_size=V, max_tokens=200)
    for gamma in range(1, 9):
        drafter = Stub(habit=habits([*prompt, *plain[0]], V)[habit])
        rule = RULES["token" if gamma % 2 else "block"]
        options: dict[str, Any] = {"draft": drafter, "gamma": gamma, "rule": rule}
        assert run(pair.target, prompt, vocab_size=V, max_tokens=200, **options) == plain, gamma
        assert pair.target.tokens == drafter.committed[:-1] == [*prompt, *plain[0]][:-1]


@RULE
def test_wrong_drafts_cost_a_pass_each_and_right_ones_save_them(pair: Pair, rule: Any) -> None:
    """D04: nothing of a wrong draft is kept, nothing of a right one is lost; a draft too long counts as cut."""
    plain, _ = run(pair.target, PROMPTS[17], vocab_size=V, max_tokens=200)
    expected = {"wrong": (200, 0), "right": (40, 160), "too long": (40, 160), "empty": (200, 0)}
    for habit, (n_rounds, n_accepted) in expected.items():
        ledger = Ledger()
        drafter = Stub(habit=habits([*PROMPTS[17], *plain], V)[habit])
        options: dict[str, Any] = {"draft": drafter, "ledger": ledger, "rule": rule}
        run(pair.target, PROMPTS[17], vocab_size=V, max_tokens=200, **options)
        summary = ledger.summary()
        assert (summary.num_rounds, summary.num_accepted_draft_tokens) == (n_rounds, n_accepted), habit


@pytest.mark.parametrize("n_prompt", PROMPTS)
@pytest.mark.parametrize("gamma", range(1, 9))
def test_perturbed_copy_drafts_and_both_memories_stay_right(pair: Pair, gamma: int, n_prompt: int) -> None:
    """D03, D04: drafts kept in part are where caches are cut; every cut is followed by a look at both."""
    prompt = PROMPTS[n_prompt]
    plain, _ = run(pair.target, prompt, vocab_size=V, max_tokens=200)
    rule = RULES["block" if gamma % 2 else "token"]
    committed = list(prompt)
    options: dict[str, Any] = {"draft": pair.draft, "gamma": gamma, "rule": rule}
    for step in start(pair.target, prompt, vocab_size=V, max_tokens=200, **options):
        committed += step.ids
        check_memories(pair, committed)
    assert committed == [*prompt, *plain]


def test_acceptance_does_not_decay(pair: Pair) -> None:
    """D03: a drafter that falls behind the text is right for a while. 8 texts of 200 tokens, halves of 100.

    Each half has some 800 decisions; two rates of 0.7 differ by more than 0.12 once in 10^7 such texts.
    """
    accepted, drafted = np.zeros(2), np.zeros(2)
    for n in range(8):
        prompt = np.random.default_rng(n).integers(0, V, 17).tolist()
        ledger, before = Ledger(), (0, 0)
        for _ in start(pair.target, prompt, vocab_size=V, max_tokens=200, draft=pair.draft, ledger=ledger):
            summary = ledger.summary()
            half = int(summary.generated_tokens > 100)
            now = summary.num_accepted_draft_tokens, summary.num_draft_tokens
            accepted[half] += now[0] - before[0]
            drafted[half] += now[1] - before[1]
            before = now
    first, last = accepted / drafted
    assert 0.6 < first < 0.8
    assert last > first - 0.12


@RULE
def test_ngrams_leave_the_tokens_as_they_are(pair: Pair, rule: Any) -> None:
    """Look-up has no law of its own: what it proposes is certain, and judged like anything else."""
    prompt = [*PROMPTS[17], *PROMPTS[17]]
    plain = run(pair.target, prompt, vocab_size=V, max_tokens=200)
    for gamma in (1, 3, 8):
        options: dict[str, Any] = {"draft": NgramDrafter(), "gamma": gamma, "rule": rule}
        assert run(pair.target, prompt, vocab_size=V, max_tokens=200, **options) == plain


# Ties, vocabularies, contexts


def test_ties_go_to_the_lowest_id_with_and_without_drafts(tmp_path: Path) -> None:
    """D05: three rows of the head are one; two routines that broke ties differently would part ways."""
    _, spec, weights = tiny_variant("llama-default-untied")
    head = weights.arrays["lm_head.weight"].copy()
    head[[5, 31]] = head[7]
    tied = ArrayWeights({**weights.arrays, "lm_head.weight": head})
    target = build_graph(tmp_path / "target", tied, spec).open()
    draft = build_graph(tmp_path / "draft", noisy(weights, NOISE), spec).open()
    with target, draft:
        written = []
        for seed in range(8):
            prompt = np.random.default_rng(seed).integers(0, V, 5).tolist()
            plain = run(target, prompt, vocab_size=V, max_tokens=100)
            assert run(target, prompt, vocab_size=V, max_tokens=100, draft=draft) == plain
            written += plain[0]
    assert 5 in written and not {7, 31} & set(written)


def test_all_logits_equal_is_id_0_everywhere() -> None:
    """D05: the extreme tie."""
    target, draft = ScriptedModel(lambda _: np.zeros(8)), ScriptedModel(lambda _: np.zeros(8))
    ledger = Ledger()
    assert run(target, [3], vocab_size=8, max_tokens=9, draft=draft, ledger=ledger)[0] == [0] * 9
    assert ledger.summary().draft_acceptance_rate == 1


@RULE
def test_nan_in_the_middle_of_a_block_is_an_error(rule: Any) -> None:
    """D05: never token 0 in silence; the row that is not there yet without drafts counts as well."""
    target = ScriptedModel(lambda context: [0, np.nan if len(context) > 4 else 1, 0, 0])
    right = Stub(habit=lambda committed, limit: [1] * limit)
    with pytest.raises(BackendError, match="nan"):
        run(target, [0, 0], vocab_size=4, draft=right, rule=rule)


def resized(weights: ArrayWeights, n_rows: int) -> ArrayWeights:
    """The same model with its rows cut off, or with rows more that win where nobody looks."""
    rows = {"model.embed_tokens.weight", "lm_head.weight"}
    arrays = dict(weights.arrays)
    for name in rows:
        array = arrays[name]
        arrays[name] = np.concatenate([array, 9 * array])[:n_rows]
    return ArrayWeights(arrays)


@pytest.mark.parametrize("n_rows", [64, 130])
def test_draft_may_be_padded_differently(pair: Pair, tmp_path: Path, n_rows: int) -> None:
    """D07 (b), (d): 60 ids are tokens; what a model has beyond is neither drafted nor written."""
    _, spec, weights = tiny_variant("llama-default-untied")
    with build_graph(
        tmp_path / "draft", resized(weights, n_rows), replace(spec, vocab_size=n_rows)
    ).open() as draft:
        ledger = Ledger()
        plain = run(pair.target, [3, 4], vocab_size=60, max_tokens=100)
        options: dict[str, Any] = {"draft": draft, "ledger": ledger}
        assert run(pair.target, [3, 4], vocab_size=60, max_tokens=100, **options) == plain
    assert max(plain[0]) < 60
    assert ledger.summary().draft_acceptance_rate == 1  # within the shared ids it is the same model


def test_draft_without_an_id_of_the_text_stops_drafting(pair: Pair, tmp_path: Path) -> None:
    """D07: a target may know tokens more; its draft cannot read them, and an engine would read a wrong row."""
    _, spec, weights = tiny_variant("llama-default-untied")
    plain, _ = run(pair.target, [3, 4], vocab_size=V, max_tokens=100)
    at = next(n for n, token in enumerate(plain) if token >= 64)
    with build_graph(tmp_path / "draft", resized(weights, 64), replace(spec, vocab_size=64)).open() as draft:
        ledger = Ledger()
        options: dict[str, Any] = {"draft": draft, "ledger": ledger}
        assert run(pair.target, [3, 4], vocab_size=V, max_tokens=100, **options)[0] == plain
    summary = ledger.summary()
    assert summary.note == f"drafting stopped at id {plain[at]}, which the draft model does not have"
    assert summary.num_rounds - summary.num_drafts >= 100 - at - 2


def test_draft_of_a_smaller_context_stops_drafting_there(pair: Pair, tmp_path: Path) -> None:
    """D08: no crash, the same ids, a note once, and no drafts (not drafts that fail) from there."""
    _, spec, weights = tiny_variant("llama-default-untied")
    graph = build_graph(tmp_path / "draft", noisy(weights, NOISE), spec, max_context=64)
    with graph.open() as draft:
        plain, _ = run(pair.target, PROMPTS[17], vocab_size=V, max_tokens=150)
        ledger, committed, late = Ledger(), list(PROMPTS[17]), 0
        for step in start(pair.target, PROMPTS[17], vocab_size=V, max_tokens=150, draft=draft, ledger=ledger):
            late += len(committed) > 64
            committed += step.ids
            assert ledger.note in ("", "drafting stopped at 64 tokens, the draft model's context")
    summary = ledger.summary()
    assert committed == [*PROMPTS[17], *plain]
    assert summary.note
    assert late > 90  # the draft's context takes a token more, or five, than the round began with
    # the last round of all had room for no draft but its own token
    assert late <= summary.num_rounds - summary.num_drafts <= late + 1
    assert summary.draft_acceptance_rate is not None and summary.draft_acceptance_rate > 0.5


def test_drafts_reach_to_the_last_place_of_both_contexts() -> None:
    """Blocks are shortened near the end: the text is that of the plain run, the engine is never overfilled."""
    for context in range(4, 20):
        plain = run(ScriptedModel(scattered(8), max_context=context), [1, 2, 3], vocab_size=8)
        for gamma in range(1, 9):
            target = ScriptedModel(scattered(8), max_context=context)
            draft = ScriptedModel(scattered(8), max_context=context)
            assert run(target, [1, 2, 3], vocab_size=8, draft=draft, gamma=gamma) == plain
            assert plain[1] == "length" and target.length == context
