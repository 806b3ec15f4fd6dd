"""The toy world keeps what it promises: its models write by the laws that it states."""

from __future__ import annotations

import doctest

import numpy as np
import toy_world
from branching import exact_law
from toy_world import END, NEWLINE, PLAIN, STOP, SameClass, ToyWorld, scattered_masses

from semspec.calibration.equivalence import Numbers
from semspec.calibration.writing import write_segments


def test_docstring_example_holds() -> None:
    """The worked example is executed, so it cannot drift from the code."""
    result = doctest.testmod(toy_world)
    assert result.attempted and not result.failed


def test_models_write_by_the_stated_law() -> None:
    """Token by token, in each situation, endings among them: all ways that chance can fall, added up."""
    masses = [[0.5, 0.3, 0.2], [0.1, 0.0, 0.9]], [[0.2, 0.3, 0.5], [0.4, 0.4, 0.2]]
    world = ToyWorld(*masses, [["10 it is", "10 is it"], ["10 it"], [f"so 12 {END}"]])
    for role in ("target", "draft"):
        for situation in range(2):
            model = world.model(role)

            def write(
                rng: object, model: object = model, prompt: tuple[int, ...] = world.prompt(situation)
            ) -> object:
                return write_segments(
                    model,  # type: ignore[arg-type]
                    prompt,
                    [rng],  # type: ignore[list-item]
                    segmenter=world.segmenter(),
                    sampling=PLAIN,
                    n_ids=world.vocab_size,
                )[0].ids

            found, stated = exact_law(write), world.segment_law(role, situation)
            assert found.keys() == stated.keys()
            assert all(abs(found[ids] - chance) < 1e-6 for ids, chance in stated.items())
            by_class = np.zeros(3)
            for ids, chance in stated.items():
                by_class[world.class_of(ids)] += chance
            assert np.allclose(by_class, world.masses(role, situation))
    assert {ids[-1] for of_class in world.wordings for ids in of_class} == {NEWLINE, STOP}


def test_collected_samples_have_known_classes_that_a_relation_finds() -> None:
    """Numbers tell the classes of plain wordings apart, as the true relation does."""
    world = ToyWorld(*scattered_masses(6, 4))
    collected = world.collect(5, 3, np.random.default_rng(0))
    assert [context.question for context, _ in collected] == [f"q{number}" for number in range(6)]
    truth = SameClass(world)
    for _, samples in collected:
        assert [(sample.author, sample.greedy) for sample in samples] == [
            *[("draft", number == 0) for number in range(6)],
            *[("target", number == 0) for number in range(4)],
        ]
        texts = [sample.text for sample in samples]
        assert np.array_equal(truth.related(texts), Numbers().related(texts))
        for sample in samples:
            assert sample.readings.keys() == {sample.author, "target"}


def test_the_published_rule_is_off_by_at_most_a_quarter() -> None:
    """TV(out, mu_T) <= beta (1 - beta), and 0 where both agree."""
    world = ToyWorld(*scattered_masses(50, 5))
    for situation in range(50):
        off = np.abs(world.round_law(situation) - world.masses("target", situation)).sum() / 2
        beta = world.overlap(situation)
        assert np.isclose(world.round_law(situation).sum(), 1) and off <= beta * (1 - beta) + 1e-12
    same = ToyWorld([[0.3, 0.7]], [[0.3, 0.7]])
    assert np.allclose(same.round_law(), same.masses("target")) and same.overlap() == 1
