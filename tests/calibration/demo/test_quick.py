"""What a quick calibration asks for, and what is shown with what it found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from semspec.calibration.calibrate import CalibrateSettings
from semspec.calibration.collection import CollectionRun, CollectSettings
from semspec.calibration.demo.quick import QUESTIONS, SETTINGS, choose_mode
from semspec.calibration.problems import KINDS, generate_problems
from semspec.runtime.config import SpecConfig
from semspec.runtime.errors import ConfigError
from semspec.runtime.probe_set import ProbeGraph, ProbeSet, RiskPoint
from semspec.runtime.segments import Boundary


def run_of(settings: CollectSettings, n_questions: int) -> CollectionRun:
    return CollectionRun(
        format=1,
        settings=settings,
        boundary=Boundary(kind="newline", min_tokens=12, max_tokens=64),
        models={},
        pooled_layers={"target": (1,), "draft": (1,)},
        widths={"target": 4, "draft": 4},
        questions=tuple(f"q{number}" for number in range(n_questions)),
        questions_sha256="",
        backend="cpu",
        shard=(1, 1),
    )


def probes(*risks: float) -> ProbeSet:
    """Supporting these."""
    graph = ProbeGraph(file="p.onnx", role="target", layers=(), features=("text.capped",), size=1, sha256="0")
    pair = {
        role: replace(graph, role=role, layers=(1,), features=(), file=f"{role}.onnx")
        for role in ("target", "draft")
    }
    points = tuple(
        RiskPoint(risk=risk, threshold=0.5, coverage=0.5, observed=risk / 2, upper=risk * 0.9)
        for risk in risks
    )
    return ProbeSet(
        format=1,
        graphs={"predictor": graph, **pair},
        risks=points,
        boundary=Boundary(kind="newline", min_tokens=12, max_tokens=64),
        models={"target": {}, "draft": {}},
        pooled_layers={"target": (1,), "draft": (1,)},
        backend="cpu",
        temperature=0.6,
        top_p=0.95,
    )


@pytest.mark.parametrize(
    ("risks", "shown", "words"),
    [
        ((0.1, 0.2, 0.3, 0.4), 0.3, "risk 30%: of the segments kept on unseen questions 15%"),
        ((0.1, 0.2), 0.2, "at most 18% with 95 % confidence"),
        ((0.4, 0.5), 0.4, "a risk of 30% cannot be vouched for, shown is the least that can be: risk 40%"),
    ],
)
def test_the_risk_that_is_shown_can_be_vouched_for(
    risks: tuple[float, ...], shown: float, words: str
) -> None:
    """The wanted one, or the nearest that there is, and the sentence says which it was."""
    found = choose_mode(probes(*risks))
    assert found.spec == SpecConfig(mode="combined", risk=shown) and words in found.says


def test_a_risk_of_outcomes_is_told_as_one() -> None:
    """Probes that were learned from answers that stay right say nothing of equivalents."""
    found = choose_mode(replace(probes(0.3), risk_of="answer"))
    assert "15% spoiled the answer, at most 27% with 95 % confidence" in found.says
    assert "had no equivalent among the target's samples, at most" in choose_mode(probes(0.3)).says


def test_without_a_risk_nothing_is_promised() -> None:
    """And no mode that needs a threshold is asked for."""
    found = choose_mode(probes())
    assert found.spec == SpecConfig(mode="semantic", preset="strict")
    assert "no risk can be vouched for" in found.says and "promises nothing" in found.says


def test_each_question_has_one_context_and_all_slots_their_share() -> None:
    """Bounds are of questions; the mix of contexts is that of a long calibration, and no shard changes it."""
    run = run_of(SETTINGS.collecting, QUESTIONS)
    cells = list(run.cells())
    assert [cell.question for cell in cells] == list(range(QUESTIONS))
    counts = {slot: sum(cell.slot == slot for cell in cells) for slot in ("prompt", "target", "mixed")}
    assert set(counts.values()) == {QUESTIONS // 3}
    shards = [cell for index in (1, 2) for cell in replace(run, shard=(index, 2)).cells()]
    assert sorted(shards) == sorted(cells)
    two = list(run_of(replace(SETTINGS.collecting, n_contexts=2), 3).cells())
    assert [(cell.question, cell.slot) for cell in two] == [
        (0, "prompt"), (0, "target"), (1, "target"), (1, "mixed"), (2, "prompt"), (2, "mixed"),
    ]  # fmt: skip
    whole = CollectSettings()
    assert "n_contexts" not in run_of(whole, 2).to_json(), "older collections go on"
    assert len(list(run_of(whole, 2).cells())) == 6


@pytest.mark.parametrize("n", [0, 4])
def test_a_number_of_contexts_that_there_is_not_is_refused(n: int) -> None:
    """Zero would collect nothing, four would be three in silence."""
    with pytest.raises(ConfigError, match=f"n_contexts must be 1 to 3, got {n}"):
        CollectSettings(n_contexts=n)


def test_outcomes_need_every_context() -> None:
    """A roll-out looks up where its question ends in the question's first context."""
    with pytest.raises(ConfigError, match="outcomes need all 3 contexts of a question, got 1"):
        CalibrateSettings(label="outcome", collecting=CollectSettings(n_contexts=1))


def test_the_questions_are_of_every_kind() -> None:
    """As many of each, so that bounds are not about one sort of problem."""
    kinds = [problem.id.split("-")[0] for problem in generate_problems(QUESTIONS)]
    assert {kinds.count(kind) for kind in KINDS} == {QUESTIONS // len(KINDS)}
