"""Quantized graphs for TensorRT against numpy's emulation of their numbers, and the gate that judges both.

Run by ONNX Runtime on the CPU. bf16 and nvfp4 have no kernels there: their graphs are held against ones that run.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from engine_cases import NATIVE, STATES, WIDE, EngineCase, engine_case, int8_sums_overflow, needs_native
from graphs import cut, read_in_pieces
from numpy.testing import assert_allclose

from semspec.export.emulation import run_emulated
from semspec.export.engine_graphs import CUT_KL, LIMITS, check_cuts, engine_quality_line, verify_engine
from semspec.export.precisions import PRECISIONS, Precision
from semspec.export.qdq_weights import FP4_BLOCK
from semspec.export.verify import Quality, closeness
from semspec.models.reference import ReferenceRun, run_reference
from semspec.runtime.errors import BundleError

TEXT = np.random.default_rng(0).integers(0, 99, 64).tolist()
LLAMA, QWEN2 = "llama-llama3-tied", "qwen2-yarn-untied"
DIALECTS = pytest.mark.parametrize("graph", [NATIVE, "primitive"])


@DIALECTS
@pytest.mark.parametrize("precision", ["fp16", "int8", "int8-w8a8", "int4", "fp8"])
@pytest.mark.parametrize("activation", ["float32", "float16"])
def test_graphs_compute_what_the_emulation_does(
    tmp_path: Path, graph: str, precision: str, activation: str
) -> None:
    """The Q/DQ that onnxruntime runs and numpy's: in fp32 the same numbers. Under fp16's noise one input in fifty
    rounds the other way, by a whole step: nearer to each other than either is to the model, no more."""
    if (precision, activation) == ("int8-w8a8", "float32") and int8_sums_overflow():
        pytest.skip("onnxruntime's sums of int8 products overflow on this processor (no VNNI)")
    custom = replace(PRECISIONS[precision], activation=activation)
    case = engine_case(tmp_path, QWEN2, graph, precision, custom=custom, **WIDE)
    emulated = run_emulated(case.spec, case.plan, TEXT, keep_states=STATES)
    exact = run_reference(case.spec, case.plan.weights, TEXT).logits
    with case.graph.open() as model:
        found, states = read_in_pieces(model, TEXT, cut(64, [40, 1, 3]), STATES)
    apart, rounding = closeness(emulated.logits, found)[0], closeness(exact, found)[0]
    if not custom.inputs:
        assert apart < (1e-9 if activation == "float32" else 2e-5)
    else:
        assert apart < (0.02 if activation == "float32" else 0.5) * rounding
    for index in STATES if activation == "float32" else ():
        typical = np.abs(emulated.states[index]).mean()
        assert np.abs(states[index] - emulated.states[index]).mean() < 0.01 * typical, index


@DIALECTS
@pytest.mark.parametrize("quantizer", ["awq", "gptq"])
def test_int4_with_ranges_is_what_was_chosen(tmp_path: Path, graph: str, quantizer: str) -> None:
    """Scaled channels are folded away, so the graph is the same model, rounded as the emulation rounds it; random
    weights have no channels that stand out, so no more than this and no harm can be asked for."""
    custom = replace(PRECISIONS["int4"], activation="float32")
    exact, apart = [], []
    for name in ("rtn", quantizer):
        case = engine_case(tmp_path / name, QWEN2, graph, "int4", quantizer=name, custom=custom, **WIDE)
        emulated = run_emulated(case.spec, case.plan, TEXT).logits
        with case.graph.open() as model:
            found, _ = read_in_pieces(model, TEXT, [slice(0, 64)])
        assert closeness(emulated, found)[0] < 1e-9
        exact.append(run_reference(case.spec, case.plan.weights, TEXT).logits)
        apart.append(closeness(exact[0], found)[0])
    assert case.plan.quantizer == quantizer
    assert closeness(*exact)[0] < 1e-9
    assert 0 < apart[1] < 1.1 * apart[0] and apart[1] != apart[0]


def nodes(case: EngineCase) -> list[tuple[Any, ...]]:
    graph = onnx.load(case.graph.path, load_external_data=False).graph
    return [(node.op_type, tuple(node.input), tuple(node.output)) for node in graph.node]


@DIALECTS
def test_bf16_graphs_are_fp16_graphs_in_another_type(tmp_path: Path, graph: str) -> None:
    """onnxruntime cannot run them on a CPU: node by node they are those that it can."""
    one, other = (engine_case(tmp_path / p, QWEN2, graph, p, **WIDE) for p in ("fp16", "bf16"))
    assert nodes(one) == nodes(other)
    ports = {spec.name: spec.dtype for spec in other.graph.spec.outputs()}
    assert ports["logits"] == ports["hidden.0"] == "bfloat16"


@DIALECTS
def test_nvfp4_graphs_differ_from_fp8_in_their_rounding_alone(tmp_path: Path, graph: str) -> None:
    """The same products of rounded inputs and de-quantized weights; two scales for each block of 16."""
    fp8, fp4 = (engine_case(tmp_path / p, QWEN2, graph, p, **WIDE) for p in ("fp8", "nvfp4"))
    rounding = {"QuantizeLinear", "DequantizeLinear", "TRT_FP4DynamicQuantize"}

    def others(case: EngineCase) -> list[tuple[Any, ...]]:
        return [node for node in nodes(case) if node[0] not in rounding and "scales" not in node[2][0]]

    assert others(fp8) == others(fp4)
    model = onnx.load(fp4.graph.path)
    found = {node.op_type: node for node in model.graph.node if node.op_type in rounding}
    dynamic = found["TRT_FP4DynamicQuantize"]
    assert dynamic.domain == "trt"
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in dynamic.attribute}
    assert attributes == {"axis": -1, "block_size": 16, "scale_type": onnx.TensorProto.FLOAT8E4M3FN}
    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    codes = [kind for name, kind in types.items() if name.endswith("mlp.down_proj.weight.codes")]
    assert codes == [onnx.TensorProto.FLOAT4E2M1] * 3
    assert {entry.domain for entry in model.opset_import} == {"", "trt"}
    assert max(entry.version for entry in model.opset_import) >= 23  # the first with 4-bit floats


@DIALECTS
def test_fp4_weights_are_those_of_the_emulation(tmp_path: Path, graph: str) -> None:
    """A twin that rounds no input and computes in fp32, its fp4 weights read by onnx's own reader: one model."""
    twin = Precision(name="nvfp4", activation="float32", weights="fp4", head="int8")
    case = engine_case(tmp_path, QWEN2, graph, "nvfp4", custom=replace(twin, inputs="fp4"), **WIDE)
    emulated = run_emulated(case.spec, replace(case.plan, precision=twin), TEXT)
    with replace(case.graph, path=widened_fp4(case.graph.path)).open() as model:
        found, _ = read_in_pieces(model, TEXT, cut(64, [40, 1, 3]))
    assert closeness(emulated.logits, found)[0] < 1e-9
    exact = run_reference(case.spec, case.plan.weights, TEXT).logits
    rounded = run_emulated(case.spec, case.plan, TEXT).logits
    weights_only, both = (closeness(exact, logits)[0] for logits in (emulated.logits, rounded))
    assert 0 < weights_only < both < LIMITS["nvfp4"][0]


