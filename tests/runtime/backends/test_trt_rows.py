"""What comes back from plans over DOUBLES of engine and driver: the CPU's tokens, and mostly without the logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from doubled import ENGINE, make_driver, make_pair, needs_doubles, run, with_plans
from engine_cases import NATIVE

pytestmark = needs_doubles
# for each backend: way -> ids, and how many rows of target and draft were copied in full
DECODE = """
import json, sys
from semspec import LLM, SamplingParams, SpecConfig
ways = json.loads(sys.argv[2])
found = {}
for backend in sys.argv[3:]:
    with LLM(sys.argv[1], backend=backend, spec=SpecConfig(num_draft_tokens=4)) as llm:
        for way, params in ways.items():
            before = llm.target.n_full_rows, llm.draft.n_full_rows
            ids = llm.generate("some text", SamplingParams(max_tokens=24, seed=3, **params)).token_ids
            full = llm.target.n_full_rows - before[0], llm.draft.n_full_rows - before[1]
            found.setdefault(way, {})[backend] = [ids, full]
print(json.dumps(found))
"""
FILTERED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "top-k": {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    "min-p": {"temperature": 0.5, "min_p": 0.5},
}
OPEN: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0.8},
    "penalised": {"repetition_penalty": 1.3},
}


@pytest.fixture(scope="module", params=["primitive", NATIVE])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("rows")
    bundle = with_plans(make_pair(folder), folder / "plans", request.param)
    done = run(
        make_driver(folder / "driver"), "-c", DECODE, bundle, json.dumps({**FILTERED, **OPEN}), "cpu", ENGINE
    )
    assert done.returncode == 0, done.stderr
    answers: dict[str, Any] = json.loads(done.stdout)
    return answers


@pytest.mark.parametrize("way", [*FILTERED, *OPEN])
def test_tokens_are_those_of_all_logits(found: dict[str, Any], way: str) -> None:
    """Whether they were drawn from 64 ids of 270 or from all."""
    (near, from_memory), (far, _) = found[way]["cpu"], found[way][ENGINE]
    assert far == near and from_memory == [0, 0]


@pytest.mark.parametrize("way", [*FILTERED, *OPEN])
def test_rows_are_copied_in_full_only_where_a_law_needs_them(found: dict[str, Any], way: str) -> None:
    """Neither model copies V logits where filters leave few ids: on a GPU these are most of what comes back."""
    ids, (of_target, of_draft) = found[way][ENGINE]
    if way in FILTERED:
        assert (of_target, of_draft) == (0, 0)
    else:
        assert of_target > 0 and of_draft > 0 and of_target <= 2 * len(ids)
