"""Datasets: rows in order, the labels asked for, and a refusal of classes or outcomes that belong to something else."""

from __future__ import annotations

import numpy as np
import pytest
import toy_dataset
from toy_world import SameClass, ToyWorld, scattered_masses

from semspec.calibration.dataset import Dataset, build_dataset, classify
from semspec.calibration.labels import label_samples
from semspec.runtime.errors import CalibrationError, ConfigError


@pytest.fixture(scope="module")
def world() -> ToyWorld:
    return ToyWorld(*scattered_masses(9, 3))


@pytest.fixture(scope="module")
def contexts(world: ToyWorld) -> toy_dataset.Described:
    questions = [(0, 1, 2), (3, 4, 5), (6, 7, 8)]
    return toy_dataset.draw_contexts(world, questions, np.random.default_rng(0))


def built(world: ToyWorld, contexts: toy_dataset.Described, label: str, **more: object) -> Dataset:
    arguments: dict[str, object] = {
        "classes": classify(contexts, SameClass(world)),
        "layers": toy_dataset.LAYERS,
        "equivalence": "same-class",
        "describe": lambda _, sample: toy_dataset.describe(world, sample),
        "label": label,
    }
    return build_dataset(contexts, **(arguments | more))  # type: ignore[arg-type]


def test_rows_are_the_samples_in_their_order(world: ToyWorld, contexts: toy_dataset.Described) -> None:
    """Row by row against the records: labels, readings and features of another segment would go unnoticed."""
    dataset = built(world, contexts, "cross")
    row = 0
    for number, (context, samples) in enumerate(contexts):
        labels = label_samples(samples, SameClass(world))
        for place, sample in enumerate(samples):
            if sample.author != "draft":
                continue
            rows = dataset.draft
            assert rows.context[row] == number and dataset.questions[rows.question[row]] == context.question
            assert rows.label[row] == labels.cross[place] and rows.own[row] == labels.own[place]
            assert rows.drawn[row] == (not sample.greedy) and rows.length[row] == len(sample.ids)
            for role in ("target", "draft"):
                assert (rows.pooled[role][row] == sample.readings[role].pooled).all()
                wanted = np.float32(sample.readings[role].signals.sum_logprob)
                assert rows.feature(f"{role}.sum_logprob")[row] == wanted
            row += 1
    assert row == len(dataset.draft) == 9 * 7 and len(dataset.target) == 9 * 5
    assert (dataset.measured == dataset.draft.drawn).all()


def test_questions_of_a_kind_are_told(world: ToyWorld, contexts: toy_dataset.Described) -> None:
    """One without a kind is like none, also where a kind has its very name; ids of others change nothing."""
    first, second, third = dict.fromkeys(context.question for context, _ in contexts)
    assert built(world, contexts, "cross").kinds.tolist() == [0, 1, 2]
    kinds = {first: "garden", third: "garden", "of another collection": "tank"}
    assert built(world, contexts, "cross", kinds=kinds).kinds.tolist() == [0, 1, 0]
    assert built(world, contexts, "cross", kinds={first: second}).kinds.tolist() == [0, 1, 2]


def test_equal_segments_of_one_context_are_told(world: ToyWorld, contexts: toy_dataset.Described) -> None:
    """They are one row to learn from; those of two contexts are not."""
    rows = built(world, contexts, "cross").draft
    keys = list(zip(rows.context.tolist(), rows.same.tolist(), strict=True))
    texts = [
        (sample.context, sample.ids)
        for _, samples in contexts
        for sample in samples
        if sample.author == "draft"
    ]
    for one in range(len(keys)):
        for other in range(one):
            assert (keys[one] == keys[other]) == (texts[one] == texts[other])


def test_overlap_is_the_mass_that_drawn_classes_share(world: ToyWorld) -> None:
    """With many samples it comes to what exact scores would accept."""
    contexts = toy_dataset.draw_contexts(
        world, [(0,), (1,), (2,)], np.random.default_rng(1), n_draft=400, n_target=400
    )
    wanted = np.mean([world.overlap(situation) for situation in range(3)])
    assert built(world, contexts, "cross").overlap == pytest.approx(wanted, abs=0.03)


def test_outcomes_are_of_greedy_segments_only(world: ToyWorld, contexts: toy_dataset.Described) -> None:
    """A drawn one that is equal would count one outcome twice; contexts that nobody rolled out have none."""
    context, samples = contexts[0]
    outcomes = {context.id: [1.0] * len(samples)}
    dataset = built(world, contexts, "outcome", outcomes=outcomes)
    known = np.isfinite(dataset.draft.label)
    assert known.sum() == 1 and not dataset.draft.drawn[known].any()
    assert (dataset.measured == known).all()


def test_what_does_not_belong_is_refused(world: ToyWorld, contexts: toy_dataset.Described) -> None:
    """Classes and outcomes are read from files: they may be of another collection."""
    classes = classify(contexts, SameClass(world))
    first = contexts[0][0].id
    with pytest.raises(CalibrationError, match="has 12 samples and classes of none"):
        built(world, contexts, "cross", classes={})
    with pytest.raises(CalibrationError, match="classes of 2"):
        built(world, contexts, "cross", classes=classes | {first: (0, 1)})
    with pytest.raises(CalibrationError, match="outcomes of 1"):
        built(world, contexts, "outcome", outcomes={first: [1.0]})
    with pytest.raises(CalibrationError, match="needs outcomes"):
        built(world, contexts, "outcome")
    with pytest.raises(ConfigError, match="label must be one of own, own-loo, joint, cross, outcome"):
        built(world, contexts, "best")
    with pytest.raises(CalibrationError, match="no context"):
        built(world, [], "cross")
