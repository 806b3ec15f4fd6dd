"""The semantic rules on a toy world: the class law of a round, its bound, and what every setting keeps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from decoding import start
from numpy.testing import assert_allclose
from toy_world import Ids, Masses, ToyWorld, scattered_masses

from semspec.runtime.acceptance import accept_tokens
from semspec.runtime.config import SpecConfig
from semspec.runtime.errors import ConfigError
from semspec.runtime.features import SegmentText
from semspec.runtime.readings import Reading
from semspec.runtime.records import Floats, Step
from semspec.runtime.semantic import ByRatio, ByScore, CombinedJudge, SemanticJudge, make_judge

FALSE_ALARM = 1e-6
WORLD = ToyWorld([[0.5, 0.3, 0.2, 0.0]], [[0.2, 0.3, 0.1, 0.4]])
SEVERAL: Mapping[str, Any] = {"max_segments": 3, "layers": (0, 1)}


class Oracle:
    """Probes that know the masses. `texts` and readings reach it as they would reach real ones; the ids are what the
    test tells it."""

    def __init__(self, world: ToyWorld, *, wrong: bool = False) -> None:
        self.world, self.wrong = world, wrong
        self.ids: Ids = ()
        self.needs_signals = self.needs_draft_signals = self.needs_target_states = False
        self.needs_draft_states = False
        self.needs_text = True

    def score(self, target: Reading, draft: Reading | None, segment: SegmentText) -> float:
        ids = self.world.ids(segment.text.strip())
        return self.world.mass("target", ids)

    def ratio_scores(self, target_pooled: Floats, draft_pooled: Floats) -> tuple[float, float]:
        s_target, s_draft = (self.world.mass(role, self.ids) for role in ("target", "draft"))
        return (s_draft, s_target) if self.wrong else (s_target, s_draft)


@dataclass(kw_only=True)
class Told:
    """A judge that tells the oracle which segment it is about."""

    inner: SemanticJudge | CombinedJudge
    oracle: Oracle

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def judge(self, review: Any, rng: np.random.Generator) -> Any:
        self.oracle.ids = review.ids
        return self.inner.judge(review, rng)


def describe(world: ToyWorld) -> Any:
    def text(context: Sequence[int], ids: Sequence[int]) -> SegmentText:
        return SegmentText(
            text=world.text(ids), before=world.text(context), n_tokens=len(ids), ended="boundary"
        )

    return text


def answer(
    judge: Any, oracle: Oracle, seed: int = 0, *, inside: Any = None, **options: Any
) -> Iterator[Step]:
    """An answer in the toy world under the rule."""
    given = {"describe": describe(WORLD), "whole_only": True, "exact_inside": True, **(inside or {})}
    return start(
        WORLD.model("target"),
        WORLD.prompt(),
        vocab_size=WORLD.vocab_size,
        draft=WORLD.model("draft"),
        judge=Told(inner=judge, oracle=oracle),
        segmenter=WORLD.segmenter(),
        temperature=1.0,
        seed=seed,
        inside=given,
        **{"drafting": {"states": True}, "max_tokens": 160, **options},
    )


def segments_of(
    judge: Any, oracle: Oracle, seed: int = 0, n: int = 15, **options: Any
) -> list[tuple[Ids, list[Step]]]:
    """n rounds: the segments behind the target's first one, and the steps that wrote each."""
    cut = WORLD.segmenter()
    found: list[tuple[Ids, list[Step]]] = []
    ids: list[int] = []
    wrote: list[Step] = []
    for step in answer(judge, oracle, seed, **options):
        ids += step.ids
        wrote.append(step)
        if (length := cut.length(ids)) is not None:
            assert length == len(ids)
            found.append((tuple(ids), wrote))
            ids, wrote = [], []
        if len(found) > n:
            break
    assert len(found) == n + 1
    return found[1:]


def class_counts(judge: Any, oracle: Oracle, **options: Any) -> Masses:
    """(C,): over 900 rounds in 60 answers."""
    counts: Counter[int] = Counter()
    for seed in range(60):
        counts.update(WORLD.class_of(ids) for ids, _ in segments_of(judge, oracle, seed, **options))
    return np.array([counts[number] for number in range(WORLD.n_classes)], float)


