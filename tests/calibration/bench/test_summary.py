"""The table against numbers worked out by hand, and its intervals against what they promise."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np
import pytest
from bench_results import result

from semspec.calibration.bench.estimates import Estimate
from semspec.calibration.bench.modes import parse_modes
from semspec.calibration.bench.records import Result
from semspec.calibration.bench.summary import ModeRow, first_difference, summarize


def rows(results: list[Result], *names: str, greedy: bool = True) -> dict[str, ModeRow]:
    table = summarize(results, parse_modes(names), greedy=greedy)
    assert [row.mode for row in table.rows] == list(names)
    return {row.mode: row for row in table.rows}


def test_numbers_by_hand() -> None:
    """Two problems, two modes, two repeats: every figure of the drafting mode."""
    drafted = {"num_rounds": 2, "num_draft_tokens": 4, "num_accepted_draft_tokens": 1, "n_from_draft": 2}
    results = [
        result("a", seconds=2.0),  # 2 tokens/s
        result("a", repeat=1, seconds=4.0),  # 1 token/s; the median of a is 1.5
        result("b", seconds=1.0, correct=False),  # 4
        result("b", repeat=1, seconds=1.0, correct=False),  # 4
        result("a", "ngram", seconds=1.0, correct=False, **drafted),  # 4
        result("a", "ngram", repeat=1, seconds=2.0, **drafted),  # 2; the median of a is 3
        result("b", "ngram", seconds=0.5, phase_ms={"draft": 8.0}, finish_reason="length", **drafted),  # 8
        result("b", "ngram", repeat=1, seconds=0.5, peak_mib=300.0, **drafted),  # 8
    ]
    found = rows(results, "autoregressive", "ngram")
    plain, row = found["autoregressive"], found["ngram"]
    assert plain.tokens_per_second.value == pytest.approx((1.5 + 4) / 2)
    assert (plain.speed_ratio, plain.accuracy_gain, plain.divergences, plain.acceptance) == (None,) * 4
    assert plain.accuracy is not None and plain.accuracy.value == 0.5
    assert (row.n, row.n_problems, row.exact) == (4, 2, True)
    assert row.tokens_per_second.value == pytest.approx((3 + 8) / 2)
    assert row.seconds.value == pytest.approx((1.5 + 0.5) / 2)
    assert row.speed_ratio is not None and row.speed_ratio.value == pytest.approx((3 / 1.5 + 8 / 4) / 2)
    assert row.accuracy is not None and row.accuracy.value == pytest.approx((0.5 + 1) / 2)
    assert row.accuracy_gain is not None and row.accuracy_gain.value == pytest.approx((-0.5 + 1) / 2)
    assert (row.acceptance, row.tokens_per_pass, row.draft_share) == (4 / 16, 16 / 8, 8 / 16)
    assert (row.mean_tokens, row.truncated, row.divergences) == (4.0, 0.25, 0)
    assert row.phase_ms == {"prefill": 3 * 90 / 4, "target": 3 * 150 / 4, "draft": 8 / 4}
    assert summarize(results, parse_modes(["ngram"]), greedy=True).peak_mib == 300.0


def test_the_ratio_is_paired_by_problem() -> None:
    """Problems differ a hundredfold in length; a mode that is twice as fast on each is twice as fast, without doubt."""
    seconds = {chr(97 + i): 1.5**i for i in range(12)}
    results = [result(problem, seconds=value) for problem, value in seconds.items()]
    results += [result(problem, "ngram", seconds=value / 2) for problem, value in seconds.items()]
    row = rows(results, "autoregressive", "ngram")["ngram"]
    assert row.speed_ratio is not None and astuple(row.speed_ratio) == pytest.approx((2, 2, 2))
    assert row.tokens_per_second.high / row.tokens_per_second.low > 2


def test_the_table_is_a_function_of_the_results() -> None:
    """Same results, same table, to the last bit: chance is seeded."""
    results = [result(chr(97 + i), seconds=1 + i % 5, correct=i % 3 == 0) for i in range(9)]
    assert summarize(results, parse_modes(["autoregressive"]), greedy=True) == summarize(
        list(results), parse_modes(["autoregressive"]), greedy=True
    )


def test_more_repeats_of_a_problem_are_not_more_problems() -> None:
    """Else a hundred timings of one question would give an interval that says nothing about the next one."""
    few = [result(p, correct=p in "abc", seconds=1.0 + ord(p)) for p in "abcdef"]
    many = [
        result(p, repeat=r, correct=p in "abc", seconds=1.0 + ord(p)) for p in "abcdef" for r in range(20)
    ]
    one, other = (rows(results, "autoregressive")["autoregressive"] for results in (few, many))
    assert one.accuracy == other.accuracy and one.tokens_per_second == other.tokens_per_second


def test_lossy_modes_have_a_share_and_no_divergences() -> None:
    """Their tokens may be others; how many of them need not be the target's is told."""
    results = [result(p) for p in "ab"]
    results += [result(p, "random:0.5", token_ids=(7,), n_lossy=n) for p, n in (("a", 3), ("b", 0))]
    results += [result(p, "draft-alone", num_rounds=0, n_lossy=4, n_from_draft=4) for p in "ab"]
    found = rows(results, "autoregressive", "random:0.5", "draft-alone")
    assert found["autoregressive"].lossy_share is None and found["autoregressive"].promise == "exact"
    row, alone = found["random:0.5"], found["draft-alone"]
    assert (row.exact, row.promise, row.divergences, row.lossy_share) == (False, "lossy", None, 3 / 8)
    assert (alone.tokens_per_pass, alone.lossy_share, alone.draft_share) == (None, 1.0, 1.0)


