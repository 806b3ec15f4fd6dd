"""`native` and `primitive` against transformers and the `ort` dialect, run by ONNX Runtime on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engine_cases import NATIVE, STATES, WIDE, engine_case, needs_native
from graphs import VARIANTS, ArrayWeights, Graph, build_graph, cut, read_in_pieces, tiny_variant, truth
from numpy.testing import assert_allclose, assert_array_equal

from semspec.export.packing import Schemes
from semspec.models.decoder import EMBEDDING
from semspec.runtime.backends import open_backend
from semspec.runtime.contract import SPAN_STEP, TOP_IDS, kv_pairs, span_of
from semspec.runtime.records import Array, Floats

TEXT = np.random.default_rng(0).integers(0, 99, 97).tolist()
LLAMA, QWEN2 = "llama-llama3-tied", "qwen2-yarn-untied"
DIALECTS = pytest.mark.parametrize("graph", [NATIVE, "primitive"])
TINY = pytest.mark.parametrize("name", [LLAMA, QWEN2])


def assert_states(found: dict[int, Floats], states: Floats, rtol: float = 1e-5) -> None:
    for index, state in found.items():
        atol = rtol * np.abs(states[index]).max()
        assert_allclose(state, states[index], rtol=0, atol=atol, err_msg=f"state {index}")


@DIALECTS
@pytest.mark.parametrize("name", VARIANTS)
def test_rows_and_states_are_those_of_transformers(tmp_path: Path, name: str, graph: str) -> None:
    """D28, D42: every switch; the prompt at once, one by one and in chunks on a cache."""
    case = engine_case(tmp_path, name, graph, "fp32")
    logits, states = truth(case.model, TEXT)
    with case.graph.open() as model:
        for sizes in ([97], [1], [5, 4, 3]):
            model.rewind(0)
            found, hidden = read_in_pieces(model, TEXT, cut(97, sizes), STATES)
            assert_allclose(found, logits, rtol=0, atol=1e-4, err_msg=str(sizes))
            assert_states(hidden, states, 2e-5)


@DIALECTS
@TINY
def test_graphs_agree_with_the_ort_dialect(tmp_path: Path, name: str, graph: str) -> None:
    """One decoder, three dialects: the same model in fp32, states and logits of every row."""
    _, spec, weights = tiny_variant(name)
    ort = build_graph(tmp_path / "ort", weights, spec, hidden_layers=STATES)
    case = engine_case(tmp_path / "engine", name, graph, "fp32")
    with ort.open() as one, case.graph.open() as other:
        expected, states = read_in_pieces(one, TEXT, cut(97, [31]), STATES)
        found, hidden = read_in_pieces(other, TEXT, cut(97, [31]), STATES)
    assert_allclose(found, expected, rtol=0, atol=1e-4)
    assert_states(hidden, np.stack([states[index] for index in STATES]), 2e-5)


@DIALECTS
@TINY
@pytest.mark.parametrize("past", [0, 1, 63, 64])
def test_several_tokens_on_a_cache_and_after_a_rewind(
    tmp_path: Path, name: str, graph: str, past: int
) -> None:
    """D31: what verification does: all rows of 12 tokens, in every cut, after wrong ones were forgotten."""
    ids = TEXT[: past + 12]
    case = engine_case(tmp_path, name, graph, "fp32")
    logits, _ = truth(case.model, ids)
    with case.graph.open() as model:
        if past:
            model.forward(ids[:past])
        for sizes in ([12], [1], [5, 4, 3], [1, 11]):
            model.forward(TEXT[20:37])
            model.rewind(past)
            found, _ = read_in_pieces(model, ids[past:], cut(12, sizes))
            model.rewind(past)
            assert_allclose(found, logits[past:], rtol=0, atol=1e-4, err_msg=str(sizes))


@DIALECTS
@pytest.mark.parametrize("precision", ["fp16", "int8", "int8-w8a8", "int4", "fp8"])
def test_a_later_id_never_changes_an_earlier_row(tmp_path: Path, graph: str, precision: str) -> None:
    """D06, D31: to the bit, with and without a cache: no scale spans rows."""
    case = engine_case(tmp_path, LLAMA, graph, precision, **WIDE)
    with case.graph.open() as model:
        for past in (0, 1, 20):
            runs = []
            for last in (3, 71):
                model.rewind(0)
                if past:
                    model.forward(TEXT[:past])
                found, _ = read_in_pieces(model, [*TEXT[past : past + 5], last], [slice(0, 6)])
                runs.append(found)
            assert_array_equal(runs[0][:-1], runs[1][:-1])
            assert not np.array_equal(runs[0][-1], runs[1][-1])


@DIALECTS
def test_wanted_rows_are_those_rows(tmp_path: Path, graph: str) -> None:
    """D43: one, several, the last of a chunk, none."""
    case = engine_case(tmp_path, QWEN2, graph, "fp32")
    with case.graph.open() as model:
        whole, _ = read_in_pieces(model, TEXT[:12], [slice(0, 12)])
        for rows in ([0], [-1], [2, 5], [1, 4, 4, 9], list(range(11)), []):
            model.rewind(0)
            found = model.forward(TEXT[:12], rows=rows).logits
            assert_allclose(found, whole[rows].reshape(-1, 99), rtol=0, atol=1e-5)


@DIALECTS
@TINY
def test_pooled_is_the_weighted_sum_of_states(tmp_path: Path, name: str, graph: str) -> None:
    """D43: over one pass, single steps and chunks with the sum handed on; summed in fp32 under fp16 states."""
    case = engine_case(tmp_path, name, graph, "fp16", initializer_range=0.1)
    weights = np.random.default_rng(5).uniform(size=97).astype(np.float32)
    with case.graph.open() as model:
        _, own = read_in_pieces(model, TEXT, [slice(0, 97)], STATES)
        expected = np.stack([weights.astype(np.float64) @ own[index] for index in STATES])
        for sizes in ([97], [1], [7, 2, 90]):
            model.rewind(0)
            pooled: Floats | None = None
            for piece in cut(97, sizes):
                found = model.forward(TEXT[piece], rows=(), pool=weights[piece], pooled=pooled).pooled
                assert found is not None
                pooled = found.copy()
            assert_allclose(pooled, expected, rtol=0, atol=2e-3 * np.abs(expected).max(), err_msg=str(sizes))


@DIALECTS
def test_the_whole_context_can_be_used(tmp_path: Path, graph: str) -> None:
    """The last row of a full cache is right; the context is no multiple of anything."""
    case = engine_case(tmp_path, LLAMA, graph, "fp32", max_context=9)
    logits, _ = truth(case.model, TEXT[:9])
    with case.graph.open() as model:
        for sizes in ([9], [1]):
            model.rewind(0)
            found, _ = read_in_pieces(model, TEXT[:9], cut(9, sizes))
            assert_allclose(found, logits, rtol=0, atol=1e-4)


@needs_native
@pytest.mark.parametrize("past", [SPAN_STEP - 2, SPAN_STEP - 1, SPAN_STEP])
def test_spans_grow_at_their_steps(tmp_path: Path, past: int) -> None:
    """Around 256 rows: what is read grows, what is seen does not jump."""
    ids = np.random.default_rng(2).integers(0, 99, past + 3).tolist()
    case = engine_case(tmp_path, QWEN2, "native", "fp32", max_context=700, max_position_embeddings=1024)
    assert [span_of(case.graph.spec, n) for n in (1, 256, 257, 512, 513, 701)] == [
        256,
        256,
        512,
        512,
        701,
        701,
    ]
    logits, _ = truth(case.model, ids)
    with case.graph.open() as model:
        model.forward(ids[:past])
        found, _ = read_in_pieces(model, ids[past:], cut(3, [1]))
        assert_allclose(found, logits[past:], rtol=0, atol=1e-4)
        model.rewind(past)
        found, _ = read_in_pieces(model, ids[past:], cut(3, [3]))
        assert_allclose(found, logits[past:], rtol=0, atol=1e-4)


@needs_native
def test_rows_behind_the_span_are_not_read(tmp_path: Path) -> None:
    """What stale rows hold can never be seen, whatever it is: NaN behind the span, large numbers inside it."""
    case = engine_case(tmp_path, LLAMA, "native", "fp32", max_context=700, max_position_embeddings=1024)
    clean, dirty = (run(case.graph, TEXT[:12], fill=fill) for fill in (0.0, 1e3))
    assert_allclose(dirty["logits"], clean["logits"], rtol=0, atol=1e-5)
    assert_array_equal(run(case.graph, TEXT[:12], behind=np.nan)["logits"], clean["logits"])


def run(graph: Graph, ids: list[int], *, fill: float = 0.0, behind: float | None = None) -> dict[str, Array]:
    """Every output but the caches' of one pass over one text. fill: what the cache held; behind: beyond the span."""
    backend, spec = open_backend("cpu", threads=1), graph.spec
    session = backend.open(graph.path)
    for past, present in kv_pairs(spec):
        shape = (1, spec.n_kv_heads, spec.capacity, spec.head_size)
        buffer = backend.zeros(shape, spec.cache)
        buffer.numpy()[:] = fill
        if behind is not None:
            buffer.numpy()[:, :, span_of(spec, len(ids)) :] = behind
        session.bind(past, present, buffer)
    index = np.dtype(spec.index_dtype)
    feeds: dict[str, Array] = {
        "input_ids": np.array([ids], index),
        "past_len": np.zeros(1, index),
        "logit_rows": np.arange(len(ids), dtype=index),
        "pool": np.ones((1, len(ids)), np.float32),
        "pooled_in": np.ones((1, len(spec.pooled_layers), spec.width), np.float32),
        "next_ids": np.array([[*ids[1:], 0]], index),
    }
    if spec.graph == "native":
        feeds["span"] = np.arange(span_of(spec, len(ids)))
    names = [port.name for port in spec.outputs() if not port.name.startswith("kv")]
    found = {name: tensor.numpy().copy() for name, tensor in session.run(feeds, names).items()}
    session.close()
    return found


