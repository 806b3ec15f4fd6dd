"""The backend of TensorRT over DOUBLES of engine and driver: the same answers as on the CPU, or its tests would fail.

Real cuda-bindings over a driver of ours, ONNX Runtime behind the engine's names. Seen here: addresses, aliasing, write
positions, strides, shapes, profiles. Not seen: an engine, its kernels, a GPU's numbers, any speed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from doubled import add_plans, make_driver, make_pair, needs_doubles, play, run, run_passes, with_plans
from engine_cases import needs_native

pytestmark = [needs_doubles, needs_native]
RTX, TRT = "tensorrt-rtx", "tensorrt"
GRAPHS = ("native", "primitive")
# engine and graph -> what is broken
MUTATIONS = {
    (RTX, "native"): ("two_buffers", "short_span", "stale_shape", "old_memory"),
    (RTX, "primitive"): ("shift_rows", "narrow_stride", "wrong_part"),
    (TRT, "native"): ("any_span", "old_memory", "old_inputs", "recorded_only"),
}
BROKEN = [(engine, graph, name) for (engine, graph), names in MUTATIONS.items() for name in names]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def bundles(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Graph -> a bundle with plans of it, for TensorRT-RTX; `tensorrt`: one of `native` for TensorRT."""
    folder = tmp_path_factory.mktemp("bundles")
    found = {graph: with_plans(pair, folder / graph, graph) for graph in GRAPHS}
    return {**found, TRT: with_plans(pair, folder / TRT, "native", engine=TRT)}


@pytest.fixture(scope="module")
def played(driver: Path, bundles: dict[str, Path]) -> dict[str, dict[str, Any]]:
    found = {graph: play(driver, bundles[graph], f"cpu,{RTX}") for graph in GRAPHS}
    return {**found, TRT: play(driver, bundles[TRT], TRT)}


@pytest.fixture(scope="module")
def broken(driver: Path, bundles: dict[str, Path]) -> dict[tuple[str, str], dict[str, Any]]:
    """Engine and graph -> mutation -> states, or the error."""
    return {
        (engine, graph): play(driver, bundles[TRT if engine == TRT else graph], engine, *names)
        for (engine, graph), names in MUTATIONS.items()
    }


