"""The decoding loop: one request, token ids in, a generator of Step out. Knows no text and no engine.

Invariant after every step: the target remembers every committed token but the pending one, the last, which
the next pass reads first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from semspec.runtime.config import SamplingParams
from semspec.runtime.errors import ConfigError
from semspec.runtime.model import LanguageModel
from semspec.runtime.records import Floats, Step
from semspec.runtime.sampling import greedy, sample, warp
from semspec.runtime.stats import Ledger

__all__ = ["decode_autoregressive"]


def decode_autoregressive(
    target: LanguageModel,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    vocab_size: int,
    end_ids: Collection[int],
    ledger: Ledger,
) -> Iterator[Step]:
    """The target alone, one token a step. The last step says why it is the last.

    prompt: at least one id. vocab_size: ids the tokenizer knows; logits beyond are padding and never drawn.
    end_ids: end the answer, and are its last id. Not guaranteed: the same tokens on other engines or
    processors. Raises ConfigError for an empty prompt or one that fills the context.
    """
    if not 1 <= len(prompt) <= target.max_context:
        raise ConfigError(
            f"the prompt has {len(prompt)} tokens; this model reads 1 to {target.max_context} (--max-context at export)"
        )
    rng = np.random.default_rng(params.seed)
    target.rewind(0)
    ledger.add_prompt(len(prompt))
    with ledger.time("prefill"):
        if len(prompt) > 1:
            target.forward(prompt[:-1], rows=())
    pending, n_written = prompt[-1], 0
    while True:
        with ledger.time("target"):
            logits = target.forward([pending]).logits[0]
        with ledger.time("sampling"):
            pending = _choose(logits[:vocab_size], params, rng)
        n_written += 1
        ledger.add_generated(1)
        reason = _finish_reason(pending, n_written, params, end_ids, full=target.length == target.max_context)
        yield Step(ids=(pending,), finish_reason=reason)
        if reason:
            return


def _choose(logits: Floats, params: SamplingParams, rng: np.random.Generator) -> int:
    return greedy(logits) if params.greedy else sample(warp(logits, params), rng)


def _finish_reason(
    token: int, n_written: int, params: SamplingParams, end_ids: Collection[int], *, full: bool
) -> str | None:
    """`stop` for an end id, `length` at max_tokens or when the context cannot take the token; else None."""
    if token in params.stop_token_ids or (token in end_ids and not params.ignore_eos):
        return "stop"
    return "length" if full or n_written >= params.max_tokens else None