@DIALECTS
@TINY
def test_signals_are_what_numpy_makes_of_the_logits(tmp_path: Path, name: str, graph: str) -> None:
    """lse, entropy, the next token's logit and 64 candidates of each wanted row, whatever the logits' height."""
    case = engine_case(tmp_path, name, graph, "fp32")
    found = run(case.graph, TEXT[:40])
    logits = found["logits"][0].astype(np.float64)
    peak = logits.max(axis=-1, keepdims=True)
    lse = (np.log(np.exp(logits - peak).sum(axis=-1, keepdims=True)) + peak)[:, 0]
    law = np.exp(logits - lse[:, None])
    for signal, expected in {
        "lse": lse,
        "entropy": -(law * (logits - lse[:, None])).sum(axis=-1),
        "next_logits": logits[np.arange(40), [*TEXT[1:40], 0]],
        "top_logits": np.sort(logits, axis=-1)[:, ::-1][:, :TOP_IDS],
        "pooled": 1 + np.stack([found[f"hidden.{index}"][0].sum(axis=0) for index in STATES]),
    }.items():
        assert found[signal].dtype == np.float32
        assert_allclose(found[signal][0], expected, rtol=1e-5, atol=1e-4, err_msg=signal)
    picked = np.take_along_axis(logits, found["top_ids"][0].astype(np.int64), axis=-1)
    assert_allclose(picked, found["top_logits"][0], rtol=0, atol=1e-6)
    assert found["top_ids"].dtype == np.dtype(case.graph.spec.index_dtype)


