"""Judges: what one must be, what it may say, whose turn it is, and whose chances it meets."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from decoding import Says, keeping
from scripted import ScriptedModel

from semspec.runtime.chooser import Chooser
from semspec.runtime.config import SamplingParams
from semspec.runtime.errors import ConfigError
from semspec.runtime.judging import Judge, Judging, Turns, check_judge, decision_rng, pass_judgement
from semspec.runtime.records import Draft, Law, Verdict
from semspec.runtime.review import Review, TargetLaws
from semspec.runtime.rows import Rows
from semspec.runtime.segments import Boundary, Segmenter
from semspec.runtime.stats import Ledger

LINES = Segmenter(
    Boundary(kind="newline", min_tokens=2, max_tokens=4), lambda token: b"\n" if token == 0 else b"a"
)


KEPT, REFUSED = Verdict(keep=1), Verdict(keep=0, target_writes=True)


def judging(judge: Judge) -> Judging:
    return Judging(judge=judge, segmenter=LINES, rng=np.random.default_rng(0))


def review(n: int = 3) -> Review:
    ids = (1,) * n
    rows = Rows(np.zeros((n + 1, 9), np.float32))
    laws = TargetLaws(Chooser(SamplingParams(), 8, [1]), rows, ids, ())
    sure = Law(ids=np.array([1]), probs=np.ones(1))
    return Review(Draft(ids=ids, laws=(sure,) * n), laws, ScriptedModel(lambda _: np.zeros(9)), Ledger())


@pytest.mark.parametrize(
    "verdict",
    [
        Verdict(keep=3),
        Verdict(keep=1),
        Verdict(keep=3, extra=7),
        Verdict(keep=0, extra=0),
        Verdict(keep=0, target_writes=True),
        Verdict(keep=2, n_exact=2, extra=5, target_writes=True),
    ],
)
def test_what_a_judge_may_say(verdict: Verdict) -> None:
    """All of it, a part, a token more, or nothing and the target's turn."""
    assert pass_judgement(judging(Says(verdict=lambda *_: verdict)), review()) is verdict


@pytest.mark.parametrize(
    ("verdict", "message"),
    [
        (Verdict(keep=4, extra=1), "keeps 4 of 3 drafted tokens"),
        (Verdict(keep=-1, extra=1), "keeps -1 of 3"),
        (Verdict(keep=0), "keeps nothing and adds nothing"),
        (Verdict(keep=1, extra=8), r"adds id 8; ids are 0\.\.7"),
        (Verdict(keep=1, extra=-1), "adds id -1"),
        (Verdict(keep=1, n_exact=2), "calls 2 of 1 kept tokens exact"),
    ],
)
def test_what_cannot_be_carried_out_is_an_error_by_the_judges_name(verdict: Verdict, message: str) -> None:
    """It comes from outside: a text that stands still, or an id of padding, must not be what the user sees."""
    with pytest.raises(ConfigError, match=f"judge 'odd' {message}"):
        pass_judgement(judging(Says(verdict=lambda *_: verdict, name="odd")), review())


def test_a_judge_goes_with_the_mode_that_asks_it() -> None:
    """A judge that is silently not asked would be a promise broken."""
    check_judge(None, "lossless")
    check_judge(keeping(True), "judged")
    with pytest.raises(ConfigError, match="needs a judge"):
        check_judge(None, "judged")
    for mode in ("lossless", "autoregressive", "draft-alone"):
        with pytest.raises(ConfigError, match=f"mode '{mode}' asks no judge"):
            check_judge(keeping(True), mode)


@pytest.mark.parametrize("missing", ["name", "lossy", "segments", "judge"])
def test_what_is_no_judge_is_refused_by_what_it_lacks(missing: str) -> None:
    """Before anything is computed."""
    attributes: dict[str, Any] = {"name": "x", "lossy": True, "segments": True, "judge": lambda *_: None}
    del attributes[missing]
    with pytest.raises(ConfigError, match=f"judge Half has no {missing}"):
        check_judge(type("Half", (), attributes)(), "judged")


def test_turns_follow_segments() -> None:
    """The target's first segment, then drafts until one is refused, then its own up to where the refused one's ends."""
    turns = Turns(judging(keeping(True)))
    assert turns.target_writes
    turns.take([0], judged=False, verdict=KEPT)
    assert turns.target_writes  # one token is no segment here
    turns.take([0], judged=False, verdict=KEPT)
    assert not turns.target_writes
    turns.take([1, 1, 0], judged=True, verdict=KEPT)
    assert not turns.target_writes
    turns.take([1], judged=True, verdict=REFUSED)
    for token in (1, 1):
        assert turns.target_writes
        turns.take([token], judged=False, verdict=KEPT)
    assert turns.target_writes
    turns.take([1], judged=False, verdict=KEPT)  # the cap, counted from the draft's place
    assert not turns.target_writes


def test_nobody_drafts_means_the_target_writes_a_segment() -> None:
    """A segment has one author; where tokens are judged there are no segments to keep whole."""
    for segments in (True, False):
        turns = Turns(judging(keeping(True, segments=segments)))
        if segments:
            turns.take([1, 0], judged=False, verdict=KEPT)
        assert not turns.target_writes
        turns.take([1], judged=False, verdict=KEPT)
        assert turns.target_writes == segments


def test_without_a_judge_there_are_no_turns() -> None:
    """Exact modes draft from the first token on."""
    turns = Turns(None)
    turns.take([1], judged=False, verdict=KEPT)
    assert not turns.target_writes


def test_decisions_meet_the_same_chances_in_one_prompt_and_others_in_another() -> None:
    """Else the first segment of every problem of a run would be kept, or every one thrown away."""
    first = decision_rng(1, [5, 6]).random(4).tolist()
    assert decision_rng(1, [5, 6]).random(4).tolist() == first
    assert decision_rng(2, [5, 6]).random(4).tolist() != first
    assert decision_rng(1, [6, 5]).random(4).tolist() != first
    assert decision_rng(1, [5]).random(4).tolist() != first
    assert np.random.default_rng(1).random(4).tolist() != first
    assert decision_rng(None, [5, 6]).random(4).tolist() != decision_rng(None, [5, 6]).random(4).tolist()
    assert decision_rng(0, np.array([5, 6])).random() == decision_rng(0, cast(Any, (5, 6))).random()
