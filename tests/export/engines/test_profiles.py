"""Optimization profiles as a pure function of sizes (D39)."""

from __future__ import annotations

import contract_graphs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semspec.export.engines.profiles import SPAN, BuildSizes, input_shapes, make_profiles
from semspec.runtime.errors import ConfigError

sizes = st.builds(BuildSizes, chunk=st.integers(1, 2048), rows=st.integers(1, 2048), batch=st.integers(1, 8))


@given(
    graph=st.sampled_from(["native", "primitive"]),
    max_context=st.one_of(st.integers(2, 9000), st.sampled_from([255, 256, 257, 8192])),
    sizes=sizes,
)
def test_profiles_hold_together(graph: str, max_context: int, sizes: BuildSizes) -> None:
    """Least <= tuned <= most in every dimension of every input; all inputs with open sizes have an entry; nothing is
    longer than the cache or the chunk; one new token and a whole chunk are both in range, with nothing in the cache
    and with a full one."""
    spec = contract_graphs.graph_spec(graph, max_context=max_context)
    profiles = make_profiles(spec, sizes)
    assert list(profiles) == ["decode", "block"]
    chunk = min(sizes.chunk, max_context)
    for profile in profiles.values():
        shapes = input_shapes(spec.inputs(), profile)
        assert shapes.keys() == {
            port.name for port in spec.inputs() if any(isinstance(size, str) for size in port.shape)
        }
        for port in spec.inputs():
            if port.name in shapes:
                for size, *three in zip(port.shape, *shapes[port.name], strict=True):
                    assert 1 <= three[0] <= three[1] <= three[2]
                    assert isinstance(size, str) or set(three) == {size}
        assert profile["S"][0] == profile["R"][0] == profile["B"][0] == 1
        assert profile["R"][2] <= profile["S"][2] <= chunk
        assert profile["B"][2] == sizes.batch
    assert profiles["block"]["S"][2] == chunk
    assert profiles["decode"]["S"][1] == 1
    assert ("T" in profiles["decode"]) == (graph == "native")
    if graph == "native":
        least, _, most = profiles["decode"]["T"]
        assert least <= SPAN
        assert max_context <= most <= spec.capacity


def test_decode_takes_two_rows() -> None:
    """Fixed at one row, TensorRT-RTX 1.7 stores fp16 weights twice: a plan of 1.8 times its weights (measured)."""
    decode = make_profiles(contract_graphs.graph_spec(), BuildSizes())["decode"]
    assert decode["S"] == decode["R"] == (1, 1, 2)


@pytest.mark.parametrize("name", ["chunk", "rows", "batch"])
def test_sizes_below_one_are_refused(name: str) -> None:
    """The compiler would speak of shape constraints, late."""
    with pytest.raises(ConfigError, match=f"{name} must be at least 1, got 0"):
        BuildSizes(**{name: 0})
