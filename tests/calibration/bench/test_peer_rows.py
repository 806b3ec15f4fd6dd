"""A peer in plan, results, table and page: beside our modes, and never taken for one of them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import bench_results
import pytest

from semspec.calibration.bench.columns import NOTHING, format_table, select_columns
from semspec.calibration.bench.modes import parse_modes
from semspec.calibration.bench.peer_names import parse_peers
from semspec.calibration.bench.plots import draw_phases, draw_speed
from semspec.calibration.bench.records import Result
from semspec.calibration.bench.report import write_report
from semspec.calibration.bench.settings import Origin, plan_cells
from semspec.calibration.bench.summary import Table, summarize
from semspec.runtime.errors import ConfigError

PEER = "llama-lookup:4"
UNKNOWN = {
    "phase_ms": {},
    "num_rounds": None,
    "num_draft_tokens": None,
    "num_accepted_draft_tokens": None,
    "n_from_draft": None,
}


def measured(seconds: float, **counts: object) -> tuple[list[Result], Table]:
    """Plain decoding in 2 s an answer, n-grams in 1, and a peer in `seconds`, on eleven problems."""
    results = []
    for number in range(11):
        results.append(bench_results.result(f"p{number}"))
        results.append(bench_results.result(f"p{number}", "ngram", seconds=1.0 + number / 100))
        peer = {
            **UNKNOWN,
            "token_ids": (9, 9),
            "peak_mib": 4321.0,
            "seconds": seconds + number / 100,
            **counts,
        }
        results.append(bench_results.result(f"p{number}", PEER, **peer))
    modes = [*parse_modes(["autoregressive", "ngram"]), *parse_peers([PEER])]
    return results, summarize(results, modes, greedy=True)


def test_peers_take_turns_with_our_modes() -> None:
    """What slows the machine slows a peer as often as us; each is first equally often."""
    settings = bench_results.settings(peers=(PEER,))
    cells = list(plan_cells(settings))
    assert len(cells) == 9 and Counter(cell.mode for cell in cells)[PEER] == 3
    assert [cells[place].mode for place in (0, 3, 6)] == ["autoregressive", "ngram", PEER]
    with pytest.raises(ConfigError, match="unknown peer"):
        list(plan_cells(bench_results.settings(peers=("nobody",))))


def test_a_run_from_before_there_were_peers_is_read() -> None:
    """Its run.json does not name them."""
    text = bench_results.origin().to_json()
    content = json.loads(text)
    del content["settings"]["peers"]
    assert Origin.from_json(json.dumps(content)) == Origin.from_json(text)


def test_what_a_peer_does_not_tell_is_kept_as_such() -> None:
    """null in the journal; 0 would be a claim."""
    result = bench_results.result(mode=PEER, **UNKNOWN)
    assert Result.from_json(result.to_json()) == result and '"num_rounds":null' in result.to_json()
    with pytest.raises(ValueError, match="num_rounds"):
        Result.from_json(result.to_json().replace('"num_rounds":null', '"num_rounds":-1'))


def test_the_table_calls_a_peer_so_and_leaves_blank_what_is_not_known() -> None:
    """Its other tokens are no divergence; its memory is its own."""
    _, table = measured(4.0)
    row = table.rows[-1]
    assert row.promise == "peer" and row.divergences is None and table.peak_mib == 100
    shown = {column.head: column.cell(row) for column in select_columns(table)}
    assert shown["promise"] == "peer" and shown["MiB"] == "4321" and shown["speed"].startswith("0.49 [")
    assert {shown[head] for head in ("per pass", "draft %", "differ")} == {NOTHING}
    assert "lossy" not in format_table(table)


def test_counts_that_a_peer_tells_are_shown() -> None:
    """As ours: kept of drafted, tokens a pass, share of the draft."""
    told = {"num_rounds": 2, "num_draft_tokens": 4, "num_accepted_draft_tokens": 2, "n_from_draft": 2}
    row = measured(4.0, **told)[1].rows[-1]
    assert (row.acceptance, row.tokens_per_pass, row.draft_share) == (0.5, 2.0, 0.5)


def test_the_finding_is_about_our_modes(tmp_path: Path) -> None:
    """A faster peer is in the table and the plots; the sentence on top does not sell it as ours."""
    results, table = measured(0.1)
    write_report(tmp_path, results, table, {"peers": {PEER: {"llama-cpp-python": "1"}}}, ())
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "1 of 1 modes faster than autoregressive; fastest: ngram (exact)" in page
    assert ">peer<" in page and "llama-cpp-python" in page


def test_plots_know_peers() -> None:
    """A bar of phases would be one bar of `rest`."""
    results, table = measured(4.0)
    assert draw_speed(table.rows) != draw_speed(table.rows[:-1])
    assert draw_phases(table.rows, results) == draw_phases(table.rows[:-1], results)
