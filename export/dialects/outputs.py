"""Outputs that are not the decoder's business, alike in every dialect: pooled sums, and signals of the logits."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from semspec.export.writer import DTYPES, GraphBuilder
from semspec.runtime.contract import TOP_IDS, GraphSpec

__all__ = ["add_pooled", "add_signals"]

FLOAT32, INT32 = DTYPES["float32"], DTYPES["int32"]


def add_pooled(builder: GraphBuilder, graph: GraphSpec, states: Mapping[int, str]) -> None:
    """pooled (B, K, E) = pooled_in + pool . states, summed in fp32. states: index -> (B, S, E)."""
    node, one = builder.node, builder.constant("1", np.array([1], np.int64))
    weights = node("Unsqueeze", ["pool", one], "pool_row")  # (B, 1, S)
    sums = []
    for index in graph.pooled_layers:
        state = states[index]
        if graph.activation != "float32":
            state = node("Cast", [state], f"pool.{index}.states", to=FLOAT32)
        sums.append(node("MatMul", [weights, state], f"pool.{index}"))
    new = node("Concat", sums, "pooled_new", axis=1)
    node("Add", ["pooled_in", new], "pooled")


def add_signals(builder: GraphBuilder, graph: GraphSpec, logits: str) -> None:
    """lse, entropy, next_logits, top_logits, top_ids: (B, R), and 64 candidates of each row; in fp32.

    The largest logit is taken off before exponentials are summed: an engine may sum them as they are.
    """
    node, last = builder.node, builder.constant("-1", np.array([-1], np.int64))
    wide = logits
    if graph.activation != "float32":
        wide = node("Cast", [logits], "logits.wide", to=FLOAT32)
    peak = node("ReduceMax", [wide, last], "logits.peak")
    powers = node("Exp", [node("Sub", [wide, peak], "logits.below_peak")], "powers")
    total = node("ReduceSum", [powers, last], "powers.sum")
    lse = node("Add", [node("Log", [total], "powers.log"), peak], "lse.kept")
    node("Squeeze", [lse, last], "lse")
    weighted = node("ReduceSum", [node("Mul", [powers, wide], "p_logits"), last], "p_logits.sum")
    mean = node("Squeeze", [node("Div", [weighted, total], "mean_logit.kept"), last], "mean_logit")
    node("Sub", ["lse", mean], "entropy")
    column = node("Unsqueeze", ["next_ids", last], "next_column")
    node("Squeeze", [node("GatherElements", [wide, column], "picked", axis=2), last], "next_logits")
    count = builder.constant("n_top", np.array([min(TOP_IDS, graph.vocab_size)], np.int64))
    narrow = graph.index_dtype == "int32"
    ids = "top_ids.wide" if narrow else "top_ids"
    builder.nodes("TopK", [wide, count], ["top_logits", ids], axis=-1, largest=1, sorted=1)
    if narrow:
        node("Cast", [ids], "top_ids", to=INT32)
