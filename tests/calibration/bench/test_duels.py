"""Duels: who is held against whom, on which problems, and what of it is chance."""

from __future__ import annotations

import numpy as np
import pytest
from bench_results import result

from semspec.calibration.bench.columns import format_table
from semspec.calibration.bench.duels import Duel, problems_to_decide
from semspec.calibration.bench.modes import parse_modes
from semspec.calibration.bench.records import Result
from semspec.calibration.bench.summary import summarize

NAMES = (
    "autoregressive",
    "lossless",
    "combined:0.2",
    "combined-random:0.5",
    "combined-whole:0.2",
    "combined-whole-random:0.5",
    "semantic:0.2",
    "semantic-paper",
    "random:0.75",
    "specreason:7",
    "topk:2",
    "draft-alone",
)


def duels(results: list[Result], names: tuple[str, ...]) -> list[Duel]:
    return list(summarize(results, parse_modes(names), greedy=True).duels)


def named(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(mode.name for mode in parse_modes(names))


def test_each_semantic_mode_meets_the_exact_one_and_the_controls_that_draft_as_it_does() -> None:
    """A control that stops elsewhere, or that judges tokens, would compare two things at once."""
    results = [result(problem, name) for problem in "ab" for name in named(NAMES)]
    found = [(duel.mode, duel.rival) for duel in duels(results, NAMES)]
    published = ["lossless", "random:0.75", "specreason:7"]
    assert found == [
        ("combined:0.2", "lossless"),
        ("combined:0.2", "combined-random:0.5"),
        ("combined-whole:0.2", "lossless"),
        ("combined-whole:0.2", "combined-whole-random:0.5"),
        *(("semantic:0.2", rival) for rival in published),
        *(("semantic-paper", rival) for rival in published),
    ]
    assert not duels(results, ("autoregressive", "lossless", "random:0.75"))


def test_numbers_by_hand() -> None:
    """Three problems, one of them twice: means by problem, the median of ratios, shares over all tokens."""
    mode, rival = "combined:0.2", "combined-random:0.5"
    results = [
        result("a", mode, seconds=1.0, n_lossy=2),  # 4 tokens in 1 s
        result("b", mode, seconds=1.0, correct=False),
        result("c", mode, seconds=1.0),
        result("a", rival, seconds=2.0, correct=False, n_lossy=1),
        result("a", rival, repeat=1, seconds=2.0, correct=True),
        result("b", rival, seconds=0.5),
        result("c", rival, seconds=3.0),
    ]
    (duel,) = duels(results, (mode, rival))
    assert (duel.n_problems, duel.only_mode, duel.only_rival) == (3, 1, 1)
    assert duel.speed.value == 2.0 and (duel.speed.low, duel.speed.high) == (0.5, 3.0)
    assert duel.gain is not None and duel.gain.value == pytest.approx((0.5 - 1 + 0) / 3)
    assert (duel.lossy, duel.rival_lossy) == (2 / 12, 1 / 16)
    assert duel.to_decide == problems_to_decide([0.5, -1, 0])


def test_as_many_problems_as_said_decide_in_four_of_five_cases() -> None:
    """Drawn from a law with the spread that was seen; 2,000 runs have a standard error of 0.009, so the bounds are five
    of them away, which includes the normal approximation's own error."""
    law = [1.0] * 3 + [-1.0] + [0.0] * 6
    n = problems_to_decide(law * 1000)
    assert n is not None
    drawn = np.random.default_rng(0).choice(law, (2000, n))
    error = drawn.std(axis=1, ddof=1) / np.sqrt(n)
    seen = float(np.mean(np.abs(drawn.mean(axis=1)) > 1.96 * error))
    assert 0.755 < seen < 0.845


@pytest.mark.parametrize("differences", [[], [1.0], [0.0] * 5, [1.0, -1.0], [1.0] * 5])
def test_nothing_is_foretold_from_nothing(differences: list[float]) -> None:
    """No spread or no difference is no base for a number of problems."""
    assert problems_to_decide(differences) is None


def test_the_table_says_it_in_words_and_without_answers_says_less() -> None:
    """Below the table, a line a rival; a number of problems has two figures, for it is no more than a guess."""
    names = ("lossless", "combined:0.2")
    results = [
        result(str(number), name, correct=(number % 7 > 2) if name == "lossless" else number % 9 > 3)
        for number in range(63)
        for name in names
    ]
    text = format_table(summarize(results, parse_modes(names), greedy=True))
    assert "combined:0.2 against lossless: speed 1.00; right answers -2 [" in text
    assert (
        "points more (of 63 problems 15 better, 16 worse); lossy tokens 0 % against 0 %; a difference" in text
    )
    assert "would take some 16000 problems to be seen" in text
    unknown = [result(str(number), name, correct=None) for number in range(3) for name in names]
    assert (
        "combined:0.2 against lossless: speed 1.00"
        in format_table(summarize(unknown, parse_modes(names), greedy=True)).splitlines()
    )
