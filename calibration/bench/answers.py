"""Is an answer right? It finds the final answer in a text and lets math-verify say whether it equals the known one.

Texts are never compared here. Nothing of them is executed: only math-verify's LaTeX grammar reads them. Main thread
only: its time limit is an alarm signal.
"""

from __future__ import annotations

import re
from typing import Any

from semspec.runtime.errors import CalibrationError

__all__ = ["check_gold", "final_answer", "is_correct"]

LONGEST = 500  # characters of a final answer; a longer one is not an answer
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
LETTER = re.compile(r"[A-J]")
NUMBER = re.compile(r"(?<![\w.)/])[-−]?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?\\?%?")
NAMED_LETTER = re.compile(
    r"\b(?i:answer|option|choice)\b(?i:\s+is)?[\s:*({\\]*(?:text\{)?\(?([A-J])(?![A-Za-z'])"
)
MARKED_LETTER = re.compile(r"\(([A-J])\)|^\W*([A-J])\W*$", re.MULTILINE)
LEADING_LETTER = re.compile(r"(?:\\text\{)?\(?([A-J])(?:[).:}]|$)")
WORDS = re.compile(r"[^\W\d_]+(?:[ '’-][^\W\d_]+)*")
AMOUNT = re.compile(r"([-−]?(?:\\?\$)?\s*\d[\d,]*(?:\.\d+)?(?:/\d+)?)\s+([^\W\d_]{2,}(?: [^\W\d_]+)*)")


def is_correct(text: str, gold: str, *, whole: bool = True) -> bool:
    """Whether the final answer in `text` equals `gold`. A text without one is wrong. whole: False for
    a text that was cut off: only what it had put in a box counts, not the number it stopped at.

    Percent signs are lenient, as in math-verify: 50% equals both 50 and 1/2. Units are not compared. Decimals count
    as equal to a fraction when six places agree. An answer that takes longer than five seconds to compare is wrong.
    """
    from math_verify import verify

    found = final_answer(text, gold, whole=whole)
    if found is None or len(found) > LONGEST:
        return False
    return bool(verify(_parsed(gold), _parsed(found)))


def check_gold(gold: str) -> None:
    """Raise CalibrationError for a known answer that no text could ever equal."""
    from math_verify import verify

    parsed = _parsed(gold)
    if not parsed or not verify(parsed, parsed):
        raise CalibrationError(f"the answer {gold[:80]!r} cannot be read as mathematics or words; correct it")


def final_answer(text: str, gold: str, *, whole: bool = True) -> str | None:
    """What `text` ends up saying: its last box; without one, where it is `whole`, the choice letter if `gold` is one,
    else the last number. None where there is none of them.

    >>> final_answer("so 3 + 4 = \\\\boxed{7}, as 7 < 10", "7"), final_answer("It costs $1,200.", "1200")
    ('7', '$1,200')
    >>> final_answer("The answer is (C), not (B).", "C")
    'C'
    """
    choice = LETTER.fullmatch(_bare(gold)) is not None
    boxed = _last_box(text)
    if boxed is not None:
        leading = LEADING_LETTER.match(boxed.strip()) if choice else None
        return leading[1] if leading else boxed
    if not whole:
        return None
    if choice:
        letters = NAMED_LETTER.findall(text)
        letters = letters or [first or second for first, second in MARKED_LETTER.findall(text)]
        return letters[-1] if letters else None
    numbers = NUMBER.findall(text)
    return numbers[-1].rstrip(",") if numbers else None


def _last_box(text: str) -> str | None:
    """What the last complete box holds; one that was cut off does not count."""
    last = None
    for match in BOX.finditer(text):
        depth = 1
        for end in range(match.end(), len(text)):
            if text[end] in "{}" and text[end - 1] != "\\":
                depth += 1 if text[end] == "{" else -1
            if depth == 0:
                last = text[match.end() : end]
                break
    return last


def _bare(answer: str) -> str:
    """Without the marks around a letter: parentheses, a full stop."""
    return answer.strip().strip("().")


def _parsed(answer: str) -> Any:
    """As math-verify reads it; empty where it cannot. Words are words, not products of letters."""
    from math_verify import LatexExtractionConfig, parse

    answer = answer.strip()
    if not answer.endswith(r"\."):
        answer = answer.rstrip(".")
    if WORDS.fullmatch(answer):
        answer = rf"\text{{{answer}}}"
    elif amount := AMOUNT.fullmatch(answer):
        answer = rf"{amount[1]}\text{{ {amount[2]}}}"
    return parse(
        rf"\boxed{{{answer}}}",
        extraction_config=[LatexExtractionConfig(boxed_match_priority=0)],
        fallback_mode="no_fallback",  # else what it cannot read is compared as a text
    )
