"""Relations that read with a neural encoder: near vectors, and entailment both ways. See equivalence.py.

    embed    two texts are near in a sentence encoder's space      nli    each follows from the other

Neither reads algebra, nor reliably a `not`: equivalence.can_be_same must hold as well. Encoders are handed in;
encoders.py makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from semspec.calibration.equivalence import Bools, Read, can_be_same
from semspec.runtime.errors import CalibrationError, ConfigError
from semspec.runtime.records import Array, Floats

__all__ = ["MINILM_LIMIT", "Embed", "Nli", "fit_limit"]

MINILM_LIMIT = 0.444
"""For all-MiniLM-L6-v2: fit_limit on the hand-labelled pairs of the tests; of them it judges 72 of 100 rightly, where
`numbers` has 68. It refuses hardly more than can_be_same does: among pairs that this lets pass, cosines of the same and
of the not quite the same lie alike (AUROC 0.53)."""


class Embed:
    """Cosine of the vectors at least `limit`, where can_be_same holds.

    Blind to what its encoder is blind to: who did what to whom, and often `not`. Not transitive.
    """

    name = "embed"

    def __init__(self, vectors: Callable[[Sequence[str]], Floats], *, limit: float) -> None:
        """vectors: texts -> (n, width) of length 1. limit: -1..1, of that encoder (fit_limit)."""
        if not -1 <= limit <= 1:
            raise ConfigError(f"the limit of a cosine must lie in -1..1, got {limit}")
        self._vectors, self.limit = vectors, limit

    def related(self, texts: Sequence[str]) -> Bools:
        """See equivalence.Equivalence. Raises what the encoder raises."""
        if not texts:
            return np.zeros((0, 0), np.bool_)
        vectors = self._vectors(texts)
        near = vectors @ vectors.T >= self.limit
        letters, possible = _compare(texts)
        return letters | (near & near.T & possible)


class Nli:
    """Entailment is the likeliest class both ways, where can_be_same holds. Not transitive.

    Tested for what it computes, on a random network; how well a trained one judges steps of an answer is NOT known.
    """

    name = "nli"

    def __init__(self, logits: Callable[[str, str], Floats], labels: Sequence[str]) -> None:
        """logits: (premise, hypothesis) -> (classes,). labels: their names, one of which begins with `entail`."""
        entailing = [place for place, label in enumerate(labels) if label.lower().startswith("entail")]
        if len(entailing) != 1:
            raise CalibrationError(
                f"an encoder for nli has one class named entailment, this one has {', '.join(labels) or 'none'}; name "
                "another"
            )
        self._logits, self._entailing = logits, entailing[0]

    def related(self, texts: Sequence[str]) -> Bools:
        """See equivalence.Equivalence. Raises what the encoder raises. Two passes a pair."""
        found, possible = _compare(texts)
        for row, one in enumerate(texts):
            for column, other in enumerate(texts[:row]):
                if possible[row, column] and not found[row, column]:
                    both = self._entails(one, other) and self._entails(other, one)
                    found[row, column] = found[column, row] = both
        return found

    def _entails(self, premise: str, hypothesis: str) -> bool:
        return int(self._logits(premise, hypothesis).argmax()) == self._entailing


def fit_limit(cosines: Array, same: Bools) -> float:
    """The limit that judges most pairs rightly, half-way between two cosines; of several the highest, which accepts
    least.

    cosines, same: (n,), of pairs for which can_be_same holds, and what a person says of them. Raises CalibrationError
    where one kind is missing.
    """
    if same.all() or not same.any():
        raise CalibrationError(
            "a limit is fitted on pairs of both kinds, the same and not the same; add the other"
        )
    values = np.unique(cosines.astype(np.float64))
    limits = np.concatenate([[values[0]], (values[1:] + values[:-1]) / 2])
    right = [int(((cosines >= limit) == same).sum()) for limit in limits]
    return float(limits[max(range(len(limits)), key=lambda place: (right[place], place))])


def _compare(texts: Sequence[str]) -> tuple[Bools, Bools]:
    """(n, n) twice: which are the same letters, and which can be the same at all."""
    read = [Read.of(text) for text in texts]
    shape = len(read), len(read)
    letters = [[one.letters == other.letters for other in read] for one in read]
    possible = [[can_be_same(one, other) for other in read] for one in read]
    return np.array(letters, np.bool_).reshape(shape), np.array(possible, np.bool_).reshape(shape)