@DIALECTS
def test_graphs_follow_the_contract(tmp_path: Path, graph: str) -> None:
    """Inputs and outputs as onnxruntime sees them: names, types, shapes."""
    for precision in ("fp32", "fp16"):
        case = engine_case(tmp_path / precision, QWEN2, graph, precision, initializer_range=0.1)
        session = open_backend("cpu", threads=1).open(case.graph.path)
        assert session.inputs == case.graph.spec.inputs()
        assert session.outputs == case.graph.spec.outputs()
        session.close()


@DIALECTS
@TINY
def test_fp16_is_near_transformers(tmp_path: Path, name: str, graph: str) -> None:
    """Close, on a cache too, and never promised to the bit."""
    case = engine_case(tmp_path, name, graph, "fp16", initializer_range=0.1)
    logits, states = truth(case.model, TEXT)
    with case.graph.open() as model:
        for sizes in ([97], [1], [5, 4, 3]):
            model.rewind(0)
            found, hidden = read_in_pieces(model, TEXT, cut(97, sizes), STATES)
            assert_allclose(found, logits, rtol=0, atol=1e-2, err_msg=str(sizes))
            assert_states(hidden, states, 5e-3)


@DIALECTS
@pytest.mark.parametrize("factor", [400.0, 1e-2])
def test_norms_and_masks_stay_inside_fp16(tmp_path: Path, graph: str, factor: float) -> None:
    """D40: squares of large states pass 65,504, those of small ones vanish: logits finite and near fp32's."""
    name = "llama-default-untied"
    model, _, weights = tiny_variant(name, initializer_range=0.1)
    scaled = ArrayWeights({**weights.arrays, EMBEDDING: weights.arrays[EMBEDDING] * np.float32(factor)})
    model.get_input_embeddings().weight.data.mul_(factor)
    case = engine_case(tmp_path, name, graph, "fp16", initializer_range=0.1, weights=scaled)
    with case.graph.open() as opened:
        found, _ = read_in_pieces(opened, TEXT, cut(97, [60, 1]))
    assert np.abs(scaled.arrays[EMBEDDING]).max() ** 2 * 10 > 65_504 or factor < 1
    assert_allclose(found, truth(model, TEXT)[0], rtol=0, atol=1e-2)


@DIALECTS
@TINY
@pytest.mark.parametrize("precision", ["int8", "int4/32", "int4/64", "int4/128"])
def test_quantized_weights_are_as_good_as_the_ort_dialects(
    tmp_path: Path, name: str, graph: str, precision: str
) -> None:
    """Other codes, without zero points, and whole rows in int8: the same distance from the model, nearly."""
    layers, _, block = precision.partition("/")
    _, spec, weights = tiny_variant(name, **WIDE)
    schemes = Schemes.choose(layers, block_size=int(block or 32))
    ort = build_graph(tmp_path / "ort", weights, spec, schemes=schemes)
    case = engine_case(tmp_path / "engine", name, graph, precision, **WIDE)
    logits, _ = truth(case.model, TEXT)
    with ort.open() as one, case.graph.open() as other:
        there, _ = read_in_pieces(one, TEXT, [slice(0, 97)])
        here, _ = read_in_pieces(other, TEXT, cut(97, [50, 1, 3]))
    theirs, ours = (float(np.square(found - logits).mean()) for found in (there, here))
    assert 0 < ours < 4 * theirs
