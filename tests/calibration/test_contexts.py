"""Contexts: who wrote them, where they end, and which questions give none."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_pairs

from semspec.calibration.bench.records import Problem
from semspec.calibration.contexts import SLOTS, Start, check_prompts, make_context, prompt_ids
from semspec.calibration.pair import Pair, open_pairs
from semspec.calibration.records import Context
from semspec.export.pipeline import export_pair
from semspec.runtime.bundle import Bundle
from semspec.runtime.config import SamplingParams
from semspec.runtime.errors import CalibrationError
from semspec.runtime.segments import Boundary, Segmenter
from semspec.runtime.tokenizer import CHAT_TEMPLATE, Tokenizer

SAMPLING = SamplingParams(temperature=1.5)
BOUNDARY = Boundary(kind="newline", min_tokens=2, max_tokens=5)
PROBLEMS = tuple(Problem(id=f"q{number}", question=f"{number}+1?") for number in range(8))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A draft that takes and gives its first 126 ids alone: it lacks `~`, letters that are not English, and </s>."""
    folder = tmp_path_factory.mktemp("contexts")
    target = tiny_pairs.save_checkpoint(folder / "target")
    draft = tiny_pairs.save_checkpoint(folder / "draft", seed=1)
    requests = tiny_pairs.request(target), tiny_pairs.request(draft)
    opened = Bundle.open(export_pair(*requests, folder / "bundle", tiny_pairs.settings()).path)
    with open_pairs(opened, sampling=SAMPLING, boundary=BOUNDARY, threads=1) as (pair,):
        model = pair.models["draft"]
        model.spec = replace(
            model.spec, vocab_size=126
        )  # no export makes such a pair over so small a vocabulary
        yield pair


@pytest.fixture(scope="module")
def plain(pair: Pair, tmp_path_factory: pytest.TempPathFactory, short_pair: Path) -> Pair:
    """The same without a chat template."""
    folder = tmp_path_factory.mktemp("plain") / "tokenizer"
    shutil.copytree(short_pair / "tokenizer", folder)
    (folder / CHAT_TEMPLATE).unlink()
    return replace(pair, tokenizer=Tokenizer.open(folder))


def make(pair: Pair, problem: Problem, slot: str, *, max_segments: int = 4, seed: int = 0) -> Context | None:
    return make_context(pair, problem, slot, max_segments=max_segments, seed=seed)


def stopped_by(pair: Pair, stop_ids: Collection[int], boundary: Boundary = BOUNDARY) -> Pair:
    return replace(pair, segmenter=Segmenter(boundary, pair.tokenizer.token_bytes, stop_ids))


def test_a_model_without_a_chat_template_is_asked_in_plain_text(pair: Pair, plain: Pair) -> None:
    """Base models are calibrated too; what is asked is the same."""
    problem = Problem(id="a", question="1+1?", answer="2")
    assert plain.tokenizer.decode(prompt_ids(plain.tokenizer, problem)).startswith("1+1?\n\n")
    chat = pair.tokenizer.decode(prompt_ids(pair.tokenizer, problem), skip_special=False)
    assert chat.startswith("<user>1+1?\n\n") and chat.endswith("<assistant>")
    unanswered = replace(problem, answer=None)
    assert plain.tokenizer.decode(prompt_ids(plain.tokenizer, unanswered)) == "1+1?\n\n"


def test_a_question_that_the_draft_cannot_read_is_refused(pair: Pair, plain: Pair) -> None:
    """Its ids have no row there: an engine would read what lies beyond the table."""
    with pytest.raises(
        CalibrationError, match="question 'q0' holds id 258, which the draft model does not have"
    ):
        check_prompts(pair, PROBLEMS)
    check_prompts(plain, PROBLEMS)
    with pytest.raises(CalibrationError, match="holds id 207"):
        check_prompts(plain, [Problem(id="pi", question="\N{GREEK SMALL LETTER PI}?")])


def test_prefixes_hold_what_both_can_read_and_no_end(plain: Pair) -> None:
    """The target writes ids that the draft lacks, and ends answers: segments are judged only before that."""
    stops = range(0, 126, 25)
    pair = stopped_by(plain, stops, Boundary(kind="newline", min_tokens=2, max_tokens=2))
    found = [
        (slot, make(pair, problem, slot, seed=seed))
        for problem in PROBLEMS
        for slot in SLOTS
        for seed in range(3)
    ]
    assert any(context is None for slot, context in found if slot != "prompt")
    assert all(context is not None for slot, context in found if slot == "prompt")
    written = [
        context.ids[len(prompt_ids(pair.tokenizer, PROBLEMS[int(context.question[1:])])) :]
        for _, context in found
        if context is not None
    ]
    assert sum(map(len, written)) > 20
    for ids in written:
        assert not set(ids) & set(stops)
        assert max(ids, default=0) < 126


