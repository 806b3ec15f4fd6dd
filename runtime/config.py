"""SamplingParams: how the next token is chosen and when to stop. SpecConfig: who drafts. Both valid from birth.

It knows ranges and what each setting does; it knows no model, no tokenizer and no logits (sampling.py).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

from semspec.runtime.errors import ConfigError

__all__ = [
    "ADAPTIVE",
    "DRAFTS",
    "MODES",
    "PRESETS",
    "RATIO_PRESETS",
    "THINKING",
    "SamplingParams",
    "SpecConfig",
]

MODES = ("autoregressive", "lossless", "semantic", "combined", "judged", "draft-alone")
DRAFTS = ("auto", "model", "ngram")
PRESETS = ("calibrated", "paper", "strict")
THINKING = ("exact", "discard", "ignore")
ADAPTIVE = ("off", "confidence", "acceptance")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Settings of one request; every filter is off and decoding is greedy unless asked otherwise.

    Filters apply in the order temperature, top_k, top_p, min_p (sampling.warp). Raises ConfigError for a
    value out of range, TypeError for an unknown setting.

    >>> SamplingParams(temperature=0.6, top_p=0.95, seed=1).greedy
    False
    """

    temperature: float = 0.0
    """Divides the logits. More: more varied; less: closer to the likeliest. 0: greedy, no chance."""

    top_k: int = 0
    """Only the k likeliest ids stay. More: more variety; 1: greedy. 0: off."""

    top_p: float = 1.0
    """The likeliest ids stay until they hold this share of the mass. More: more of the tail; 1: off."""

    min_p: float = 0.0
    """Ids below this share of the likeliest's chance go. More: fewer ids; 1: only the likeliest. 0: off."""

    repetition_penalty: float = 1.0
    """Makes ids of prompt and answer less likely: their logits are divided by it (multiplied where negative).
    More: less repetition; below 1: more. 1: off."""

    presence_penalty: float = 0.0
    """Taken from the logit of every id of the answer. More: newer words; negative: more of the same. 0: off."""

    frequency_penalty: float = 0.0
    """As presence_penalty, but once for each time the id was written. 0: off."""

    seed: int | None = None
    """Same seed, same bundle, same machine: same output. None: other chances at every call."""

    max_tokens: int = 512
    """At most this many new tokens. More: longer answers; the context is the other limit."""

    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the answer beside the model's own end tokens. More ids: earlier ends."""

    stop: tuple[str, ...] = ()
    """Texts that end the answer wherever they appear, across tokens too. The text ends before them; the ids end
    with the token that completed one."""

    logprobs: bool = False
    """True: report each token's log-probability under the target itself, before penalties and temperature."""

    ignore_eos: bool = False
    """True: the model's own end tokens are like any other; only max_tokens and stop_token_ids end it."""

    def __post_init__(self) -> None:
        _number(self, "temperature", 0, math.inf, "use 0 for greedy, about 0.7 for variety")
        _integer(self, "top_k", 0, "use 0 to switch it off")
        _number(self, "top_p", 0, 1, "use 1 to switch it off")
        if self.top_p == 0:
            raise ConfigError("top_p must be above 0 and at most 1, got 0; use temperature=0 for greedy")
        _number(self, "min_p", 0, 1, "use 0 to switch it off")
        if self.seed is not None:
            _integer(self, "seed", 0, "use None for other chances at every call")
        _integer(self, "max_tokens", 1, "leave it out for the default of 512")
        _number(self, "repetition_penalty", 0.01, 100, "use 1 to switch it off")
        for name in ("presence_penalty", "frequency_penalty"):
            _number(self, name, -100, 100, "use 0 to switch it off")
        _token_ids(self, "stop_token_ids")
        _texts(self, "stop")
        for name in ("ignore_eos", "logprobs"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")

    @property
    def greedy(self) -> bool:
        """True when no chance is involved: temperature 0."""
        return self.temperature == 0

    @classmethod
    def from_generation_config(cls, mapping: Mapping[str, Any], **overrides: Any) -> SamplingParams:
        """A model's own defaults (keys as in generation_config.json), then `overrides` by field name.

        do_sample false or absent means greedy, as in transformers, unless temperature is overridden; a filter
        that is absent or null is off. End tokens are not read here: they belong to the bundle. Settings that
        would change the output but that semspec does not have (beams, typical_p, ...) are named in a
        logged warning. Raises ConfigError for a value out of range, TypeError for an unknown override.
        """
        given = {key: value for key, value in mapping.items() if value is not None}
        unmet = {key: given[key] for key, off in _UNMET.items() if given.get(key, off) != off}
        if unmet:
            found = ", ".join(f"{key}={value}" for key, value in unmet.items())
            logger.warning("generation_config asks for %s, which semspec does not apply", found)
        defaults = {field: given[key] for field, key in _MET.items() if key in given}
        defaults["temperature"] = given.get("temperature", 1.0) if given.get("do_sample") else 0.0
        if isinstance(defaults.get("stop"), str):
            defaults["stop"] = (defaults["stop"],)
        return cls(**{**defaults, **overrides})


# Field and the key of a generation_config that sets it, beside temperature. max_length is not read: it counts
# the prompt too.
_MET: Mapping[str, str] = {
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_tokens": "max_new_tokens",
    "repetition_penalty": "repetition_penalty",
    "stop": "stop_strings",
}

# What a generation_config may ask for beyond SamplingParams, with the value that asks for nothing.
_UNMET: Mapping[str, Any] = {
    "bad_words_ids": [],
    "begin_suppress_tokens": [],
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": [],
    "forced_bos_token_id": [],
    "forced_eos_token_id": [],
    "guidance_scale": 1.0,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": 0.0,
    "sequence_bias": [],
    "suppress_tokens": [],
    "typical_p": 1.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecConfig:
    """How tokens are drafted and judged. Raises ConfigError for a value out of range, or that the mode does not use.

    Exact speculation changes the speed, never the answer: `lossless` has the target's law exactly, and for
    temperature 0 its tokens. `semantic` and `combined` keep whole segments of the draft by what they mean, so the
    answer is another one: how far is bounded for a segment, by `risk`, and not for the answer. `judged` promises what
    its judge does, `draft-alone` nothing about the target. Not guaranteed: that it is faster; that depends on the pair
    and the device (Summary tells).
    """

    mode: str = "lossless"
    """`lossless`: drafts are judged by the exact rule. `autoregressive`: the target alone. `semantic`: whole segments
    by the bundle's probes, see `preset`. `combined`: by the exact rule first, by the probes where it stops early.
    `judged`: by the judge given with the request. `draft-alone`: the draft model answers by itself, without the target;
    log-probabilities are its own then."""

    draft: str = "auto"
    """Who drafts: `model`, the bundle's draft; `ngram`, what followed the same words earlier in the text; `auto`,
    the model where there is one, n-grams where there is none. Segments are drafted by the model alone."""

    num_draft_tokens: int = 4
    """Most tokens of a draft. More: fewer target passes where drafts are good, more waste where they are not. Segments
    have the bundle's boundary instead, and this where they are exact inside."""

    block: bool = False
    """True: block verification, which keeps at least as many tokens of a draft on average as token by token."""

    preset: str | None = None
    """Of `semantic`. `calibrated`: a segment is kept where the predictor's score reaches the threshold of `risk`.
    `paper`: with chance min(1, s_T / s_D), as published; what is refused is thrown away. `strict`: where s_T is no less
    than s_D. None: `calibrated`."""

    risk: float | None = None
    """Share of kept segments that may mean what the target would not say, as calibration measured it; `combined` keeps
    lossily only those that the exact rule refuses, which are worse. More: more is kept. 0: exact, as `lossless`. None:
    0.1. Not of presets that have no threshold."""

    ratio_floor: float | None = None
    """Of `paper` and `strict`: a segment with a smaller s_T / s_D is refused. More: less is kept. None: no floor."""

    greedy_accept: bool | None = None
    """Of `paper` and `strict`: True keeps from the ratio 1 on and leaves nothing to chance. None: as the preset."""

    keep_prefix: bool | None = None
    """True: of a segment that is refused the part stays that the exact rule keeps. None: True, but for `paper` and
    `strict`."""

    top2: bool = False
    """True: a segment all of whose tokens are among the target's two likeliest is kept without asking probes. On the
    pilot pair 23 of 100 such segments meant something else."""

    bonus: bool = False
    """True: a kept segment is followed by a token of the target's own, which begins the next one; of several segments
    in one round the last, where all are kept."""

    exact_inside: bool | None = None
    """True: what the target writes itself is drafted token by token and judged by the exact rule. False: plainly. None:
    True, but for `judged`."""

    thinking: str | None = None
    """What the end of a reasoning model's thoughts changes. `exact`: the target writes what follows. `discard`: and a
    draft that ends them is thrown away. `ignore`: nothing. None: `exact`, `discard` for `paper` and `strict`."""

    adaptive: str | None = None
    """When a segment's draft stops before its end, to be judged by the exact rule alone. `confidence`: with a token,
    not the segment's first, of which the draft was unsure: the likeliest one had a chance below `min_confidence`.
    `acceptance`: the sooner, the less of the latest ones was kept. `off`: never. It sets the number of segments too
    (`max_segments`). None: `confidence` for `combined`, whose unsure drafts cost more than they give, else `off`; a
    judge of `judged` is then shown what else cuts drafts short too, such as max_tokens."""

    min_confidence: float = 0.65
    """Of adaptive `confidence`. More: shorter drafts, and fewer lossy tokens; 0: whole ones. The default was chosen on
    six training questions of the 1.5B/0.5B pair (tokens/s of `combined` at risk 0.2: on three 25.7 without and 29.3 at
    0.5, on three others 27.7, 28.8 and 29.3 at 0.5, 0.65 and 0.8), when drafts stopped before the unsure token."""

    max_segments: int = 1
    """Most segments that are drafted before the target looks at them, in one pass; they stay up to the first that is
    not kept whole, and what was drafted behind it was in vain. More: fewer passes where most are kept, more waste where
    they are not. A further one is begun, with adaptive `confidence`, where the draft was sure of every token so far;
    with `acceptance`, while all so far are likely kept; with `off`, always. Above 1, probes that read the target's
    states need a bundle whose target returns these (--hidden-layers)."""

    max_lossy_fraction: float = 1.0
    """Most of an answer, at any moment, that need not follow the target's law. Less: segments are refused that would
    exceed it. 1: no limit."""

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                known = ", ".join(choice for choice in allowed if choice is not None)
                raise ConfigError(f"{name} must be one of {known}, got {getattr(self, name)!r}")
        _integer(self, "num_draft_tokens", 1, "use mode 'autoregressive' to decode without drafts")
        _integer(self, "max_segments", 1, "leave it out for one at a time")
        for name, high in (
            ("risk", 1),
            ("ratio_floor", math.inf),
            ("min_confidence", 1),
            ("max_lossy_fraction", 1),
        ):
            if getattr(self, name) is not None:
                _number(self, name, 0, high, "leave it out for the default")
        for name in ("block", "top2", "bonus", "exact_inside", "greedy_accept", "keep_prefix"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (value is None and name in NULLABLE):
                raise ConfigError(f"{name} must be True or False, got {value!r}")
        self._check_use()

    @property
    def pacing(self) -> str:
        """`adaptive`, where it is left out too."""
        return self.adaptive or ("confidence" if self.mode == "combined" else "off")

    @property
    def inside(self) -> bool:
        """`exact_inside`, where it is left out too."""
        return self.mode != "judged" if self.exact_inside is None else self.exact_inside

    @property
    def semantic(self) -> bool:
        """Whether probes judge segments: a semantic mode with a risk above 0."""
        return self.mode in SEMANTIC and self.risk != 0

    def _check_use(self) -> None:
        """Refuse settings that nothing would look at."""
        changed = {one.name for one in fields(self) if getattr(self, one.name) != one.default}
        if self.mode not in SEMANTIC:
            allowed = EXACT_SETTINGS | (DRAFTED_SEGMENTS if self.mode == "judged" else set())
            if unused := sorted(changed - allowed):
                raise ConfigError(
                    f"{unused[0]} belongs to the modes semantic and combined, not to {self.mode!r}; leave it out"
                )
            if "min_confidence" in changed and self.pacing != "confidence":
                raise ConfigError(f"min_confidence is not used by adaptive {self.pacing!r}; leave it out")
            return
        by_ratio = self.preset in RATIO_PRESETS
        unused = [] if by_ratio else ["ratio_floor", "greedy_accept"]
        unused += ["risk"] if by_ratio else []
        unused += [] if self.pacing == "confidence" else ["min_confidence"]
        unused += ["preset", "keep_prefix", "top2"] if self.mode == "combined" else []
        for name in unused:
            if name in changed:
                raise ConfigError(
                    f"{name} is not used by mode {self.mode!r} with preset {self.preset or 'calibrated'!r} and "
                    f"adaptive {self.pacing!r}; leave it out"
                )
        if self.draft == "ngram":
            raise ConfigError(f"n-grams draft no segments: mode {self.mode!r} needs draft='model'")


RATIO_PRESETS = ("paper", "strict")
SEMANTIC = ("semantic", "combined")
EXACT_SETTINGS = frozenset({"mode", "draft", "num_draft_tokens", "block"})
DRAFTED_SEGMENTS = frozenset({"adaptive", "min_confidence", "exact_inside"})
"""Settings of whoever judges segments; of `judged` only where its judge does (requests.py)."""
NULLABLE = frozenset({"exact_inside", "greedy_accept", "keep_prefix"})
CHOICES: Mapping[str, tuple[str | None, ...]] = {
    "mode": MODES,
    "draft": DRAFTS,
    "preset": (None, *PRESETS),
    "thinking": (None, *THINKING),
    "adaptive": (None, *ADAPTIVE),
}


def _number(params: SamplingParams | SpecConfig, name: str, low: float, high: float, repair: str) -> None:
    """Store the field as a float, or refuse what is not a finite number in low..high."""
    value: Any = getattr(params, name)
    allowed = f"at least {low}" if high == math.inf else f"between {low} and {high}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(f"{name} must be a number {allowed}, got {value!r}; {repair}")
    number = float(value)
    if not (math.isfinite(number) and low <= number <= high):
        raise ConfigError(f"{name} must be finite and {allowed}, got {value}; {repair}")
    object.__setattr__(params, name, number)


def _integer(params: SamplingParams | SpecConfig, name: str, low: int, repair: str) -> None:
    """Store the field as an int, or refuse what is not a whole number of at least `low`."""
    value: Any = getattr(params, name)
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < low:
        raise ConfigError(f"{name} must be a whole number of at least {low}, got {value!r}; {repair}")
    object.__setattr__(params, name, int(value))


def _token_ids(params: SamplingParams, name: str) -> None:
    """Store the field as a tuple of ints, or refuse what is not a tuple (or list) of token ids."""
    value: Any = getattr(params, name)
    if not isinstance(value, tuple | list) or not all(
        isinstance(item, Integral) and not isinstance(item, bool) and int(item) >= 0 for item in value
    ):
        raise ConfigError(
            f"{name} must be a tuple of token ids of at least 0, got {value!r}; write for example (2,)"
        )
    object.__setattr__(params, name, tuple(int(item) for item in value))


def _texts(params: SamplingParams, name: str) -> None:
    """Store the field as a tuple of texts, or refuse what is not a tuple (or list) of texts that say something."""
    value: Any = getattr(params, name)
    if not isinstance(value, tuple | list) or not all(isinstance(item, str) and item for item in value):
        raise ConfigError(
            f"{name} must be a tuple of texts that are not empty, got {value!r}; write for example ('END',)"
        )
    object.__setattr__(params, name, tuple(value))
