"""THE decoder: embedding -> layers -> final norm -> head, written once, for every family and every engine.

It knows the order of operations and the names of weights; numbers, shapes and caches belong to the Ops.
Names are those of transformers checkpoints. The residual stream is added and normalised in one operation,
since every engine has a fused kernel for that pair.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from semspec.models.ops import Linear, Ops
from semspec.models.spec import ModelSpec

__all__ = ["EMBEDDING", "FINAL_NORM", "HEAD", "decode", "enter", "head_linear", "layer_linears", "run_layer"]

V = TypeVar("V")

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


def decode(spec: ModelSpec, ops: Ops[V]) -> V:
    """Run the whole model through `ops`; returns the logits of the wanted rows, (B, R, V).

    States are offered on the way: 0 is the embedding, i the stream after layer i, L the final norm's output.
    """
    normed, stream = enter(spec, ops)
    for layer in range(spec.n_layers):
        normed, stream = run_layer(spec, ops, layer, normed, stream)
    return ops.head(normed, head_linear(spec))


def enter(spec: ModelSpec, ops: Ops[V]) -> tuple[V, V]:
    """From ids to what layer 0 reads: (its norm of the stream, the stream)."""
    stream = ops.embed(EMBEDDING)
    ops.state(0, stream)
    return ops.norm(stream, _norm_before(spec, 0)), stream


def run_layer(spec: ModelSpec, ops: Ops[V], layer: int, normed: V, stream: V) -> tuple[V, V]:
    """One layer; returns what the next reads, and after the last layer what the head reads: (normed, stream)."""
    attended = _attention(spec, ops, normed, layer)
    normed, stream = ops.add_norm(stream, attended, f"model.layers.{layer}.post_attention_layernorm.weight")
    fed = _feed_forward(spec, ops, normed, layer)
    normed, stream = ops.add_norm(stream, fed, _norm_before(spec, layer + 1))
    last = layer + 1 == spec.n_layers
    ops.state(layer + 1, normed if last else stream)
    return normed, stream


def _attention(spec: ModelSpec, ops: Ops[V], normed: V, layer: int) -> V:
    qkv = ops.linear(normed, _qkv(spec, layer))
    return ops.linear(ops.attend(qkv, layer), _output(spec, layer))


def _feed_forward(spec: ModelSpec, ops: Ops[V], normed: V, layer: int) -> V:
    return ops.linear(ops.gate(ops.linear(normed, _gate_up(spec, layer))), _down(spec, layer))


def _norm_before(spec: ModelSpec, layer: int) -> str:
    return FINAL_NORM if layer == spec.n_layers else f"model.layers.{layer}.input_layernorm.weight"


def head_linear(spec: ModelSpec) -> Linear:
    """The head: the embedding itself where the model ties the two."""
    return Linear(name="head", weights=(EMBEDDING if spec.tied else HEAD,))


def layer_linears(spec: ModelSpec) -> Iterator[Linear]:
    """Every linear inside the layers, in the order the decoder meets them."""
    for layer in range(spec.n_layers):
        yield from (_qkv(spec, layer), _output(spec, layer), _gate_up(spec, layer), _down(spec, layer))


def _qkv(spec: ModelSpec, layer: int) -> Linear:
    return _stacked(layer, "qkv", "self_attn", ("q_proj", "k_proj", "v_proj"), spec.qkv_bias)


def _output(spec: ModelSpec, layer: int) -> Linear:
    return _stacked(layer, "attention_output", "self_attn", ("o_proj",), spec.output_bias)


def _gate_up(spec: ModelSpec, layer: int) -> Linear:
    return _stacked(layer, "gate_up", "mlp", ("gate_proj", "up_proj"), spec.mlp_bias)


def _down(spec: ModelSpec, layer: int) -> Linear:
    return _stacked(layer, "down", "mlp", ("down_proj",), spec.mlp_bias)


def _stacked(layer: int, name: str, module: str, parts: tuple[str, ...], bias: bool) -> Linear:
    prefix = f"model.layers.{layer}.{module}"
    return Linear(
        name=f"layers.{layer}.{name}",
        weights=tuple(f"{prefix}.{part}.weight" for part in parts),
        biases=tuple(f"{prefix}.{part}.bias" for part in parts) if bias else (),
    )