def alarm(counts: Masses, law: Masses) -> bool:
    """Whether chi-square says that the counts are of another law; false once in 10^6 runs at most.

    With k degrees of freedom it exceeds k + 2 sqrt(k x) + 2 x with chance e^-x at most (Laurent and Massart 2000).
    """
    possible = law > 0
    if counts[~possible].any():
        return True
    expected = law[possible] * counts.sum()
    statistic = float(((counts[possible] - expected) ** 2 / expected).sum())
    k, x = int(possible.sum()) - 1, -math.log(FALSE_ALARM)
    return statistic > k + 2 * math.sqrt(k * x) + 2 * x


def paper(oracle: Oracle, **settings: Any) -> SemanticJudge:
    spec = SpecConfig(mode="semantic", preset="paper", **settings)
    judge = make_judge(spec, oracle, 0.0, closing=None)
    assert isinstance(judge, SemanticJudge)
    return judge


@pytest.mark.parametrize("inside", [{}, {"exact_inside": False}, SEVERAL], ids=str)
def test_a_round_of_the_published_rule_has_the_class_law_that_follows_from_it(inside: Any) -> None:
    """min(mu_T, mu_D) + (1 - beta) mu_T with exact scores, also where the target drafts inside, and where several
    segments are read in one pass; chi-square."""
    oracle = Oracle(WORLD)
    counts = class_counts(paper(oracle), oracle, inside=inside)
    assert not alarm(counts, WORLD.round_law())


def test_a_wrong_rule_is_caught() -> None:
    """Scores that are exchanged, and a rule that keeps all: the same test finds them."""
    exchanged = Oracle(WORLD, wrong=True)
    assert alarm(class_counts(paper(exchanged), exchanged), WORLD.round_law())
    oracle = Oracle(WORLD)
    everything = SemanticJudge(rule=ByScore(probes=oracle, threshold=0.0), keep_prefix=False)
    counts = class_counts(everything, oracle, inside=SEVERAL)
    assert alarm(counts, WORLD.round_law()) and not alarm(counts, WORLD.masses("draft"))


def test_segments_are_kept_as_often_as_the_models_agree() -> None:
    """beta of them, within 5 standard deviations; whole or not at all."""
    oracle, kept, n = Oracle(WORLD), 0, 0
    for seed in range(40):
        for _, steps in segments_of(paper(oracle), oracle, seed):
            judged = next(step.judged for step in steps if step.judged is not None)
            assert judged.n_kept in (0, judged.n_drafted) and judged.reason == "ratio"
            assert judged.figures["ratio"] == judged.figures["s_target"] / judged.figures["s_draft"]
            n, kept = n + 1, kept + (judged.n_kept > 0)
    beta = WORLD.overlap()
    assert abs(kept / n - beta) < 5 * math.sqrt(beta * (1 - beta) / n)


@pytest.mark.parametrize("seed", range(50))
def test_the_class_law_is_within_its_bound(seed: int) -> None:
    """TV(out, mu_T) <= beta (1 - beta) <= 1/4: exactly, from the law that the sampled one was tested against."""
    masses = scattered_masses(4, 6, seed, agreement=seed / 50)
    world = ToyWorld(*masses)
    for situation in range(4):
        beta = world.overlap(situation)
        distance = np.abs(world.round_law(situation) - world.masses("target", situation)).sum() / 2
        assert distance <= beta * (1 - beta) + 1e-12 and beta * (1 - beta) <= 0.25


def test_the_combined_rule_without_its_predictor_is_the_exact_rule() -> None:
    """Nothing is kept by score, so classes have the target's law, and no token is lossy. Of several segments a round;
    of one, test_pace.py has the law by enumeration."""
    oracle = Oracle(WORLD)
    judge = CombinedJudge(rule=ByScore(probes=oracle, threshold=2.0))
    counts = class_counts(judge, oracle, inside=SEVERAL)
    assert not alarm(counts, WORLD.masses("target"))
    assert not any(step.n_lossy for step in answer(judge, oracle))


