"""Features: the same names and numbers for those who train and those who decode, written out by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import tiny_tokenizers

from semspec.runtime.errors import ConfigError
from semspec.runtime.features import FEATURES, SegmentText, check_features, feature_values, segment_text
from semspec.runtime.readings import Signals
from semspec.runtime.segments import Boundary, Segmenter
from semspec.runtime.tokenizer import Tokenizer

TARGET = Signals(mean_logprob=-0.5, min_logprob=-2.0, sum_logprob=-3.0, mean_entropy=0.7, agreement=0.75)
DRAFT = Signals(mean_logprob=-0.25, min_logprob=-1.0, sum_logprob=-1.5, mean_entropy=0.3, agreement=1.0)


def said(text: str, before: str = "Q: 3 and 4?\n", n_tokens: int = 6, ended: str = "boundary") -> SegmentText:
    return SegmentText(text=text, before=before, n_tokens=n_tokens, ended=ended)


def values(segment: SegmentText, *names: str) -> list[float]:
    return feature_values([f"text.{name}" for name in names], segment=segment).tolist()


def counts(segment: SegmentText, name: str) -> int:
    """A feature that is log(1 + count), as its count."""
    (value,) = values(segment, name)
    return round(math.expm1(value))


def test_the_names_are_these() -> None:
    """predictor.json names them: a name that goes or changes its meaning makes old probes wrong."""
    signals = ("mean_logprob", "min_logprob", "sum_logprob", "mean_entropy", "agreement")
    text = ["no_number", "numbers", "new_numbers", "equals", "latex", "log_length", "boxed", "words", "stop"]
    text += ["list_item", "colon", "operators", "capped"]
    expected = [f"{role}.{name}" for role in ("target", "draft") for name in signals]
    assert list(FEATURES) == expected + [f"text.{name}" for name in text]


def test_values_come_in_the_order_asked() -> None:
    """fp32, as a graph takes them; only what is asked is read."""
    names = ["draft.agreement", "text.capped", "target.mean_logprob", "draft.sum_logprob"]
    found = feature_values(names, target=TARGET, draft=DRAFT, segment=said("x", ended="cap"))
    assert found.dtype == np.float32 and found.tolist() == [1.0, 1.0, -0.5, -1.5]
    assert feature_values([]).shape == (0,)
    assert feature_values(["target.min_logprob"], target=TARGET).tolist() == [-2.0]


def test_a_whole_segment_written_out() -> None:
    """3 is in the question, 12 is not; a counter is no number; a LaTeX command is no word."""
    segment = said("2. So \\(3 \\times 4 = 12\\), that is:\n", n_tokens=20)
    found = feature_values(FEATURES[10:], segment=segment)
    expected = {
        "no_number": 0,
        "numbers": math.log1p(3),
        "new_numbers": math.log1p(1),
        "equals": 1,
        "latex": 1,
        "log_length": math.log(20),
        "boxed": 0,
        "words": math.log1p(3),
        "stop": 0,
        "list_item": 1,
        "colon": 1,
        "operators": math.log1p(1),
        "capped": 0,
    }
    np.testing.assert_allclose(found, np.float32(list(expected.values())), rtol=1e-6)


@pytest.mark.parametrize(
    ("text", "numbers", "new"),
    [
        ("no numbers here", 0, 0),
        ("3 and 4 and 3", 2, 0),
        ("5 apples", 1, 1),
        ("1,200.50 or 1200.5 or 01200.500", 1, 1),
        ("3.0 is 3", 1, 0),
        ("costs $.5, then 0.5", 1, 1),
        ("1. first\n2) second\nStep 3: third\n**4.** bold", 0, 0),
        ("10. 20", 1, 1),
        ("ends with 7.", 1, 1),
        ("٣ is a digit too", 1, 1),
    ],
)
def test_numbers_are_told_apart_by_their_worth(text: str, numbers: int, new: int) -> None:
    """Distinct, and not said before; how a number is written does not matter, counters of lists do not count."""
    assert (counts(said(text), "numbers"), counts(said(text), "new_numbers")) == (numbers, new)
    assert values(said(text), "no_number") == [float(numbers == 0)]


def test_a_counter_in_the_middle_of_a_line_is_a_number() -> None:
    """A segment may begin anywhere: what stands before it says whether a line begins."""
    assert counts(said("3. Then", before="The sum is "), "numbers") == 1
    assert values(said("3. Then", before="The sum is "), "list_item") == [0.0]
    assert counts(said("3. Then", before="x\n"), "numbers") == 0
    assert values(said("3. Then", before=""), "list_item") == [1.0]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("3 + 4 - 5 * 6 / 7", 4),
        ("3+4", 1),
        ("step-by-step and/or so", 0),
        ("- a bullet\n* another", 0),
        ("**3** and **4**", 0),
        ("\\frac{1}{2} \\cdot 3 \\div 2 \\times x", 4),
        ("2 × 3 ÷ 4", 2),
        ("x^2", 1),
        ("(3) - (4)", 1),
        ("\\timestamp", 0),
    ],
)
def test_operators_are_those_of_calculations(text: str, count: int) -> None:
    """Hyphens, bullets and bold type use the same signs."""
    assert counts(said(text), "operators") == count


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("\\boxed{4}", "boxed", 1),
        ("boxed 4", "boxed", 0),
        ("costs $4", "latex", 1),
        ("\\[ 4 \\]", "latex", 1),
        ("a \\ b", "latex", 0),
        ("a = b", "equals", 1),
        ("- item", "list_item", 1),
        ("text\n* item", "list_item", 1),
        ("## Heading", "list_item", 1),
        ("plain", "list_item", 0),
        ("as follows:\n\n", "colon", 1),
        ("**Step:**\n", "colon", 1),
        ("at 3:15", "colon", 0),
    ],
)
def test_marks_of_the_text(text: str, name: str, expected: int) -> None:
    """True is 1."""
    assert values(said(text), name) == [expected]


def test_how_it_ended() -> None:
    """One of three ways; an end token is told from a cap."""
    for ended, expected in (("boundary", [0, 0]), ("stop", [1, 0]), ("cap", [0, 1])):
        assert values(said("x", ended=ended), "stop", "capped") == expected


def test_what_is_missing_or_unknown_is_named() -> None:
    """A reading that was not made must not become a zero."""
    with pytest.raises(ConfigError, match=r"no feature 'target\.luck'; known: target\.mean_logprob"):
        feature_values(["target.luck"], target=TARGET)
    with pytest.raises(ConfigError, match=r"'draft\.agreement' needs the draft's signals"):
        feature_values(["draft.agreement"], target=TARGET)
    with pytest.raises(ConfigError, match=r"'text\.words' needs the segment's text"):
        feature_values(["text.words"], target=TARGET, draft=DRAFT)
    with pytest.raises(ConfigError, match="must differ"):
        check_features(["text.words", "text.words"])
    with pytest.raises(ConfigError, match="boundary, stop, cap, got 'tired'"):
        said("x", ended="tired")
    with pytest.raises(ConfigError, match="at least 1 token, got 0"):
        said("x", n_tokens=0)


def test_ids_become_a_segments_text(tmp_path: Path) -> None:
    """One way from ids to text for calibration and decoding: control tokens left out, all of the context before it."""
    tiny_tokenizers.save(tmp_path, tiny_tokenizers.byte_level(), generation={"eos_token_id": 258})
    tokenizer = Tokenizer.open(tmp_path)
    segmenter = Segmenter(Boundary(min_tokens=1, max_tokens=4), tokenizer.token_bytes, tokenizer.eos_ids)
    context = [257, *tokenizer.encode("Hi: ")]
    for text, tail, ended in (("a\n", [], "boundary"), ("a", [258], "stop"), ("abcd", [], "cap")):
        ids = [*(token for byte in text for token in tokenizer.encode(byte)), *tail]
        found = segment_text(tokenizer, context, ids, segmenter)
        assert found == SegmentText(text=text, before="Hi: ", n_tokens=len(ids), ended=ended)