def test_what_is_not_known_is_none() -> None:
    """No answers, no plain decoding, one problem: no invented number."""
    row = rows([result("a", "ngram", correct=None)], "ngram")["ngram"]
    assert (row.accuracy, row.accuracy_gain, row.speed_ratio, row.divergences) == (None,) * 4
    assert row.tokens_per_second == Estimate(value=2.0, low=2.0, high=2.0)


def test_divergences_are_counted_where_there_must_be_none() -> None:
    """At temperature 0 an exact mode gives the very tokens of plain decoding for the same problem, seed and repeat."""
    results = [result(p) for p in "ab"] + [result("a", "ngram"), result("b", "ngram", token_ids=(1, 2, 3))]
    assert rows(results, "autoregressive", "ngram")["ngram"].divergences == 1
    assert rows(results, "autoregressive", "ngram", greedy=False)["ngram"].divergences is None


@pytest.mark.parametrize(
    ("one", "other", "place"),
    [
        ((), (), None),
        ((1, 2), (1, 2), None),
        ((1, 2), (1, 3), 1),
        ((1,), (1, 3), 1),
        ((1, 3), (1,), 1),
        ((), (1,), 0),
    ],
)
def test_first_difference(one: tuple[int, ...], other: tuple[int, ...], place: int | None) -> None:
    """An answer that stops early differs too."""
    assert first_difference(one, other) == place


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    """95 % intervals of a mean and of a median, over 200 drawn runs of 40 problems each."""
    rng, hits = np.random.default_rng(1), {"accuracy": 0, "speed": 0}
    runs = 200
    for _ in range(runs):
        right, seconds = rng.random(40) < 0.7, np.exp(rng.normal(0, 0.5, 40))
        results = [
            result(str(i), correct=bool(right[i]), seconds=float(seconds[i]), generated_tokens=1)
            for i in range(40)
        ]
        row = rows(results, "autoregressive")["autoregressive"]
        assert row.accuracy is not None
        hits["accuracy"] += row.accuracy.low <= 0.7 <= row.accuracy.high
        hits["speed"] += row.tokens_per_second.low <= 1.0 <= row.tokens_per_second.high
    assert all(0.88 <= count / runs <= 0.99 for count in hits.values()), hits
