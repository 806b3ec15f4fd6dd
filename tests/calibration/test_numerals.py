"""Numbers in texts: notations are one, results are exact, and nothing that is written can hurt."""

from __future__ import annotations

from fractions import Fraction

import pytest

from semspec.calibration.numerals import read_numbers


@pytest.mark.parametrize(
    ("text", "literal"),
    [
        ("3 apples and 12.50 crowns", ("3", "12.5")),
        ("1,200 seats, 1{,}200 seats", ("1200", "1200")),
        ("the digits 1, 2, 3", ("1", "2", "3")),
        ("20% or 20 % or 20\\% or 20 percent or twenty percent", ("1/5",) * 5),
        ("\\frac{3}{4} of \\boxed{8}", ("3", "4", "8")),
        ("two rolls, Twenty-five eggs, twenty five days", ("2", "25", "25")),
        ("fourteen, fifteen, forty, eighty", ("14", "15", "40", "80")),
        ("one of them", ()),
        ("2. The bus\n3) The train\n**Step 4:** 5 km, see step 6", ("5",)),
        ("The answer is 18.", ("18",)),
        ("- 4 boxes", ("4",)),
        ("$5 and €6", ("5", "6")),
        ("x2 + .5", ("1/2", "2")),
        ("", ()),
    ],
)
def test_numbers_are_read_in_every_notation(text: str, literal: tuple[str, ...]) -> None:
    """Two wordings of one step seldom write their numbers alike; counters of a list are no numbers of the step."""
    assert read_numbers(text).literal == tuple(sorted(Fraction(number) for number in literal))


def test_quotients_are_numbers_too_where_they_are_not_whole() -> None:
    """3/4 is 0.75; but 6/2 stays a division, as 6 and 2 are what the step says."""
    assert read_numbers("3/4 = 0.75").evaluated == (Fraction(3, 4), Fraction(3, 4))
    assert read_numbers("6/2 = 3").evaluated == (2, 3, 6)
    assert read_numbers("5/0").evaluated == (0, 5)


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("12 * 3", "36"),
        ("3 \\times 12 = 36 crowns.", "36"),
        ("2 + 3 * 4 =", "14"),
        ("(2 + 3) × 4", "20"),
        ("\\frac{2 + 4}{3}", "2"),
        ("5 - 8", "-3"),
        ("x = -3", "-3"),
        ("y - 3", "-3"),
        ("60 km / 2 h = 30 km/h", "30"),
        ("2^10", "1024"),
        ("2^-1", "1/2"),
        ("8 = 5 + 3", "8"),
        ("3x4 tiles", "12"),
        ("= 8\n12 - 5", "7"),
        ("The answer is 18.", "18"),
        ("the area (12 * 5", "60"),
        ("7 / (3 - 3)", "0"),
        ("10 crowns, 4 kg", "4"),
    ],
)
def test_the_last_calculation_is_done_exactly(text: str, result: str) -> None:
    """A step without its result says it all the same; where nothing can be calculated, the last number counts."""
    assert read_numbers(text).result == Fraction(result)


def test_no_number_no_result() -> None:
    """Nothing is invented."""
    assert read_numbers("Let us begin + = (") == ((), (), None, False)


@pytest.mark.parametrize(
    "text",
    [
        "9^9^9^9",
        "9" * 20_000,
        "(" * 5_000 + "1" + ")" * 5_000,
        "-" * 5_000 + "1",
        "2^999999999",
        "1000000007^64^64",
        "1/0",
        "٣ + 4",  # digits of another script
        "²3",
    ],
)
def test_hostile_texts_are_read_in_bounds(text: str) -> None:
    """Segments are whatever a model wrote: no power without bound, no deep recursion, no digit that int() refuses."""
    assert read_numbers(text).result is not None


def test_a_written_calculation_is_noticed() -> None:
    """Where there is none, words say what happens to the numbers."""
    assert read_numbers("5 + 3").calculates and read_numbers("x = 5").calculates
    assert not read_numbers("5 more than 3").calculates
