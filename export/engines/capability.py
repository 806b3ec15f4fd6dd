"""Which precision runs on which GPU, and which graph with which release: one table, asked before anything is built.

Rows marked [compiled] were held against TensorRT-RTX's compiler for 8.0, 8.6, 8.9 and 12.0, rows for other capabilities
rest on NVIDIA's documents. Capabilities are text, `8.6`, ordered as numbers: Orin's 8.7 has what 8.0 has, and no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from semspec.runtime.errors import ConfigError

__all__ = [
    "GRAPHS",
    "PRECISIONS",
    "RTX_CAPABILITIES",
    "Need",
    "allowed_precisions",
    "check_precisions",
    "graphs_for",
    "parse_capabilities",
    "release",
]

# The pooled sum of every graph is a product in fp32, which TensorRT-RTX has no kernel for below 8.0.
LEAST = (8, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """capability: the least. release: the least of full TensorRT; TensorRT-RTX has all. bits: that one weight takes,
    scales included."""

    capability: tuple[int, int]
    release: tuple[int, int] = (10, 3)
    bits: float


PRECISIONS: Mapping[str, Need] = {
    "fp32": Need(capability=LEAST, bits=32),  # [compiled]
    "bf16": Need(capability=LEAST, bits=16),  # [compiled]
    "fp16": Need(capability=LEAST, bits=16),  # [compiled]
    "int8": Need(capability=LEAST, bits=8.1),  # [compiled]
    "int8-w8a8": Need(capability=LEAST, bits=8.1),  # [compiled]
    "fp8": Need(capability=(8, 9), bits=8.1),  # [compiled]
    "int4": Need(capability=LEAST, bits=4.5),  # [compiled]
    "nvfp4": Need(capability=(12, 0), release=(10, 13), bits=4.5),  # [compiled]
}

# name -> the least release of full TensorRT that reads it; TensorRT-RTX reads both. The better one first.
GRAPHS: Mapping[str, tuple[int, int]] = {"native": (10, 15), "primitive": (10, 3)}

RTX_CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1")  # of release 1.7


def parse_capabilities(text: str) -> tuple[str, ...]:
    """`86,89,120` as ascending capabilities, the last digit being the minor number. Raises ConfigError.

    >>> parse_capabilities("120,8.6")
    ('8.6', '12.0')
    """
    parts = [part.strip().replace(".", "") for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and 2 <= len(part) <= 3 for part in parts):
        raise ConfigError(
            f"compute capabilities must be numbers such as 86,89,120 separated by commas, got {text!r}"
        )
    return tuple(sorted({f"{part[:-1]}.{part[-1]}" for part in parts}, key=_number))


def release(version: str) -> tuple[int, int]:
    """Major and minor number of an engine's version."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def graphs_for(engine: str, version: str) -> tuple[str, ...]:
    """Names of the graphs that this engine reads, the better one first."""
    if engine == "tensorrt-rtx":
        return tuple(GRAPHS)
    return tuple(name for name, least in GRAPHS.items() if release(version) >= least)


def allowed_precisions(engine: str, version: str, capabilities: Iterable[str]) -> tuple[str, ...]:
    """Names of the precisions that run on all of them, the exact ones first."""
    numbers = [_number(text) for text in capabilities]
    known = engine == "tensorrt-rtx" or release(version)
    return tuple(
        name
        for name, need in PRECISIONS.items()
        if all(number >= need.capability for number in numbers) and (known is True or known >= need.release)
    )


def check_precisions(
    what: str, precisions: Sequence[str], engine: str, version: str, capabilities: Sequence[str]
) -> None:
    """Refuse, before the work, what the engine would refuse after it, or run wrongly.

    what: whose precisions, for the message. Raises ConfigError naming the capability or release that is in the way,
    and what is allowed there.
    """
    for name in precisions:
        if name not in PRECISIONS:
            raise ConfigError(
                f"{what} has the unknown precision {name!r}; known: {', '.join(PRECISIONS)}: install the semspec that "
                "exported it"
            )
        need = PRECISIONS[name]
        allowed = ", ".join(allowed_precisions(engine, version, capabilities)) or "none"
        for capability in capabilities:
            if _number(capability) < need.capability:
                raise ConfigError(
                    f"{what} is in {name}, which needs compute capability {_text(need.capability)} or above, and "
                    f"{capability} was asked for; allowed for {', '.join(capabilities)}: {allowed}: export with one of "
                    f"these, or build for other devices"
                )
        if engine == "tensorrt" and release(version) < need.release:
            raise ConfigError(
                f"{what} is in {name}, which needs TensorRT {_text(need.release)} or above, and {version} is "
                f"installed; allowed with it: {allowed}: export with one of these, or update"
            )


def _number(capability: str) -> tuple[int, int]:
    return release(capability)


def _text(numbers: tuple[int, int]) -> str:
    return f"{numbers[0]}.{numbers[1]}"
