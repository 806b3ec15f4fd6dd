"""Judges: rules from outside that say how much of a draft is kept, and whose turn it is where they judge segments.

The extension point of mode `judged`, as processors are that of sampling. It knows what a judge must be and what it
may say; it knows no judge.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol, runtime_checkable

import numpy as np

from semspec.runtime.errors import ConfigError
from semspec.runtime.features import SegmentText
from semspec.runtime.records import Draft, Verdict
from semspec.runtime.review import Review
from semspec.runtime.segments import Segment, Segmenter

__all__ = ["Judge", "Judging", "Turns", "check_judge", "decision_rng", "pass_judgement"]


@runtime_checkable
class Judge(Protocol):
    """Says how much of a draft is kept. One judge may serve many requests, one after the other."""

    @property
    def name(self) -> str:
        """What steps call it."""
        ...

    @property
    def lossy(self) -> bool:
        """Whether the tokens it keeps need not follow the target's own law."""
        ...

    @property
    def segments(self) -> bool:
        """True: drafts are segments, the target writes the first one. False: drafts are a number of tokens."""
        ...

    def judge(self, review: Review, rng: np.random.Generator) -> Verdict:
        """Its word on one draft of at least one token.

        rng: its own numbers, the same for the same seed and prompt whatever tokens were drawn in between, so that
        two rules meet the same chances. Tokens drawn from laws of `review.p` may use it too.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Judging:
    """A judge at work on one request.

    rng: the judge's numbers. whole_only: a draft that stopped before its segment's end is left to the exact rule, and
    the rest of the segment to the target. exact_inside: what the target writes itself is drafted too, token by token,
    and judged by the exact rule. closing: an id that ends the thoughts; from the first one on the target writes all.
    few_rows: the judge reads none of the target's logits, so only those are computed that tokens may be drawn from.
    bonus: a token of the target's stands behind the last segment of a round if it is kept. max_segments: most segments
    of a draft, which are judged in turn up to the first that is not kept whole. layers: states (Forward.hidden) that
    the judge's pooled ones are of where a draft has several; none where it reads none. describe: context and segment ->
    what the segment says, where the judge asks.
    """

    judge: Judge
    segmenter: Segmenter
    rng: np.random.Generator
    whole_only: bool = False
    exact_inside: bool = False
    closing: int | None = None
    few_rows: bool = False
    bonus: bool = False
    max_segments: int = 1
    layers: tuple[int, ...] = ()
    describe: Callable[[Sequence[int], Sequence[int]], SegmentText] | None = None


class Turns:
    """Who writes next. The target: all of it without a drafter, its first segment where segments are judged, a
    segment that the judge leaves to it, one where the drafter has nothing to say, and what follows the thoughts."""

    def __init__(self, judging: Judging | None) -> None:
        self._judging = judging
        self._own: Segment | None = None
        self._to_end = False
        if judging is not None and judging.judge.segments:
            self._own = judging.segmenter.begin()

    @property
    def target_writes(self) -> bool:
        """No draft is to be judged now, but by the exact rule."""
        return self._to_end or self._own is not None

    @property
    def silent(self) -> bool:
        """Nothing is to be drafted now."""
        return self._judging is not None and self.target_writes and not self._judging.exact_inside

    def segment(self) -> Segment | None:
        """A segment for a draft to go on with, to be written on at will; None where drafts have no such end."""
        if self._judging is None or self._to_end or not self._judging.judge.segments:
            return None
        return self._judging.segmenter.begin() if self._own is None else copy.copy(self._own)

    @property
    def n_segments(self) -> int:
        """Most segments of a draft now; what the target writes itself ends with one."""
        return 1 if self._judging is None or self.target_writes else self._judging.max_segments

    def judging(self, draft: Draft) -> Judging | None:
        """Who judges the draft, which is in one piece; None: the exact rule, and where there is no draft."""
        judging = self._judging
        if judging is None or self.target_writes or not draft.ids:
            return None
        return judging if draft.whole or not judging.whole_only else None

    def take(self, ids: Sequence[int], *, judged: bool, verdict: Verdict) -> None:
        """A round committed `ids`. judged: by the judge. What it was not asked about the target goes on with."""
        if self._judging is None:
            return
        self._to_end |= verdict.to_end or self._judging.closing in ids
        left_over = self._judging.judge.segments and not judged
        if self._own is None and (verdict.target_writes or left_over):
            self._own = self._judging.segmenter.begin()
        if self._own is not None and any(self._own.push(token) for token in ids):
            self._own = None


def pass_judgement(judging: Judging, review: Review) -> Verdict:
    """The judge's verdict, checked. Raises ConfigError, by its name, for one that cannot be carried out."""
    name, verdict, n = judging.judge.name, judging.judge.judge(review, judging.rng), len(review.ids)
    if not 0 <= verdict.keep <= n:
        raise ConfigError(
            f"judge {name!r} keeps {verdict.keep} of {n} drafted tokens; keep must be in 0..{n}"
        )
    if not 0 <= verdict.n_exact <= verdict.keep:
        raise ConfigError(
            f"judge {name!r} calls {verdict.n_exact} of {verdict.keep} kept tokens exact; n_exact must be in "
            f"0..{verdict.keep}"
        )
    n_ids = review.rows.n_ids
    if verdict.extra is not None and not 0 <= verdict.extra < n_ids:
        raise ConfigError(f"judge {name!r} adds id {verdict.extra}; ids are 0..{n_ids - 1}")
    if verdict.keep == 0 and verdict.extra is None and not verdict.target_writes:
        raise ConfigError(
            f"judge {name!r} keeps nothing and adds nothing, so the text would not grow; give an extra token or "
            f"target_writes=True"
        )
    return verdict


def check_judge(judge: object, mode: str) -> None:
    """Refuse a judge that is none, or that mode `mode` has no use for, and that mode `judged` without one.

    Raises ConfigError.
    """
    if judge is None:
        if mode == "judged":
            raise ConfigError("mode 'judged' needs a judge: give judge=..., or use mode 'lossless'")
        return
    if mode != "judged":
        raise ConfigError(
            f"mode {mode!r} asks no judge; use SpecConfig(mode='judged'), or leave the judge out"
        )
    missing = [name for name in ("name", "lossy", "segments") if not hasattr(judge, name)]
    missing += [] if callable(getattr(judge, "judge", None)) else ["judge(review, rng)"]
    if missing:
        raise ConfigError(
            f"judge {type(judge).__name__} has no {missing[0]}; it needs name, lossy, segments and "
            f"judge(review, rng)"
        )


def decision_rng(seed: int | None, prompt: Sequence[int]) -> np.random.Generator:
    """A judge's numbers: others for every prompt, or the first decisions of all answers would fall the same way."""
    if seed is None:
        return np.random.default_rng()
    text = sha256(np.asarray(prompt, np.int64).tobytes()).digest()
    return np.random.default_rng([seed, *np.frombuffer(text, np.uint32)])
