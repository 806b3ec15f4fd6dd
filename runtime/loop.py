"""The decoding loop: one request, token ids in, a generator of Step out. Knows no engine and no tokenizer.

    propose -> review (one pass of the target over pending and draft) -> verdict -> commit, rewind, yield

Invariant after every round: the target remembers every committed token but the pending one, the last, which the
next pass reads first; a drafter's model remembers a prefix of them. A round is a step, but where a judge looks at a
draft of several segments: these are judged in order, up to the first that is not kept whole, and each is a step.
Between two of them both models remember the rest of the draft too, and the drafter was not told yet.

Without a drafter a round is one token: plain decoding is the same loop with empty drafts. So is a segment that the
target writes itself where a judge looks at segments (judging.py), unless it is drafted token by token inside; its first
token comes from the pass that reviewed the draft it replaces.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from semspec.runtime.acceptance import Rule, accept_tokens
from semspec.runtime.chooser import Chooser
from semspec.runtime.drafting import Drafter
from semspec.runtime.errors import ConfigError
from semspec.runtime.judging import Judging, Turns, pass_judgement
from semspec.runtime.model import LanguageModel, common_prefix
from semspec.runtime.records import Draft, Judged, Law, Step, Verdict
from semspec.runtime.review import Review, TargetLaws
from semspec.runtime.rows import Rows
from semspec.runtime.sampling import sample
from semspec.runtime.stats import Ledger
from semspec.runtime.stopping import Cut, StopWatch
from semspec.runtime.windows import Window, read_draft

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

    What the target remembers of an earlier text is used as far as the prompt begins with it. The iterator may be left
    after any step: what models remember then is what they have read, and `tokens` says it. Not guaranteed: the same
    tokens on other engines or processors. Raises ConfigError for an empty prompt or one that the context
    does not hold.
    """
    _check_prompt(target, request.prompt)
    _prefill(target, request)
    pending, turns = request.prompt[-1], Turns(request.judging)
    while True:
        step = yield from _round(target, request, turns, pending)
        if step.finish_reason:
            return
        pending = step.ids[-1]


def _round(
    target: LanguageModel, request: Request, turns: Turns, pending: int
) -> Generator[Step, None, Step]:
    """Draft, read, and judge piece by piece, up to the first that is not kept whole; its step is returned too."""
    pieces = _propose(target, request, turns).pieces()
    known, ids = target.length, list[int]()
    with request.ledger.time("draft" if request.alone else "target"):
        judges = [turns.judging(piece) for piece in pieces]
        windows = read_draft(target, pending, pieces, judges, all_rows=request.logprobs)
    for window in windows:
        verdict, rows = _judge(target, request, window)
        with request.ledger.time("sampling"):
            new = window.piece.ids[: verdict.keep] + (() if verdict.extra is None else (verdict.extra,))
            cut = request.watch.push(new, full=known + len(ids) + len(new) == target.max_context)
            new = new[: cut.n_ids]
            for token in new:
                request.chooser.accept(token)
            ids += new
            over = cut.finish_reason is not None or not _goes_on(window, verdict)
            if over:
                target.rewind(known + len(ids))
                if request.drafter is not None:
                    request.drafter.commit(ids)
                    request.ledger.note = request.drafter.note
            step = _step(request, window, verdict, cut, new, rows, over=over)
        turns.take(step.ids, judged=window.judging is not None, verdict=verdict)
        yield step
        if over:
            break
    return step


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
    n_segments = turns.n_segments
    with request.ledger.time("draft"):
        draft = request.drafter.propose(
            limit, request.rng, segment=copy.copy(segment), judged=judged, segments=n_segments
        )
    # whoever proposes more than was asked for is heard as far as there is room, and never beyond a stop or a segment
    ids, ends = draft.ids[:limit], list[int]()
    for n, token in enumerate(ids, 1):
        if segment is not None and segment.push(token):
            ends.append(n)
            segment = segment.following() if len(ends) < n_segments else None
        if token in request.watch.stop_ids or (ends and segment is None):
            ids = ids[:n]
            break
    heard = Draft(ids=ids, laws=draft.laws[: len(ids)], ends=tuple(ends))
    return replace(heard, readings=draft.readings[: common_prefix(draft.cuts, heard.cuts)])


def _limit(target: LanguageModel, request: Request, judged: bool) -> int:
    """Most tokens of a draft: its review reads the pending one too and, but for segments, ends with one more."""
    room, left = target.max_context - target.length - 1, request.watch.left
    if judged and request.judging is not None:
        return min(request.judging.max_segments * request.judging.segmenter.boundary.max_tokens, left, room)
    return min(request.num_draft_tokens, left - 1, room)


