"""Collecting: every context with its samples on the disk, once, the same bytes however often it was interrupted."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_pairs
from safetensors import safe_open

from semspec.calibration.bench.records import Problem
from semspec.calibration.collect import collect
from semspec.calibration.collection import (
    RUN,
    Collection,
    CollectSettings,
    join_collections,
    open_collection,
)
from semspec.calibration.records import Context, Sample
from semspec.runtime.config import SamplingParams, SpecConfig
from semspec.runtime.errors import CalibrationError, ConfigError
from semspec.runtime.llm import LLM
from semspec.runtime.segments import Boundary
from semspec.runtime.tokenizer import Tokenizer

PROBLEMS = (
    Problem(id="sum", question="2+3?", answer="5"),
    Problem(id="a/../b", question="2*3?", answer="6"),  # ids are names of nothing on the disk
    Problem(id="open", question="Why?"),
)
SETTINGS = CollectSettings(n_draft=3, n_target=2, max_segments=2, temperature=1.5)


def run(bundle: Path, out: Path, problems: tuple[Problem, ...] = PROBLEMS, **options: Any) -> Collection:
    return collect(bundle, problems, out, **{"settings": SETTINGS, "threads": 1, **options})


@pytest.fixture(scope="module")
def whole(short_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Collection:
    """Three questions, collected in one go."""
    return run(short_pair, tmp_path_factory.mktemp("whole") / "out")


def test_every_context_has_its_samples_and_readings(whole: Collection, short_pair: Path) -> None:
    """From a question to arrays: what labels and predictors are made from."""
    tokenizer = Tokenizer.open(short_pair / "tokenizer")
    found = list(whole.contexts())
    assert not whole.missing and len({context.id for context, _ in found}) == len(found) >= 7
    assert {context.written_by for context, _ in found} >= {"nobody", "target", "mixed"}
    answers = {problem.id: problem.answer for problem in PROBLEMS}
    for context, samples in found:
        assert context.answer == answers[context.question]
        kinds = [(sample.author, sample.greedy) for sample in samples]
        assert kinds == [("draft", True), *[("draft", False)] * 3, ("target", True), *[("target", False)] * 2]
        for sample in samples:
            assert sample.context == context.id
            assert sample.readings.keys() == {sample.author, "target"}
            for role, reading in sample.readings.items():
                assert reading.pooled.shape == whole.run.shapes[role]
                assert reading.signals.sum_logprob <= reading.signals.min_logprob <= 0
            prompt = tokenizer.stream(context.ids)
            assert prompt.push(sample.ids) + prompt.finish() == sample.text


def test_prefixes_go_on_from_the_prompt(whole: Collection) -> None:
    """Segments are judged inside of answers: the prompt first, then at most max_segments segments of six tokens."""
    contexts = [context for context, _ in whole.contexts()]
    prompts = {context.question: context.ids for context in contexts if context.written_by == "nobody"}
    assert prompts.keys() == {problem.id for problem in PROBLEMS}
    for context in contexts:
        prompt = prompts[context.question]
        assert context.ids[: len(prompt)] == prompt
        assert len(context.ids) - len(prompt) <= 2 * 6
        assert (context.written_by == "nobody") is (context.ids == prompt)


def test_prefixes_begin_with_what_was_drawn_after_the_prompt(whole: Collection) -> None:
    """It is not drawn again: `target` begins with the target's first sample, `mixed` behind that with a first sample
    there, or behind the prompt with a second."""
    found = {context.id: (context.ids, samples) for context, samples in whole.contexts()}

    def drawn(slot: str, number: int, *roles: str) -> list[tuple[int, ...]]:
        """The texts with which a prefix may begin, of what the authors drew in a slot."""
        ids, samples = found.get(f"{problem.id}/{slot}", ((), []))
        own = [[one.ids for one in samples if one.author == role and not one.greedy] for role in roles]
        return [(*ids, *segments[number]) for segments in own if segments]

    begun = 0
    for problem in PROBLEMS:
        allowed = {
            "target": drawn("prompt", 0, "target"),
            "mixed": [*drawn("target", 0, "draft", "target"), *drawn("prompt", 1, "draft", "target")],
        }
        for slot, beginnings in allowed.items():
            if f"{problem.id}/{slot}" in found:
                ids = found[f"{problem.id}/{slot}"][0]
                assert any(ids[: len(text)] == text for text in beginnings)
                begun += 1
    assert begun >= 4


def test_the_greedy_draft_is_what_the_bundle_itself_would_draft(whole: Collection, short_pair: Path) -> None:
    """The states are those of the engines that decode, in the texts that decoding meets."""
    with LLM(short_pair, spec=SpecConfig(mode="draft-alone"), threads=1) as llm:
        for context, samples in whole.contexts():
            n = len(samples[0].ids)
            answer = llm.generate(context.ids, SamplingParams(max_tokens=n))
            assert answer.token_ids == samples[0].ids


def test_a_file_is_read_by_others_too(whole: Collection) -> None:
    """Plain safetensors: a row a sample, the layers side by side; the graphs' hashes are in run.json."""
    with safe_open(whole.folder / "00000-prompt.safetensors", "np") as file:
        assert set(file.keys()) == {
            f"{pair}.{kind}"
            for pair in ("draft.draft", "draft.target", "target.target")
            for kind in ("pooled", "signals")
        }
        pooled = file.get_tensor("draft.target.pooled")
    _, samples = next(whole.contexts())
    assert np.array_equal(pooled[2].reshape(whole.run.shapes["target"]), samples[2].readings["target"].pooled)
    for role in ("target", "draft"):
        assert any(name.endswith(".onnx") for name in whole.run.models[role])
        assert all(len(sha256) == 64 for sha256 in whole.run.models[role].values())


