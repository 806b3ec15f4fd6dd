"""Built-in word problems: right answers, own numbers, the same for the same seed."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

import pytest

from semspec.calibration.bench.answers import is_correct
from semspec.calibration.problems import KINDS, generate_problems
from semspec.runtime.errors import ConfigError


def _shopping(n: int, price: int, m: int, dearer: int, left: int) -> int:
    return sum([price] * n + [dearer] * m) + left


def _journey(first: int, slow: int, second: int, fast: int) -> int:
    return sum(slow for _ in range(first)) + sum(fast for _ in range(second))


def _sharing(total: int, broken: int, kept: int, children: int) -> Fraction:
    return Fraction(total - broken - kept, children)


def _percent(price: int, off: int, delivery: int) -> Fraction:
    return price - price * Fraction(off, 100) + delivery


def _ages(age: int, times: int, years: int) -> int:
    return (age + years) + (times * age + years)


def _garden(width: int, longer: int, price: int) -> int:
    sides = [width, width + longer, width, width + longer]
    return sum(side * price for side in sides)


def _workers(few: int, days: int, more: int) -> Fraction:
    one_does_a_day = Fraction(1, few * days)
    return 1 / (one_does_a_day * (few + more))


def _pages(daily: int, days: int, faster: int, more: int, left: int) -> int:
    return sum([daily] * days) + sum([daily + faster] * more) + left


def _average(games: int, mean: int, wanted: int) -> int:
    return next(points for points in range(1000) if games * mean + points == wanted * (games + 1))


def _bakery(trays: int, each: int, unsold: int, price: int, costs: int) -> int:
    return trays * each * price - unsold * price - costs


def _tank(start: int, inflow: int, outflow: int, minutes: int) -> int:
    litres = start
    for _ in range(minutes):
        litres += inflow
        litres -= outflow
    return litres


def _bag(red: int, blue: int, green: int, added: int) -> Fraction:
    beads = ["red"] * (red + added) + ["blue"] * blue + ["green"] * green
    return Fraction(beads.count("red"), len(beads))


SOLVERS: dict[str, Callable[..., int | Fraction]] = {
    "shopping": _shopping,
    "journey": _journey,
    "sharing": _sharing,
    "percent": _percent,
    "ages": _ages,
    "garden": _garden,
    "workers": _workers,
    "pages": _pages,
    "average": _average,
    "bakery": _bakery,
    "tank": _tank,
    "bag": _bag,
}


def test_answers_are_those_of_the_question_as_it_is_written() -> None:
    """A wrong gold answer would teach the predictor lies: each is worked out again from the numbers in the text."""
    assert SOLVERS.keys() == KINDS.keys()
    for problem in generate_problems(1200, seed=3):
        numbers = [int(number) for number in re.findall(r"\d+", problem.question)]
        solve = SOLVERS[problem.id.split("-")[0]]
        assert problem.answer == str(Fraction(solve(*numbers))), problem
        assert Fraction(problem.answer) > 0, problem


def test_no_two_are_alike_and_a_list_only_grows() -> None:
    """Folds are made of kinds: a template or its numbers under another name would be in both parts."""
    problems = generate_problems(600)
    assert {problem.kind for problem in problems} == KINDS.keys()
    assert all(problem.id.split("-")[0] == problem.kind for problem in problems)
    assert len({problem.id for problem in problems}) == 600
    keys = {(problem.id.split("-")[0], *re.findall(r"\d+", problem.question)) for problem in problems}
    assert len(keys) == 600
    assert generate_problems(40) == problems[:40]
    others = {problem.question for problem in generate_problems(600, seed=1)}
    assert len(others & {problem.question for problem in problems}) < 6


def test_answers_can_be_read_by_whoever_judges_them() -> None:
    """Outcome labels compare a boxed answer with these."""
    for problem in generate_problems(len(KINDS)):
        assert problem.answer is not None
        assert is_correct(f"So it is \\boxed{{{problem.answer}}}.", problem.answer)
        assert not is_correct("So it is \\boxed{0}.", problem.answer)


@pytest.mark.parametrize(("n", "message"), [(0, "at least 1, got 0"), (10**6, "is used up; ask for fewer")])
def test_as_many_as_there_are(n: int, message: str) -> None:
    """Rather an error than problems that come twice."""
    with pytest.raises(ConfigError, match=message):
        generate_problems(n)
