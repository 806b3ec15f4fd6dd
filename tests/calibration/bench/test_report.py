"""What a person reads of a benchmark: that it is whole, safe to open, and claims no more than was measured."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench_results
import numpy as np
import pytest
from pages import Page, pictures

from semspec.calibration.bench.columns import format_table
from semspec.calibration.bench.divergences import find_divergences
from semspec.calibration.bench.modes import parse_modes
from semspec.calibration.bench.records import PLAIN, Mode, Result
from semspec.calibration.bench.report import write_report
from semspec.calibration.bench.summary import Table, summarize
from semspec.runtime.config import SpecConfig
from semspec.runtime.errors import ConfigError

LOSSY = Mode(name="hasty", exact=False, spec=SpecConfig(draft="ngram"))
ORIGIN = {
    "settings": {"bundle_sha256": "ab" * 32, "sampling": {"temperature": 0.0}, "problems": ["p1", "p2"]},
    "machines": [{"processor": "Some CPU 9000", "cores": 2, "python": "3.12.1", "onnxruntime": "1.2.3"}],
}


def result(problem: str, mode: str, **changes: Any) -> Result:
    """One answer of 40 tokens in 0.4 s, half of it drafted where the mode drafts."""
    drafts = 0 if mode == PLAIN else 20
    values: dict[str, Any] = {
        "token_ids": tuple(range(40)),
        "seconds": 0.4,
        "generated_tokens": 40,
        "phase_ms": {"prefill": 20.0, "target": 300.0, "sampling": 10.0} | ({"draft": 9.0} if drafts else {}),
        "num_rounds": 40 - drafts,
        "num_draft_tokens": 2 * drafts,
        "num_accepted_draft_tokens": drafts,
        "n_from_draft": drafts,
    }
    return bench_results.result(problem, mode, **{**values, **changes})


def measured(
    seconds: Sequence[float], mode: Mode | None = None, *, greedy: bool = True
) -> tuple[list[Result], Table]:
    """Plain decoding at 0.4 s an answer, and a mode that took these seconds for one problem each."""
    mode = mode or parse_modes(["ngram"])[0]
    results = [
        result(f"p{number}", name, seconds=taken, correct=number % 3 > 0)
        for number, time in enumerate(seconds)
        for name, taken in ((PLAIN, 0.4), (mode.name, time))
    ]
    return results, summarize(results, [*parse_modes([PLAIN]), mode], greedy=greedy)


def written(folder: Path, results: Sequence[Result], table: Table, origin: Any = None) -> str:
    divergences = [replace(one, margin=0.12345) for one in find_divergences(results, table)]
    write_report(folder, results, table, ORIGIN if origin is None else origin, divergences)
    return (folder / "report.html").read_text(encoding="utf-8")


def test_page_asks_for_nothing_else(tmp_path: Path) -> None:
    """A report is opened years later, offline, by a stranger: nothing to fetch, nothing to run."""
    page = Page(written(tmp_path, *measured([0.2, 0.3])))
    assert not {"script", "link", "iframe", "object", "form", "a"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name == "href" or name.startswith("on")]
    assert "url(" not in page.text and "@import" not in page.text


def test_plots_are_pictures_of_something(tmp_path: Path) -> None:
    """Speed, answers against speed, drafts, phases: each decodes, and is more than an empty canvas."""
    from matplotlib.image import imread

    results, _ = measured([0.2, 0.3, 0.25], LOSSY)
    worse = [
        result(one.cell.problem, one.cell.mode, seconds=one.seconds, correct=i > 2)
        for i, one in enumerate(results)
    ]
    found = pictures(written(tmp_path, worse, summarize(worse, [*parse_modes([PLAIN]), LOSSY], greedy=True)))
    assert len(found) == 4
    for png in found:
        dots = np.asarray(imread(io.BytesIO(png)))
        assert dots.shape[1] > 1500 and dots.std() > 0.01


def test_plots_that_have_nothing_to_show_are_left_out(tmp_path: Path) -> None:
    """Plain decoding alone has no ratio and no drafts: one plot remains, and no empty axes."""
    plain = [one for one in measured([0.2, 0.3])[0] if one.cell.mode == PLAIN]
    page = written(tmp_path, plain, summarize(plain, parse_modes([PLAIN]), greedy=True))
    assert len(pictures(page)) == 1 and "No speed-up can be told" in page


def test_exact_and_lossy_modes_are_called_so(tmp_path: Path) -> None:
    """A fast mode that changes answers must not pass for one that does not."""
    results, table = measured([0.2, 0.3], LOSSY)
    page = Page(written(tmp_path, results, table)).text
    assert "hasty (lossy)" in page and "autoregressiveexact" in page and "hastylossy" in page
    lines = [line.split()[:2] for line in format_table(table).splitlines()[2:4]]
    assert lines == [[PLAIN, "exact"], ["hasty", "lossy"]]


@pytest.mark.parametrize(
    ("seconds", "says"),
    [
        ([0.2] * 5 + [0.25] * 5, "1 of 1 modes faster than autoregressive; fastest: ngram (exact), "),
        ([0.8] * 5 + [0.7] * 5, "No mode faster than autoregressive; least slow: ngram (exact), 0."),
        ([0.1, 0.9] * 5, "No mode shown to be faster than autoregressive, for no interval lies above 1; "),
        ([0.2], "Measured on too little for an interval; highest: ngram (exact), 2.00 times as fast."),
    ],
)
def test_first_sentence_claims_no_more_than_the_interval(
    tmp_path: Path, seconds: list[float], says: str
) -> None:
    """It is the sentence that gets quoted: an interval that holds 1 is not a speed-up, one problem is not a result."""
    assert says in written(tmp_path, *measured(seconds))


def test_first_sentence_is_of_exact_modes_where_there_are_any(tmp_path: Path) -> None:
    """A mode that may answer anything is as fast as it likes."""
    problems = [str(number) for number in range(9)]
    modes = [*parse_modes([PLAIN, "ngram"]), LOSSY]
    speeds = {PLAIN: 0.4, "ngram": 0.2, LOSSY.name: 0.01}
    results = [
        result(one, mode.name, seconds=speeds[mode.name] * (1 + 0.01 * int(one) * (mode.name != PLAIN)))
        for one in problems
        for mode in modes
    ]
    says = "1 of 1 exact modes faster than autoregressive; fastest: ngram (exact), 1.9"
    assert says in written(tmp_path, results, summarize(results, modes, greedy=True))


def test_page_tells_machine_origin_and_size(tmp_path: Path) -> None:
    """A speed without its machine, versions and number of problems is no measurement."""
    page = Page(written(tmp_path, *measured([0.2, 0.3]))).text
    assert "On Some CPU 9000, 2 cores, python 3.12.1, onnxruntime 1.2.3" in page
    assert "2 problems, 2 modes, 1 seed, 1 repeat: 4 answers" in page
    assert "bundle sha256" in page and "ab" * 32 in page and "sampling / temperature0.0" in page


def test_text_from_outside_is_escaped_and_kept(tmp_path: Path) -> None:
    """Problem ids, mode names and bundle names come from files of strangers; half a surrogate pair must not stop
    the report either."""
    evil = "<script>alert('x')</script>\"&\ud800"
    mode = Mode(name="<b>$x_1$ é\x1b[31m", exact=True, spec=SpecConfig(draft="ngram"))
    results = [result(evil, PLAIN), result(evil, mode.name, token_ids=(1, 2))]
    table = summarize(results, [*parse_modes([PLAIN]), mode], greedy=True)
    page = Page(
        written(tmp_path, results, table, {evil: [evil, {"name": evil}], "machines": [{"processor": evil}]})
    )
    assert "script" not in page.tags and page.tags.count("b") == 2  # the two ids that differ
    assert page.text.count("<script>alert('x')</script>\"&") == 7  # machine, divergence, five in the origin
    assert "\x1b" not in format_table(table)


def test_page_shows_where_answers_part_and_by_how_much(tmp_path: Path) -> None:
    """The first look at a fault: both tokens, and whether the target was near a tie."""
    ids = tuple(range(100, 140))
    answers = [(*ids[:20], 7, *ids[21:]), ids[:30]]
    results = [result("p", "ngram", repeat=n, token_ids=mine) for n, mine in enumerate(answers)]
    results += [result("p", PLAIN, repeat=n, token_ids=ids) for n, _ in enumerate(answers)]
    table = summarize(results, parse_modes([PLAIN, "ngram"]), greedy=True)
    page = written(tmp_path, results, table)
    assert "<b>120</b>" in page and "<b>7</b>" in page and "(end)" in page and "0.123" in page
    write_report(tmp_path, results, table, ORIGIN, find_divergences(results, table))
    assert "<td class='words'>-</td>" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_page_says_that_nothing_was_counted_where_chance_decides(tmp_path: Path) -> None:
    """Exact under sampling means the same law, not the same tokens."""
    results = [result("p", PLAIN), result("p", "ngram", token_ids=(1, 2))]
    table = summarize(results, parse_modes([PLAIN, "ngram"]), greedy=False)
    assert "Not counted: the run was sampled" in written(tmp_path, results, table)


def test_same_results_give_the_same_bytes_and_replace_the_old_page(tmp_path: Path) -> None:
    """A run that was killed and resumed must end in the same files, and leave no others."""
    first = written(tmp_path, *measured([0.2, 0.3]))
    assert written(tmp_path, *measured([0.2, 0.4])) != first
    assert written(tmp_path, *measured([0.2, 0.3])) == first
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_drawing_leaves_the_state_of_pyplot_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a notebook or an application, a report must not touch windows, back ends or open figures."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it now fails
    assert len(pictures(written(tmp_path, *measured([0.2, 0.3])))) == 3


def test_missing_matplotlib_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extra is optional; the message is the command that helps, and no half report stays."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"needs matplotlib.*pip install 'semspec\[bench\]'"):
        written(tmp_path, *measured([0.2, 0.3]))
    assert not list(tmp_path.iterdir())


def test_table_shows_the_ratio_with_its_interval() -> None:
    """A ratio alone invites belief; plain decoding over itself is 1 by definition and has none."""
    text = format_table(measured([0.2] * 6 + [0.25] * 6)[1])
    head, _, plain, ngram, *_ = text.splitlines()
    assert head.split()[:3] == ["mode", "promise", "speed"] and plain.split()[2] == "1"
    assert ngram[head.index("speed") - 14 :].split()[:3] == ["1.80", "[1.60,", "2.00]"]
    assert "95 % bootstrap interval over 12 problems" in text and "24 answers" in text


def test_table_leaves_out_columns_that_say_nothing() -> None:
    """No data with answers: no column of right answers; no drafts: none about drafts."""
    plain = [result(f"p{n}", PLAIN, correct=None) for n in range(3)]
    head = format_table(summarize(plain, parse_modes([PLAIN]), greedy=False)).splitlines()[0]
    assert "right" not in head and "kept" not in head and "differ" not in head and "tokens/s" in head


@pytest.mark.parametrize(
    ("n_problems", "says"),
    [(1, "One problem only: numbers without intervals"), (4, "4 problems are few: the intervals are rough")],
)
def test_table_warns_of_few_problems(n_problems: int, says: str) -> None:
    """Bootstrap intervals of a handful of problems are too narrow, and look no different from good ones."""
    text = format_table(measured([0.2 + 0.01 * n for n in range(n_problems)])[1])
    assert says in text and ("[" in text.splitlines()[3]) == (n_problems > 1)


def test_table_does_not_show_certainty_where_all_answers_agree() -> None:
    """Ten of ten right is not 100 % for sure: 0.74 ** 10 is 5 %, so the truth may be 26 points lower."""
    results = [result(f"p{n}", PLAIN) for n in range(10)]
    text = format_table(summarize(results, parse_modes([PLAIN]), greedy=True))
    assert "after 10 problems the truth may be 26 points away" in text


def test_table_says_when_the_token_limit_decided_what_is_right() -> None:
    """Answers that never reached their end are wrong for want of room, not of wit."""
    results = [result(f"p{n}", PLAIN, finish_reason="length" if n < 3 else "stop") for n in range(12)]
    text = format_table(summarize(results, parse_modes([PLAIN]), greedy=True))
    assert "25 % of a mode's answers were cut off" in text and "--max-tokens" in text
