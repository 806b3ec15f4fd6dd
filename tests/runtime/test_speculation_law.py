"""Sampled speculation follows the law of plain decoding: 20,000 answers by the real generator, by chi-square.

The exact law of the whole loop is compared in test_acceptance by enumeration; here chance is real, and the logits
are those of a tiny llama on the engine, looked up. A right rule exceeds the limit once in 10^7 runs of a test, so
over all tests of this file less than once in 10^6; the seeds are fixed: what passed once goes on passing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import pytest
from decoding import start
from graphs import ArrayWeights, build_graph, tiny_variant

from semspec.runtime.acceptance import RULES, Rule, accept_tokens
from semspec.runtime.chooser import Chooser
from semspec.runtime.config import SamplingParams
from semspec.runtime.drafting import NgramDrafter
from semspec.runtime.records import Floats, Forward, Law, Verdict
from semspec.runtime.rows import Rows
from semspec.runtime.sampling import sample

V = 4  # ids that can be drawn, of 99 rows
N = 2  # tokens that are compared
PROMPT = (2, 0, 2)
RUNS = 20_000
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "all": {
        "temperature": 0.8,
        "top_p": 0.95,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
    },
}


@dataclass(kw_only=True)
class LookUp:
    """A LanguageModel whose logits were computed beforehand: by text, prompt included."""

    rows: Mapping[tuple[int, ...], Floats]
    max_context: int = 64
    tokens: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.tokens)

    def forward(self, ids: Sequence[int], *, rows: Sequence[int] = (-1,), **_: Any) -> Forward:
        ends = [self.length + range(len(ids))[row] + 1 for row in rows]
        self.tokens += ids
        found = [self.rows[tuple(self.tokens[:end])] for end in ends]
        return Forward(rows=Rows(np.array(found, np.float32).reshape(-1, V)))

    def rewind(self, length: int) -> None:
        del self.tokens[length:]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[LookUp, LookUp]:
    """Logits of two tiny models after every text of up to N more tokens."""
    found = []
    for name, family in (("target", "llama-default-untied"), ("draft", "qwen2-default-untied")):
        _, spec, weights = tiny_variant(family)
        mild = ArrayWeights({**weights.arrays, "lm_head.weight": weights.arrays["lm_head.weight"] / 4})
        rows = {}
        with build_graph(tmp_path_factory.mktemp(name) / "graph", mild, spec).open() as model:
            for more in (text for n in range(N + 2) for text in product(range(V), repeat=n)):
                model.rewind(0)
                rows[(*PROMPT, *more)] = model.forward([*PROMPT, *more]).logits[0, :V].copy()
        found.append(LookUp(rows=rows))
    return found[0], found[1]


def exact(target: LookUp, params: SamplingParams) -> Floats:
    """The chance of every text of N tokens: the product of what each is drawn from."""
    chances = np.zeros(V**N)
    for place, text in enumerate(product(range(V), repeat=N)):
        chooser, chance = Chooser(params, V, PROMPT), 1.0
        for n, token in enumerate(text):
            chance *= chooser.law(target.rows[(*PROMPT, *text[:n])]).prob(token)
            chooser.accept(token)
        chances[place] = chance
    return chances


def counts(pair: tuple[LookUp, LookUp], rule: Rule, *, drafts: str = "model", **params: Any) -> Floats:
    """How often each text of N tokens came, of RUNS answers."""
    target, draft = pair
    rng = np.random.default_rng(11)
    found = np.zeros(V**N)
    for _ in range(RUNS):
        text: tuple[int, ...] = ()
        options = {
            "draft": NgramDrafter() if drafts == "ngram" else draft,
            "gamma": N,
            "rule": rule,
            "rng": rng,
        }
        for step in start(target, PROMPT, vocab_size=V, max_tokens=N + 1, **options, **params):
            text += step.ids
            if len(text) >= N:
                break
        found[np.polyval(text[:N], V)] += 1
    return found


def excess(found: Floats, chances: Floats) -> float:
    """Chi-square over what it exceeds with chance 10^-7 (Wilson and Hilferty; 5.2 deviations): above 1 is an alarm."""
    expected = chances * RUNS
    assert not found[chances == 0].any()
    small = expected < 10
    found, expected = (np.array([*x[~small], x[small].sum()]) for x in (found, expected))
    found, expected = found[expected > 0], expected[expected > 0]
    degrees = found.size - 1
    assert degrees >= 5
    limit = degrees * (1 - 2 / (9 * degrees) + 5.2 * np.sqrt(2 / (9 * degrees))) ** 3
    return float(np.sum((found - expected) ** 2 / expected) / limit)


def no_residual(ids: Sequence[int], q: Sequence[Law], p: Sequence[Law], rng: np.random.Generator) -> Verdict:
    """Draws from p itself after a rejection."""
    for i, token in enumerate(ids):
        if not rng.random() * q[i].prob(token) < p[i].prob(token):
            return Verdict(keep=i, extra=sample(p[i], rng))
    return Verdict(keep=len(ids), extra=sample(p[len(ids)], rng))


def raw_q(ids: Sequence[int], q: Sequence[Law], p: Sequence[Law], rng: np.random.Generator) -> Verdict:
    """Compares with another q than the one drawn from, as where a temperature of 0.5 is left out."""
    raw = [Law(ids=law.ids, probs=law.probs**0.5 / np.sum(law.probs**0.5)) for law in q]
    return accept_tokens(ids, raw, p, rng)


@pytest.mark.parametrize(
    ("drafts", "rule", "settings"),
    [
        ("model", "token", "plain"),
        ("model", "token", "all"),
        ("model", "block", "all"),
        ("ngram", "block", "plain"),
    ],
)
def test_answers_follow_the_law(pair: tuple[LookUp, LookUp], drafts: str, rule: str, settings: str) -> None:
    """D13, D14: temperature, filters and penalties in both laws, the true generator in every place."""
    params = SETTINGS[settings]
    found = counts(pair, RULES[rule], drafts=drafts, **params)
    assert excess(found, exact(pair[0], SamplingParams(**params))) < 1


@pytest.mark.parametrize("rule", [no_residual, raw_q])
def test_wrong_rule_is_an_alarm(pair: tuple[LookUp, LookUp], rule: Rule) -> None:
    """The test above would be worth nothing otherwise."""
    params = SETTINGS["plain"]
    assert excess(counts(pair, rule, **params), exact(pair[0], SamplingParams(**params))) > 1
