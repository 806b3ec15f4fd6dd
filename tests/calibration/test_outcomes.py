"""Outcomes: whether the answer stays right, once a context, the same bytes however often it was interrupted."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_pairs

from semspec.calibration.bench.answers import is_correct
from semspec.calibration.bench.journal import RUN
from semspec.calibration.bench.records import Problem
from semspec.calibration.collect import collect
from semspec.calibration.collection import Collection, CollectSettings
from semspec.calibration.outcomes import Outcome, Outcomes, RollOut, open_outcomes, sample_labels
from semspec.calibration.records import Sample
from semspec.calibration.rollouts import find_outcomes
from semspec.runtime.config import SamplingParams, SpecConfig
from semspec.runtime.errors import CalibrationError, ConfigError
from semspec.runtime.llm import LLM

PROBLEMS = (
    Problem(id="sum", question="2+3?", answer="5"),
    Problem(id="open", question="Why?"),
    Problem(id="product", question="2*3?", answer="6"),
)
SETTINGS = CollectSettings(n_draft=3, n_target=2, max_segments=2, temperature=1.5)
TOKENS = 12


@pytest.fixture(scope="module")
def collection(short_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Collection:
    folder = tmp_path_factory.mktemp("outcomes") / "collection"
    return collect(short_pair, PROBLEMS, folder, SETTINGS, threads=1)


def run(bundle: Path, collection: Collection, out: Path, **options: Any) -> Outcomes:
    return find_outcomes(bundle, collection, out, **{"max_tokens": TOKENS, "threads": 1, **options})


@pytest.fixture(scope="module")
def whole(short_pair: Path, collection: Collection, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run(short_pair, collection, tmp_path_factory.mktemp("whole") / "out")


def test_the_target_goes_on_as_it_would_alone(
    whole: Outcomes, collection: Collection, short_pair: Path
) -> None:
    """Drafting helps and changes nothing; what was said before the segment is part of the answer, not the question."""
    prompts = {c.question: c.ids for c, _ in collection.contexts() if c.written_by == "nobody"}
    contexts = {context.id: (context, samples) for context, samples in collection.contexts()}
    found = [outcome for _, outcome in whole.all()]
    assert {outcome.question for outcome in found} == {"sum", "product"} and not whole.missing
    assert {outcome.context for outcome in found} == {
        name for name, (context, _) in contexts.items() if context.answer is not None
    }
    with LLM(short_pair, spec=SpecConfig(mode="autoregressive"), threads=1) as llm:
        for outcome in found:
            context, samples = contexts[outcome.context]
            greedy = {sample.author: sample.ids for sample in samples if sample.greedy}
            for author, one in (("draft", outcome.after_draft), ("target", outcome.after_own)):
                assert one.segment == greedy[author]
                if one.segment[-1] == tiny_pairs.EOS_ID:
                    assert one.ids == () and one.whole
                else:
                    answer = llm.generate((*context.ids, *one.segment), SamplingParams(max_tokens=TOKENS))
                    assert one.ids == answer.token_ids
                    assert one.whole is (answer.finish_reason == "stop")
                begun = (*context.ids, *one.segment)[len(prompts[context.question]) :]
                text = llm.tokenizer.decode([*begun, *one.ids])
                assert one.right is is_correct(text, outcome.answer, whole=one.whole)


def test_interrupted_after_every_step_it_ends_with_the_same_bytes(
    whole: Outcomes, collection: Collection, short_pair: Path, tmp_path: Path
) -> None:
    """Nothing is repeated: what was there is not touched; what a kill left half-written is no obstacle."""

    class Killed(Exception):
        pass

    def kill(*_: Any) -> None:
        raise Killed

    out, written = tmp_path / "out", dict[str, int]()
    for _ in collection.run.cells():
        with pytest.raises(Killed):
            run(short_pair, collection, out, on_progress=kill)
        now = {path.name: path.stat().st_mtime_ns for path in out.glob("0*.json")}
        assert len(now) == len(written) + 1 and written.items() <= now.items()
        written = now
        (out / "00002-mixed.json.partial").write_bytes(b"torn")
    steps: list[int] = []
    assert run(short_pair, collection, out, on_progress=lambda *step: steps.append(1)).missing == []
    assert not steps, "something was done again"
    (out / "00002-mixed.json.partial").unlink(missing_ok=True)
    assert tiny_pairs.tree(out) == tiny_pairs.tree(whole.folder)


def test_a_budget_stops_in_time_and_a_growing_collection_is_followed(
    whole: Outcomes, collection: Collection, short_pair: Path, tmp_path: Path
) -> None:
    """By a clock on which a context takes a minute, and the look before it another, two fit into five and a half, of
    two questions and slots; what was not collected yet is not missing."""
    now = iter(range(0, 10**6, 60))
    part = run(short_pair, collection, tmp_path / "out", budget=5.5, clock=lambda: float(next(now)))
    n = len(list(collection.run.cells()))
    assert len(part.missing) == n - 2
    found = {path.name for path in part.folder.glob("0*.json")}
    assert found == {"00000-prompt.json", "00001-target.json"}
    growing = collect(short_pair, PROBLEMS, tmp_path / "growing", SETTINGS, threads=1)
    for slot in ("target", "mixed"):
        (growing.folder / f"00002-{slot}.safetensors").unlink()
    followed = run(short_pair, growing, tmp_path / "out")
    assert followed.missing == [] and len(list(followed.folder.glob("0*.json"))) == n - 2
    assert run(short_pair, collection, tmp_path / "out").missing == []
    assert tiny_pairs.tree(tmp_path / "out") == tiny_pairs.tree(whole.folder)


def test_only_the_bundle_and_the_run_that_it_is_of_go_on(
    whole: Outcomes, collection: Collection, short_pair: Path, tiny_pair: Path, tmp_path: Path
) -> None:
    """Outcomes of two targets, or with two limits, would be nobody's; a folder of something else is left alone."""
    with pytest.raises(CalibrationError, match="collected with other models"):
        run(tiny_pair, collection, tmp_path / "out")
    with pytest.raises(ConfigError, match="max_tokens is 12 there and 13 here"):
        run(short_pair, collection, whole.folder, max_tokens=13)
    with pytest.raises(ConfigError, match="budget"):
        run(short_pair, collection, tmp_path / "out", budget=0.0)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="thesis"):
        run(short_pair, collection, tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    assert not (tmp_path / "out").exists()


def test_outcomes_are_read_back_and_damage_is_named(
    whole: Outcomes, collection: Collection, short_pair: Path, tmp_path: Path
) -> None:
    """By file, and what to do."""
    again = open_outcomes(whole.folder, collection)
    assert list(again.all()) == list(whole.all())
    other = replace(collection, run=replace(collection.run, questions=("x",)))
    with pytest.raises(CalibrationError, match="of another collection"):
        open_outcomes(whole.folder, other)
    with pytest.raises(CalibrationError, match=RUN):
        open_outcomes(tmp_path, collection)
    copy = run(short_pair, collection, tmp_path / "copy", budget=None)
    for content in (b"{", b"[]", b"\xff", b'{"run": {}, "outcome": null}'):
        (copy.folder / "00000-prompt.json").write_bytes(content)
        with pytest.raises(
            CalibrationError, match=r"00000-prompt\.json is damaged .* run the same command again"
        ):
            list(copy.all())


def test_labels_are_known_after_the_two_segments_only(whole: Outcomes, collection: Collection) -> None:
    """One number a sample, as build_dataset takes them; equal segments have equal outcomes."""
    labels, counts, nan = whole.labels(), whole.counts(), 0
    assert counts.contexts == len(labels) == sum(c.answer is not None for c, _ in collection.contexts())
    for context, samples in collection.contexts():
        if context.answer is not None:
            assert len(labels[context.id]) == len(samples)
            nan += all(math.isnan(label) for label in labels[context.id])
    assert counts.own_right == counts.contexts - nan and counts.both_right <= counts.own_right


def _sample(author: str, ids: tuple[int, ...], *, greedy: bool = False) -> Sample:
    return Sample(context="c", author=author, greedy=greedy, ids=ids, text="", readings={})


@pytest.mark.parametrize(
    ("after_draft", "after_own", "expected"),
    [
        (True, True, [1, math.nan, 1, 1, 1]),
        (False, True, [0, math.nan, 0, 1, 1]),
        (True, False, [math.nan] * 5),
        (False, False, [math.nan] * 5),
    ],
)
def test_a_segment_can_only_spoil_what_would_have_been_right(
    after_draft: bool, after_own: bool, expected: list[float]
) -> None:
    """Where the target's own way goes wrong, the draft is not to blame, nor to praise."""

    def rolled(segment: tuple[int, ...], right: bool) -> RollOut:
        return RollOut(segment=segment, ids=(), whole=True, right=right)

    outcome = Outcome(
        context="c",
        question="q",
        answer="5",
        after_draft=rolled((1, 2), after_draft),
        after_own=rolled((3,), after_own),
    )
    samples = [
        _sample("draft", (1, 2), greedy=True),
        _sample("draft", (1,)),
        _sample("draft", (1, 2)),
        _sample("target", (3,), greedy=True),
        _sample("draft", (3,)),
    ]
    assert np.array_equal(sample_labels(outcome, samples), expected, equal_nan=True)
