"""Features: numbers that a predictor may read beside states, from the signals of a pass and from a segment's text.

One definition for both who train and who decode. It knows no model and no predictor; text is data, looked at with
simple patterns that any language's digits and LaTeX pass through.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from semspec.runtime.errors import ConfigError
from semspec.runtime.readings import Signals
from semspec.runtime.records import Floats
from semspec.runtime.segments import Segmenter
from semspec.runtime.tokenizer import Tokenizer

__all__ = ["ENDS", "FEATURES", "SegmentText", "check_features", "feature_values", "segment_text"]

ENDS = ("boundary", "stop", "cap")


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentText:
    """What a segment says. before: all the text it follows, the prompt's included. Both without control tokens.

    ended: by its `boundary`, by a `stop` token, or at the `cap` (or wherever else it was cut).
    Raises ConfigError for another end and for no tokens.
    """

    text: str
    before: str
    n_tokens: int
    ended: str

    def __post_init__(self) -> None:
        if self.ended not in ENDS:
            raise ConfigError(f"a segment ends by one of {', '.join(ENDS)}, got {self.ended!r}")
        if self.n_tokens < 1:
            raise ConfigError(f"a segment has at least 1 token, got {self.n_tokens}")


def segment_text(
    tokenizer: Tokenizer, context: Sequence[int], ids: Sequence[int], segmenter: Segmenter
) -> SegmentText:
    """`ids` (n,), n at least 1, after `context`, the pending token included. Reads the whole context: microseconds a
    token. One that is as long as the cap has ended there, whatever its last token is."""
    stream = tokenizer.stream()
    before = stream.push(context)
    text = stream.push(ids) + stream.finish()
    if ids[-1] in segmenter.stop_ids:
        ended = "stop"
    elif len(ids) >= segmenter.boundary.max_tokens:
        ended = "cap"
    else:
        ended = "boundary"
    return SegmentText(text=text, before=before, n_tokens=len(ids), ended=ended)


def feature_values(
    names: Sequence[str],
    *,
    target: Signals | None = None,
    draft: Signals | None = None,
    segment: SegmentText | None = None,
) -> Floats:
    """(F,) fp32, in the order of `names`, some of FEATURES. target, draft: each model's signals of the segment.

    Counts enter as log(1 + count); what is true or false as 1 or 0. Raises ConfigError for an unknown name, and for
    one whose reading is not given.
    """
    check_features(names)
    given: dict[str, Signals | SegmentText | None] = {"target": target, "draft": draft, "text": segment}
    values = np.empty(len(names), np.float32)
    for place, name in enumerate(names):
        kind, _, what = name.partition(".")
        reading = given[kind]
        if reading is None:
            needed = "the segment's text" if kind == "text" else f"the {kind}'s signals"
            raise ConfigError(f"feature {name!r} needs {needed}, which were not read")
        values[place] = (
            _TEXT[what](reading) if isinstance(reading, SegmentText) else float(getattr(reading, what))
        )
    return values


def check_features(names: Sequence[str]) -> None:
    """Raises ConfigError for a name that is not one of FEATURES, or is there twice."""
    for name in names:
        if name not in FEATURES:
            raise ConfigError(f"there is no feature {name!r}; known: {', '.join(FEATURES)}")
    if len(set(names)) != len(names):
        raise ConfigError(f"features must differ, got {', '.join(names)}")


_COUNTER = re.compile(r"(?<=\n)([ \t>*#]*(?:step[ \t]+)?)\d{1,3}[ \t]*[.):](?=[\s*])", re.IGNORECASE)
_ITEM = re.compile(
    r"\n[ \t>]*(?:[-*•+][ \t]|#|(?:\*\*)?(?:step[ \t]+)?\d{1,3}[ \t]*[.):][\s*])", re.IGNORECASE
)
_NUMBER = re.compile(r"\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|(?<!\d)\.\d+")
_LATEX = re.compile(r"\\[A-Za-z([]|\$")
_WORD = re.compile(r"(?<!\\)\b[^\W\d_]+")
_OPERATOR = re.compile(
    r"\\(?:times|cdot|div|[dt]?frac|pm|sqrt)(?![A-Za-z])|[×÷·−^]"
    r"|(?<=[\d)}\]])[ \t]?[-+*/][ \t]?(?=[\d(\\$€£A-Za-z])"
)


def _numbers(text: str) -> set[str]:
    """Numbers as they are worth: 1,200.50 and 1200.5 are one; counters of lists are none."""
    return {_plain(found) for found in _NUMBER.findall(_COUNTER.sub(r"\1", text))}


def _plain(number: str) -> str:
    whole, _, part = number.replace(",", "").partition(".")
    return f"{whole.lstrip('0') or '0'}.{part.rstrip('0')}".rstrip(".")


def _lines(segment: SegmentText) -> str:
    """The text, a newline in front of it where it begins a line."""
    begins = not segment.before or segment.before.endswith("\n")
    return f"\n{segment.text}" if begins else segment.text


def _distinct(segment: SegmentText) -> set[str]:
    return _numbers(_lines(segment))


def _new(segment: SegmentText) -> set[str]:
    found = _distinct(segment)
    return found - _numbers(f"\n{segment.before}") if found else found


_TEXT: Mapping[str, Callable[[SegmentText], float]] = {
    "no_number": lambda segment: float(not _distinct(segment)),
    "numbers": lambda segment: math.log1p(len(_distinct(segment))),
    "new_numbers": lambda segment: math.log1p(len(_new(segment))),
    "equals": lambda segment: float("=" in segment.text),
    "latex": lambda segment: float(_LATEX.search(segment.text) is not None),
    "log_length": lambda segment: math.log(segment.n_tokens),
    "boxed": lambda segment: float("\\boxed" in segment.text),
    "words": lambda segment: math.log1p(len(_WORD.findall(segment.text))),
    "stop": lambda segment: float(segment.ended == "stop"),
    "list_item": lambda segment: float(_ITEM.search(_lines(segment)) is not None),
    "colon": lambda segment: float(segment.text.rstrip().rstrip("*").endswith(":")),
    "operators": lambda segment: math.log1p(len(_OPERATOR.findall(segment.text))),
    "capped": lambda segment: float(segment.ended == "cap"),
}

FEATURES: tuple[str, ...] = (
    *(f"{role}.{field.name}" for role in ("target", "draft") for field in fields(Signals)),
    *(f"text.{name}" for name in _TEXT),
)
"""Every feature there is: `target.*` and `draft.*` are Signals' fields, `text.*` are of SegmentText."""
