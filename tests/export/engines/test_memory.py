"""What a build needs, told before it (D41)."""

from __future__ import annotations

import sys

import contract_graphs
import pytest

from semspec.export.engines.device import Device
from semspec.export.engines.memory import MemoryNeed, check_memory, free_bytes, memory_need
from semspec.export.engines.profiles import PROBE_PROFILES, BuildSizes, make_profiles
from semspec.runtime.errors import BackendError

MIB, GIB = 1 << 20, 1 << 30
ALLOWED = ("fp32", "bf16", "fp16", "int8", "int8-w8a8", "int4")
NEED = MemoryNeed(weights=3 * GIB, build=10 * GIB, run=4 * GIB)


def device(gib: int, *, shared: bool) -> Device:
    return Device(name="Orin Nano", capability="8.7", n_bytes=gib * GIB, shared=shared)


@pytest.mark.parametrize(
    ("graph", "n_layers", "weights", "peak"),
    [
        ("native", 24, 1202, 3910),  # random weights, fp16
        ("native", 24, 696, 2670),  # random weights, int4
        ("native", 30, 256.8, 1484),  # SmolLM2, fp16
        ("native", 30, 183.2, 1266),  # fp8
        ("native", 30, 135.4, 1028),  # int4
        ("native", 30, 138.6, 1201),  # nvfp4
        ("primitive", 30, 138.6, 1377),  # nvfp4
        ("primitive", 30, 183.2, 1395),  # fp8
        ("primitive", 30, 135.4, 1262),  # int4
    ],
)
def test_estimate_covers_what_was_measured(graph: str, n_layers: int, weights: float, peak: float) -> None:
    """MiB that builds by TensorRT-RTX 1.7 took; and not much more, or what would fit is refused."""
    spec = contract_graphs.graph_spec(graph, n_layers=n_layers)
    need = memory_need(spec, int(weights * MIB), make_profiles(spec, BuildSizes()))
    assert peak * MIB < need.build < 1.3 * peak * MIB


def test_a_plan_needs_its_weights_its_cache_and_its_logits() -> None:
    """KV of all layers at full length and V numbers a row are what a small device runs out of."""
    sizes = {"n_layers": 28, "n_kv_heads": 2, "head_size": 128, "width": 1536, "vocab_size": 151_936}
    spec = contract_graphs.graph_spec(max_context=8191, **sizes)
    need = memory_need(spec, GIB, make_profiles(spec, BuildSizes(rows=64)))
    cache, logits = 28 * 2 * 2 * 128 * 8192 * 2, 64 * 151_936 * 10
    assert cache + logits < need.run - GIB < cache + logits + (128 << 20)
    assert memory_need(None, 1000, PROBE_PROFILES).run < 64 << 20


def test_refusal_has_both_numbers_and_what_would_fit() -> None:
    """A build that is killed after ten minutes says neither."""
    with pytest.raises(BackendError) as caught:
        check_memory("target native", NEED, "fp16", ALLOWED, None, 7 * GIB)
    message = str(caught.value)
    assert "building target native needs about 10.0 GiB of memory and 7.0 GiB are free" in message
    assert (
        "fits: the same model exported in int8 or int8-w8a8 or int4;" in message
        and "--ignore-memory" in message
    )


def test_refusal_says_so_where_nothing_fits() -> None:
    """No precision must be recommended that would be killed as well."""
    with pytest.raises(
        BackendError, match="no precision of this model, only a smaller one, or another machine"
    ):
        check_memory("target native", NEED, "fp16", ALLOWED, None, GIB)


def test_a_device_too_small_for_the_plan_is_told_before_the_build() -> None:
    """The build might pass and the first run fail."""
    with pytest.raises(
        BackendError, match=r"needs about 4\.0 GiB on Orin Nano, which has 3\.0 GiB; fits: the same"
    ):
        check_memory("target native", NEED, "fp16", ALLOWED, device(3, shared=False), 64 * GIB)


def test_shared_memory_holds_the_build_and_the_plan() -> None:
    """On a Jetson the kernels that are timed run in the memory that the compiler fills."""
    check_memory("target native", NEED, "fp16", ALLOWED, device(16, shared=False), 12 * GIB)
    with pytest.raises(BackendError, match=r"needs about 14\.0 GiB of memory and 12\.0 GiB are free"):
        check_memory("target native", NEED, "fp16", ALLOWED, device(16, shared=True), 12 * GIB)


def test_unknown_memory_refuses_nothing() -> None:
    """Some systems do not tell."""
    check_memory("target native", NEED, "fp16", ALLOWED, None, None)


@pytest.mark.skipif(sys.platform != "linux", reason="read from Linux's /proc")
def test_free_memory_is_read() -> None:
    """Something between nothing and a large server."""
    found = free_bytes()
    assert found is not None and 1 << 20 < found < 1 << 45
