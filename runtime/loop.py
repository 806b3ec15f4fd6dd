"""The decoding loop: one request, token ids in, a generator of Step out. Knows no engine and no tokenizer.

    propose -> review (one pass of the target over pending and draft) -> verdict -> commit, rewind, yield

Invariant after every step: the target remembers every committed token but the pending one, the last, which the
next pass reads first; a drafter's model remembers a prefix of them. Without a drafter a round is one token: plain
decoding is the same loop with empty drafts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from semspec.runtime.acceptance import Rule, accept_tokens
from semspec.runtime.chooser import Chooser
from semspec.runtime.drafting import Drafter
from semspec.runtime.errors import ConfigError
from semspec.runtime.model import LanguageModel, common_prefix
from semspec.runtime.records import Draft, Floats, Law, Step
from semspec.runtime.stats import Ledger
from semspec.runtime.stopping import StopWatch

__all__ = ["Request", "decode"]

EMPTY = Draft(ids=(), laws=())
CUT_OFF = Law(ids=np.zeros(1, np.int64), probs=np.ones(1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request on its way: the prompt, and the objects that follow its text.

    drafter None, or num_draft_tokens 0: plain decoding. logprobs: also report each token's log-probability.
    """

    prompt: Sequence[int]
    chooser: Chooser
    watch: StopWatch
    ledger: Ledger
    rng: np.random.Generator
    drafter: Drafter | None = None
    num_draft_tokens: int = 0
    rule: Rule = accept_tokens
    logprobs: bool = False


def decode(target: LanguageModel, request: Request) -> Iterator[Step]:
    """Decode to the end of the answer; the last step says why it is the last.

    What the target remembers of an earlier text is used as far as the prompt begins with it. Not guaranteed: the
    same tokens on other engines or processors. Raises ConfigError for an empty prompt or one that the context
    does not hold.
    """
    _check_prompt(target, request.prompt)
    _prefill(target, request)
    pending = request.prompt[-1]
    while True:
        draft = _propose(target, request)
        with request.ledger.time("target"):
            found = target.forward([pending, *draft.ids], rows=range(len(draft.ids) + 1))
        with request.ledger.time("sampling"):
            step = _judge(target, request, draft, found.logits)
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
    """A draft that neither max_tokens nor the context cuts short: its review ends with one token of the target's."""
    if request.drafter is None:
        return EMPTY
    limit = min(request.num_draft_tokens, request.watch.left - 1, target.max_context - target.length - 1)
    if limit <= 0:
        return EMPTY
    with request.ledger.time("draft"):
        draft = request.drafter.propose(limit, request.rng)
    # whoever proposes more than was asked for is heard as far as there is room, and never beyond a stop
    ends = (n for n, token in enumerate(draft.ids[:limit], 1) if token in request.watch.stop_ids)
    n = next(ends, limit)
    return Draft(ids=draft.ids[:n], laws=draft.laws[:n])


def _judge(target: LanguageModel, request: Request, draft: Draft, logits: Floats) -> Step:
    """Apply the rule, cut at a stop, and bring every memory to what was committed."""
    remembered = target.length - len(draft.ids) - 1
    laws = _Laws(request.chooser, logits, draft.ids, request.watch.stop_ids)
    verdict = request.rule(draft.ids, draft.laws, laws, request.rng)
    laws.close()
    ids = (*draft.ids[: verdict.keep], verdict.extra)
    cut = request.watch.push(ids, full=remembered + len(ids) == target.max_context)
    ids = ids[: cut.n_ids]
    target.rewind(remembered + len(ids))
    for token in ids:
        request.chooser.accept(token)
    if request.drafter is not None:
        request.drafter.commit(ids)
        request.ledger.note = request.drafter.note
    n_kept = min(verdict.keep, len(ids))
    # a draft that was cut by a stop counts up to the stop
    looked_at = min(len(draft.ids), len(ids)) if cut.finish_reason else len(draft.ids)
    request.ledger.add_round(drafted=looked_at, accepted=n_kept, emitted=len(ids))
    return Step(
        ids=ids,
        text=cut.text,
        n_from_draft=n_kept,
        finish_reason=cut.finish_reason,
        logprobs=_log_probabilities(request, ids, logits) if request.logprobs else (),
    )


class _Laws(Sequence[Law]):
    """The target's laws along a draft, made when they are read: each with the history of its own place.

    Behind a stop id any law will do, for what is drawn from it is cut off; a grammar that has ended is not asked.
    """

    def __init__(
        self, chooser: Chooser, logits: Floats, ids: Sequence[int], stop_ids: Collection[int]
    ) -> None:
        self._chooser, self._logits, self._ids, self._stop_ids = chooser, logits, ids, stop_ids
        self._made: list[Law] = []
        self._n_told = 0

    def __len__(self) -> int:
        return len(self._ids) + 1

    def __getitem__(self, i: int) -> Law:  # type: ignore[override]
        while len(self._made) <= i:
            self._made.append(self._make(len(self._made)))
        return self._made[i]

    def close(self) -> None:
        """Take back the drafted tokens that the chooser was told about."""
        self._chooser.rollback(self._n_told)

    def _make(self, place: int) -> Law:
        if place:
            token = self._ids[place - 1]
            if token in self._stop_ids:
                return CUT_OFF
            self._chooser.accept(token)
            self._n_told += 1
        return self._chooser.law(self._logits[place])


def _log_probabilities(request: Request, ids: Sequence[int], logits: Floats) -> tuple[float, ...]:
    """Natural log-probabilities of ids under the model itself: before penalties, processors and temperature."""
    found = []
    for token, row in zip(ids, logits[:, : request.chooser.vocab_size], strict=False):
        wide = row.astype(np.float64)
        peak = wide.max()
        found.append(float(wide[token] - peak - np.log(np.exp(wide - peak).sum())))
    return tuple(found)
