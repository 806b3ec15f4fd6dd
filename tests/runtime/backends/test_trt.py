"""The backend of TensorRT over DOUBLES of engine and driver: the same answers as on the CPU, or its tests would fail.

Real cuda-bindings over a driver of ours, ONNX Runtime behind the engine's names. Seen here: addresses, aliasing, write
positions, strides, shapes, profiles. Not seen: an engine, its kernels, a GPU's numbers, any speed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from doubled import add_plans, make_driver, make_pair, needs_doubles, play, run, with_plans
from engine_cases import needs_native

pytestmark = [needs_doubles, needs_native]
GRAPHS = ("native", "primitive")
MUTATIONS = [
    ("native", "two_buffers"),
    ("native", "short_span"),
    ("native", "stale_shape"),
    ("primitive", "shift_rows"),
    ("primitive", "narrow_stride"),
    ("primitive", "wrong_part"),
]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def bundles(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Graph -> a bundle with plans of it."""
    folder = tmp_path_factory.mktemp("bundles")
    return {graph: with_plans(pair, folder / graph, graph) for graph in GRAPHS}


@pytest.fixture(scope="module")
def played(driver: Path, bundles: dict[str, Path]) -> dict[str, dict[str, Any]]:
    return {graph: play(driver, bundle) for graph, bundle in bundles.items()}


@pytest.mark.parametrize("graph", GRAPHS)
def test_answers_are_those_of_the_cpu(played: dict[str, dict[str, Any]], graph: str) -> None:
    """Prefill in chunks, rejected drafts, rewinding, segments kept by probes, and a second turn."""
    found = played[graph]
    assert found["tensorrt-rtx"] == found["cpu"]
    assert 0 < found["cpu"]["kept"] < found["cpu"]["judged"] and found["cpu"]["rejected"] > 0
    assert len(found["cpu"]["alone"]) == 24


def test_a_plan_that_fits_is_preferred(played: dict[str, dict[str, Any]]) -> None:
    """`auto` says what it took, and why not what comes before it."""
    name, why = played["native"]["auto"]
    assert name == "tensorrt-rtx"
    assert (
        why.startswith("tensorrt-rtx fits; not tensorrt: ") and "no plan of its target for tensorrt:" in why
    )


@pytest.mark.parametrize("graph", GRAPHS)
def test_states_are_those_of_the_cpu(played: dict[str, dict[str, Any]], graph: str) -> None:
    """Of a text that takes several chunks and more than one span, on a cache that held another."""
    found = played[graph]["states"]
    assert found["tensorrt-rtx"] == pytest.approx(found["cpu"], abs=2e-3)


@pytest.mark.parametrize(("graph", "mutation"), MUTATIONS)
def test_what_is_broken_is_seen(
    driver: Path, bundles: dict[str, Path], played: dict[str, dict[str, Any]], graph: str, mutation: str
) -> None:
    """Doubles that let a wrong position, stride, alias or span pass would prove nothing."""
    found = play(driver, bundles[graph], mutation)
    right = pytest.approx(played[graph]["states"]["cpu"], abs=2e-3)
    assert "error" in found or found["states"] != right


def test_graph_whose_plan_fits_is_taken(
    driver: Path, pair: Path, tmp_path: Path, played: dict[str, dict[str, Any]]
) -> None:
    """A bundle may hold plans of one graph for one device and of the other for another."""
    bundle = with_plans(pair, tmp_path / "bundle", "native", capabilities=("8.9",))
    assert "no plan of target's graph 'native'" in refusal(driver, bundle)
    add_plans(bundle, "primitive")
    assert play(driver, bundle, "nothing")["states"] == played["primitive"]["states"]["tensorrt-rtx"]


def refusal(driver: Path, bundle: Path) -> str:
    return str(play(driver, bundle, "nothing")["error"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"version": "1.6.1.120"},
            "it has native for tensorrt-rtx 1.6.1.120 on 8.6: build it with: semspec build",
        ),
        ({"capabilities": ("8.9",)}, "tensorrt-rtx 0.0.double on compute capability 8.6; it has native for"),
        (
            {"engine": "tensorrt"},
            "has no plan of its target for tensorrt-rtx: it has tensorrt 0.0.double on 8.6",
        ),
    ],
)
def test_plans_for_another_release_or_gpu_are_one_error(
    driver: Path, pair: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """Both sides and the command (D38)."""
    assert message in refusal(driver, with_plans(pair, tmp_path / "bundle", "native", **changes))


def test_bundle_without_plans_names_the_command(driver: Path, pair: Path) -> None:
    """An explicit request never falls back to the CPU."""
    assert "it has none; build it with: semspec build" in refusal(driver, pair)


SESSION = """
import sys
import numpy as np
from pathlib import Path
from semspec.runtime.backends import open_backend
from semspec.runtime.errors import SemspecError
try:
    backend = open_backend("tensorrt-rtx")
    session = backend.open(Path(sys.argv[1]))
    print(session.most("input_ids"), session.most("logit_rows"))
    feeds = {"input_ids": np.zeros((1, 65), np.int64), "past_len": np.zeros(1, np.int32), "other": np.zeros(1)}
    session.run(feeds, ["logits"])
except SemspecError as error:
    print(error)
"""


def test_wrong_inputs_are_named_all_at_once(driver: Path, bundles: dict[str, Path]) -> None:
    """With what the plan was compiled for: the runtime cuts its calls by it (D39)."""
    plan = bundles["native"] / "target" / "plans" / "native" / "native.plan"
    first, second = run(driver, "-c", SESSION, plan).stdout.strip().splitlines()
    assert first == "(1, 64) (16,)"
    assert "input_ids has shape [1, 65], at most [1, 2] or [1, 64]" in second
    assert "past_len is int32, expected int64" in second
    assert "logit_rows is missing" in second and "other is unknown" in second


def test_file_that_is_no_plan_is_refused(driver: Path, tmp_path: Path) -> None:
    """The engine's own words in one line, and the command."""
    (tmp_path / "x.plan").write_text("no plan")
    (line,) = run(driver, "-c", SESSION, tmp_path / "x.plan").stdout.strip().splitlines()
    assert "cannot load" in line and "Magic tag does not match (another line); build it here with" in line


def test_missing_driver_is_one_line(tmp_path: Path) -> None:
    """Before the engine's runtime is touched, which would crash."""
    (line,) = run(tmp_path, "-c", SESSION, tmp_path / "x.plan").stdout.strip().splitlines()
    assert "there is no NVIDIA driver here" in line
