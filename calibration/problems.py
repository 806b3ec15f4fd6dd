"""Word problems with exact answers, from a seed: contexts for calibration where nobody has data of their own.

Own text, two to four steps of arithmetic each, of kinds that take turns. It knows no model and no file.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

from semspec.calibration.bench.records import Problem
from semspec.runtime.errors import ConfigError

__all__ = ["KINDS", "generate_problems"]

TRIES = 200  # at a problem that is like none before, until its kind counts as used up
NAMES = ("Amira", "Bo", "Chen", "Dalia", "Emil", "Farah", "Goran", "Hana", "Ilse", "Jonas", "Kofi", "Lina")
THINGS = ("pencils", "notebooks", "postcards", "candles", "lemons", "badges", "marbles", "seed packets")
PLACES = ("the harbour", "the old mill", "the next village", "the station", "the lake", "the market town")


class _Asked(NamedTuple):
    question: str
    answer: Fraction | int


def generate_problems(n: int, seed: int = 0) -> list[Problem]:
    """`n` problems, the same for the same seed; the first of a longer list are those of a shorter one.

    No two of one kind have the same numbers. Answers are whole numbers or fractions in lowest terms, such as `3/4`.
    Raises ConfigError for an `n` below 1 and for more problems than there are.
    """
    if n < 1:
        raise ConfigError(f"the number of problems must be at least 1, got {n}")
    rng, seen = random.Random(seed), set[tuple[str, ...]]()
    kinds, problems = list(KINDS), list[Problem]()
    while len(problems) < n:
        kind = kinds[len(problems) % len(kinds)]
        asked = _ask_anew(kind, rng, seen)
        name = f"{kind}-{seed}-{len(problems) + 1}"
        problems.append(Problem(id=name, question=asked.question, answer=str(asked.answer), kind=kind))
    return problems


def _ask_anew(kind: str, rng: random.Random, seen: set[tuple[str, ...]]) -> _Asked:
    for _ in range(TRIES):
        asked = KINDS[kind](rng)
        key = (kind, *re.findall(r"\d+", asked.question))
        if key not in seen:
            seen.add(key)
            return asked
    raise ConfigError(
        f"there are no {len(seen) + 1} problems that differ: the kind {kind!r} is used up; ask for fewer"
    )


def _shopping(rng: random.Random) -> _Asked:
    name, (thing, other) = rng.choice(NAMES), rng.sample(THINGS, 2)
    n, m, price, dearer = rng.randint(3, 12), rng.randint(2, 9), rng.randint(2, 9), rng.randint(3, 14)
    left = rng.randint(3, 40)
    return _Asked(
        f"{name} buys {n} {thing} at {price} crowns each and {m} {other} at {dearer} crowns each. Afterwards {left} "
        f"crowns are left in the purse. How many crowns were in the purse at first?",
        n * price + m * dearer + left,
    )


def _journey(rng: random.Random) -> _Asked:
    name, place = rng.choice(NAMES), rng.choice(PLACES)
    slow, fast = rng.randint(4, 18), rng.randint(20, 60)
    first, second = rng.randint(2, 6), rng.randint(2, 5)
    return _Asked(
        f"On the way to {place}, {name} cycles {first} hours at {slow} km an hour and then takes a bus for {second} "
        f"hours at {fast} km an hour. How many km is the whole way?",
        first * slow + second * fast,
    )


def _sharing(rng: random.Random) -> _Asked:
    thing = rng.choice(THINGS)
    children, each, spare, eaten = (
        rng.randint(3, 12),
        rng.randint(4, 20),
        rng.randint(1, 9),
        rng.randint(2, 15),
    )
    total = children * each + eaten + spare
    return _Asked(
        f"A box holds {total} {thing}. {eaten} of them are broken and thrown away, and the teacher keeps {spare}. "
        f"The rest is shared equally among {children} children. How many {thing} does each child get?",
        each,
    )


def _percent(rng: random.Random) -> _Asked:
    name = rng.choice(NAMES)
    price, off, delivery = 20 * rng.randint(2, 30), 5 * rng.randint(1, 12), rng.randint(3, 25)
    return _Asked(
        f"A lamp costs {price} crowns. In a sale its price falls by {off} %, and delivery costs {delivery} crowns. "
        f"How many crowns does {name} pay for the lamp with delivery?",
        Fraction(price * (100 - off), 100) + delivery,
    )


def _ages(rng: random.Random) -> _Asked:
    younger, elder = rng.sample(NAMES, 2)
    age, times, years = rng.randint(4, 15), rng.randint(2, 5), rng.randint(2, 20)
    return _Asked(
        f"{younger} is {age} years old, and {elder} is {times} times as old. How old will the two be together in "
        f"{years} years?",
        age + times * age + 2 * years,
    )


def _garden(rng: random.Random) -> _Asked:
    name = rng.choice(NAMES)
    width, longer, price = rng.randint(3, 18), rng.randint(1, 15), rng.randint(2, 12)
    return _Asked(
        f"{name}'s garden is a rectangle {width} m wide, and it is {longer} m longer than it is wide. A fence all "
        f"around it costs {price} crowns a metre. How many crowns does the fence cost?",
        2 * (width + width + longer) * price,
    )


def _workers(rng: random.Random) -> _Asked:
    few, days, more = rng.randint(2, 8), rng.randint(2, 12), rng.randint(1, 8)
    return _Asked(
        f"{few} painters need {days} days for a house, and all of them work at the same pace. How many days would "
        f"the house take if {more} more painters of that pace joined from the start? Give an exact fraction if it is "
        f"not a whole number.",
        Fraction(few * days, few + more),
    )


def _pages(rng: random.Random) -> _Asked:
    name = rng.choice(NAMES)
    daily, days, faster, more = rng.randint(6, 30), rng.randint(2, 9), rng.randint(2, 15), rng.randint(2, 7)
    left = rng.randint(5, 60)
    return _Asked(
        f"{name} reads {daily} pages of a book every day for {days} days, and then {faster} pages more than that "
        f"every day for {more} days. Then {left} pages are left. How many pages has the book?",
        daily * days + (daily + faster) * more + left,
    )


def _average(rng: random.Random) -> _Asked:
    name, n, mean = rng.choice(NAMES), rng.randint(3, 8), rng.randint(8, 40)
    higher = rng.randint(1, 9)
    return _Asked(
        f"After {n} games {name} has scored {mean} points a game on average. How many points are needed in the next "
        f"game to raise the average of all games to {mean + higher}?",
        (n + 1) * (mean + higher) - n * mean,
    )


def _bakery(rng: random.Random) -> _Asked:
    trays, per_tray, price = rng.randint(3, 12), rng.randint(6, 24), rng.randint(2, 6)
    unsold, costs = rng.randint(1, 8), rng.randint(5, 19)
    return _Asked(
        f"A bakery fills {trays} trays with {per_tray} rolls each. It sells all but {unsold} of the rolls at {price} "
        f"crowns each, and flour and heat cost {costs} crowns. How many crowns does the bakery gain?",
        (trays * per_tray - unsold) * price - costs,
    )


def _tank(rng: random.Random) -> _Asked:
    inflow, outflow = rng.randint(12, 40), rng.randint(2, 11)
    minutes, start = rng.randint(4, 25), rng.randint(10, 90)
    return _Asked(
        f"A tank holds {start} litres. {inflow} litres a minute flow in while {outflow} litres a minute leak out. "
        f"How many litres are in the tank after {minutes} minutes, if it does not overflow?",
        start + (inflow - outflow) * minutes,
    )


def _bag(rng: random.Random) -> _Asked:
    red, blue, green = rng.randint(2, 15), rng.randint(2, 15), rng.randint(2, 15)
    added = rng.randint(1, 8)
    return _Asked(
        f"A bag has {red} red, {blue} blue and {green} green beads. {added} more red beads are put in. What is the "
        f"chance that a bead drawn at random is red? Give a fraction in lowest terms.",
        Fraction(red + added, red + added + blue + green),
    )


KINDS: dict[str, Callable[[random.Random], _Asked]] = {
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
"""Name -> what makes one; problems take them in this order, in turn."""