@pytest.fixture(scope="module")
def passes(driver: Path, bundles: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """Of each bundle, what was recorded and launched."""
    return {name: run_passes(driver, bundle, TRT if name == TRT else RTX) for name, bundle in bundles.items()}


@pytest.mark.parametrize("graph", GRAPHS)
def test_answers_are_those_of_the_cpu(played: dict[str, dict[str, Any]], graph: str) -> None:
    """Prefill in chunks, rejected drafts, rewinding, segments kept by probes, and a second turn."""
    found = played[graph]
    assert found[RTX] == found["cpu"]
    assert 0 < found["cpu"]["kept"] < found["cpu"]["judged"] and found["cpu"]["rejected"] > 0
    assert len(found["cpu"]["alone"]) == 24


def test_replayed_answers_are_those_of_the_cpu(played: dict[str, dict[str, Any]]) -> None:
    """Passes of TensorRT are recorded by us: most are launched, and none is left behind when all is closed."""
    assert played[TRT][TRT] == played["native"]["cpu"]
    counts = played[TRT]["counts"]
    assert counts["launches"] > 100 and counts["graphs"] == 0


def test_engine_that_replays_itself_is_left_to_it(played: dict[str, dict[str, Any]]) -> None:
    """TensorRT-RTX: one context a shape, or each would be recorded anew; and nothing is recorded around it."""
    counts = played["native"]["counts"]
    assert counts["replayed"] > 100 > 2 * counts["recorded"] and counts["launches"] == 0
    none = played["primitive"]["counts"]
    assert "replayed" not in none and none["launches"] == 0


def test_a_plan_that_fits_is_preferred(played: dict[str, dict[str, Any]]) -> None:
    """`auto` says what it took, and why not what comes before it."""
    name, why = played["native"]["auto"]
    assert name == "tensorrt-rtx"
    assert (
        why.startswith("tensorrt-rtx fits; not tensorrt: ") and "no plan of its target for tensorrt:" in why
    )


@pytest.mark.parametrize(
    ("played_as", "engine", "graph"), [*((name, RTX, name) for name in GRAPHS), (TRT, TRT, "native")]
)
def test_states_are_those_of_the_cpu(
    played: dict[str, dict[str, Any]], played_as: str, engine: str, graph: str
) -> None:
    """Of a text that takes several chunks and more than one span, on a cache that held another."""
    found = played[played_as]["states"][engine]
    assert found == pytest.approx(played[graph]["states"]["cpu"], abs=2e-3)


@pytest.mark.parametrize(("engine", "graph", "mutation"), BROKEN)
def test_what_is_broken_is_seen(
    broken: dict[tuple[str, str], dict[str, Any]],
    played: dict[str, dict[str, Any]],
    engine: str,
    graph: str,
    mutation: str,
) -> None:
    """Doubles that let a wrong position, stride, alias, span or replay pass would prove nothing."""
    found = broken[engine, graph][mutation]
    right = pytest.approx(played[graph]["states"]["cpu"], abs=2e-3)
    assert "error" in found or found["states"] != right


def test_stale_address_is_what_is_seen(broken: dict[tuple[str, str], dict[str, Any]]) -> None:
    """Of memory that moved: by the driver where we launch, by the engine where it replays."""
    found = [broken[engine, "native"]["old_memory"]["error"] for engine in (TRT, RTX)]
    assert "cuGraphLaunch: CUDA_ERROR_ILLEGAL_ADDRESS" in found[0] and "the pass failed: 700" in found[1]


def test_graph_whose_plan_fits_is_taken(
    driver: Path, pair: Path, tmp_path: Path, played: dict[str, dict[str, Any]]
) -> None:
    """A bundle may hold plans of one graph for one device and of the other for another."""
    bundle = with_plans(pair, tmp_path / "bundle", "native", capabilities=("8.9",))
    assert "no plan of target's graph 'native'" in refusal(driver, bundle)
    add_plans(bundle, "primitive")
    assert play(driver, bundle, RTX, "nothing")["nothing"]["states"] == played["primitive"]["states"][RTX]


def refusal(driver: Path, bundle: Path) -> str:
    return str(play(driver, bundle, RTX, "nothing")["nothing"]["error"])


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


def test_pass_that_comes_again_is_recorded_then_launched(passes: dict[str, dict[str, Any]]) -> None:
    """The first of its shapes runs plainly, the second in a context of its own, recorded when it is done.

    What is launched answers as what ran, reads the inputs of now, and is dropped for shapes that came later.
    """
    found = passes[TRT]
    assert found["repeated"]["counts"] == [[0, 0], [1, 0], [1, 1], [1, 2]]
    assert found["repeated"]["alike"] and found["repeated"]["away"] < 1e-4
    assert found["bounded"] == [1, 2, 1, 2, 2, 3, 2, 3]
    assert (found["graphs"], found["left"]) == ("backend", 0)


def test_memory_is_shared_and_what_was_recorded_in_the_old_one_is_not_launched(
    passes: dict[str, dict[str, Any]],
) -> None:
    """Target and draft never run at once. The draft needs more: from then on both work in the larger one, and the
    target's pass runs plainly once and is recorded again."""
    assert passes[TRT]["grown"] == {"places": "aaabbb", "launches": [0, 0, 1, 1, 1, 2]}
    assert all(passes[graph]["grown"] == {"places": "aaabbb", "launches": [0] * 6} for graph in GRAPHS)


def test_engine_that_replays_itself_gets_a_context_for_a_shape(passes: dict[str, dict[str, Any]]) -> None:
    """What is plain, recorded and replayed there is told by the double of the engine."""
    found = passes["native"]
    assert found["engine"] == {"plain": 1, "recorded": 1, "replayed": 5}
    assert found["repeated"]["alike"] and (found["graphs"], found["left"]) == ("engine", 0)


def test_graph_whose_cache_is_written_from_outside_is_not_replayed(passes: dict[str, dict[str, Any]]) -> None:
    """Of `primitive` new rows are copied behind the old ones, at another place after each pass."""
    found = passes["primitive"]
    assert found["graphs"] == "none: its caches are not updated in place"
    assert found["engine"] == {} and found["repeated"]["away"] < 1e-4


@pytest.mark.parametrize(
    ("engine", "change", "why"),
    [
        (
            TRT,
            {"waits": True},
            "the engine refused to have a pass recorded: a pass of this plan waits for the device",
        ),
        (RTX, {"capturable": False}, "the engine says that its passes cannot be captured"),
    ],
)
def test_engine_that_cannot_be_recorded_runs_plainly_and_says_so(
    driver: Path, bundles: dict[str, Path], tmp_path: Path, engine: str, change: dict[str, bool], why: str
) -> None:
    """Answers are right all the same; why it is so is told once in the log, and to whoever asks."""
    plan = bundles["native"] / "target" / "plans" / "native" / "native.plan"
    (tmp_path / "changed.plan").write_text(json.dumps({**json.loads(plan.read_text()), **change}))
    found = run_passes(driver, bundles[TRT if engine == TRT else "native"], engine, tmp_path / "changed.plan")
    assert found["graphs"] == f"none: {why}"
    assert found["told"].count(f"changed.plan runs without CUDA graphs: {why}") == 1
    assert found["repeated"]["alike"] and found["repeated"]["counts"][-1] == [0, 0] and found["left"] == 0
    assert found["grown"]["places"] == "aaabbb"


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