class _Killed(Exception):
    pass


def _kill(*_: Any) -> None:
    raise _Killed


def test_interrupted_after_every_step_it_ends_with_the_same_bytes(
    whole: Collection, short_pair: Path, tmp_path: Path
) -> None:
    """Nothing is repeated: what was there is not touched; what a kill left half-written is no obstacle."""
    out, written = tmp_path / "out", dict[str, int]()
    while len(written) < len(list(whole.run.cells())):
        with pytest.raises(_Killed):
            run(short_pair, out, on_progress=_kill)
        now = {path.name: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}
        assert len(now) > len(written) and written.items() <= now.items()
        written = now
        (out / ".00001-mixed.safetensors.writing").write_bytes(b"torn")
    steps: list[tuple[int, int]] = []
    assert run(short_pair, out, on_progress=lambda _, done, n: steps.append((done, n))).missing == []
    assert not steps, "something was done again"
    (out / ".00001-mixed.safetensors.writing").unlink(missing_ok=True)
    assert tiny_pairs.tree(out) == tiny_pairs.tree(whole.folder)


def test_questions_worked_on_at_once_give_the_same_bytes(
    whole: Collection, short_pair: Path, tmp_path: Path
) -> None:
    """Each question by one pair on one core: how many there are is nobody's business."""
    assert not run(short_pair, tmp_path / "out", threads=3).missing
    assert tiny_pairs.tree(tmp_path / "out") == tiny_pairs.tree(whole.folder)


