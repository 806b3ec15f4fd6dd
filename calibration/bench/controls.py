"""Controls: rules that a better one has to beat on the same engine, and the draft model alone. All of them are lossy.

    random:0.7      a segment is kept by chance; its length does not matter, so 0.7 of the tokens are kept on average
    logprob:-0.15   kept where the target's mean log-probability of its tokens is at least -0.15
    specreason:7    the target is asked to grade the segment 0-9 and it is kept from 7 on (arXiv 2504.07891)
    topk:2:4        drafts of 4 tokens: each is kept while it is among the target's 2 likeliest
    draft-alone     the draft model answers by itself
    combined-random:0.3, combined-logprob:-0.5
                    the exact rule first; where it stops early, as random and logprob say: drafted as in `combined`
    combined-whole-random:0.3, combined-whole-logprob:-0.5
                    the same without stopping where the draft is unsure: as in `combined-whole`

Segments are those of the bundle's boundary. One that is not kept is thrown away, its first tokens too, and the target
writes one in its place: as published, and the same for all of these rules but the combined ones, so that they can be
compared.

It knows names and rules; what they gave is counted elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np

from semspec.calibration.bench.records import Mode
from semspec.runtime.config import SamplingParams, SpecConfig
from semspec.runtime.errors import CalibrationError, ConfigError
from semspec.runtime.judging import Judge
from semspec.runtime.llm import LLM
from semspec.runtime.records import Verdict
from semspec.runtime.review import Review
from semspec.runtime.sampling import log_probabilities, rank, sample
from semspec.runtime.semantic import CombinedJudge
from semspec.runtime.tokenizer import Tokenizer

__all__ = [
    "CONTROLS",
    "AfterExact",
    "AtRandom",
    "ByGrade",
    "ByLogprob",
    "InTopK",
    "Recorder",
    "measure_threshold",
    "parse_control",
    "threshold_for_rate",
]

QUESTION = (
    "\n\nGrade of the last step alone, as a strict teacher gives it, from 0 (wrong) to 9 (certainly right):"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AtRandom:
    """Keeps a segment with chance `rate`, whatever is in it."""

    rate: float
    reason: ClassVar[str] = "random"
    lossy: ClassVar[bool] = True
    segments: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return f"random:{_written(self.rate)}"

    def prepare(self, tokenizer: Tokenizer) -> Judge:
        return self

    def judge(self, review: Review, rng: np.random.Generator) -> Verdict:
        return _whole(review, self.decide(review, rng.random())[0])

    def decide(self, review: Review, chance: float) -> tuple[bool, Mapping[str, float]]:
        """Whether the segment is kept, and the figures. chance: uniform in [0, 1)."""
        return chance < self.rate, {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ByLogprob:
    """Keeps a segment whose mean log-probability under the target itself is at least `least`."""

    least: float
    reason: ClassVar[str] = "log-probability"
    lossy: ClassVar[bool] = True
    segments: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return f"logprob:{_written(self.least)}"

    def prepare(self, tokenizer: Tokenizer) -> Judge:
        return self

    def judge(self, review: Review, rng: np.random.Generator) -> Verdict:
        return _whole(review, self.decide(review, 0.0)[0])

    def decide(self, review: Review, chance: float) -> tuple[bool, Mapping[str, float]]:
        """Whether the segment is kept, and the figures. chance: not used."""
        mean = _mean_logprob(review)
        return mean >= self.least, {"mean_logprob": mean}


@dataclass(frozen=True, slots=True, kw_only=True)
class AfterExact:
    """Asks the exact rule first, and `rule` where that stops early: the judge of mode `combined` with another rule.
    kind: how drafts end, a key of AFTER_EXACT."""

    rule: AtRandom | ByLogprob
    kind: str = "combined"

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.rule.name}"

    def prepare(self, tokenizer: Tokenizer) -> Judge:
        return CombinedJudge(rule=self.rule, name=self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class InTopK:
    """Keeps drafted tokens while they are among the `k` ids that the target itself finds likeliest.

    The first that is not is replaced by one from the target's law, and behind a draft that is kept comes one more. Of
    equally likely ids the lowest counts as likelier, so `k` 1 keeps at temperature 0 what the exact rule keeps.
    """

    k: int
    lossy: ClassVar[bool] = True
    segments: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return f"topk:{self.k}"

    def prepare(self, tokenizer: Tokenizer) -> Judge:
        return self

    def judge(self, review: Review, rng: np.random.Generator) -> Verdict:
        ranks = (rank(row, token) for row, token in zip(review.logits, review.ids, strict=False))
        keep = next((n for n, place in enumerate(ranks) if place >= self.k), len(review.ids))
        return Verdict(keep=keep, extra=sample(review.p[keep], rng))


@dataclass(frozen=True, slots=True, kw_only=True)
class ByGrade:
    """SpecReason's rule: keeps a segment that the target, asked in words, grades `least` or better.

    The grade is the mean of 0..9 under the target's chances of these ten tokens, so it has decimals. The likeliest
    digit alone tells nothing of a small model: Qwen2.5-Coder-1.5B (int4) said 9 to each of 37 segments, with means from
    5.0 to 7.5. So `least` must be chosen for the model; the published 7 is strict for this one.
    """

    least: float

    def prepare(self, tokenizer: Tokenizer) -> Judge:
        """Raises CalibrationError where a digit is not one token."""
        bos = [tokenizer.bos_id]
        asked = [tokenizer.encode(f"{QUESTION} {digit}") for digit in range(10)]
        asked = [ids[1:] if ids[:1] == bos else ids for ids in asked]
        question, digits = asked[0][:-1], tuple(ids[-1] for ids in asked)
        if any(ids[:-1] != question for ids in asked) or len(set(digits)) < 10:
            raise CalibrationError(
                "specreason needs a tokenizer with a token for each digit, and this bundle's has not; leave it out"
            )
        return _Grader(least=self.least, question=tuple(question), digits=digits)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grader:
    """ByGrade in the words of one tokenizer. A segment is not kept where there is no room to ask."""

    least: float
    question: tuple[int, ...]
    digits: tuple[int, ...]
    lossy: ClassVar[bool] = True
    segments: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return f"specreason:{_written(self.least)}"

    def judge(self, review: Review, rng: np.random.Generator) -> Verdict:
        grade = self.grade(review)
        return _whole(review, grade is not None and grade >= self.least)

    def grade(self, review: Review) -> float | None:
        """0..9; None where there is no room to ask."""
        logits = review.ask(self.question)
        if logits is None:
            return None
        chances = np.exp(
            [log_probabilities(logits[None, list(self.digits)], [place])[0] for place in range(10)]
        )
        return float(chances @ np.arange(10))


@dataclass(slots=True)
class Recorder:
    """A judge that does as `inner` says, and notes (mean log-probability, length) of all it was shown."""

    inner: Judge
    seen: list[tuple[float, int]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def lossy(self) -> bool:
        return self.inner.lossy

    @property
    def segments(self) -> bool:
        return self.inner.segments

    def judge(self, review: Review, rng: np.random.Generator) -> Verdict:
        self.seen.append((_mean_logprob(review), len(review.ids)))
        return self.inner.judge(review, rng)


def threshold_for_rate(segments: Sequence[tuple[float, int]], rate: float) -> float:
    """The T with which `logprob:T` keeps a share of these segments' tokens that is nearest to `rate`.

    segments: (mean log-probability, number of tokens) each. T lies in the middle between the lowest that is kept and
    the highest that is not; of two equally near shares the smaller one is taken. Not guaranteed: the same rate on
    other text, and on text that the rule itself has shaped. Raises CalibrationError for no segments and for a rate
    outside 0..1.

    Of 100 tokens 10 are in the likeliest segment, 30 in the next: with both 0.4 are kept.

    >>> threshold_for_rate([(-1.0, 60), (-0.25, 10), (-0.5, 30)], 0.4)
    -0.75
    """
    if not segments or not 0 <= rate <= 1:
        raise CalibrationError(
            f"a threshold takes segments and a rate between 0 and 1, got {len(segments)} segments and {rate}"
        )
    lengths: dict[float, int] = {}
    for value, n in segments:
        lengths[value] = lengths.get(value, 0) + n
    values = sorted(lengths, reverse=True)
    kept = np.cumsum([0, *(lengths[value] for value in values)]) / sum(lengths.values())
    n = int(np.argmin(np.abs(kept - rate)))
    if n == 0:
        return math.nextafter(values[0], math.inf)
    return values[-1] if n == len(values) else (values[n - 1] + values[n]) / 2


def measure_threshold(
    llm: LLM, chats: Sequence[Sequence[Mapping[str, Any]]], sampling: SamplingParams, rate: float
) -> float:
    """threshold_for_rate on the segments that the draft writes in answers to `chats`, which are kept by chance.

    By chance at the same `rate`, so that what stands before a segment is as mixed as it will be. Raises as
    threshold_for_rate and LLM.chat.
    """
    recorder = Recorder(AtRandom(rate=rate))
    for chat in chats:
        llm.chat(chat, sampling, spec=SEGMENTS, judge=recorder)
    return threshold_for_rate(recorder.seen, rate)


def parse_control(name: str) -> Mode | None:
    """The mode of a control's name; None for a name that is none's. Raises ConfigError for a number that is not one."""
    known, *numbers = name.split(":")
    if known not in CONTROLS:
        return None
    try:
        return CONTROLS[known](*numbers)
    except (TypeError, ValueError):
        raise ConfigError(
            f"{name!r} is not a control; written as random:0.7 (0 to 1), logprob:-0.15, combined-random:0.3, "
            f"combined-logprob:-0.5, topk:2 or topk:2:8 (with draft length), specreason or specreason:7 (0 to 9), "
            f"draft-alone"
        ) from None


def _random(rate: str) -> AtRandom:
    return AtRandom(rate=_within(rate, 0, 1))


def _logprob(least: str) -> ByLogprob:
    return ByLogprob(least=_within(least, -math.inf, 0))


def _specreason(least: str = "7") -> Mode:
    value = _within(least, 0, 9)
    return Mode(
        name=f"specreason:{_written(value)}", exact=False, spec=SEGMENTS, control=ByGrade(least=value)
    )


def _topk(k: str, length: str = "4") -> Mode:
    rule, n = InTopK(k=_count(k)), _count(length)
    spec = SpecConfig(mode="judged", draft="model", num_draft_tokens=n)
    return Mode(name=f"{rule.name}:{n}", exact=False, spec=spec, control=rule)


def _draft_alone() -> Mode:
    return Mode(name="draft-alone", exact=False, spec=SpecConfig(mode="draft-alone", draft="model"))


def _after_exact_random(kind: str, rate: str) -> Mode:
    return _after_exact(kind, _random(rate))


def _after_exact_logprob(kind: str, least: str) -> Mode:
    return _after_exact(kind, _logprob(least))


def _after_exact(kind: str, rule: AtRandom | ByLogprob) -> Mode:
    control = AfterExact(rule=rule, kind=kind)
    return Mode(name=control.name, exact=False, spec=AFTER_EXACT[kind], control=control)


def _judged(rule: AtRandom | ByLogprob) -> Mode:
    return Mode(name=rule.name, exact=False, spec=SEGMENTS, control=rule)


def _written(number: float) -> str:
    """As it is read back, without `.0`."""
    return repr(number).removesuffix(".0")


def _within(text: str, low: float, high: float) -> float:
    value = float(text)
    if not (low <= value <= high and math.isfinite(value)):
        raise ValueError
    return value + 0.0  # no minus at 0


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) == 0:
        raise ValueError
    return int(text)


def _whole(review: Review, kept: bool) -> Verdict:
    """All of a segment, or nothing of it and the target's turn."""
    return Verdict(keep=len(review.ids)) if kept else Verdict(keep=0, target_writes=True)


def _mean_logprob(review: Review) -> float:
    return float(np.mean(log_probabilities(review.logits, review.ids)))


SEGMENTS = SpecConfig(mode="judged", draft="model")
AFTER_EXACT: Mapping[str, SpecConfig] = {
    "combined": SpecConfig(mode="judged", draft="model", adaptive="confidence", exact_inside=True),
    "combined-whole": SpecConfig(mode="judged", draft="model", adaptive="off", exact_inside=True),
}
"""How drafts end and who writes the rest, by the semantic mode that it is the same as."""

CONTROLS: Mapping[str, Callable[..., Mode]] = {
    "random": lambda rate: _judged(_random(rate)),
    "logprob": lambda least: _judged(_logprob(least)),
    **{f"{kind}-random": partial(_after_exact_random, kind) for kind in AFTER_EXACT},
    **{f"{kind}-logprob": partial(_after_exact_logprob, kind) for kind in AFTER_EXACT},
    "topk": _topk,
    "specreason": _specreason,
    "draft-alone": _draft_alone,
}
