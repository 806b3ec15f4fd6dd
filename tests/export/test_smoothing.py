"""Scales for rounded inputs: the model stays the model, and inputs with large channels round better."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine_cases import WIDE, tiny_ranges
from graphs import ArrayWeights, tiny_variant
from numpy.testing import assert_allclose

from semspec.export.emulation import run_emulated
from semspec.export.engine_plan import fit_engine, plan_engine
from semspec.export.packing import Schemes
from semspec.export.qdq_weights import LARGEST
from semspec.export.ranges import Ranges
from semspec.export.scaling import FoldedWeights
from semspec.export.smoothing import choose_smoothing, input_scales
from semspec.export.verify import closeness
from semspec.models.decoder import layer_linears
from semspec.models.reference import run_reference
from semspec.models.spec import ModelSpec

IDS = np.random.default_rng(5).integers(0, 99, 60).tolist()
NAMES = pytest.mark.parametrize("name", ["llama-llama3-tied", "qwen2-yarn-untied", "llama-default-tied"])


def made(name: str) -> tuple[ModelSpec, ArrayWeights, Ranges]:
    _, spec, weights = tiny_variant(name, **WIDE)
    return spec, weights, tiny_ranges(name, tuple(sorted(WIDE.items())))


@NAMES
def test_folding_is_exact_in_fp32(name: str) -> None:
    """D36: norms, value rows of grouped heads, up rows, biases: the folded model is the model."""
    spec, weights, ranges = made(name)
    folding = choose_smoothing(spec, weights, ranges)
    plain, folded = (run_reference(spec, w, IDS).logits for w in (weights, FoldedWeights(weights, folding)))
    assert_allclose(folded, plain, rtol=0, atol=1e-4)
    assert any(scale.max() / scale.min() > 1.05 for scale in folding.inputs.values())


@pytest.mark.parametrize("kind", ["int8", "fp8", "fp4"])
def test_steps_reach_the_largest_input(kind: str) -> None:
    """The largest number measured, after the folding, is the largest code; no more, no less."""
    spec, weights, ranges = made("llama-llama3-tied")
    folding = choose_smoothing(spec, weights, ranges) if kind == "int8" else None
    found = input_scales(spec, ranges, kind, folding)
    assert list(found) == [linear.name for linear in layer_linears(spec)]
    most = LARGEST["fp4"] * LARGEST["fp8"] if kind == "fp4" else LARGEST[kind]
    for name, step in found.items():
        scale = folding.inputs[name] if folding else 1
        assert step * most == pytest.approx(float((ranges.linears[name].abs_max / scale).max()))


def test_large_channels_are_shared_out() -> None:
    """Four channels 30 times as large as the others leave int8 inputs no steps for those: scaled, they do."""
    name = "llama-default-untied"
    _, spec, weights = tiny_variant(name, **WIDE)
    ranges = tiny_ranges(name, tuple(sorted(WIDE.items())))
    plan = plan_engine(spec, weights, "int8-w8a8", Schemes.choose("int4"), ranges)
    norms = [
        f"model.layers.{i}.{part}layernorm.weight" for i in range(3) for part in ("input_", "post_attention_")
    ]
    arrays = dict(weights.arrays)
    for norm in norms:
        factors = np.ones(128, np.float32)
        factors[[3, 40, 41, 99]] = 30
        arrays[norm] = arrays[norm] * factors
        layer = norm.rsplit(".", 2)[0]
        parts = ("self_attn.q", "self_attn.k", "self_attn.v") if "input" in norm else ("mlp.gate", "mlp.up")
        for part in parts:
            arrays[f"{layer}.{part}_proj.weight"] = arrays[f"{layer}.{part}_proj.weight"] / factors
    outliers = ArrayWeights(arrays)
    measured = large_ranges(ranges)
    plain = replace(plan, weights=outliers, input_scales=input_scales(spec, measured, "int8"))
    smooth = fit_engine(replace(plan, weights=outliers), spec, measured, lambda done, total: None)
    exact = run_reference(spec, weights, IDS).logits
    there, here = (closeness(exact, run_emulated(spec, p, IDS).logits)[0] for p in (plain, smooth))
    assert here < there / 4


def large_ranges(ranges: Ranges) -> Ranges:
    """The ranges of a model whose norms write four channels 30 times as large."""
    factors = np.ones(128, np.float32)
    factors[[3, 40, 41, 99]] = 30
    linears = {}
    for name, found in ranges.linears.items():
        own = factors if name.endswith(("qkv", "gate_up")) else np.ones_like(found.mean)
        moments = found.moments.copy()
        for span in range(len(moments)):
            part = own[span * 128 : (span + 1) * 128]
            moments[span, : len(part), : len(part)] *= np.outer(part, part)
        linears[name] = replace(
            found,
            abs_max=found.abs_max * own,
            mean_abs=found.mean_abs * own,
            mean=found.mean * own,
            moments=moments,
        )
    return replace(ranges, linears=linears)