def test_a_question_whose_answer_ends_at_once_has_its_prompt_alone(plain: Pair) -> None:
    """Nothing is made up in its place."""
    pair = stopped_by(plain, range(260))
    assert [make(pair, PROBLEMS[0], slot) is None for slot in SLOTS] == [False, True, True]


def test_a_context_leaves_room_for_the_longest_segment(plain: Pair) -> None:
    """128 tokens of context, segments of up to 50 after a prompt of 6: one more fits, and the one to be judged."""
    pair = stopped_by(plain, (), Boundary(kind="newline", min_tokens=50, max_tokens=50))
    lengths = set()
    for problem in PROBLEMS:
        if context := make(pair, problem, "mixed", max_segments=1):
            lengths.add(len(context.ids))
        for slot in ("target", "mixed"):
            context = make(pair, problem, slot, max_segments=9)
            assert context is None or len(context.ids) <= pair.longest_context == 78
    assert lengths == {56}


def test_mixed_prefixes_end_with_the_draft(plain: Pair) -> None:
    """Where the plan was kept to its end; a prefix in which no draft's segment is left is called what it is."""
    whole = stopped_by(plain, ())
    kinds = {
        context.written_by
        for problem in PROBLEMS
        for context in [make(whole, problem, "mixed")]
        if context is not None
    }
    assert "mixed" in kinds and kinds <= {"mixed", "target"}
    for problem in PROBLEMS:  # one segment: that of the draft
        context = make(whole, problem, "mixed", max_segments=1)
        assert context is not None and context.written_by == "mixed"
        assert context.id == f"{problem.id}/mixed" and context.question == problem.id


def test_the_seed_decides(plain: Pair) -> None:
    """The same again for the same seed; other prefixes for another one, and for another question."""
    whole = stopped_by(plain, ())
    first = make(whole, PROBLEMS[0], "mixed")
    assert first == make(whole, PROBLEMS[0], "mixed")
    others = [make(whole, PROBLEMS[0], "mixed", seed=seed) for seed in range(1, 5)]
    assert any(other is not None and first is not None and other.ids != first.ids for other in others)


def test_a_prefix_may_begin_with_what_is_there(plain: Pair) -> None:
    """A segment that its author has drawn already is the first; all behind it follows from it."""
    whole, problem = stopped_by(plain, ()), PROBLEMS[0]
    prompt = tuple(prompt_ids(plain.tokenizer, problem))
    drawn = {"target": (65, 66, 67, 68, 69), "draft": (75, 76, 77, 78, 79)}
    starts = [Start(ids=prompt, drawn=drawn)]
    found = [
        make_context(whole, problem, slot, max_segments=4, seed=seed, starts=starts)
        for slot in SLOTS[1:]
        for seed in range(12)
    ]
    written = [context.ids[len(prompt) :] for context in found if context is not None]
    assert len(written) == 24 and {ids[:5] for ids in written} == set(drawn.values())
    assert len(set(written)) > len(drawn)
    ends = make_context(stopped_by(plain, [69]), problem, "target", max_segments=3, seed=0, starts=starts)
    assert ends is None  # the answer ends with it


def test_a_mixed_prefix_goes_on_where_the_targets_ends(plain: Pair) -> None:
    """What is drawn once serves two contexts; who collects the second alone gets the same kind of text."""
    target = plain.models["target"]  # and a draft that has all of its ids
    whole = replace(stopped_by(plain, ()), models={"target": target, "draft": target})
    for problem in PROBLEMS:
        before, found = (make(whole, problem, slot) for slot in ("target", "mixed"))
        assert before is not None and found is not None and found.written_by == "mixed"
        assert found.ids[: len(before.ids)] == before.ids and len(found.ids) > len(before.ids)


def test_a_start_that_leaves_nothing_to_write_is_passed_over(plain: Pair) -> None:
    """The target's prefix may reach the end of the answer: then the question alone is gone on from."""
    whole, problem = stopped_by(plain, [70]), PROBLEMS[0]
    prompt = tuple(prompt_ids(plain.tokenizer, problem))
    ending, going = {"draft": (70,), "target": (70,)}, {"draft": (75,) * 5, "target": (65,) * 5}
    starts = [Start(ids=(*prompt, 80, 80), drawn=ending), Start(ids=prompt, drawn=going)]
    found = make_context(whole, problem, "mixed", max_segments=2, seed=0, starts=starts)
    assert found is not None and found.ids == (*prompt, *going["draft"])
