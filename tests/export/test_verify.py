"""The numerics gate: broken graphs are refused with figures, good ones graded; the figures against hand numbers."""

from __future__ import annotations

import doctest
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import ArrayWeights, Graph, build_graph, tiny_variant
from tiny_pairs import request, save_checkpoint, settings

from semspec.export import verify
from semspec.export.packing import Schemes
from semspec.export.pipeline import export_pair
from semspec.export.quantize import Scheme, scheme
from semspec.export.verify import (
    GATE_TOKENS,
    LIMITS,
    Quality,
    check_bits,
    check_fp16,
    compare,
    judge,
    verify_graph,
)
from semspec.models.reference import ReferenceRun
from semspec.runtime.bundle import Bundle
from semspec.runtime.errors import BundleError, ConfigError
from semspec.runtime.model import CachedModel

TEXT = np.random.default_rng(0).integers(0, 99, 64).tolist()
VARIANT = "llama-default-untied"


@pytest.fixture
def made(tmp_path: Path) -> tuple[Graph, Any, Any]:
    """A small fp32 graph that is right, its specification and its weights."""
    _, spec, weights = tiny_variant(VARIANT)
    return build_graph(tmp_path / "m", weights, spec, max_context=96), spec, weights


def gate(graph: Graph, spec: Any, weights: Any, precision: str = "fp32", **changes: Any) -> Quality:
    with graph.open() as model:
        return verify_graph(model, spec, weights, TEXT, Schemes.choose(precision, **changes), level="quick")


def reference_of(logits: Any, states: Any = ((1.0, 0.0),), peak: float = 1.0) -> ReferenceRun:
    return ReferenceRun(
        logits=np.asarray(logits, np.float32),
        states={1: np.asarray(states, np.float32)},
        state_peaks=(0.5, peak),
    )


def quality(**changes: Any) -> Quality:
    figures: dict[str, Any] = {"level": "quick", "tokens": 64, "kl": 0.0, "top1": 1.0, "cosine": 1.0}
    figures |= {"perplexity": 9.0, "reference_perplexity": 9.0}
    return Quality(**{**figures, "state_peak": 1.0, "grade": "faithful", **changes})


# the figures


def test_the_docstring_example_holds() -> None:
    """Two to one against one to two, by hand."""
    assert doctest.testmod(verify).failed == 0


def test_figures_of_two_rows_by_hand() -> None:
    """Row 1: probabilities 2/3, 1/3 against 1/3, 2/3: KL = ln(2) / 3, another arg-max. Row 2: a shifted copy of
    the logits, so nothing differs. States: equal, and 45 degrees apart."""
    logits = np.log(np.array([[1, 2], [3, 1]], np.float32)) + np.array([[0], [7]], np.float32)
    found = compare(
        reference_of(np.log([[2, 1], [3, 1]]), [[1, 0], [0, 2]], peak=9.0),
        logits.astype(np.float32),
        {1: np.array([[3, 0], [1, 1]], np.float32)},
        [0, 1],
        "quick",
    )
    assert (found.perplexity, found.reference_perplexity) == (pytest.approx(1.5), pytest.approx(3.0))
    assert found.kl == pytest.approx(math.log(2) / 3 / 2, abs=1e-7)
    assert found.cosine == pytest.approx(math.sqrt(0.5), abs=1e-7)
    assert (found.tokens, found.top1, found.state_peak, found.grade) == (2, 0.5, 9.0, "fair")


@pytest.mark.parametrize(
    ("kl", "grade"),
    [
        (0, "faithful"),
        (0.0099, "faithful"),
        (0.0101, "good"),
        (0.0999, "good"),
        (0.101, "fair"),
        (0.301, "rough"),
    ],
)
def test_grades_follow_the_divergence(kl: float, grade: str) -> None:
    """A word for people; its limits are part of what it means. By hand: even odds against (p, 1 - p) have
    KL = -ln(4 p (1 - p)) / 2."""
    p = (1 + math.sqrt(1 - math.exp(-2 * kl))) / 2
    logits = np.log(np.array([[p, 1 - p]] * 2))
    found = compare(reference_of([[0, 0]] * 2), logits, {1: np.ones((1, 2), np.float32)}, [0, 0], "quick")
    assert found.kl == pytest.approx(kl, abs=1e-9) and found.grade == grade


def test_numbers_that_are_none_are_refused_not_a_crash() -> None:
    """Infinite logits make every figure NaN, and NaN is below and above no limit."""
    logits = np.array([[np.inf, 0]] * 2, np.float32)
    with np.errstate(invalid="ignore"):
        found = compare(reference_of([[1, 2]] * 2), logits, {1: np.ones((1, 2), np.float32)}, [0, 0], "quick")
    assert math.isnan(found.kl) and found.grade == "rough"
    with pytest.raises(BundleError, match="mean KL nan"):
        judge(found, scheme("fp32", 32))


