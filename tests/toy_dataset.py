"""Datasets drawn from a ToyWorld's laws, without a model: what learning sees, with the truth known.

A question is a few situations of the world, each a context; segments are drawn from the laws, and readings are made up
from what is known: log-probabilities of the wording, and in layer 0, entry 0 of the states, the mass of its class.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from toy_world import SameClass, ToyWorld

from semspec.calibration.dataset import Dataset, build_dataset, classify
from semspec.calibration.records import Context, Sample
from semspec.runtime.features import SegmentText
from semspec.runtime.readings import Reading, Signals
from semspec.runtime.records import Floats

LAYERS = {"target": (1, 2), "draft": (1, 2)}
WIDTH = 5
Described = list[tuple[Context, list[Sample]]]


def draw_contexts(
    world: ToyWorld,
    questions: Sequence[Sequence[int]],
    rng: np.random.Generator,
    *,
    n_draft: int = 6,
    n_target: int = 4,
    noise: float = 0.1,
    telling: bool = True,
) -> Described:
    """questions: the situations of each. noise: of the mass in the states. telling: whether signals tell anything."""
    found: Described = []
    for number, situations in enumerate(questions):
        for place, situation in enumerate(situations):
            context = Context(
                id=f"q{number}/{place}",
                question=f"q{number}",
                ids=world.prompt(situation),
                answer=None,
                written_by=("nobody", "target", "mixed")[place % 3],
            )
            samples = []
            for author, n in (("draft", n_draft), ("target", n_target)):
                law = world.segment_law(author, situation)
                drawn = [
                    max(law, key=law.__getitem__),
                    *(world.draw(author, rng, situation) for _ in range(n)),
                ]
                for order, ids in enumerate(drawn):
                    roles = ("draft", "target") if author == "draft" else ("target",)
                    readings = {
                        role: read(world, role, situation, ids, noise=noise, telling=telling)
                        for role in roles
                    }
                    samples.append(
                        Sample(
                            context=context.id,
                            author=author,
                            greedy=order == 0,
                            ids=ids,
                            text=world.text(ids),
                            readings=readings,
                        )
                    )
            found.append((context, samples))
    return found


def read(
    world: ToyWorld, role: str, situation: int, ids: tuple[int, ...], *, noise: float, telling: bool
) -> Reading:
    """What a model makes of a wording; the same each time it is asked."""
    rng = np.random.default_rng((situation, len(role), *ids))
    law = world.segment_law(role, situation)
    logprob = float(np.log(law.get(ids, 1e-4)))
    shares = np.array(list(law.values()))
    pooled = rng.standard_normal((2, WIDTH)).astype(np.float32)
    pooled[0, 0] = world.mass(role, ids, situation) + noise * rng.standard_normal()
    told = logprob if telling else float(rng.standard_normal())
    signals = Signals(
        mean_logprob=told / len(ids),
        min_logprob=told,
        sum_logprob=told,
        mean_entropy=float(-(shares * np.log(shares)).sum()) if telling else 0.0,
        agreement=float(rng.random() < 0.5),
    )
    return Reading(pooled=pooled, signals=signals)


def describe(world: ToyWorld, sample: Sample) -> SegmentText:
    """As if a boundary had ended each."""
    return SegmentText(text=sample.text, before="Case:\n", n_tokens=len(sample.ids), ended="boundary")


def make_dataset(world: ToyWorld, contexts: Described, label: str = "cross") -> Dataset:
    """With the true classes."""
    relation = SameClass(world)
    return build_dataset(
        contexts,
        classify(contexts, relation),
        layers=LAYERS,
        equivalence=relation.name,
        describe=lambda _, sample: describe(world, sample),
        label=label,
    )


def states(dataset: Dataset, layers: Sequence[int]) -> Floats:
    """(n, K, E) of the target's layers named, for a probe that reads them."""
    places = [dataset.layers["target"].index(layer) for layer in layers]
    found: Floats = dataset.draft.pooled["target"][:, places]
    return found
