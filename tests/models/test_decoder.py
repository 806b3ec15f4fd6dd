"""The decoder's story, told to an Ops that writes down what it is asked."""

from __future__ import annotations

import dataclasses

import pytest
from graphs import VARIANTS, tiny_variant

from semspec.models.decoder import EMBEDDING, HEAD, decode, head_linear, layer_linears
from semspec.models.ops import Linear
from semspec.models.spec import ModelSpec


class Written:
    """Values are formulas; every weight and state that passes is noted."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.linears: list[Linear] = []
        self.states: dict[int, str] = {}

    def embed(self, weight: str) -> str:
        self.read.append(weight)
        return "e"

    def norm(self, x: str, weight: str) -> str:
        self.read.append(weight)
        return f"n({x})"

    def add_norm(self, stream: str, branch: str, weight: str) -> tuple[str, str]:
        total = f"{stream}+{branch}"
        return self.norm(total, weight), total

    def linear(self, x: str, linear: Linear) -> str:
        self.linears.append(linear)
        self.read += [*linear.weights, *linear.biases]
        return f"{linear.name.rpartition('.')[2]}({x})"

    def attend(self, qkv: str, layer: int) -> str:
        return f"attend{layer}({qkv})"

    def gate(self, gate_up: str) -> str:
        return f"gate({gate_up})"

    def state(self, index: int, x: str) -> None:
        self.states[index] = x

    def head(self, normed: str, linear: Linear) -> str:
        self.read += [name for name in linear.weights if name not in self.read]
        return f"{linear.name}({normed})"


def small_spec(n_layers: int) -> ModelSpec:
    return dataclasses.replace(tiny_variant("llama-default-untied")[1], n_layers=n_layers)


def test_one_layer_written_out() -> None:
    """The whole decoder on one page: pre-norms, two residual additions, a final norm, the head."""
    ops = Written()
    attention = "attention_output(attend0(qkv(n(e))))"
    stream = f"e+{attention}+down(gate(gate_up(n(e+{attention}))))"
    assert decode(small_spec(1), ops) == f"head(n({stream}))"
    assert ops.states == {0: "e", 1: f"n({stream})"}


def test_states_are_offered_at_every_index() -> None:
    """D42: 0 is the embedding, i the stream after layer i, and the last one is after the final norm."""
    ops = Written()
    logits = decode(small_spec(3), ops)
    assert list(ops.states) == [0, 1, 2, 3]
    assert all(not ops.states[index].startswith("n(") for index in (0, 1, 2))
    assert ops.states[2].startswith(ops.states[1] + "+")
    assert logits == f"head({ops.states[3]})"


@pytest.mark.parametrize("name", VARIANTS)
def test_every_tensor_of_transformers_is_used_once(name: str) -> None:
    """D28: no bias, norm or projection is lost on the way, whatever the switches say."""
    model, spec, _ = tiny_variant(name)
    ops = Written()
    decode(spec, ops)
    assert sorted(ops.read) == sorted(parameter for parameter, _ in model.named_parameters())


def test_linears_are_listed_as_they_are_met() -> None:
    """What a calibration or a size table iterates over is what the decoder multiplies with."""
    spec = tiny_variant("llama-llama3-tied")[1]
    ops = Written()
    decode(spec, ops)
    assert list(layer_linears(spec)) == ops.linears
    assert len({linear.name for linear in ops.linears}) == len(ops.linears) == 4 * spec.n_layers


@pytest.mark.parametrize(("tied", "weight"), [(True, EMBEDDING), (False, HEAD)])
def test_a_tied_head_is_the_embedding(tied: bool, weight: str) -> None:
    """D30: the same name, so nobody stores it twice."""
    spec = dataclasses.replace(small_spec(1), tied=tied)
    assert head_linear(spec).weights == (weight,)
