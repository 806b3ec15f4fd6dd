"""The decoding loop: one request, token ids in, a generator of Step out. Knows no engine and no tokenizer.

    propose -> review (one pass of the target over pending and draft) -> verdict -> commit, rewind, yield

Invariant after every step: the target remembers every committed token but the pending one, the last, which the
next pass reads first; a drafter's model remembers a prefix of them. Without a drafter a round is one token: plain
decoding is the same loop with empty drafts. So is a segment that the target writes itself where a judge looks at
segments (judging.py), unless it is drafted token by token inside; its first token comes from the pass that reviewed
the draft it replaces.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from semspec.runtime.acceptance import Rule, accept_tokens
from semspec.runtime.chooser import Chooser
from semspec.runtime.drafting import Drafter
from semspec.runtime.errors import ConfigError
from semspec.runtime.judging import Judging, Turns, pass_judgement
from semspec.runtime.model import LanguageModel, common_prefix
from semspec.runtime.records import Draft, Floats, Judged, Law, Step, Verdict
from semspec.runtime.review import Review, TargetLaws
from semspec.runtime.sampling import log_probabilities, sample
from semspec.runtime.stats import Ledger
from semspec.runtime.stopping import Cut, StopWatch

__all__ = ["Request", "decode"]

EMPTY = Draft(ids=(), laws=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request on its way: the prompt, and the objects that follow its text.

    drafter None, or num_draft_tokens 0: plain decoding. judging: who judges drafts instead of `rule`. alone: the model
    that decodes is the draft, standing in for the target. logprobs: also report each token's log-probability.
    """

    prompt: Sequence[int]
    chooser: Chooser
    watch: StopWatch
    ledger: Ledger
    rng: np.random.Generator
    drafter: Drafter | None = None
    num_draft_tokens: int = 0
    rule: Rule = accept_tokens
    judging: Judging | None = None
    alone: bool = False
    logprobs: bool = False


def decode(target: LanguageModel, request: Request) -> Iterator[Step]:
    """Decode to the end of the answer; the last step says why it is the last.

    What the target remembers of an earlier text is used as far as the prompt begins with it. Not guaranteed: the
    same tokens on other engines or processors. Raises ConfigError for an empty prompt or one that the context
    does not hold.
    """
    _check_prompt(target, request.prompt)
    _prefill(target, request)
    pending, turns = request.prompt[-1], Turns(request.judging)
    while True:
        draft = _propose(target, request, turns)
        judging = turns.judging(draft)
        rows = _rows(request, draft, judging)
        with request.ledger.time("draft" if request.alone else "target"):
            found = target.forward([pending, *draft.ids], rows=rows, pool=_pool(draft, judging))
        laws = TargetLaws(request.chooser, found.logits, draft.ids, request.watch.stop_ids, rows=rows)
        if judging is None:
            verdict = _by_rule(request, draft, laws)
        else:
            verdict = _by_judge(request, judging, draft, laws, target, found.pooled)
        laws.close()
        with request.ledger.time("sampling"):
            step = _commit(target, request, judging, draft, verdict, laws.logits)
        turns.take(step.ids, judged=judging is not None, verdict=verdict)
        pending = step.ids[-1]
        yield step
        if step.finish_reason:
            return


def _check_prompt(target: LanguageModel, prompt: Sequence[int]) -> None:
    if not 1 <= len(prompt) <= target.max_context:
        raise ConfigError(
            f"the prompt has {len(prompt)} tokens; this model reads 1 to {target.max_context} (--max-context at export)"
        )


def _prefill(target: LanguageModel, request: Request) -> None:
    """Read all of the prompt but its last token, as far as it is not remembered already."""
    request.ledger.add_prompt(len(request.prompt))
    with request.ledger.time("prefill"):
        *known, _ = request.prompt
        target.rewind(common_prefix(target.tokens, known))
        if len(known) > target.length:
            target.forward(known[target.length :], rows=())
    if request.drafter is not None:
        request.drafter.start(request.prompt)


def _propose(target: LanguageModel, request: Request, turns: Turns) -> Draft:
    """A draft that neither max_tokens nor the context cuts short."""
    segment = turns.segment()
    judged = segment is not None and not turns.target_writes
    limit = _limit(target, request, judged)
    if request.drafter is None or limit <= 0 or turns.silent:
        return EMPTY
    with request.ledger.time("draft"):
        draft = request.drafter.propose(limit, request.rng, segment=copy.copy(segment), judged=judged)
    # whoever proposes more than was asked for is heard as far as there is room, and never beyond a stop or a segment
    ids, whole = draft.ids[:limit], False
    for n, token in enumerate(ids, 1):
        whole = segment is not None and segment.push(token)
        if whole or token in request.watch.stop_ids:
            ids = ids[:n]
            break
    n = len(ids)
    reading = draft.reading if n == len(draft.ids) else None
    return Draft(ids=ids, laws=draft.laws[:n], whole=whole, reading=reading)