def widened_fp4(path: Path) -> Path:
    """The graph with its fp4 weights as onnx reads them, and no input rounded: onnxruntime can run that."""
    model = onnx.load(path)
    graph = model.graph
    arrays = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    made = {output: node for node in graph.node for output in node.output}
    rounded: dict[str, str] = {}
    kept: list[onnx.NodeProto] = []
    gone: set[str] = set()
    for node in graph.node:
        if node.op_type == "TRT_FP4DynamicQuantize":
            rounded[node.output[0]] = node.input[0]
            gone |= set(node.output)
        elif node.input[0] in rounded:
            kept.append(onnx.helper.make_node("Identity", [rounded[node.input[0]]], node.output))
        elif gone & set(node.input):  # scales of what was rounded
            gone |= set(node.output)
        elif arrays.get(node.input[0], np.zeros(0)).dtype == ml_dtypes.float4_e2m1fn:
            scales, whole = (arrays[name] for name in made[made[node.input[1]].input[0]].input)
            steps = np.repeat(scales.astype(np.float32) * whole, FP4_BLOCK, axis=1)
            wide = arrays[node.input[0]].astype(np.float32) * steps
            graph.initializer.append(onnx.numpy_helper.from_array(wide, node.output[0]))
        else:
            kept.append(node)
    read = {name for node in kept for name in node.input}
    weights = [tensor for tensor in graph.initializer if tensor.name in read]
    for field, values in ((graph.node, kept), (graph.initializer, weights)):
        del field[:]
        field.extend(values)
    out = path.with_name("widened.onnx")
    onnx.save(model, out)
    return out


