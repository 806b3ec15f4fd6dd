"""Numbers in a segment's text: which are said, and what its last calculation comes to.

Exact arithmetic on plain and LaTeX notation. It knows no algebra: names, units and words break a calculation off.
Text is data: nothing of it is executed, and powers are bounded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

__all__ = ["Said", "read_numbers"]

MAX_EXPONENT = 64
MAX_BASE = 10**9
MAX_DEPTH = 50  # of brackets and signs in each other

_UNITS = ("two", "three", "four", "five", "six", "seven", "eight", "nine")
_TEENS = (
    "ten",
    "eleven",
    "twelve",
    *(f"{unit}teen" for unit in ("thir", "four", "fif", "six", "seven", "eigh", "nine")),
)
_TENS = tuple(f"{unit}ty" for unit in ("twen", "thir", "for", "fif", "six", "seven", "eigh", "nine"))
_WORDS = {word: number for number, word in enumerate([*_UNITS, *_TEENS], start=2)}
_WORDS |= {word: 10 * number for number, word in enumerate(_TENS, start=2)}
_WORDS |= {
    f"{ten}{dash}{unit}": _WORDS[ten] + number
    for ten in _TENS
    for dash in ("-", " ")
    for number, unit in enumerate(["one", *_UNITS], start=1)
}

_COUNTER = re.compile(r"^[\s#*>]*(?:step\s+)?\d{1,3}\s*[.):](?=[\s*]+\S)", re.IGNORECASE | re.MULTILINE)
_STEP = re.compile(r"\bstep\s+\d{1,3}\b", re.IGNORECASE)
_BULLET = re.compile(r"^[ \t]*[-*•][ \t]+", re.MULTILINE)
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_SIGNS = (
    (re.compile(r"\\times|\\cdot|\\ast|[×·∗✕]|(?<=[\d)])\s*[xX]\s*(?=[\d(])"), "*"),
    (re.compile(r"\\div|÷"), "/"),
    (re.compile(r"[−–]"), "-"),
    (re.compile(r"\\left|\\right|\\boxed|\\[,;!]|\\?[$€£]|\\[()\[\]]|[*]{2}|[{}\[\]]"), " "),
    (re.compile(r"\\approx|\\implies|\\Rightarrow|⇒|→|≈"), "="),
)
_DIGITS = r"\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+"
_SPELT = "|".join(sorted(_WORDS, key=len, reverse=True))
_TOKEN = re.compile(
    rf"(?:(?P<digits>{_DIGITS})|\b(?P<word>{_SPELT})\b)(?P<percent>\s*(?:\\?%|percent\b))?"
    r"|(?P<sign>[-+*/^()=])|[^\W\d_]+|\S|\n",
    re.IGNORECASE,
)


class Said(NamedTuple):
    """What a text says in numbers.

    literal: every number as often as it is written, ascending. evaluated: the same, but two whose quotient is written
    (3/4) are that quotient where it is not whole. result: what the last calculation comes to, else the last number;
    None without numbers. calculates: whether a calculation or an equation is written out.
    """

    literal: tuple[Fraction, ...]
    evaluated: tuple[Fraction, ...]
    result: Fraction | None
    calculates: bool


def read_numbers(text: str) -> Said:
    """The numbers of `text`: 1,200 and 3.50, 20 % and 1/5, \\frac{3}{4}, two to ninety-nine in words.

    Left out are list counters (`2.`, `Step 3:`) and, in words, `one`, which is seldom a number. Not read: ordinals,
    `half`, `twice`, numbers above ninety-nine in words, words of other languages. A sign belongs to the result only.
    """
    tokens = _tokens(_plain(text))
    literal = tuple(sorted(token for token in tokens if isinstance(token, Fraction)))
    if not literal:
        return Said((), (), None, False)
    calculates = any(token in ("+", "-", "*", "/", "^", "=") for token in tokens)
    return Said(literal, tuple(sorted(_evaluated(tokens))), _result(tokens), calculates)


def _plain(text: str) -> str:
    """Without counters and bullets, in one notation."""
    text = _STEP.sub(" ", _COUNTER.sub("\n", text)).replace("{,}", ",")
    text = _FRACTION.sub(_slashed, _BULLET.sub("", text))
    for pattern, sign in _SIGNS:
        text = pattern.sub(f" {sign} ", text)
    return text


def _slashed(fraction: re.Match[str]) -> str:
    above, below = fraction[1].strip(), fraction[2].strip()
    simple = above.isdecimal() and below.isdecimal()
    return f" {above}/{below} " if simple else f" (({above})/({below})) "


def _tokens(text: str) -> list[Fraction | str]:
    """Numbers, signs, and "" for anything else."""
    found: list[Fraction | str] = []
    for match in _TOKEN.finditer(text):
        if match["digits"] or match["word"]:
            # By way of Decimal, since int() refuses thousands of digits.
            number = (
                Decimal(match["digits"].replace(",", ""))
                if match["digits"]
                else _WORDS[match["word"].lower()]
            )
            found.append(Fraction(number) / (100 if match["percent"] else 1))
        else:
            found.append(match["sign"] or "")
    return found


def _evaluated(tokens: Sequence[Fraction | str]) -> list[Fraction]:
    found, place = list[Fraction](), 0
    while place < len(tokens):
        match tokens[place : place + 3]:
            case [Fraction() as one, "/", Fraction() as other] if other and (one / other).denominator > 1:
                found.append(one / other)
                place += 3
            case [Fraction() as one, *_]:
                found.append(one)
                place += 1
            case _:
                place += 1
    return found


def _result(tokens: Sequence[Fraction | str]) -> Fraction:
    """There is a number among the tokens."""
    end, last = max((place, token) for place, token in enumerate(tokens) if isinstance(token, Fraction))
    while tokens[end + 1 : end + 2] == [")"]:
        end += 1
    start = end
    while start > 0 and tokens[start - 1] not in ("", "="):
        start -= 1
    for first in range(start, end):  # past an unmatched bracket, or what was written before without a break
        value = _Calculation(tokens[first : end + 1]).value()
        if value is not None:
            return value
    return last


class _Calculation:
    """One side of an equation, read from left to right with the usual precedence."""

    def __init__(self, tokens: Sequence[Fraction | str]) -> None:
        self.tokens, self.place, self.depth = tokens, 0, 0

    def value(self) -> Fraction | None:
        """None where the tokens are not one whole calculation, divide by zero, or leave the bounds."""
        try:
            found = self._sum()
        except (ValueError, ZeroDivisionError):
            return None
        return found if self.place == len(self.tokens) else None

    def _take(self, *signs: str) -> str:
        """The next token if it is one of `signs`, else ""."""
        if self.place < len(self.tokens):
            token = self.tokens[self.place]
            if isinstance(token, str) and token in signs:
                self.place += 1
                return token
        return ""

    def _sum(self) -> Fraction:
        found = self._product()
        while sign := self._take("+", "-"):
            other = self._product()
            found = found + other if sign == "+" else found - other
        return found

    def _product(self) -> Fraction:
        found = self._signed()
        while sign := self._take("*", "/"):
            other = self._signed()
            found = found * other if sign == "*" else found / other
        return found

    def _signed(self) -> Fraction:
        if sign := self._take("+", "-"):
            self._deeper()
            found = self._signed()
            self.depth -= 1
            return -found if sign == "-" else found
        return self._power()

    def _power(self) -> Fraction:
        base = self._operand()
        if not self._take("^"):
            return base
        exponent = self._signed()
        sizes = abs(base.numerator), base.denominator
        if exponent.denominator > 1 or abs(exponent) > MAX_EXPONENT or max(sizes) > MAX_BASE:
            raise ValueError("beyond the bounds")
        return Fraction(base ** int(exponent))

    def _operand(self) -> Fraction:
        if self._take("("):
            self._deeper()
            found = self._sum()
            self.depth -= 1
            if not self._take(")"):
                raise ValueError("an open bracket")
            return found
        token = self.tokens[self.place] if self.place < len(self.tokens) else ""
        if not isinstance(token, Fraction):
            raise ValueError("no number")
        self.place += 1
        return token

    def _deeper(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ValueError("too deep")
