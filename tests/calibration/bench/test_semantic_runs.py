"""Semantic modes in whole runs, on a real pair of engines with probes of its own sizes."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
from tiny_probes import add_probes

from semspec.calibration.bench.modes import parse_modes
from semspec.calibration.bench.records import Problem
from semspec.calibration.bench.run import run
from semspec.runtime.config import SamplingParams

GREEDY = SamplingParams(max_tokens=12)
SAMPLED = SamplingParams(temperature=0.6, top_p=0.95, max_tokens=12)
PROBLEMS = tuple(Problem(id=str(number), question=f"{number}?", answer="5") for number in range(2))
MODES = ("autoregressive", "combined:0.2", "semantic:0.2", "semantic-paper")


@pytest.fixture(scope="module")
def bundle(short_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Risks measured at temperature 0.6, top-p 0.95."""
    copy = Path(shutil.copytree(short_pair, tmp_path_factory.mktemp("calibrated") / "bundle"))
    add_probes(copy)
    return copy


@pytest.mark.parametrize(("sampling", "times"), [(SAMPLED, 0), (GREEDY, 1)])
def test_a_run_warns_of_the_risk_only_where_its_own_sampling_is_another(
    bundle: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, sampling: SamplingParams, times: int
) -> None:
    """The warm-up once asked greedily, so that every sampled run was told of a request with temperature 0."""
    with caplog.at_level(logging.WARNING):
        done = run(bundle, PROBLEMS, parse_modes(MODES), tmp_path, sampling, threads=1)
    assert caplog.text.count("the risk was measured at temperature 0.6, top-p 0.95") == times
    assert [row.mode for row in done.table.rows] == list(MODES)
    lossy = {row.mode: row.lossy_share for row in done.table.rows}
    assert lossy["autoregressive"] is None and all(lossy[name] is not None for name in MODES[1:])