def gate(case: EngineCase, reference: ReferenceRun | None = None) -> Quality:
    reference = reference or run_reference(case.spec, case.plan.weights, TEXT, keep_states=STATES)
    return verify_engine(case.graph.path, case.spec, case.plan, case.graph.spec, reference, TEXT, "quick")


@needs_native
@pytest.mark.parametrize("precision", [*PRECISIONS, "int4+bf16"])
def test_every_precision_passes_the_gate(tmp_path: Path, precision: str) -> None:
    """Of the model that its numbers say, since few bits make another of a random one; a word for those that no graph
    was run for."""
    case = engine_case(tmp_path, QWEN2, "native", precision, **WIDE)
    coarse = precision in ("int8-w8a8", "int4", "int4+bf16", "fp8", "nvfp4")
    quality = gate(case, run_emulated(case.spec, case.plan, TEXT, keep_states=STATES) if coarse else None)
    assert quality.tokens == 64
    assert quality.kl <= LIMITS[case.plan.precision.name][0]
    assert quality.emulated is (precision in ("bf16", "int4+bf16", "nvfp4"))
    assert ("numpy's emulation" if quality.emulated else "not an engine") in engine_quality_line(quality)


@needs_native
def test_another_model_is_refused(tmp_path: Path) -> None:
    """Figures, limits, and the next better precision."""
    case = engine_case(tmp_path, QWEN2, "native", "int8", **WIDE)
    reference = run_reference(case.spec, case.plan.weights, TEXT, keep_states=STATES)
    other = replace(reference, logits=reference.logits[:, ::-1] * 3)
    with pytest.raises(
        BundleError, match=r"int8 graph is not the model any more: .*; use --engine-precision fp16"
    ):
        gate(case, other)


@needs_native
@pytest.mark.parametrize("precision", ["fp16", "bf16", "int4", "int4+bf16"])
def test_states_that_fp16_cannot_hold_are_refused(tmp_path: Path, precision: str) -> None:
    """D40: before a device finds out; bf16 has the room, and the refusal names it."""
    case = engine_case(tmp_path, QWEN2, "native", precision, **WIDE)
    reference = run_emulated(case.spec, case.plan, TEXT, keep_states=STATES)
    high = replace(reference, state_peaks=(20_000.0,))
    if precision.endswith("bf16"):
        assert gate(case, high).state_peak == 20_000
        return
    repair = {"fp16": "bf16", "int4": r"int4\+bf16"}[precision]
    with pytest.raises(
        BundleError, match=rf"reach 20000 and fp16 .* up to 16000; use --engine-precision {repair}$"
    ):
        gate(case, high)


@needs_native
def test_a_graph_whose_cuts_disagree_is_refused(tmp_path: Path) -> None:
    """A mask that shows the future is no model: the gate sees it where one pass alone cannot."""
    case = engine_case(tmp_path, LLAMA, "native", "fp32", **WIDE)
    broken = onnx.load(case.graph.path)
    for node in broken.graph.node:
        if node.op_type == "Less":
            node.input[1] = "span.half"
    two = onnx.numpy_helper.from_array(np.array(2, np.int64), "two")
    broken.graph.initializer.append(two)
    broken.graph.node.insert(0, onnx.helper.make_node("Div", ["span", "two"], ["span.half"]))
    path = tmp_path / "broken.onnx"
    onnx.save(broken, path)
    with (
        replace(case.graph, path=path).open() as opened,
        pytest.raises(BundleError, match="is not one model: after"),
    ):
        check_cuts(opened, TEXT)


def test_good_cuts_give_rows_and_last_states(tmp_path: Path) -> None:
    """All logits, and the states of the rows that were read one by one."""
    case = engine_case(tmp_path, LLAMA, "primitive", "fp32", **WIDE)
    reference = run_reference(case.spec, case.plan.weights, TEXT, keep_states=STATES)
    with case.graph.open() as model:
        logits, states = check_cuts(model, TEXT)
    assert closeness(reference.logits, logits)[0] < CUT_KL / 1000
    for index in STATES:
        assert_allclose(states[index], reference.states[index][-len(states[index]) :], rtol=0, atol=1e-4)
