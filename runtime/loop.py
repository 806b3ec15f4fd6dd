"""The decoding loop: one request, token ids in, a generator of Step out. Knows no engine and no tokenizer.

    propose -> review (one pass of the target over pending and draft) -> verdict -> commit, rewind, yield

Invariant after every step: the target remembers every committed token but the pending one, the last, which the
next pass reads first; a drafter's model remembers a prefix of them. Without a drafter a round is one token: plain
decoding is the same loop with empty drafts. So is a segment that the target writes itself where a judge looks at
segments (judging.py); its first token comes from the pass that reviewed the draft it replaces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from semspec.runtime.acceptance import Rule, accept_tokens
from semspec.runtime.chooser import Chooser
from semspec.runtime.drafting import Drafter
from semspec.runtime.errors import ConfigError
from semspec.runtime.judging import Judging, Turns, pass_judgement
from semspec.runtime.model import LanguageModel, common_prefix
from semspec.runtime.records import Draft, Floats, Step, Verdict
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
        draft = EMPTY if turns.target_writes else _propose(target, request)
        with request.ledger.time("draft" if request.alone else "target"):
            found = target.forward([pending, *draft.ids], rows=range(len(draft.ids) + 1))
        laws = TargetLaws(request.chooser, found.logits, draft.ids, request.watch.stop_ids)
        verdict = _judge(target, request, draft, laws)
        with request.ledger.time("sampling"):
            step = _commit(target, request, draft, verdict, laws.logits)
        turns.take(step.ids, drafted=bool(draft.ids), target_writes=verdict.target_writes)
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


def _propose(target: LanguageModel, request: Request) -> Draft:
    """A draft that neither max_tokens nor the context cuts short."""
    limit = _limit(target, request)
    if request.drafter is None or limit <= 0:
        return EMPTY
    with request.ledger.time("draft"):
        draft = request.drafter.propose(limit, request.rng)
    # whoever proposes more than was asked for is heard as far as there is room, and never beyond a stop or a segment
    ids = draft.ids[:limit]
    if request.judging is not None and request.judging.judge.segments:
        n = request.judging.segmenter.length(ids) or len(ids)
    else:
        n = next((n for n, token in enumerate(ids, 1) if token in request.watch.stop_ids), len(ids))
    return Draft(ids=ids[:n], laws=draft.laws[:n])


def _limit(target: LanguageModel, request: Request) -> int:
    """Most tokens of a draft: its review reads the pending one too and, but for segments, ends with one more."""
    room, left = target.max_context - target.length - 1, request.watch.left
    if request.judging is not None and request.judging.judge.segments:
        return min(request.judging.segmenter.boundary.max_tokens, left, room)
    return min(request.num_draft_tokens, left - 1, room)


def _judge(target: LanguageModel, request: Request, draft: Draft, laws: TargetLaws) -> Verdict:
    """What is kept of a draft and which token follows it."""
    judging = request.judging if draft.ids else None
    if judging is None:
        with request.ledger.time("sampling"):
            verdict = request.rule(draft.ids, draft.laws, laws, request.rng)
    else:
        with request.ledger.time("judge"):
            verdict = pass_judgement(judging, Review(draft, laws, target, request.ledger))
        if verdict.target_writes and verdict.extra is None:
            verdict = replace(verdict, extra=sample(laws[verdict.keep], request.rng))
        if judging.judge.segments:
            request.ledger.add_segment(kept=verdict.keep == len(draft.ids))
    laws.close()
    return verdict


def _commit(target: LanguageModel, request: Request, draft: Draft, verdict: Verdict, logits: Floats) -> Step:
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
    step = Step(
        ids=ids,
        text=cut.text,
        n_from_draft=len(ids) if request.alone else n_kept,
        n_lossy=_n_lossy(request, verdict, ids),
        rule=_rule(request, draft),
        finish_reason=cut.finish_reason,
        logprobs=log_probabilities(logits, ids) if request.logprobs else (),
    )
    request.ledger.add_round(
        drafted=_looked_at(request, draft, verdict, cut),
        accepted=n_kept,
        emitted=len(ids),
        lossy=step.n_lossy,
        passes=0 if request.alone else 1,
    )
    return step


def _looked_at(request: Request, draft: Draft, verdict: Verdict, cut: Cut) -> int:
    """Tokens of a draft that count as judged: those behind a stop do not; a segment thrown away does as a whole."""
    whole = request.judging is not None and request.judging.judge.segments and cut.n_ids > verdict.keep
    return min(len(draft.ids), cut.n_ids) if cut.finish_reason and not whole else len(draft.ids)


def _n_lossy(request: Request, verdict: Verdict, ids: Sequence[int]) -> int:
    if request.alone:
        return len(ids)
    if request.judging is None or not request.judging.judge.lossy:
        return 0
    return max(0, min(verdict.keep, len(ids)) - verdict.n_exact)


def _rule(request: Request, draft: Draft) -> str:
    if not draft.ids:
        return "draft" if request.alone else "target"
    return "lossless" if request.judging is None else request.judging.judge.name