def test_the_combined_rule_draws_what_the_exact_rule_draws() -> None:
    """Token by token under one seed, with the same drafts: first round of every seed, prefix, correction and bonus."""
    oracle = Oracle(WORLD)
    combined = CombinedJudge(rule=ByScore(probes=oracle, threshold=2.0), bonus=True)
    for seed in range(100):
        ours, exact = (first_judged(judge, oracle, seed) for judge in (combined, Exact()))
        assert (ours.ids, ours.n_from_draft) == (exact.ids, exact.n_from_draft) and not ours.n_lossy


class Exact:
    """The exact rule as a judge of segments."""

    name, lossy, segments, few_rows = "exact", False, True, False

    def judge(self, review: Any, rng: np.random.Generator) -> Any:
        return review.exact()


def first_judged(judge: Any, oracle: Oracle, seed: int) -> Step:
    steps = answer(judge, oracle, seed, inside={"bonus": True})
    return next(step for step in steps if step.judged is not None)


def test_a_score_from_the_threshold_on_is_enough() -> None:
    """Classes of the draft's that the target says with chance 0.3 or more; of others the exact part is kept."""
    oracle = Oracle(WORLD)
    for judge in (
        SemanticJudge(rule=ByScore(probes=oracle, threshold=0.3)),
        CombinedJudge(rule=ByScore(probes=oracle, threshold=0.3)),
    ):
        n_kept = 0
        for ids, steps in segments_of(judge, oracle):
            judged = next(step.judged for step in steps if step.judged is not None)
            if judged.n_lossy:
                assert (
                    judged.reason == "score" and judged.figures["score"] >= judged.figures["threshold"] == 0.3
                )
                assert WORLD.class_of(ids) in (0, 1) and judged.n_kept == judged.n_drafted
                n_kept += 1
            assert all(step.n_lossy == 0 for step in steps if step.judged is not judged)
        assert n_kept


@pytest.mark.parametrize(
    ("settings", "classes"),
    [
        ({"greedy_accept": True}, {0, 1, 2}),  # ratios 2.5, 1, 2, 0
        ({"greedy_accept": True, "ratio_floor": 2.0}, {0, 2}),
        ({"ratio_floor": 2.2}, {0}),
        ({"ratio_floor": 3.0}, set()),
    ],
)
def test_ratios_may_have_a_floor_and_leave_nothing_to_chance(settings: Any, classes: set[int]) -> None:
    """What is drafted and of another class is never kept."""
    oracle = Oracle(WORLD)
    kept = {
        WORLD.class_of(ids)
        for seed in range(4)
        for ids, steps in segments_of(paper(oracle, **settings), oracle, seed)
        if any(step.judged is not None and step.judged.n_kept for step in steps)
    }
    assert kept == classes


def test_presets_are_what_they_are_called() -> None:
    """Published: by ratio and chance, thrown away, one row. Strict: without chance. Ours: by score, prefixes kept."""
    oracle = Oracle(WORLD)

    def judge(**settings: Any) -> SemanticJudge | CombinedJudge:
        return make_judge(SpecConfig(**{"mode": "semantic", **settings}), oracle, 0.7, closing=9)

    published = SemanticJudge(rule=ByRatio(probes=oracle), keep_prefix=False, discards=9)
    assert judge(preset="paper") == published and published.few_rows
    strict = SemanticJudge(rule=ByRatio(probes=oracle, greedy=True), keep_prefix=False, discards=9)
    assert judge(preset="strict") == strict
    assert judge() == judge(preset="calibrated") == SemanticJudge(rule=ByScore(probes=oracle, threshold=0.7))
    assert judge(mode="combined") == CombinedJudge(rule=ByScore(probes=oracle, threshold=0.7))
    assert judge(preset="paper", keep_prefix=True, thinking="exact") == SemanticJudge(
        rule=ByRatio(probes=oracle)
    )
    assert not judge().few_rows and not judge(preset="paper", top2=True).few_rows
    states_alone = Oracle(WORLD)
    assert make_judge(
        SpecConfig(mode="semantic", keep_prefix=False), states_alone, 0.5, closing=None
    ).few_rows
    states_alone.needs_signals = True
    spec = SpecConfig(mode="semantic", keep_prefix=False)
    assert not make_judge(spec, states_alone, 0.5, closing=None).few_rows


