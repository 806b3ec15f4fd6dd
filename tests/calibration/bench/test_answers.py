"""Which final answers are found in a text, and which of them count as right."""

from __future__ import annotations

import pytest

from semspec.calibration.bench.answers import check_gold, final_answer, is_correct
from semspec.runtime.errors import CalibrationError

# (what the model wrote, known answer, right?); all of it written for this test
PAIRS = [
    (r"Adding up, \boxed{42}", "42", True),
    (r"\boxed{42}", "43", False),
    (r"\boxed{7.0}", "7", True),
    (r"\boxed{-15}", "-15", True),
    (r"\boxed{15}", "-15", False),
    (r"\boxed{−15}", "-15", True),  # the sign of typography
    (r"\boxed{12{,}500}", "12500", True),
    (r"\boxed{12,500}", "12500", True),
    (r"\boxed{3000000}", "3,000,000", True),
    (r"\boxed{12.500}", "12500", False),
    (r"\boxed{\frac{6}{8}}", r"\frac{3}{4}", True),
    (r"\boxed{0.75}", r"\frac{3}{4}", True),
    (r"\boxed{3/4}", "0.75", True),
    (r"\boxed{\dfrac34}", "3/4", True),
    (r"\boxed{4/3}", "3/4", False),
    (r"\boxed{0.33}", r"\frac{1}{3}", False),
    (r"\boxed{2\frac{1}{2}}", "2.5", True),
    (r"\boxed{35\%}", "35", True),
    (r"\boxed{35\%}", "0.35", True),
    (r"\boxed{0.35}", "35", False),
    (r"\boxed{\$18}", "18", True),
    (r"\boxed{18 dollars}", "18", True),
    (r"\boxed{18\text{ dollars}}", "18", True),
    (r"\boxed{9\text{ cm}^2}", "9", True),
    (r"\boxed{90^\circ}", "90", True),
    (r"\boxed{8 cm}", "9", False),
    (r"\boxed{\sqrt{12}}", r"2\sqrt{3}", True),
    (r"\boxed{x^2 + 2x + 1}", "(x+1)^2", True),
    (r"\boxed{x = 6}", "6", True),
    (r"\boxed{(1, 2)}", "(1,2)", True),
    (r"\boxed{(2, 1)}", "(1,2)", False),
    (r"\boxed{\text{Friday}}", "Friday", True),
    (r"\boxed{friday}", r"\text{Friday}", True),
    (r"\boxed{\text{Sunday}}", "Friday", False),
    (r"\boxed{thorn}", "north", False),  # the same letters are not the same word
    (r"\boxed{yes}", "no", False),
    (r"\boxed{C}", "C", True),
    (r"\boxed{\text{(C) } 40}", "C", True),
    (r"\boxed{D}", "C", False),
    ("Looking at them all, the answer is (C).", "C", True),
    ("The answer is B, although C looked good.", "C", False),
    ("She pays 3 times 40, that is $120.", "120", True),
    ("From 1,300 take 52: 1,248 remain.", "1248", True),
    ("It fell to -8 degrees.", "-8", True),
    (r"First \boxed{3}, no: \boxed{4}", "4", True),
    (r"\boxed{5}, which is less than 6", "5", True),
    ("I do not know.", "5", False),
    ("", "5", False),
    (r"\boxed{}", "5", False),
]


@pytest.mark.parametrize(("text", "gold", "right"), PAIRS)
def test_what_counts_as_right(text: str, gold: str, right: bool) -> None:
    """Accuracy is worth as much as this judgement: units, fractions, percent, separators, signs, words, letters."""
    assert is_correct(text, gold) is right


@pytest.mark.parametrize(
    ("text", "gold", "found"),
    [
        (r"so \boxed{\frac{1}{2}} it is", "0.5", r"\frac{1}{2}"),
        (r"\boxed{1}, then \boxed{2", "1", "1"),
        (r"\fbox{3} and 4", "3", "3"),
        (r"\boxed{\{1, 2\}}", "1", r"\{1, 2\}"),
        ("7-3 leaves 4", "4", "4"),
        ("10-3", "7", "3"),
        ("about .5.", "0.5", ".5"),
        ("Answer: A. It is not B.", "A", "A"),
        ("B", "A", "B"),
        ("A dog and 3 cats", "B", None),
        ("no number", "3", None),
    ],
)
def test_where_the_final_answer_is(text: str, gold: str, found: str | None) -> None:
    """The last whole box before anything else; a sign is a sign only where it does not subtract."""
    assert final_answer(text, gold) == found


def test_a_text_that_was_cut_off_has_its_box_only() -> None:
    """The number it happened to stop at is not its answer; one in a box is, whatever else it went on to say."""
    assert is_correct("so we add 2 + 3", "3") and not is_correct("so we add 2 + 3", "3", whole=False)
    assert is_correct(r"\boxed{3}. To check, 4", "3", whole=False)
    assert is_correct(r"\boxed{(C) 3}. The answer is (B", "C", whole=False)


def test_towers_of_powers_are_wrong_and_end() -> None:
    """A model may write numbers that no machine can compute; the run goes on."""
    assert not is_correct(r"\boxed{9^{9^{9^{9}}}}", "5")


def test_an_endless_answer_is_wrong() -> None:
    """A box full of text is not parsed for minutes."""
    assert not is_correct(r"\boxed{" + "1+" * 1000 + "1}", "1001")


def test_code_in_an_answer_is_not_run(tmp_path: object) -> None:
    """Answers are strangers' text; only the grammar of mathematics reads them."""
    assert not is_correct(rf"\boxed{{__import__('pathlib').Path('{tmp_path}/x').touch()}}", "5")
    assert not list(__import__("pathlib").Path(str(tmp_path)).iterdir())


@pytest.mark.parametrize("gold", ["18", r"\frac{1}{2}", "Friday", "north west", "C", "(1, 2)", "1,000"])
def test_known_answers_that_can_be_met(gold: str) -> None:
    """Each of the kinds that data sets hold."""
    check_gold(gold)
    assert is_correct(rf"\boxed{{{gold}}}", gold)


def test_a_known_answer_that_nothing_equals_is_refused() -> None:
    """It would count every answer as wrong, silently."""
    with pytest.raises(CalibrationError, match="cannot be read"):
        check_gold("{")
