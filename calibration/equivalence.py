"""When do two segments say the same? Relations between texts, by name; each says what it reads and what it is blind to.

    exact      letters                    numbers    numbers and the last result; words where there are none

Relations see a segment's text alone, not what it follows. Those that read with a neural encoder are in
equivalence_neural.py.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from semspec.calibration.numerals import Said, read_numbers

__all__ = ["LEAST_OVERLAP", "Bools", "Equivalence", "Exact", "Numbers", "Read", "can_be_same", "normalized"]

Bools: TypeAlias = npt.NDArray[np.bool_]

LEAST_OVERLAP = 0.5
"""Of the words of two segments without numbers: shared ones over all."""

_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?")
_LIMITS = "no not never none without cannot more less fewer most least before after greater larger smaller remaining"
_SHARES = "half third quarter twice double triple"
_STEPS = (
    "add added plus sum increase increased subtract subtracted minus difference decrease decreased "
    "multiply multiplied times product divide divided quotient"
)
_TURNING = frozenset(f"{_LIMITS} {_SHARES} {_STEPS}".split())
"""Words that turn the meaning of a step: they must agree however much else is shared."""


class Equivalence(Protocol):
    """A relation between texts: symmetric, true of a text and itself; need not be transitive (cluster.py)."""

    @property
    def name(self) -> str: ...

    def related(self, texts: Sequence[str]) -> Bools:
        """(n, n): which say the same."""
        ...


class Exact:
    """The same letters: Unicode's canonical form, any white space for one space.

    Transitive. Blind to nothing and strict to a fault: another word is another meaning.
    """

    name = "exact"

    def related(self, texts: Sequence[str]) -> Bools:
        """See Equivalence."""
        keys = [normalized(text) for text in texts]
        same = [[one == other for other in keys] for one in keys]
        return np.array(same, np.bool_).reshape(len(keys), len(keys))


class Numbers:
    """Equal numbers, each equally often, and an equal last result (numerals.py); made for steps of a calculation.

    Where neither text calculates anything, words that turn a step's meaning, such as `not`, `more` or `divide`, must
    agree too. Of two texts without numbers also LEAST_OVERLAP of the words are shared; without words either, they are
    the same letters. Blind to whose numbers they are and in which unit: `Bo has 5 kg` is `Ilse has 5 m`. Not
    transitive.
    """

    name = "numbers"

    def related(self, texts: Sequence[str]) -> Bools:
        """See Equivalence."""
        read = [Read.of(text) for text in texts]
        found = np.eye(len(texts), dtype=np.bool_)
        for row, one in enumerate(read):
            for column, other in enumerate(read[:row]):
                found[row, column] = found[column, row] = _says_the_same(one, other)
        return found


class Read(NamedTuple):
    """What is read of a text: normalized letters, numbers, and words in lower case."""

    letters: str
    said: Said
    words: frozenset[str]

    @classmethod
    def of(cls, text: str) -> Read:
        """Read once, compared often."""
        words = (word.lower().replace("’", "'") for word in _WORD.findall(text))
        return cls(normalized(text), read_numbers(text), frozenset(words))


def can_be_same(one: Read, other: Read) -> bool:
    """Whether nothing speaks against it: the same numbers and result, and, where nothing is calculated, the same of
    the words that turn a step's meaning."""
    numbers = one.said.literal == other.said.literal or one.said.evaluated == other.said.evaluated
    if not numbers or one.said.result != other.said.result:
        return False
    return one.said.calculates or other.said.calculates or _turns(one.words) == _turns(other.words)


def _says_the_same(one: Read, other: Read) -> bool:
    if one.letters == other.letters:
        return True
    if not can_be_same(one, other):
        return False
    if one.said.literal:
        return True
    return bool(one.words) and len(one.words & other.words) >= LEAST_OVERLAP * len(one.words | other.words)


def normalized(text: str) -> str:
    """Unicode's canonical form, any white space for one space, none at the ends."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def _turns(words: frozenset[str]) -> frozenset[str]:
    """Contractions with n't are all one `not`."""
    return frozenset("not" if word.endswith("n't") else word for word in words) & _TURNING