@pytest.mark.parametrize(
    ("precision", "kl", "top1", "repair"),
    [
        ("fp32", 1e-3, 0.99, "this is a fault of semspec or of the engine: report it"),
        ("int8", 0.05, 0.93, "use --precision fp32"),
        ("int4", 0.6, 0.6, "use --precision int8"),
    ],
)
def test_limits_and_their_repair(precision: str, kl: float, top1: float, repair: str) -> None:
    """At the limit it is still the model; beyond either, the message has the figures and what to do."""
    chosen = scheme(precision, 64)
    judge(quality(kl=kl, top1=top1), chosen)
    for figures in ({"kl": kl * 1.01, "top1": top1}, {"kl": kl, "top1": top1 - 0.01}):
        with pytest.raises(BundleError) as caught:
            judge(quality(**figures), chosen)
        message = str(caught.value)
        assert message.startswith(
            f"the {chosen} graph is not the model any more: mean KL {figures['kl']:.3g}"
        )
        assert f"top-1 {figures['top1']:.2f} (at least {top1:g})" in message and message.endswith(repair)


def test_fp16_has_an_end() -> None:
    """Sums of a few states of 16,000 still fit into 65,504; more do not."""
    check_fp16(16_000.0, "use another")
    with pytest.raises(BundleError, match=r"reach 24494 .* up to 16000; use another"):
        check_fp16(24_494.05, "use another")


# broken graphs


def test_a_right_graph_passes(made: tuple[Graph, Any, Any]) -> None:
    """Without this, the refusals below would prove nothing."""
    found = gate(*made)
    assert found.grade == "faithful" and found.top1 == 1.0 and found.kl < 1e-6 and found.cosine > 0.99999
    assert found.tokens == GATE_TOKENS["quick"] and found.better == ""


