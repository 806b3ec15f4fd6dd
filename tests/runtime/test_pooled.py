"""Pooled sums on a device: taken from where they lie, copied when somebody looks, gone with the model's next pass.

The device is a DOUBLE: graphs of plans run by ONNX Runtime on the CPU, whose memory stands for a device's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from engine_cases import NATIVE, engine_case
from numpy.testing import assert_allclose, assert_array_equal

from semspec.runtime.backends import open_backend
from semspec.runtime.backends.base import Tensor
from semspec.runtime.errors import ConfigError
from semspec.runtime.model import CachedModel
from semspec.runtime.pooled import HeldPooled, Pooled
from semspec.runtime.records import Array, Floats

BACKEND = open_backend("cpu", threads=1)
TEXT = np.random.default_rng(3).integers(0, 99, 12).tolist()
GONE = "gone with the model's next pass; copy what must last"


@dataclass
class Counting:
    """A tensor that counts how often it is copied."""

    values: Array
    copies: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def numpy(self) -> Array:
        self.copies.append(self.shape)
        return self.values.copy()


@pytest.fixture(scope="module", params=["primitive", NATIVE])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("graph")
    with engine_case(folder, "llama-default-untied", request.param, "fp32").graph.open() as opened:
        yield opened


def summed(model: CachedModel, cuts: list[int], take: Callable[[Pooled], Pooled | Floats]) -> Floats:
    """The sum over a text that is read in pieces, each of which goes on from what `take` makes of the one before."""
    model.rewind(0)
    weights, before = np.linspace(-1, 1, len(TEXT), dtype=np.float32), None
    for start, end in zip([0, *cuts], [*cuts, len(TEXT)], strict=True):
        found = model.forward(TEXT[start:end], pool=weights[start:end], pooled=before).states
        assert isinstance(found, HeldPooled)
        before = take(found)
    return found.values.copy()


@pytest.mark.parametrize("cuts", [[], [5], [*range(1, 12)]], ids=str)
def test_a_sum_goes_on_from_where_it_lies(model: CachedModel, cuts: list[int]) -> None:
    """Bit for bit as if it had been copied in between: over single steps of a draft, and pieces of any size."""
    lying = summed(model, cuts, lambda found: found)
    assert_array_equal(lying, summed(model, cuts, lambda found: found.values.copy()))
    assert_array_equal(lying, summed(model, cuts, lambda found: found.copy()))
    assert_allclose(lying, summed(model, [], lambda found: found), rtol=0, atol=1e-4)


def test_a_sum_goes_on_over_the_passes_of_one_call(
    model: CachedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text longer than a pass, begun from a sum that is on the device."""
    expected = summed(model, [4], lambda found: found)
    monkeypatch.setattr(model, "_chunk", 3)
    assert_allclose(summed(model, [4], lambda found: found), expected, rtol=0, atol=1e-4)


def test_a_sum_is_gone_with_the_next_pass(model: CachedModel) -> None:
    """Its memory holds another by then, and would be read without a word."""
    model.rewind(0)
    found = model.forward(TEXT[:3], pool=np.ones(3, np.float32))
    states, copied = found.states, None if found.states is None else found.states.copy()
    assert isinstance(states, HeldPooled) and copied is not None and states.shape == copied.shape
    expected = states.values.copy()
    model.forward(TEXT[3:4], pool=np.ones(1, np.float32))
    buffer = BACKEND.zeros((1, 1, expected.shape[1]), "float32")
    for read in (
        lambda: found.pooled,
        lambda: states.values,
        lambda: states.shape,
        lambda: states.copy(),
        lambda: states.copy_to(buffer, [0]),
        lambda: model.forward(TEXT[4:5], pool=np.ones(1, np.float32), pooled=states),
    ):
        with pytest.raises(ConfigError, match=GONE):
            read()
    assert model.length == 4
    assert_array_equal(copied.values, expected)


def test_nothing_is_copied_before_somebody_looks() -> None:
    """And then once."""
    tensor = Counting(np.arange(6, dtype=np.float32).reshape(1, 2, 3))
    held = HeldPooled(cast(Tensor, tensor), BACKEND)
    assert held.shape == (2, 3) and held.feed is cast(Tensor, tensor) and not tensor.copies
    assert held.values.tolist() == held.copy().values.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tensor.copies == [(1, 2, 3)]


@pytest.mark.parametrize("layers", [(0,), (2,), (0, 2), (2, 0), (0, 1, 2)], ids=str)
def test_layers_are_gathered_in_their_order(layers: tuple[int, ...]) -> None:
    """A probe reads some of the pooled layers, neighbours or not."""
    there = BACKEND.zeros((1, 3, 4), "float32")
    there.numpy()[:] = np.arange(12, dtype=np.float32).reshape(1, 3, 4)
    buffer = BACKEND.zeros((1, len(layers), 4), "float32")
    HeldPooled(there, BACKEND).copy_to(buffer, layers)
    assert_array_equal(buffer.numpy(), there.numpy()[:, list(layers)])
