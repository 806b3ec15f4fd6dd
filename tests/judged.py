"""Decoding by segments with scripted models, and what it should give: a simulation in plain words.

Both models depend on all they have read, so a token too many or too few in a cache shows. Id 0 is a newline.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np
import numpy.typing as npt
from decoding import start
from scripted import Law, ScriptedModel, scattered

from semspec.runtime.acceptance import accept_tokens
from semspec.runtime.chooser import Chooser
from semspec.runtime.config import SamplingParams
from semspec.runtime.judging import Judge
from semspec.runtime.model import LanguageModel
from semspec.runtime.records import Draft, Step
from semspec.runtime.records import Law as DrawLaw
from semspec.runtime.review import Review, TargetLaws
from semspec.runtime.rows import Rows
from semspec.runtime.segments import Boundary, Segmenter
from semspec.runtime.stats import Ledger

V = 6
PROMPT = [3, 4]
TARGET, DRAFT = scattered(V, seed=1), scattered(V, seed=2)


def lines(low: int = 2, cap: int = 5, stop_ids: Sequence[int] = ()) -> Segmenter:
    boundary = Boundary(kind="newline", min_tokens=low, max_tokens=cap)
    return Segmenter(boundary, lambda token: b"\n" if token == 0 else b"a", stop_ids)


def greedy(law: Law, text: Sequence[int], n: int) -> list[int]:
    """The n tokens that a model writes after `text`."""
    found: list[int] = []
    for _ in range(n):
        found.append(int(np.argmax(np.asarray(law((*text, *found)), np.float32))))
    return found


def simulate(decisions: Sequence[bool], n: int, cut: Segmenter) -> tuple[list[int], list[str]]:
    """The first n tokens at temperature 0, and who wrote each: the method in plain words, without a cache."""
    text, authors = list(PROMPT), list[str]()

    def write(law: Law, author: str) -> None:
        ids = greedy(law, text, cut.boundary.max_tokens)
        ids = ids[: cut.length(ids)]
        text.extend(ids)
        authors.extend([author] * len(ids))

    write(TARGET, "target")
    for kept in cycle(decisions):
        if len(authors) >= n:
            return text[len(PROMPT) :][:n], authors[:n]
        write(DRAFT if kept else TARGET, "draft" if kept else "target")
    raise AssertionError("unreachable")


def steps_of(judge: Judge, cut: Segmenter, **options: Any) -> tuple[list[Step], ScriptedModel, ScriptedModel]:
    """All steps of a request, with the invariant checked after each, and the two models."""
    context = options.pop("context", 64)
    target, draft = ScriptedModel(TARGET, max_context=context), ScriptedModel(DRAFT, max_context=context)
    committed, steps = list(PROMPT), list[Step]()
    given = {"vocab_size": V, "draft": draft, "judge": judge, "segmenter": cut, **options}
    for step in start(target, PROMPT, **given):
        committed += step.ids
        steps.append(step)
        assert step.ids
        assert target.tokens == committed[:-1]
        assert draft.tokens == committed[: draft.length] and draft.length < len(committed)
        assert 0 <= step.n_lossy <= step.n_from_draft <= len(step.ids)
    return steps, target, draft


def text_of(steps: Sequence[Step]) -> list[int]:
    return [token for step in steps for token in step.ids]


def authors_of(steps: Sequence[Step]) -> list[str]:
    return [
        "draft" if place < step.n_from_draft else "target" for step in steps for place in range(len(step.ids))
    ]


def review_of(
    logits: npt.ArrayLike, ids: Sequence[int], *, target: LanguageModel | None = None, **params: Any
) -> Review:
    """What the target says of drafted `ids`: logits (n + 1, V), under SamplingParams `params`, after no prompt."""
    rows = np.asarray(logits, np.float32)
    chooser = Chooser(SamplingParams(**params), rows.shape[1], [0])
    sure = tuple(DrawLaw(ids=np.array([token]), probs=np.ones(1)) for token in ids)
    laws = TargetLaws(chooser, Rows(rows), ids, ())
    model = target or ScriptedModel(lambda _: np.zeros(rows.shape[1]))
    rng = np.random.default_rng(0)
    return Review(
        Draft(ids=tuple(ids), laws=sure),
        laws,
        model,
        Ledger(),
        exact=lambda ids, q, p: accept_tokens(ids, q, p, rng),
    )