@pytest.mark.parametrize("kind", ["semantic", "combined", "paper"])
@pytest.mark.parametrize("most", [0.0, 0.2, 0.5, 1.0])
def test_lossy_tokens_never_exceed_their_share(most: float, kind: str) -> None:
    """After every step, not only at the end; where all would be kept, it is what limits."""
    oracle = Oracle(WORLD)
    judge: Any = {
        "semantic": SemanticJudge(rule=ByScore(probes=oracle, threshold=0.0), most_lossy=most),
        "combined": CombinedJudge(rule=ByScore(probes=oracle, threshold=0.0), most_lossy=most),
        "paper": paper(oracle, max_lossy_fraction=most),
    }[kind]
    written = lossy = 0
    reasons = set()
    for seed in range(3):
        written = lossy = 0
        for step in answer(judge, oracle, seed, inside={**SEVERAL, "max_segments": 1 + seed}):
            written, lossy = written + len(step.ids), lossy + step.n_lossy
            assert lossy <= most * written
            reasons |= {step.judged.reason} if step.judged else set()
    assert ("lossy limit" in reasons) == (most < 1) or kind == "paper"
    assert (lossy == 0) == (most == 0)


def test_top_2_is_a_shortcut() -> None:
    """All tokens among the two likeliest: kept without asking probes, which would refuse."""
    oracle = Oracle(WORLD)
    judge = SemanticJudge(rule=ByScore(probes=oracle, threshold=2.0), top2=True)
    reasons = {step.judged.reason for step in answer(judge, oracle) if step.judged}
    assert reasons >= {"top-2", "score"}


@pytest.mark.parametrize("inside", [{}, SEVERAL], ids=str)
def test_states_are_the_mean_of_the_rows_that_predicted_the_segment(inside: Any) -> None:
    """D42, D43: those of the pending token and of all drafted ones but the last, whatever was refused before; of both
    models, of each of several segments, and of the target also where one row of logits is computed."""
    seen: list[tuple[Floats, Floats]] = []

    class Noting(Oracle):
        def ratio_scores(self, target_pooled: Floats, draft_pooled: Floats) -> tuple[float, float]:
            seen.append((target_pooled.copy(), draft_pooled.copy()))
            return super().ratio_scores(target_pooled, draft_pooled)

    oracle, text, outcomes = Noting(WORLD), list(WORLD.prompt()), set[bool]()
    models = {role: WORLD.model(role) for role in ("target", "draft")}
    for step in answer(paper(oracle), oracle, inside={"few_rows": True, **inside}, max_tokens=200):
        if step.judged is not None:
            outcomes.add(step.judged.n_kept > 0)
            rows = [text[-1], *oracle.ids[:-1]]
            for model, pooled in zip(models.values(), seen[-1], strict=True):
                model.rewind(0)
                model.forward(text[:-1], rows=())
                expected = model.forward(rows, pool=np.ones(len(rows), np.float32)).pooled
                assert expected is not None
                assert_allclose(pooled, expected / len(rows), atol=1e-5)
        text += step.ids
    assert outcomes == {True, False} and len(seen) > 10


def test_a_ratio_without_the_drafts_states_is_an_error() -> None:
    """A drafter that has none must not be taken for one that is sure."""
    oracle = Oracle(WORLD)
    with pytest.raises(ConfigError, match="needs the draft's own states"):
        list(answer(paper(oracle), oracle, drafting={}))


def test_exact_parts_follow_the_requests_own_rule() -> None:
    """So `block` holds inside segments too: it is asked of every segment, once."""
    drafts: list[int] = []

    def rule(ids: Any, *arguments: Any) -> Any:
        drafts.append(len(ids))
        return accept_tokens(ids, *arguments)

    oracle = Oracle(WORLD)
    judge = CombinedJudge(rule=ByScore(probes=oracle, threshold=2.0))
    steps = list(answer(judge, oracle, inside={"exact_inside": False}, rule=rule, max_tokens=60))
    judged = [step.judged.n_drafted for step in steps if step.judged]
    assert judged and [n for n in drafts if n][: len(judged)] == judged
