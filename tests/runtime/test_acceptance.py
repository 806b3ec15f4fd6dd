"""Acceptance rules let out the target's law. By enumeration (tests/branching.py): every way chance can fall, added up.

What is compared is the law of n + 1 tokens: one round, continued by the target where the draft fell early. Rules that
are wrong in the usual ways must fail the same comparison, or it would prove nothing.
"""

from __future__ import annotations

import doctest
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import branching
import numpy as np
import pytest
from branching import exact_law
from laws import Laws, Text, always, chosen, distance, emitted, expected, kept, law_of, play, table
from scripted import ScriptedModel, scattered

from semspec.runtime import acceptance
from semspec.runtime.acceptance import RULES, Rule, accept_block, accept_tokens, residual
from semspec.runtime.chooser import Chooser
from semspec.runtime.config import SamplingParams
from semspec.runtime.drafting import ModelDrafter
from semspec.runtime.loop import Request, decode
from semspec.runtime.records import Law, Verdict
from semspec.runtime.sampling import sample
from semspec.runtime.stats import Ledger
from semspec.runtime.stopping import StopWatch

EXACT = 1e-12  # float64 sums
CAUGHT = 5e-3  # a wrong rule is off by at least that much somewhere
CHANCE = 1e-6  # of a false alarm, for each statistical test


def test_worked_examples_hold() -> None:
    """The docstrings' examples are executed, those of the tool that the proofs rest on too."""
    for module, n_examples in ((acceptance, 3), (branching, 1)):
        assert sum(bool(test.examples) for test in doctest.DocTestFinder().find(module)) == n_examples
        assert doctest.testmod(module).failed == 0


def test_enumeration_agrees_with_multiplication() -> None:
    """The tool itself: texts sampled from p alone have the law that p's chances multiply to."""
    p = table(4, seed=5)

    def run(rng: Any) -> Text:
        text: Text = ()
        for _ in range(3):
            text += (sample(p(text), rng),)
        return text

    assert distance(exact_law(run), expected(p, 3)) < EXACT


# Exact means exact

