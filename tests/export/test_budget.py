"""A budget of bits: kept, spent where rounding harms most, and refused where nothing fits."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from semspec.export.budget import Option, spend, steps_for
from semspec.export.quantize import Scheme, readable_embedding, scheme

STEPS = (scheme("int4", 128), scheme("int4", 64), scheme("int4", 32), scheme("int8", 128))
COARSEST, FINEST = STEPS[0], STEPS[-1]


def options_of(harms: Sequence[float], n_weights: int) -> list[Option]:
    """One linear's options, harm by step."""
    return [
        Option(scheme=step, bits=step.bits_per_weight * n_weights, harm=harm)
        for step, harm in zip(STEPS, harms, strict=True)
    ]


def totals(options: Mapping[str, Sequence[Option]], chosen: Mapping[str, Scheme]) -> tuple[float, float]:
    """Bits and harm of a choice."""
    taken = [option for name in options for option in options[name] if option.scheme == chosen[name]]
    return sum(option.bits for option in taken), sum(option.harm for option in taken)


def test_choices_are_near_the_best_there_are() -> None:
    """Against all 4^5 choices, for 20 drawn models: within the budget, and near the least harm.

    The bound of every greedy on a convex hull: no worse than the best with one upgrade less to spend.
    """
    rng = np.random.default_rng(0)
    for _ in range(20):
        sizes = rng.integers(1, 9, 5)
        options = {
            str(i): options_of((np.sort(rng.random(4))[::-1] * rng.lognormal()).tolist(), int(size))
            for i, size in enumerate(sizes)
        }
        budget = 5.2 * int(sizes.sum())
        bits, harm = totals(options, spend(options, budget))
        every = [
            (sum(option.bits for option in row), sum(option.harm for option in row))
            for row in itertools.product(*options.values())
        ]
        largest = max(own[-1].bits - own[0].bits for own in options.values())
        least = min(harm for bits, harm in every if bits <= budget)
        bound = min((harm for bits, harm in every if bits <= budget - largest), default=np.inf)
        assert bits <= budget
        assert least - 1e-9 <= harm <= bound + 1e-9


def test_ends_of_the_scale() -> None:
    """Bits without end buy the finest; what saves nothing is not bought."""
    options = {"one": options_of([4, 3, 2, 1], 10), "two": options_of([4, 4, 4, 4], 10)}
    assert spend(options, 1000) == {"one": FINEST, "two": COARSEST}
    assert spend(options, 20 * COARSEST.bits_per_weight) == {"one": COARSEST, "two": COARSEST}


def test_a_budget_below_the_coarsest_is_refused() -> None:
    """Rather than overspent."""
    with pytest.raises(ValueError, match=r"take 2\.\d+ bits more than 40"):
        spend({"one": options_of([4, 3, 2, 1], 10)}, 40)


@pytest.mark.parametrize("width", [8, 48, 64, 96, 128, 576, 896, 1536, 4864])
def test_steps_waste_nothing_and_can_be_read(width: int) -> None:
    """Blocks fill the rows wherever any size does; an embedding's int4 rows have an even number of them."""
    for step in steps_for(width):
        assert width % step.block_size == 0 or (width % 32 and step.block_size == 32)
    if (width // 32) % 2 == 0 and width % 32 == 0:
        assert all(readable_embedding(step, width) for step in steps_for(width, embeds=True))