def _limit(target: LanguageModel, request: Request, judged: bool) -> int:
    """Most tokens of a draft: its review reads the pending one too and, but for segments, ends with one more."""
    room, left = target.max_context - target.length - 1, request.watch.left
    if judged and request.judging is not None:
        return min(request.judging.segmenter.boundary.max_tokens, left, room)
    return min(request.num_draft_tokens, left - 1, room)


def _rows(request: Request, draft: Draft, judging: Judging | None) -> Sequence[int]:
    """The rows of a review that are looked at: all of them, or those that tokens may be drawn from."""
    n = len(draft.ids)
    if judging is None or not judging.few_rows or not draft.whole or request.logprobs:
        return range(n + 1)
    return (0, n) if judging.bonus else (0,)


def _pool(draft: Draft, judging: Judging | None) -> Floats | None:
    """1 for the rows that predicted the draft, 0 for the one behind it."""
    if judging is None:
        return None
    pool = np.ones(len(draft.ids) + 1, np.float32)
    pool[-1] = 0
    return pool


def _by_rule(request: Request, draft: Draft, laws: TargetLaws) -> Verdict:
    """The exact rule. Where the target's own segment ends with the draft, no token of the next one is drawn."""
    with request.ledger.time("sampling"):
        verdict = request.rule(draft.ids, draft.laws, laws, request.rng)
    return replace(verdict, extra=None) if draft.whole and verdict.keep == len(draft.ids) else verdict


def _by_judge(
    request: Request,
    judging: Judging,
    draft: Draft,
    laws: TargetLaws,
    target: LanguageModel,
    pooled: Floats | None,
) -> Verdict:
    """What the judge says, and a token of the target's where it is to go on."""

    def exact(ids: Sequence[int], q: Sequence[Law], p: Sequence[Law]) -> Verdict:
        return request.rule(ids, q, p, request.rng)

    review = Review(
        draft, laws, target, request.ledger, pooled=pooled, describe=judging.describe, exact=exact
    )
    with request.ledger.time("judge"):
        verdict = pass_judgement(judging, review)
    adds = verdict.target_writes or (judging.bonus and verdict.keep == len(draft.ids))
    if adds and verdict.extra is None:
        verdict = replace(verdict, extra=sample(laws[verdict.keep], request.rng))
    if judging.judge.segments:
        request.ledger.add_segment(len(draft.ids), kept=verdict.keep == len(draft.ids))
    return verdict


def _commit(
    target: LanguageModel,
    request: Request,
    judging: Judging | None,
    draft: Draft,
    verdict: Verdict,
    logits: Floats,
) -> Step:
    """Cut at a stop, and bring every memory to what was committed."""
    remembered = target.length - len(draft.ids) - 1
    ids = draft.ids[: verdict.keep] if verdict.extra is None else (*draft.ids[: verdict.keep], verdict.extra)
    cut = request.watch.push(ids, full=remembered + len(ids) == target.max_context)
    ids = ids[: cut.n_ids]
    target.rewind(remembered + len(ids))
    for token in ids:
        request.chooser.accept(token)
    if request.drafter is not None:
        request.drafter.commit(ids)
        request.ledger.note = request.drafter.note
    n_kept = min(verdict.keep, len(ids))
    n_lossy = len(ids) if request.alone else _n_lossy(judging, verdict, n_kept)
    n_judged = _looked_at(judging, draft, verdict, cut)
    request.ledger.add_round(
        drafted=n_judged,
        accepted=n_kept,
        emitted=len(ids),
        lossy=n_lossy,
        passes=0 if request.alone else 1,
    )
    ms = request.ledger.lap()
    return Step(
        ids=ids,
        text=cut.text,
        n_from_draft=len(ids) if request.alone else n_kept,
        n_lossy=n_lossy,
        rule=_rule(request, judging, draft),
        finish_reason=cut.finish_reason,
        logprobs=log_probabilities(logits, ids) if request.logprobs else (),
        judged=None if judging is None else _judged(verdict, n_judged, n_kept, n_lossy, ms),
    )


def _judged(verdict: Verdict, n_judged: int, n_kept: int, n_lossy: int, ms: Mapping[str, float]) -> Judged:
    return Judged(
        n_drafted=n_judged,
        n_kept=n_kept,
        n_lossy=n_lossy,
        reason=verdict.reason,
        figures=verdict.figures,
        ms=ms,
    )


def _looked_at(judging: Judging | None, draft: Draft, verdict: Verdict, cut: Cut) -> int:
    """Tokens of a draft that count as judged: those behind a stop do not; a segment thrown away does as a whole."""
    whole = judging is not None and judging.judge.segments and cut.n_ids > verdict.keep
    return min(len(draft.ids), cut.n_ids) if cut.finish_reason and not whole else len(draft.ids)


def _n_lossy(judging: Judging | None, verdict: Verdict, n_kept: int) -> int:
    if judging is None or not judging.judge.lossy:
        return 0
    return max(0, n_kept - verdict.n_exact)


def _rule(request: Request, judging: Judging | None, draft: Draft) -> str:
    if not draft.ids:
        return "draft" if request.alone else "target"
    return "lossless" if judging is None else judging.judge.name
