"""Controls in whole runs, beside exact modes, on a real pair of engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from semspec.calibration.bench.answering import chat_of
from semspec.calibration.bench.columns import format_table
from semspec.calibration.bench.modes import parse_modes
from semspec.calibration.bench.records import Problem
from semspec.calibration.bench.run import Run, run
from semspec.runtime.config import SamplingParams, SpecConfig
from semspec.runtime.errors import BundleError
from semspec.runtime.llm import LLM

GREEDY = SamplingParams(max_tokens=24)
SAMPLED = SamplingParams(temperature=0.6, top_p=0.95, max_tokens=24)
PROBLEMS = tuple(Problem(id=str(number), question=f"{number}?", answer="5") for number in range(4))
CONTROLS = "random:0.7,random:0,logprob:-3,topk:1,topk:2,specreason:4.5,draft-alone"


def measure(bundle: Path, out: Path, modes: str, sampling: SamplingParams = GREEDY) -> Run:
    return run(bundle, PROBLEMS, parse_modes(modes.split(",")), out, sampling, threads=1)


def test_controls_run_beside_exact_modes(short_pair: Path, tmp_path: Path) -> None:
    """All in one run: called lossy, no divergence counted, shares by token; with ends that can be known beforehand."""
    names = f"autoregressive,lossless,{CONTROLS}"
    done = measure(short_pair, tmp_path, names)
    assert [row.mode for row in done.table.rows] == names.replace("topk:1", "topk:1:4").replace(
        "topk:2", "topk:2:4"
    ).split(",")
    rows = {row.mode: row for row in done.table.rows}
    ids: dict[str, list[tuple[int, ...]]] = {}
    for one in done.results:
        ids.setdefault(one.cell.mode, []).append(one.token_ids)
    for name in ("autoregressive", "lossless"):
        assert rows[name].promise == "exact" and rows[name].lossy_share is None
    lossy = [row for row in rows.values() if row.promise == "lossy"]
    assert len(lossy) == 7 and all(row.divergences is None for row in lossy)
    assert ids["random:0"] == ids["topk:1:4"] == ids["autoregressive"] != ids["draft-alone"]
    assert rows["topk:1:4"].acceptance == rows["lossless"].acceptance
    assert (rows["random:0"].acceptance, rows["random:0"].lossy_share) == (0, 0)
    assert 0 < (rows["random:0.7"].acceptance or 0) < 1
    assert rows["random:0.7"].lossy_share == rows["random:0.7"].draft_share
    assert (rows["draft-alone"].lossy_share, rows["draft-alone"].tokens_per_pass) == (1, None)
    with LLM(short_pair, spec=SpecConfig(mode="draft-alone"), threads=1) as llm:
        alone = [llm.chat(chat_of(problem), GREEDY).token_ids for problem in PROBLEMS]
    assert ids["draft-alone"] == alone
    text = format_table(done.table)
    assert "lossy %" in text and "A lossy mode does not promise" in text
    assert "lossy %" not in format_table(replace(done.table, rows=done.table.rows[:2]))


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_controls_are_reproduced(short_pair: Path, tmp_path: Path, sampling: SamplingParams) -> None:
    """Same seed, same decisions and tokens; other problems have other decisions."""
    runs = [measure(short_pair, tmp_path / name, CONTROLS, sampling) for name in "xy"]
    texts = [[(one.cell, one.token_ids, one.n_lossy) for one in done.results] for done in runs]
    assert texts[0] == texts[1]


def test_a_control_without_a_draft_model_is_refused(tiny_bundle: Path, tmp_path: Path) -> None:
    """Nobody else drafts for it in silence."""
    for number, name in enumerate(CONTROLS.split(",")):
        with pytest.raises(BundleError, match="has no draft"):
            measure(tiny_bundle, tmp_path / str(number), name)