PAIRS: dict[str, tuple[Laws, Laws, int]] = {  # q, p, drafted tokens
    "other after every text": (table(4, seed=1), table(4, seed=2), 3),
    "five symbols": (table(5, seed=3), table(5, seed=4), 2),
    "equal": (table(3, seed=6), table(3, seed=6), 3),
    "q has what p lacks": (table(4, seed=7), table(4, seed=8, holes=0.5), 2),
    "p has what q lacks": (table(4, seed=9, holes=0.5), table(4, seed=10), 2),
    "q is sure": (always(0, 1, 0), always(0.2, 0.3, 0.5), 3),
    "p is sure": (always(0.2, 0.3, 0.5), always(0, 0, 1), 3),
    "both sure, equal": (always(0, 1, 0), always(0, 1, 0), 3),
    "both sure, different": (always(1, 0, 0), always(0, 1, 0), 2),
    "nothing in common": (always(0.5, 0.5, 0, 0), always(0, 0, 0.3, 0.7), 2),
    "one token": (table(5, seed=11), table(5, seed=12), 1),
    "no token": (table(5, seed=11), table(5, seed=12), 0),
    "q is greedy": (chosen(13, temperature=0), chosen(14, temperature=1), 2),
    "both greedy": (chosen(13, temperature=0), chosen(14, temperature=0), 3),
    "after a certain rejection": (
        lambda text: law_of(1, 0, 0) if not text else law_of(0.2, 0.5, 0.3),
        lambda text: law_of(0, 1, 1) if not text else law_of(0.5, 0.2, 0.3),
        3,
    ),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("pair", PAIRS)
def test_rules_let_out_the_law_of_the_target(rule: str, pair: str) -> None:
    """D13: whatever the draft's law is, the tokens follow the target's; to 1e-12, by enumeration."""
    q, p, n = PAIRS[pair]
    assert distance(emitted(RULES[rule], q, p, n), expected(p, n + 1)) < EXACT


SETTINGS: list[dict[str, Any]] = [
    *({"temperature": temperature, **filters} for temperature in (0.3, 1.0, 1.7) for filters in (
        {}, {"top_p": 0.8}, {"top_k": 2}, {"top_p": 0.7, "top_k": 3}, {"min_p": 0.3}
    )),
    {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"temperature": 1.0, "repetition_penalty": 1.5},
    {"temperature": 0.7, "presence_penalty": 0.7, "frequency_penalty": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "repetition_penalty": 0.8, "frequency_penalty": -0.5, "top_k": 3},
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_rules_are_exact_after_penalties_and_filters(rule: str, settings: dict[str, Any]) -> None:
    """D13, D14: p and q are what is sampled from, made by the Chooser with the history of each place."""
    q, p = chosen(21, **settings), chosen(22, **settings)
    assert distance(emitted(RULES[rule], q, p, 2), expected(p, 3)) < EXACT


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(10))
def test_greedy_rounds_write_what_the_target_alone_writes(rule: str, seed: int) -> None:
    """Temperature 0 is no special case in the rules: one-hot laws make them compare arg-maxes."""
    q, p = chosen(seed, temperature=0), chosen(seed + 100 * (seed % 3), temperature=0)
    text: Text = ()
    while len(text) < 4:
        text += (int(p(text).ids[0]),)
    for chance in range(5):
        verdict, written = play(RULES[rule], q, p, 3, np.random.default_rng(chance))
        assert written == text
        agreed = next((i for i in range(3) if q(text[:i]).ids[0] != text[i]), 3)
        assert (verdict.keep, verdict.extra) == (agreed, text[agreed])


# A wrong rule is caught


def no_residual(ids: Sequence[int], q: Sequence[Law], p: Sequence[Law], rng: Any) -> Verdict:
    """Draws from p itself after a rejection."""
    verdict = accept_tokens(ids, q, p, rng)
    return Verdict(keep=verdict.keep, extra=sample(p[verdict.keep], rng))


def late_residual(ids: Sequence[int], q: Sequence[Law], p: Sequence[Law], rng: Any) -> Verdict:
    """Reads p one place too late."""
    return accept_tokens(ids, q, [*p[1:], p[-1]], rng)


def unclipped_block(ids: Sequence[int], q: Sequence[Law], p: Sequence[Law], rng: Any) -> Verdict:
    """Block verification whose weights may exceed 1."""
    weight, best, best_weight = 1.0, 0, 1.0
    for i, token in enumerate(ids, 1):
        weight *= p[i - 1].prob(token) / q[i - 1].prob(token)
        chance = weight
        if i < len(ids):
            above = sum(max(0.0, weight * p[i].prob(x) - q[i].prob(x)) for x in range(8))
            chance = above / (above + 1 - weight) if above + 1 > weight else 1.0
        if rng.random() < chance:
            best, best_weight = i, weight
    law = p[best] if best == len(ids) else residual(p[best], q[best], best_weight)
    return Verdict(keep=best, extra=sample(law, rng))


def unweighted_block(ids: Sequence[int], q: Sequence[Law], p: Sequence[Law], rng: Any) -> Verdict:
    """Block verification whose last token forgets the weight."""
    verdict = accept_block(ids, q, p, rng)
    if verdict.keep == len(ids):
        return verdict
    return Verdict(keep=verdict.keep, extra=sample(residual(p[verdict.keep], q[verdict.keep]), rng))


Q, P = chosen(42, temperature=1.7), chosen(142, temperature=1.7)
RAW = chosen(42, temperature=1.0)
WRONG: dict[str, tuple[Rule, Laws, Laws | None]] = {  # rule, draft, what the rule takes for the draft's law
    "raw q, without temperature": (accept_tokens, Q, RAW),
    "raw q, without temperature, block": (accept_block, Q, RAW),
    "greedy draft, taken for a sampled one": (accept_tokens, chosen(42, temperature=0), Q),
    "no residual": (no_residual, Q, None),
    "shifted by one": (late_residual, Q, None),
    "weights not clipped": (unclipped_block, Q, None),
    "residual without weight": (unweighted_block, Q, None),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rules_are_caught_by_enumeration(name: str) -> None:
    """D13: the mistakes of the field; a comparison that lets them pass would be worth nothing."""
    rule, q, told = WRONG[name]
    assert distance(emitted(rule, q, P, 2, told), expected(P, 3)) > CAUGHT


# The same with numpy's own generator


def surprise(rule: Rule, q: Laws, p: Laws, n: int, *, told: Laws | None = None, runs: int = 12_000) -> float:
    """Chi-square of `runs` texts over what it exceeds with chance 1e-6 if p is their law: above 1 is an alarm.

    With k degrees of freedom chi-square exceeds k + 2 sqrt(k x) + 2 x with chance e^-x at most (Laurent and Massart,
    2000, lemma 1). Texts that p cannot write are an alarm at once; those expected less than 5 times count as one.
    """
    rng = np.random.default_rng(20_24)
    counts = Counter(play(rule, q, p, n, rng, told=told)[1] for _ in range(runs))
    law = expected(p, n + 1)
    if counts.keys() - law.keys():
        return math.inf
    often = [text for text, chance in law.items() if chance * runs >= 5]
    chances = np.array([*(law[text] for text in often), 1 - sum(law[text] for text in often)])
    found = np.array([*(counts[text] for text in often), runs - sum(counts[text] for text in often)])
    if chances[-1] * runs < 1e-6:
        chances, found = chances[:-1], found[:-1]
    chi_square = float(((found - runs * chances) ** 2 / (runs * chances)).sum())
    freedom, x = len(chances) - 1, -math.log(CHANCE)
    return chi_square / (freedom + 2 * math.sqrt(freedom * x) + 2 * x)


FILTERED = {"temperature": 0.4, "top_p": 0.95}
PENALIZED = {"temperature": 1.7, "top_k": 3, "repetition_penalty": 1.3, "frequency_penalty": 0.7}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("settings", [{"temperature": 1.0}, FILTERED, PENALIZED], ids=str)
def test_rules_follow_the_target_by_chi_square(rule: str, settings: dict[str, Any]) -> None:
    """D13: with the real generator; a right rule fails each of these six with chance below 1e-6."""
    assert surprise(RULES[rule], chosen(31, **settings), chosen(32, **settings), 2) < 1


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rules_are_caught_by_chi_square(name: str) -> None:
    """The statistical test has teeth too, at the same number of runs."""
    rule, q, told = WRONG[name]
    assert surprise(rule, q, P, 2, told=told) > 1


def test_same_seed_same_verdicts() -> None:
    """A seed is a promise, also in speculation."""
    rounds = [[play(rule, Q, P, 3, np.random.default_rng(8)) for rule in RULES.values()] for _ in range(2)]
    assert rounds[0] == rounds[1]


# How much is kept


def test_two_symbols_keep_ten_or_eleven_ninths() -> None:
    """The published example: of two drafted tokens 10/9 are kept token by token, 11/9 as a block."""
    q, p = always(2, 1), always(1, 2)
    assert kept(accept_tokens, q, p, 2) == pytest.approx(10 / 9, abs=EXACT)
    assert kept(accept_block, q, p, 2) == pytest.approx(11 / 9, abs=EXACT)


def test_two_symbols_keep_ten_or_eleven_ninths_with_the_real_generator() -> None:
    """The same counted: 12000 rounds of 0..2 kept tokens, so a mean is off by 0.05 with chance below 1e-6.

    Hoeffding: 2 exp(-2 * 12000 * 0.05^2 / 2^2) = 6.1e-7; the two means are 0.11 apart.
    """
    q, p, rng = always(2, 1), always(1, 2), np.random.default_rng(5)
    for rule, mean in ((accept_tokens, 10 / 9), (accept_block, 11 / 9)):
        found = np.mean([play(rule, q, p, 2, rng)[0].keep for _ in range(12_000)])
        assert abs(found - mean) < 0.05


@pytest.mark.parametrize("seed", range(24))
def test_block_keeps_at_least_as_much_as_tokens(seed: int) -> None:
    """What block verification is for; exact means over random pairs, some with ids that only one side has."""
    size, n = ((3, 3), (2, 4), (4, 2), (5, 2))[seed % 4]
    q, p = (table(size, seed=100 + seed + side, holes=0.2 * (seed % 3)) for side in (0, 50))
    assert kept(accept_block, q, p, n) >= kept(accept_tokens, q, p, n) - EXACT


@pytest.mark.parametrize("n", [1, 2, 3])
def test_equal_laws_keep_everything(n: int) -> None:
    """A draft that is the target is never rejected: acceptance below 1 would be a fault."""
    q = table(4, seed=40)
    for rule in RULES.values():
        assert kept(rule, q, q, n) == pytest.approx(n, abs=EXACT)


# What they read, and residual


class Read(Sequence[Law]):
    """Laws that note which of them were read."""

    def __init__(self, laws: Sequence[Law]) -> None:
        self.laws, self.read = laws, list[int]()

    def __len__(self) -> int:
        return len(self.laws)

    def __getitem__(self, i: int) -> Law:  # type: ignore[override]
        self.read.append(i)
        return self.laws[i]


@pytest.mark.parametrize("rule", RULES)
def test_nothing_is_read_behind_a_token_that_the_target_cannot_draw(rule: str) -> None:
    """A grammar has no law behind what it forbids, and n-grams propose what it forbids."""
    p = Read([law_of(0.5, 0.5, 0), law_of(0.5, 0.5, 0), law_of(1, 0, 0), law_of(1, 0, 0)])
    verdict = RULES[rule](
        [0, 2, 1], [law_of(1, 0, 0), law_of(0, 0, 1), law_of(0, 1, 0)], p, np.random.default_rng(0)
    )
    assert verdict.keep <= 1 and max(p.read) <= 1


@pytest.mark.parametrize("rule", RULES)
def test_laws_are_read_in_order(rule: str) -> None:
    """The loop makes each with the history of its place and takes them back at the end."""
    for seed in range(20):
        p = Read([P((0, 1, 2)[:i]) for i in range(4)])
        RULES[rule]([0, 1, 2], [law_of(1, 1, 1, 1)] * 3, p, np.random.default_rng(seed))
        first = list(dict.fromkeys(p.read))
        assert first == list(range(len(first)))


def test_residual_by_definition() -> None:
    """weight * p - q where positive, over all overlaps of supports."""
    for seed, weight in itertools.product(range(40), (1.0, 0.6)):
        p, q = (table(6, seed=seed + side, holes=0.4)(()) for side in (0, 500))
        plain = np.array([max(0.0, weight * p.prob(x) - q.prob(x)) for x in range(6)])
        found = residual(p, q, weight)
        if plain.sum() > 0:
            assert found.ids.tolist() == np.flatnonzero(plain).tolist()
            np.testing.assert_allclose(found.probs, plain[plain > 0] / plain.sum(), atol=1e-12)
        else:
            assert found is p


# The loop as a whole: all that lies between two models and the answer


def stub_watch(params: SamplingParams) -> StopWatch:
    class Silent:
        def push(self, ids: Sequence[int]) -> str:
            return ""

        def finish(self) -> str:
            return ""

    return StopWatch(params, (), Silent())


def answers(params: SamplingParams, prompt: Sequence[int], rule: Rule | None, n: int) -> dict[Text, float]:
    """The exact law of the answers of the decoding loop, drafted by a model under `rule`, or plain."""

    def run(rng: Any) -> Text:
        target, draft = (ScriptedModel(scattered(3, seed, spread=1.5)) for seed in (51, 52))
        chooser = Chooser(params, 3, prompt)
        request = Request(
            prompt=prompt,
            chooser=chooser,
            watch=stub_watch(params),
            ledger=Ledger(),
            rng=rng,
            drafter=ModelDrafter(draft, chooser) if rule else None,
            num_draft_tokens=n,
            rule=rule or accept_tokens,
        )
        return tuple(token for step in decode(target, request) for token in step.ids)

    return exact_law(run)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0, "max_tokens": 3},
        {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.4, "max_tokens": 4},
        {"temperature": 1.7, "presence_penalty": 0.7, "frequency_penalty": 0.7, "top_k": 2, "max_tokens": 4},
        {"temperature": 1.0, "stop_token_ids": (1,), "max_tokens": 3},
    ],
    ids=str,
)
def test_loop_answers_follow_the_law_of_plain_decoding(settings: dict[str, Any]) -> None:
    """D13, D14: models, penalties, filters, caches, cap and stops together; every answer's chance to 1e-12."""
    params = SamplingParams(**settings)
    plain = answers(params, (0, 2), None, 0)
    for rule, n in ((accept_tokens, 2), (accept_block, 2), (accept_block, 3)):
        assert distance(answers(params, (0, 2), rule, n), plain) < EXACT


def test_loop_with_a_wrong_rule_is_caught() -> None:
    """The comparison above sees a rule without residual."""
    params = SamplingParams(temperature=1.0, max_tokens=3)
    wrong = answers(params, (0, 2), no_residual, 2)
    assert distance(wrong, answers(params, (0, 2), None, 0)) > CAUGHT