def test_shards_joined_are_the_whole_run(whole: Collection, short_pair: Path, tmp_path: Path) -> None:
    """Every question on one machine; together they are what one machine would have collected."""
    shards = [tmp_path / "1", tmp_path / "2"]
    for index, shard in enumerate(shards, start=1):
        part = run(short_pair, shard, shard=(index, 2))
        assert {cell.question for cell in part.run.cells()} == ({0, 2} if index == 1 else {1})
    joined = join_collections(shards[::-1], tmp_path / "joined")
    assert tiny_pairs.tree(joined.folder) == tiny_pairs.tree(whole.folder)
    with pytest.raises(ConfigError, match=r"all 2 shards .* found 1/2"):
        join_collections(shards[:1], tmp_path / "again")
    with pytest.raises(ConfigError, match="exists"):
        join_collections(shards, tmp_path / "joined")
    with pytest.raises(ConfigError, match=r"settings\.seed is 1 there and 0 here"):
        other = run(
            short_pair, tmp_path / "other", PROBLEMS, shard=(2, 2), settings=replace(SETTINGS, seed=1)
        )
        join_collections([shards[0], other.folder], tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_budget_stops_in_time_and_the_rest_can_follow(
    whole: Collection, short_pair: Path, tmp_path: Path
) -> None:
    """A context that might not be ready in time is not begun: by a clock on which each takes a minute, and the look
    before it another, two fit into five minutes and a half."""
    now = iter(range(0, 10**6, 60))

    def clock() -> float:
        return float(next(now))

    part = run(short_pair, tmp_path / "out", budget=5.5, clock=clock)
    n = len(list(whole.run.cells())) - len(part.missing)
    assert n == 2 and len(list(part.contexts())) <= n
    assert run(short_pair, tmp_path / "out").missing == []
    assert tiny_pairs.tree(tmp_path / "out") == tiny_pairs.tree(whole.folder)


def test_other_settings_do_not_go_on_in_a_folder(whole: Collection, short_pair: Path) -> None:
    """Labels from two laws would be nobody's; neither is another boundary, question or bundle mixed in."""
    before = tiny_pairs.tree(whole.folder)
    changed = (Problem(id="sum", question="3+3?", answer="6"), *PROBLEMS[1:])
    refused: list[tuple[tuple[Problem, ...], dict[str, Any], str]] = [
        (PROBLEMS, {"settings": CollectSettings(n_draft=4)}, r"settings\.max_segments is 2 there and 6 here"),
        (
            PROBLEMS,
            {"boundary": Boundary(kind="blank-line", min_tokens=1, max_tokens=8)},
            r"boundary\.kind is 'newline' there",
        ),
        (changed, {}, "questions_sha256"),
        (PROBLEMS, {"shard": (1, 2)}, "shard"),
    ]
    for problems, options, message in refused:
        with pytest.raises(ConfigError, match=message):
            run(short_pair, whole.folder, problems, **options)
    assert tiny_pairs.tree(whole.folder) == before


@contextmanager
def _largest_file(n_bytes: int) -> Iterator[None]:
    """A real refusal to write more, as a full disk gives it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_one_line_and_the_run_goes_on_later(
    whole: Collection, short_pair: Path, tmp_path: Path
) -> None:
    """What was collected before stays, and nothing half-written is taken for whole. The bundle is only read."""
    bundle = tiny_pairs.tree(short_pair)
    limit = (whole.folder / RUN).stat().st_size
    with _largest_file(limit), pytest.raises(CalibrationError, match="cannot be written: File too large"):
        run(short_pair, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [RUN]
    run(short_pair, tmp_path / "out")
    assert tiny_pairs.tree(tmp_path / "out") == tiny_pairs.tree(whole.folder)
    assert tiny_pairs.tree(short_pair) == bundle


@pytest.mark.parametrize(
    ("problems", "options", "error", "message"),
    [
        ((), {}, CalibrationError, "no questions"),
        ((PROBLEMS[0], PROBLEMS[0]), {}, CalibrationError, "two questions have the id 'sum'"),
        (
            (PROBLEMS[0], replace(PROBLEMS[0], id="again", question=f" {PROBLEMS[0].question}")),
            {},
            CalibrationError,
            "questions 'sum' and 'again' ask the same",
        ),
        (
            (Problem(id="long", question="7" * 250),),
            {},
            CalibrationError,
            r"question 'long' has \d+ tokens, and at most 250 leave room for a segment of 6",
        ),
        (PROBLEMS, {"shard": (3, 2)}, ConfigError, "shard must be i/n with i in 1..n, got 3/2"),
        (PROBLEMS, {"budget": 0.0}, ConfigError, "budget must be more than 0 minutes"),
    ],
)
def test_what_cannot_be_collected_is_refused_before_anything_is_written(
    short_pair: Path,
    tmp_path: Path,
    problems: tuple[Problem, ...],
    options: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    """Rather than after the hours in which the others were collected."""
    with pytest.raises(error, match=message):
        run(short_pair, tmp_path / "out", problems, **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_draft": 1}, "n_draft must be at least 2, got 1"),
        ({"n_target": 1}, "n_target must be at least 2, got 1"),
        ({"max_segments": 0}, "max_segments must be at least 1"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"seed": -1}, "seed must be at least 0"),
    ],
)
def test_settings_are_valid_from_birth(changes: dict[str, Any], message: str) -> None:
    """A single sample says nothing of how likely its meaning is."""
    with pytest.raises(ConfigError, match=message):
        CollectSettings(**changes)


def test_a_folder_of_something_else_or_in_use_is_left_alone(
    whole: Collection, short_pair: Path, tmp_path: Path
) -> None:
    """Nothing of ours among a user's files, and nobody collects twice."""
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"holds 'notes\.txt'"):
        run(short_pair, tmp_path)
    with pytest.raises(CalibrationError, match="holds no collection"):
        open_collection(tmp_path)

    def again(*_: Any) -> None:
        with pytest.raises(CalibrationError, match="another run is writing"):
            run(short_pair, tmp_path / "out", PROBLEMS[:1])
        raise _Killed

    with pytest.raises(_Killed):
        run(short_pair, tmp_path / "out", PROBLEMS[:1], on_progress=again)


def _first(collection: Collection) -> tuple[Context, tuple[Sample, ...]]:
    return next(collection.contexts())


def test_a_damaged_file_is_named_with_its_repair(whole: Collection, short_pair: Path, tmp_path: Path) -> None:
    """Cut, of another run, or not safetensors: never taken for a context."""
    out = join_collections([whole.folder], tmp_path / "out")
    path = out.folder / "00000-prompt.safetensors"
    content = path.read_bytes()
    for damaged in (content[:-4], content[:100], b"", content.replace(b'"how', b'"who')):
        path.write_bytes(damaged)
        with pytest.raises(CalibrationError, match=r"00000-prompt\.safetensors is damaged .*; remove it"):
            _first(out)
    path.write_bytes(content.replace(out.run.fingerprint.encode(), b"0" * 64))
    with pytest.raises(CalibrationError, match=r"is of another run than its run\.json"):
        _first(out)
    path.unlink()
    run(short_pair, out.folder)
    assert path.read_bytes() == content
    (out.folder / RUN).write_bytes(b"{}")
    with pytest.raises(CalibrationError, match=r"run\.json is damaged"):
        open_collection(out.folder)
