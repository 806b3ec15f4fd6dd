"""Which precision runs where: one table, and what it says when it refuses."""

from __future__ import annotations

import pytest

from semspec.export import precisions
from semspec.export.engines.capability import (
    PRECISIONS,
    allowed_precisions,
    check_precisions,
    graphs_for,
    parse_capabilities,
)
from semspec.runtime.errors import ConfigError

RTX = ("tensorrt-rtx", "1.7.1.116")
EXACT = ("fp32", "bf16", "fp16", "int8", "int8-w8a8")


def test_table_has_every_precision_that_can_be_exported() -> None:
    """A precision without a row could be exported and never built."""
    assert set(PRECISIONS) == set(precisions.PRECISIONS)


@pytest.mark.parametrize(
    ("capability", "allowed"),
    [
        ("7.5", ()),
        ("8.0", (*EXACT, "int4")),
        ("8.6", (*EXACT, "int4")),
        ("8.7", (*EXACT, "int4")),
        ("8.9", (*EXACT, "fp8", "int4")),
        ("9.0", (*EXACT, "fp8", "int4")),
        ("12.0", (*EXACT, "fp8", "int4", "nvfp4")),
        ("12.1", (*EXACT, "fp8", "int4", "nvfp4")),
    ],
)
def test_precisions_of_each_capability(capability: str, allowed: tuple[str, ...]) -> None:
    """Orin's 8.7 is no 8.9: it has what 8.0 has (D41)."""
    assert allowed_precisions(*RTX, [capability]) == allowed


def test_several_devices_get_what_all_of_them_run() -> None:
    """One plan for several devices fails where a single one of them cannot run it."""
    assert allowed_precisions(*RTX, ["8.6", "12.0"]) == allowed_precisions(*RTX, ["8.6"])


def test_refusal_names_the_device_and_what_runs_there() -> None:
    """D41: fp8 on Ampere is known before a build of many minutes, and so is what to do instead."""
    with pytest.raises(ConfigError) as caught:
        check_precisions("target native", ("fp8", "fp16"), *RTX, ["8.6", "8.9"])
    message = str(caught.value)
    assert (
        "target native is in fp8, which needs compute capability 8.9 or above, and 8.6 was asked for"
        in message
    )
    assert "allowed for 8.6, 8.9: fp32, bf16, fp16, int8, int8-w8a8, int4" in message


def test_release_of_full_tensorrt_counts_too() -> None:
    """nvfp4 came after JetPack 6's release; TensorRT-RTX counts its releases by itself."""
    with pytest.raises(
        ConfigError, match=r"nvfp4, which needs TensorRT 10\.13 or above, and 10\.3\.0 is installed"
    ):
        check_precisions("draft primitive", ("nvfp4",), "tensorrt", "10.3.0", ["12.0"])
    check_precisions("draft primitive", ("nvfp4",), *RTX, ["12.0"])


def test_unknown_precision_is_refused() -> None:
    """A bundle of a later semspec may have one."""
    with pytest.raises(ConfigError, match="unknown precision 'fp2'"):
        check_precisions("target native", ("fp2",), *RTX, ["12.0"])


@pytest.mark.parametrize(
    ("engine", "version", "graphs"),
    [
        ("tensorrt", "10.3.0", ("primitive",)),
        ("tensorrt", "10.13.3.9", ("primitive",)),
        ("tensorrt", "10.14.1", ("primitive",)),
        ("tensorrt", "10.15.1", ("native", "primitive")),
        ("tensorrt", "11.4.0.106", ("native", "primitive")),
        (*RTX, ("native", "primitive")),
    ],
)
def test_graphs_of_each_release(engine: str, version: str, graphs: tuple[str, ...]) -> None:
    """10.15 brought the cache update that `native` rests on."""
    assert graphs_for(engine, version) == graphs


def test_capabilities_are_read_as_nvidia_writes_them() -> None:
    """The last digit is the minor number; order and repetition do not matter."""
    assert parse_capabilities("120, 86,8.9,86") == ("8.6", "8.9", "12.0")


@pytest.mark.parametrize("text", ["", "8", "sm86", "86,", "1234", "8.6.1.0", "８６"])
def test_other_capabilities_are_refused(text: str) -> None:
    """A typo must not become another device."""
    with pytest.raises(ConfigError, match="compute capabilities must be numbers such as 86,89,120"):
        parse_capabilities(text)