def _judge(target: LanguageModel, request: Request, window: Window) -> tuple[Verdict, Rows]:
    """The verdict on a piece that follows what was committed, and the target's rows along it."""
    piece, judging = window.piece, window.judging
    laws = TargetLaws(request.chooser, window.rows, piece.ids, request.watch.stop_ids, places=window.places)
    if judging is not None:
        verdict = _by_judge(target, request, window, judging, laws)
    else:
        verdict = _by_rule(request, piece, laws)
    laws.close()
    return verdict, laws.rows


def _by_rule(request: Request, draft: Draft, laws: TargetLaws) -> Verdict:
    """The exact rule. Where the target's own segment ends with the draft, no token of the next one is drawn."""
    with request.ledger.time("sampling"):
        verdict = request.rule(draft.ids, draft.laws, laws, request.rng)
    return replace(verdict, extra=None) if draft.whole and verdict.keep == len(draft.ids) else verdict


def _by_judge(
    target: LanguageModel, request: Request, window: Window, judging: Judging, laws: TargetLaws
) -> Verdict:
    """What the judge says, and a token of the target's where it is to go on."""

    def exact(ids: Sequence[int], q: Sequence[Law], p: Sequence[Law]) -> Verdict:
        return request.rule(ids, q, p, request.rng)

    n = len(window.piece.ids)
    review = Review(
        window.piece,
        laws,
        target,
        request.ledger,
        states=window.states,
        n_behind=window.n_behind,
        describe=judging.describe,
        exact=exact,
    )
    with request.ledger.time("judge"):
        verdict = pass_judgement(judging, review)
    if judging.judge.segments:
        request.ledger.add_segment(n, kept=verdict.keep == n)
    if _goes_on(window, verdict):
        return replace(verdict, extra=None)
    adds = verdict.target_writes or (judging.bonus and verdict.keep == n)
    if adds and verdict.extra is None:
        verdict = replace(verdict, extra=sample(laws[verdict.keep], request.rng))
    return verdict


def _goes_on(window: Window, verdict: Verdict) -> bool:
    """Whether the next piece of the draft is judged too: there is one, and all of this one is kept."""
    kept = verdict.keep == len(window.piece.ids)
    return window.n_behind > 0 and kept and not (verdict.target_writes or verdict.to_end)


def _step(
    request: Request,
    window: Window,
    verdict: Verdict,
    cut: Cut,
    ids: tuple[int, ...],
    rows: Rows,
    *,
    over: bool,
) -> Step:
    """What was committed of a piece, and counted. over: nothing behind it is looked at any more."""
    judging = window.judging
    n_kept = min(verdict.keep, len(ids))
    n_lossy = len(ids) if request.alone else _n_lossy(judging, verdict, n_kept)
    n_judged = _looked_at(window, verdict, cut)
    in_vain = window.n_behind if over and cut.finish_reason is None else 0
    request.ledger.add_round(
        drafted=n_judged + in_vain,
        accepted=n_kept,
        emitted=len(ids),
        lossy=n_lossy,
        passes=0 if request.alone or window.start else 1,
    )
    ms = request.ledger.lap()
    return Step(
        ids=ids,
        text=cut.text,
        n_from_draft=len(ids) if request.alone else n_kept,
        n_lossy=n_lossy,
        rule=_rule(request, window),
        finish_reason=cut.finish_reason,
        logprobs=_logprobs(rows, ids) if request.logprobs else (),
        judged=None if judging is None else _judged(verdict, n_judged, n_kept, n_lossy, ms),
    )


def _logprobs(rows: Rows, ids: Sequence[int]) -> tuple[float, ...]:
    """Of each id at its place, under the target itself."""
    return tuple(row.logprob(token) for token, row in zip(ids, rows, strict=False))


def _judged(verdict: Verdict, n_judged: int, n_kept: int, n_lossy: int, ms: Mapping[str, float]) -> Judged:
    return Judged(
        n_drafted=n_judged,
        n_kept=n_kept,
        n_lossy=n_lossy,
        reason=verdict.reason,
        figures=verdict.figures,
        ms=ms,
    )


def _looked_at(window: Window, verdict: Verdict, cut: Cut) -> int:
    """Tokens of a piece that count as judged: those behind a stop do not; a segment thrown away does as a whole."""
    n, judging = len(window.piece.ids), window.judging
    whole = judging is not None and judging.judge.segments and cut.n_ids > verdict.keep
    return min(n, cut.n_ids) if cut.finish_reason and not whole else n


def _n_lossy(judging: Judging | None, verdict: Verdict, n_kept: int) -> int:
    if judging is None or not judging.judge.lossy:
        return 0
    return max(0, n_kept - verdict.n_exact)


def _rule(request: Request, window: Window) -> str:
    if not window.piece.ids:
        return "draft" if request.alone else "target"
    return "lossless" if window.judging is None else window.judging.judge.name
