"""Hand-written laws p and q, one round of speculation with them, and the exact law of the text it lets out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from branching import exact_law
from scripted import scattered

from semspec.runtime.acceptance import Rule
from semspec.runtime.chooser import Chooser
from semspec.runtime.config import SamplingParams
from semspec.runtime.records import Law, Verdict
from semspec.runtime.sampling import sample

Text: TypeAlias = tuple[int, ...]
Laws: TypeAlias = Callable[[Text], Law]
"""What was written so far -> the law of the next token."""


def law_of(*chances: float) -> Law:
    """Chances by id, those of 0 left out."""
    values = np.array(chances, float)
    ids = np.flatnonzero(values)
    return Law(ids=ids, probs=values[ids] / values.sum())


def always(*chances: float) -> Laws:
    return lambda _: law_of(*chances)


def table(size: int, seed: int, *, holes: float = 0.0) -> Laws:
    """Another law after every text; each id is missing with chance `holes`."""

    def law(text: Text) -> Law:
        rng = np.random.default_rng((size, seed, *text))
        chances = rng.dirichlet(np.full(size, 0.7)) * (rng.random(size) >= holes)
        return law_of(*chances) if chances.any() else law_of(*rng.dirichlet(np.ones(size)))

    return remembered(law)


def chosen(seed: int, prompt: Sequence[int] = (0, 2), size: int = 4, **settings: Any) -> Laws:
    """Laws as requests have them: scattered logits, then penalties, temperature and filters."""
    logits, params = scattered(size, seed, spread=1.5), SamplingParams(**settings)

    def law(text: Text) -> Law:
        chooser = Chooser(params, size, prompt)
        for token in text:
            chooser.accept(token)
        return chooser.law(np.asarray(logits((9, *text)), np.float32))

    return remembered(law)


def remembered(law: Laws) -> Laws:
    known: dict[Text, Law] = {}
    return lambda text: known[text] if text in known else known.setdefault(text, law(text))


def play(rule: Rule, q: Laws, p: Laws, n: int, rng: Any, *, told: Laws | None = None) -> tuple[Verdict, Text]:
    """One round of n drafted tokens, then the target alone up to n + 1. told: what the rule takes for q."""
    draft: Text = ()
    for _ in range(n):
        draft += (sample(q(draft), rng),)
    places = [draft[:i] for i in range(n + 1)]
    verdict = rule(draft, [(told or q)(place) for place in places[:-1]], [p(place) for place in places], rng)
    text = (*draft[: verdict.keep], verdict.extra)
    while len(text) <= n:
        text += (sample(p(text), rng),)
    return verdict, text


def emitted(rule: Rule, q: Laws, p: Laws, n: int, told: Laws | None = None) -> dict[Text, float]:
    return exact_law(lambda rng: play(rule, q, p, n, rng, told=told)[1])


def expected(p: Laws, length: int) -> dict[Text, float]:
    """The target's own law of `length` tokens, by multiplying."""
    found: dict[Text, float] = {(): 1.0}
    for _ in range(length):
        found = {
            (*text, int(token)): chance * share
            for text, chance in found.items()
            for token, share in zip(p(text).ids, p(text).probs, strict=True)
        }
    return found


def distance(ours: Mapping[Text, float], theirs: Mapping[Text, float]) -> float:
    """The largest difference of any text's chance."""
    return max(abs(ours.get(text, 0.0) - theirs.get(text, 0.0)) for text in {*ours, *theirs})


def kept(rule: Rule, q: Laws, p: Laws, n: int) -> float:
    """How many drafted tokens are kept on average."""
    law = exact_law(lambda rng: play(rule, q, p, n, rng)[0].keep)
    return sum(keep * chance for keep, chance in law.items())
