"""What tests of the decoding loop share: one request without bundle or tokenizer, drafters of bad habits, judges."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, cast

import numpy as np

from semspec.runtime.acceptance import Rule, accept_tokens
from semspec.runtime.chooser import Chooser, Processor
from semspec.runtime.config import SamplingParams
from semspec.runtime.drafting import Drafter, ModelDrafter
from semspec.runtime.judging import Judge, Judging, decision_rng
from semspec.runtime.loop import Request, decode
from semspec.runtime.model import CachedModel, LanguageModel
from semspec.runtime.records import Draft, Law, Step, Verdict
from semspec.runtime.review import Review
from semspec.runtime.segments import Segment, Segmenter
from semspec.runtime.stats import Ledger
from semspec.runtime.stopping import StopWatch, TextSource


@dataclass(frozen=True)
class Letters:
    """Text of ids, each one piece: `pieces[id]`, or nothing at all where there are none."""

    pieces: Sequence[str] = ()

    def push(self, ids: Sequence[int]) -> str:
        return "".join(self.pieces[token] for token in ids) if self.pieces else ""

    def finish(self) -> str:
        return ""


@dataclass(kw_only=True)
class Stub:
    """A drafter that proposes what `habit` says of the committed tokens and the limit, and is sure of it."""

    habit: Callable[[list[int], int], Sequence[int]]
    note: str = ""
    committed: list[int] = field(default_factory=list)

    def start(self, prompt: Sequence[int]) -> None:
        self.committed = list(prompt)

    def propose(
        self,
        limit: int,
        rng: np.random.Generator,
        *,
        segment: Segment | None = None,
        judged: bool = False,
        segments: int = 1,
    ) -> Draft:
        ids = tuple(self.habit(self.committed, limit))
        return Draft(ids=ids, laws=tuple(Law(ids=np.array([token]), probs=np.ones(1)) for token in ids))

    def commit(self, ids: Sequence[int]) -> None:
        self.committed += ids


@dataclass(kw_only=True)
class Says:
    """A judge that says what `verdict` does."""

    verdict: Callable[[Review, np.random.Generator], Verdict]
    name: str = "says"
    lossy: bool = True
    segments: bool = True

    def judge(self, review: Review, rng: np.random.Generator) -> Verdict:
        return self.verdict(review, rng)


def keeping(*decisions: bool, **options: Any) -> Says:
    """Whole segments kept or thrown away as `decisions` say, one after the other, round and round."""
    turns = cycle(decisions)

    def verdict(review: Review, rng: np.random.Generator) -> Verdict:
        return Verdict(keep=len(review.ids)) if next(turns) else Verdict(keep=0, target_writes=True)

    return Says(verdict=verdict, **options)


def habits(text: Sequence[int], vocab_size: int) -> dict[str, Callable[[list[int], int], Sequence[int]]]:
    """Ways to draft where the target, left alone, would write `text`, prompt included."""

    def right(committed: list[int], limit: int) -> Sequence[int]:
        return text[len(committed) : len(committed) + limit]

    return {
        "right": right,
        "wrong": lambda committed, limit: [(t + 1) % vocab_size for t in right(committed, limit)],
        "constant": lambda committed, limit: [text[-1]] * limit,
        "empty": lambda committed, limit: [],
        "too long": lambda committed, limit: right(committed, limit + 3),
        "repeating": lambda committed, limit: committed[-1:] * limit,
        "third wrong": lambda committed, limit: [
            t if at % 3 != 2 else (t + 1) % vocab_size for at, t in enumerate(right(committed, limit))
        ],
    }


def start(
    target: LanguageModel,
    prompt: Sequence[int],
    *,
    vocab_size: int,
    draft: Drafter | LanguageModel | None = None,
    gamma: int = 4,
    rule: Rule = accept_tokens,
    judge: Judge | None = None,
    segmenter: Segmenter | None = None,
    inside: Mapping[str, Any] | None = None,
    drafting: Mapping[str, Any] | None = None,
    alone: bool = False,
    end_ids: Collection[int] = (),
    text: TextSource | None = None,
    processors: Sequence[Processor] = (),
    ledger: Ledger | None = None,
    rng: np.random.Generator | None = None,
    **params: Any,
) -> Iterator[Step]:
    """decode() with a request of its own. draft: a drafter, or a model that drafts. judge: with the segmenter that cuts
    its segments; the stop ids are the segmenter's own. inside: further fields of Judging, drafting: of ModelDrafter.
    params: SamplingParams'.
    """
    sampling = SamplingParams(**params)
    chooser = Chooser(sampling, vocab_size, prompt, processors)
    watch = StopWatch(sampling, end_ids, text or Letters())
    if draft is None or hasattr(draft, "propose"):
        drafter = cast("Drafter | None", draft)
    else:
        rows = draft.spec.vocab_size if isinstance(draft, CachedModel) else None
        model = cast(LanguageModel, draft)
        reads = drafting or {}
        drafter = ModelDrafter(model, chooser, stop_ids=watch.stop_ids, vocab_size=rows, **reads)
    judging = None
    if judge is not None:
        assert segmenter is not None
        rng_of_judge = decision_rng(sampling.seed, prompt)
        judging = Judging(judge=judge, segmenter=segmenter, rng=rng_of_judge, **(inside or {}))
    request = Request(
        prompt=prompt,
        chooser=chooser,
        watch=watch,
        ledger=ledger or Ledger(),
        rng=rng or np.random.default_rng(sampling.seed),
        drafter=drafter,
        num_draft_tokens=gamma,
        rule=rule,
        judging=judging,
        alone=alone,
        logprobs=sampling.logprobs,
    )
    return decode(target, request)


def run(target: LanguageModel, prompt: Sequence[int], **options: Any) -> tuple[list[int], str | None]:
    """All ids of a request and the reason of its last step; options as for `start`."""
    steps = list(start(target, prompt, **options))
    assert all(step.finish_reason is None for step in steps[:-1])
    return [token for step in steps for token in step.ids], steps[-1].finish_reason
