"""From a relation between texts to classes of meaning.

The rule for relations that are not transitive: the text that says the same as most others not yet in a class founds
one with all of those; the earlier one where several have as many; and so on with the rest. So a class has a member
that every other one is equivalent to, chains (a like b, b like c, a unlike c) do not grow together, and of a
transitive relation the classes are its own. Texts that are equal are always in one class, and count as often as
they were written.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from semspec.calibration.equivalence import Bools, Equivalence
from semspec.runtime.errors import CalibrationError
from semspec.runtime.records import Ints

__all__ = ["classes_of", "open_share", "split_classes"]


def classes_of(texts: Sequence[str], equivalence: Equivalence) -> Ints:
    """(n,) class ids 0.. of `texts`, numbered by first appearance. Raises what the relation raises."""
    distinct = list(dict.fromkeys(texts))
    places = {text: place for place, text in enumerate(distinct)}
    rows = np.array([places[text] for text in texts], np.int64)
    return split_classes(equivalence.related(distinct)[np.ix_(rows, rows)])


def split_classes(related: Bools) -> Ints:
    """(n,) class ids 0.. of a relation (n, n), numbered by first appearance; the rule is the module's.

    Raises CalibrationError for a relation that is not symmetric, or not true of a thing and itself.
    """
    _check(related)
    founders = np.full(len(related), -1, np.int64)
    while (free := founders < 0).any():
        degrees = np.where(free, (related & free).sum(axis=1), -1)
        founder = int(degrees.argmax())
        founders[related[founder] & free] = founder
    _, first, classes = np.unique(founders, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[classes.reshape(-1)].astype(np.int64)


def open_share(related: Bools) -> float:
    """How far from transitive: of the triples where a is like b and b like c, the share where a is unlike c.

    0.0 where there is no such triple. Raises CalibrationError as split_classes does.
    """
    _check(related)
    counts = related.astype(np.float64)
    np.fill_diagonal(counts, 0.0)
    paths = counts @ counts
    np.fill_diagonal(paths, 0.0)
    total = float(paths.sum())
    return float((paths * ~related).sum()) / total if total else 0.0


def _check(related: Bools) -> None:
    square = related.ndim == 2 and related.shape[0] == related.shape[1]
    if not (square and related.diagonal().all() and (related == related.T).all()):
        raise CalibrationError(
            f"a relation of shape {related.shape} must be square, symmetric and true of each text and itself; "
            "repair the equivalence that made it"
        )
