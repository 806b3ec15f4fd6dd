"""Probes over DOUBLES of engine and driver: states stay on the device from the pass to the probe, the score comes back.

Seen here: which memory is read, in what order, and what is copied to the host. Not seen: an engine or a GPU's numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from doubled import ENGINE, make_driver, make_pair, needs_doubles, play_scores, with_plans
from engine_cases import NATIVE

pytestmark = needs_doubles
LAYERS, WIDTH = (2, 3), 48
STATES = str(len(LAYERS) * WIDTH * 4)  # bytes of a model's pooled states; nothing else is read in so many
# what is broken -> the way to judge in which it is: the predictor asks no states of the draft
MUTATIONS = {
    "stale": "predictor",
    "reversed_layers": "predictor",
    "first_layer": "predictor",
    "no_copy": "predictor",
    "sum_for_mean": "predictor",
    "other_model": "paper",
    "begins_anew": "paper",
}
NEAR = 1e-4


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="module", params=["primitive", NATIVE])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("scores")
    return with_plans(make_pair(folder, LAYERS), folder / "plans", request.param)


@pytest.fixture(scope="module")
def found(driver: Path, bundle: Path) -> dict[str, Any]:
    return play_scores(driver, bundle, f"cpu,{ENGINE}")


def near(scores: list[list[float]]) -> Any:
    """Same segments, and scores but for what two graphs of one model round otherwise."""
    return [pytest.approx(own, abs=NEAR) for own in scores]


@pytest.mark.parametrize("way", ["predictor", "paper"])
def test_scores_are_those_of_the_cpu(found: dict[str, Any], way: str) -> None:
    """Two layers with a signal, or of each model its last one; kept or not, and again in a second round."""
    there, here = (found[backend]["ways"][way]["scores"] for backend in (ENGINE, "cpu"))
    assert there == near(here) and len(here) >= 5
    assert found[ENGINE]["same"] and found["cpu"]["same"]
    for own in zip(*here, strict=True):  # they differ, so that another's would be seen
        assert max(own) - min(own) > 20 * NEAR


def test_states_do_not_come_back(found: dict[str, Any]) -> None:
    """The target's are never read. The draft's sum is, once a segment: how long that is was not known before."""
    ways = found[ENGINE]["ways"]
    assert STATES not in ways["predictor"]["read"]
    n_judged, n_drafted = len(ways["paper"]["scores"]), ways["paper"]["drafted"]
    assert n_judged <= ways["paper"]["read"][STATES] < n_drafted
    assert all(own["read"]["4"] >= len(own["scores"]) for own in ways.values())  # the scores themselves


def test_memory_is_taken_once(found: dict[str, Any]) -> None:
    """A second round of the same requests takes no further block of the device."""
    first, second = found[ENGINE]["blocks"]
    assert first == second > 0


@pytest.fixture(scope="module")
def broken(driver: Path, bundle: Path) -> dict[str, Any]:
    return play_scores(driver, bundle, ENGINE, "nothing", *MUTATIONS)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_what_is_broken_is_seen(broken: dict[str, Any], mutation: str) -> None:
    """An old state, another layer, another model's or a lost sum would give a score that looks like one."""
    way = MUTATIONS[mutation]
    right = broken["nothing"]["ways"][way]["scores"]
    assert right and broken[mutation]["ways"][way]["scores"] != near(right)
