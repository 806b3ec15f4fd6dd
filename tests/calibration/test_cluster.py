"""Classes of meaning: those of a transitive relation, and a stated rule for the others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from semspec.calibration.cluster import classes_of, open_share, split_classes
from semspec.calibration.equivalence import Bools, Exact
from semspec.runtime.errors import CalibrationError


def relation(n: int, pairs: Sequence[tuple[int, int]]) -> Bools:
    related = np.eye(n, dtype=np.bool_)
    for one, other in pairs:
        related[one, other] = related[other, one] = True
    return related


def test_a_transitive_relation_is_split_into_its_own_classes() -> None:
    """Whatever the order; ids by first appearance."""
    wanted = np.array([0, 1, 0, 2, 1, 0])
    assert split_classes(wanted[:, None] == wanted[None, :]).tolist() == wanted.tolist()
    assert split_classes(np.zeros((0, 0), np.bool_)).tolist() == []


def test_a_chain_does_not_grow_together() -> None:
    """a like b like c like d, and no more: the middle founds a class with its neighbours, the end stays alone."""
    assert split_classes(relation(4, [(0, 1), (1, 2), (2, 3)])).tolist() == [0, 0, 0, 1]


def test_the_text_like_most_others_founds_the_first_class() -> None:
    """The order in which texts were sampled does not decide: the star takes its points before a pair is made."""
    star = relation(5, [(4, 1), (4, 2), (4, 3), (0, 1)])
    assert split_classes(star).tolist() == [0, 1, 1, 1, 1]
    order = np.array([4, 2, 0, 3, 1])
    shuffled = split_classes(star[np.ix_(order, order)])
    assert [set(np.flatnonzero(shuffled == number)) for number in (0, 1)] == [{0, 1, 3, 4}, {2}]


def test_every_class_has_a_member_like_all_others() -> None:
    """What a class means, on random relations."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        upper = np.triu(rng.random((9, 9)) < 0.3, 1)
        related = upper | upper.T | np.eye(9, dtype=np.bool_)
        classes = split_classes(related)
        assert list(dict.fromkeys(classes.tolist())) == list(range(classes.max() + 1))
        for number in range(classes.max() + 1):
            members = classes == number
            assert any(related[one, members].all() for one in np.flatnonzero(members))


def test_equal_texts_are_compared_once_and_count_as_often_as_written() -> None:
    """Eight samples are three or four texts; a relation that reads with a network is paid for those."""

    class Counting(Exact):
        seen: Sequence[str] = ()

        def related(self, texts: Sequence[str]) -> Bools:
            self.seen = texts
            return super().related(texts)

    counting = Counting()
    assert classes_of(["b", "a", "b ", "b", "a"], counting).tolist() == [0, 1, 0, 0, 1]
    assert counting.seen == ["b", "a", "b "]


def test_open_share_measures_the_distance_from_transitive() -> None:
    """0 for classes; of a chain of three both ways along it are open; half of a pair of chains closed."""
    wanted = np.array([0, 0, 0, 1, 1])
    assert open_share(wanted[:, None] == wanted[None, :]) == 0
    assert open_share(relation(3, [(0, 1), (1, 2)])) == 1
    assert open_share(relation(4, [(0, 1), (1, 2), (0, 2), (2, 3)])) == pytest.approx(4 / 10)
    assert open_share(relation(2, [])) == 0


@pytest.mark.parametrize(
    "related",
    [
        np.ones((2, 3), np.bool_),
        np.zeros((2, 2), np.bool_),
        np.array([[True, True], [False, True]]),
        np.ones(3, np.bool_),
    ],
)
def test_what_is_no_such_relation_is_refused(related: Bools) -> None:
    """An equivalence of one's own with a mistake in it is not made into labels."""
    for function in (split_classes, open_share):
        with pytest.raises(CalibrationError, match="must be square, symmetric"):
            function(related)
