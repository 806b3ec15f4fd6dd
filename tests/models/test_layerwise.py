"""The reference over windows: the same numbers as one text at a time, every weight read once, from any layer on."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from graphs import ArrayWeights, tiny_variant
from numpy.testing import assert_array_equal

from semspec.models.decoder import head_linear, layer_linears
from semspec.models.layerwise import run_layerwise
from semspec.models.reference import run_reference
from semspec.runtime.records import Floats

RNG = np.random.default_rng(0)
WINDOWS = [RNG.integers(0, 99, size).tolist() for size in (31, 1, 17, 31)]


class Inputs:
    """Keeps what every linear reads: name -> one array a window."""

    def __init__(self) -> None:
        self.seen: dict[str, list[Floats]] = {}

    def __call__(self, name: str, x: Floats) -> None:
        self.seen.setdefault(name, []).append(x.copy())


@pytest.mark.parametrize("name", ["llama-llama3-tied", "qwen2-default-untied"])
def test_each_window_is_a_text_of_its_own(name: str) -> None:
    """Bit by bit what the reference computes for that text alone: nothing of another window gets in."""
    _, spec, weights = tiny_variant(name)
    *_, last = run_layerwise(spec, weights, WINDOWS, Inputs())
    for window, normed in zip(WINDOWS, last.normed, strict=True):
        alone = run_reference(spec, weights, window, keep_states=[spec.n_layers])
        assert_array_equal(normed, alone.states[spec.n_layers])


def test_every_linear_is_shown_once_a_window_in_the_decoders_order() -> None:
    """A layer is whole before the next begins, so whoever rounds a layer has seen all of its inputs."""
    _, spec, weights = tiny_variant("qwen2-default-untied")
    inputs = Inputs()
    seen_at_yield = [list(inputs.seen) for _ in run_layerwise(spec, weights, WINDOWS, inputs)]
    names = [linear.name for linear in layer_linears(spec)]
    assert seen_at_yield == [names[:4], names[:8], [*names, head_linear(spec).name]]
    for linear in (*layer_linears(spec), head_linear(spec)):
        width = weights.shape(linear.weights[0])[1]
        assert [x.shape for x in inputs.seen[linear.name]] == [(len(window), width) for window in WINDOWS]


def test_every_weight_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading is half the work of a quantized file; the head is not read at all, of the embedding wanted rows only."""
    _, spec, weights = tiny_variant("qwen2-default-untied")
    monkeypatch.setattr("semspec.models.reference.BLOCK_BYTES", 4096)  # several blocks a matrix
    read: Counter[str] = Counter()

    class Watched(ArrayWeights):
        def read(self, name: str, rows: slice | None = None) -> Any:
            values = super().read(name, rows)
            read[name] += values.size
            return values

    for _ in run_layerwise(spec, Watched(weights.arrays), WINDOWS, Inputs()):
        pass
    assert (
        read.pop("model.embed_tokens.weight") == len({i for window in WINDOWS for i in window}) * spec.width
    )
    expected = {name: array.size for name, array in weights.arrays.items()}
    assert dict(read) == {name: size for name, size in expected.items() if name in read}
    assert set(expected) - set(read) == {"model.embed_tokens.weight", "lm_head.weight"}


@pytest.mark.parametrize("after", [0, 1, 2])
def test_it_goes_on_from_any_layer_with_the_same_bits(after: int) -> None:
    """What is on the disk after a layer is all that the rest depends on."""
    _, spec, weights = tiny_variant("llama-default-untied")
    whole, rest = Inputs(), Inputs()
    streams = list(run_layerwise(spec, weights, WINDOWS, whole))
    *_, last = [streams[after], *run_layerwise(spec, weights, WINDOWS, rest, start=streams[after])]
    assert [s.done for s in streams] == [1, 2, 3]
    for found, expected in zip(last.normed, streams[-1].normed, strict=True):
        assert_array_equal(found, expected)
    for name, arrays in rest.seen.items():
        for found, expected in zip(arrays, whole.seen[name], strict=True):
            assert_array_equal(found, expected)
    assert len(rest.seen) == (0 if after == 2 else 4 * (2 - after) + 1)


def test_progress_names_layer_and_window() -> None:
    """One call a window and layer."""
    _, spec, weights = tiny_variant("llama-default-tied")
    seen: list[tuple[int, int]] = []
    on_window = lambda *at: seen.append(at)  # noqa: E731
    for _ in run_layerwise(spec, weights, WINDOWS, Inputs(), on_window=on_window):
        pass
    assert seen == [(layer, window) for layer in range(3) for window in range(4)]