@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "lm_head.weight"])
def test_changed_weights_are_refused(made: tuple[Graph, Any, Any], name: str) -> None:
    """A block of one matrix negated in the data file: every cut still agrees, but it is another model."""
    graph, spec, weights = made
    initializers = onnx.load(graph.path, load_external_data=False).graph.initializer
    (tensor,) = (tensor for tensor in initializers if tensor.name == name)
    where = {entry.key: entry.value for entry in tensor.external_data}
    data = np.memmap(
        graph.path.parent / where["location"], np.float32, "r+", int(where["offset"]), tuple(tensor.dims)
    )
    data[: len(data) // 2] *= -1
    data.flush()
    with pytest.raises(
        BundleError, match=r"the fp32 graph is not the model any more: mean KL .* top-1 0\.\d\d"
    ):
        gate(graph, spec, weights)


def test_another_models_weights_are_refused(made: tuple[Graph, Any, Any]) -> None:
    """The graph of one checkpoint, held against another of the same shapes."""
    graph, spec, weights = made
    other = ArrayWeights({name: np.flip(values).copy() for name, values in weights.arrays.items()})
    with pytest.raises(BundleError, match="not the model any more"):
        gate(graph, spec, other)


class Rounding(CachedModel):
    """A model whose single rows come out a little different, as from another kernel."""

    def forward(self, ids: Any, **options: Any) -> Any:
        found = super().forward(ids, **options)
        if len(ids) == 1:
            found.logits[0, 0] = np.nextafter(found.logits[0, 0], np.float32(np.inf))
        return found


class Forgetful(CachedModel):
    """A model whose cache keeps one wrong token after a rewind."""

    def rewind(self, length: int) -> None:
        super().rewind(length + 1 if 0 < length < self.length else length)


@pytest.mark.parametrize(
    ("kind", "cut"),
    [(Rounding, "one token on a cache of 0"), (Forgetful, "a rewind of 1 wrong tokens")],
    ids=["rounding", "forgetful"],
)
def test_one_bit_or_one_row_is_enough(
    made: tuple[Graph, Any, Any], kind: type[CachedModel], cut: str
) -> None:
    """The last bit of one logit; and a rewind that is off by one row."""
    with made[0].open() as model:
        model.__class__ = kind
        with pytest.raises(BundleError, match=f"logits after {cut} differ from one pass by up to"):
            check_bits(model, TEXT)


def test_a_graph_that_ignores_spare_is_refused(smollm2_bundle: Path, tmp_path: Path) -> None:
    """The input is there and has no effect: single steps take another path through attention, other bits follow.

    On the real model, where it was measured; a tiny one has too few numbers to differ on every processor.
    """
    bundle = Bundle.open(smollm2_bundle)
    source = bundle.graph_file("target", "cpu")
    model = onnx.load(source, load_external_data=False)
    for node in model.graph.node:
        node.input[:] = ["0" if name == "spare" else name for name in node.input]
    broken = tmp_path / "cpu.onnx"
    broken.write_bytes(model.SerializeToString())
    os.link(source.parent / "weights.data", tmp_path / "weights.data")
    graph = Graph(path=broken, spec=bundle.model("target").graphs["cpu"])
    exact = r"not exact on this machine: logits after one token on a cache of \d+ differ"
    with graph.open() as opened, pytest.raises(BundleError, match=exact):
        check_bits(opened, TEXT[:16])


def test_a_hostile_model_is_refused_in_int4(tmp_path: Path) -> None:
    """Random weights of a wide range: the figures, the better precision, the model's name, and nothing left."""
    checkpoint = save_checkpoint(tmp_path / "tiny")
    with pytest.raises(BundleError) as caught:
        export_pair(request(checkpoint, "int4"), None, tmp_path / "out", settings(verify="quick"))
    message = str(caught.value)
    assert message.startswith("target tiny: the int4 block 32 graph is not the model any more: mean KL 1.")
    assert message.endswith("use --precision int8") and [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_the_coarsest_class_of_weights_decides(tmp_path: Path) -> None:
    """fp32 layers under an int4 head are as good as int4: held against its limits, and it is the head to change."""
    mixed = request(save_checkpoint(tmp_path / "tiny"), "fp32", head="int4", embedding="fp32")
    report = export_pair(mixed, None, tmp_path / "out", settings(verify="quick"))
    found = report.models["target"].quality
    assert found is not None and found.kl > LIMITS["fp32"][0]
    option, coarsest = mixed.schemes.coarsest
    with pytest.raises(BundleError, match=r"the int4 block 32 graph .*; use --head-precision int8"):
        judge(quality(kl=1.0), coarsest, option)


# what may pass, and how it is graded


def test_the_real_model_in_int4_passes_and_is_graded(smollm2_bundle: Path) -> None:
    """The figures of the second scheme of the pilot: KL 0.19-0.24 and 0.78 over more text; here over 64 tokens."""
    found = Bundle.open(smollm2_bundle).model("target").quality
    assert found["level"] == "quick" and found["tokens"] == 64
    assert 0.1 < found["kl"] < 0.3 and found["top1"] > 0.7 and found["cosine"] > 0.8
    assert found["grade"] == "fair" and found["better"] == "int8"
    assert found["state_peak"] == pytest.approx(24_494, abs=1)


def test_the_real_model_is_refused_in_fp16(smollm2_gguf: Path, tmp_path: Path) -> None:
    """Its states reach 24,494: the graph for cuda would compute infinities on some texts."""
    asked = request(smollm2_gguf, "int4", name="SmolLM2", quantizer="rtn")
    with pytest.raises(BundleError) as caught:
        export_pair(asked, None, tmp_path / "out", settings(graphs=("cpu", "cuda"), verify="quick"))
    assert str(caught.value) == (
        "target SmolLM2: hidden states reach 24494 and fp16 activations are allowed up to 16000; "
        "leave cuda out of --graphs: it has no other"
    )
    assert not list(tmp_path.iterdir())


def test_the_gate_reports_its_rows_and_uses_its_text(made: tuple[Graph, Any, Any]) -> None:
    """Progress counts to the end; the model is left empty."""
    graph, spec, weights = made
    seen: list[tuple[int, int]] = []
    with graph.open() as model:
        verify_graph(
            model,
            spec,
            weights,
            TEXT,
            Schemes.choose("fp32"),
            level="quick",
            on_row=lambda *row: seen.append(row),
        )
        assert model.length == 0
    assert seen == [(i, 64) for i in range(1, 65)]


def test_a_small_context_is_used_as_far_as_it_goes(tmp_path: Path) -> None:
    """Wrong tokens need room behind the text; below 18 tokens there is no gate, and the message says so."""
    _, spec, weights = tiny_variant(VARIANT)
    small = build_graph(tmp_path / "small", weights, spec, max_context=18)
    assert gate(small, spec, weights).tokens == 2
    with pytest.raises(
        ConfigError, match="at least 18 tokens, got 17; raise --max-context, or skip the gate"
    ):
        gate(build_graph(tmp_path / "less", weights, spec, max_context=17), spec, weights)


def test_a_text_too_short_is_refused(made: tuple[Graph, Any, Any]) -> None:
    """Figures over fewer tokens than the manifest says would be a lie."""
    graph, spec, weights = made
    with graph.open() as model, pytest.raises(ConfigError, match="has 63 tokens and 64 are needed"):
        verify_graph(model, spec, weights, TEXT[:63], Schemes.choose("fp32"), level="quick")


def test_the_coarsest_is_found() -> None:
    """Layers before head before embedding where bits are equal."""
    assert Schemes.choose("int4").coarsest == ("--precision", Scheme(name="int4", bits=4, block_size=32))
    assert Schemes.choose("fp32", head="int8").coarsest[0] == "--head-precision"
    assert Schemes.choose("fp32", embedding="int4", head="int8").coarsest[0] == "--embedding-precision"
