"""Which boundary a bundle gets: the one that was asked for, or the one that suits the target's tokenizer."""

from __future__ import annotations

from dataclasses import replace

from semspec.runtime.errors import ConfigError
from semspec.runtime.segments import Boundary, parse_boundary
from semspec.runtime.tokenizer import Tokenizer

__all__ = ["fit_boundary"]


def fit_boundary(asked: Boundary | None, cap: int | None, tokenizer: Tokenizer) -> Boundary:
    """asked: None for blank lines, 1 to 500 tokens, where the model reasons before it answers, lines of 12 to 64 where
    it does not. cap: another than the rule's; its least length shrinks to fit.

    Raises ConfigError for a cap below 1 and for ids that the tokenizer does not have.
    """
    boundary = asked or parse_boundary("blank-line" if tokenizer.reasons else "newline")
    if cap is not None:
        boundary = replace(boundary, max_tokens=cap, min_tokens=min(boundary.min_tokens, max(cap, 1)))
    if boundary.ids and boundary.ids[-1] >= tokenizer.vocab_size:
        raise ConfigError(
            f"boundary id {boundary.ids[-1]} is not in the tokenizer, whose ids are 0..{tokenizer.vocab_size - 1}"
        )
    return boundary
