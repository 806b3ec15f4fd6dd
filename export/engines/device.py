"""The GPU at hand, asked through NVIDIA's driver: its name, its compute capability, its memory. No package is needed.

An engine's runtime must not be touched before a driver was found: without one it is known to crash the process.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

__all__ = ["Device", "find_device"]

LIBRARIES = ("libcuda.so.1", "nvcuda.dll")
INTEGRATED, MAJOR, MINOR = 18, 75, 76  # CU_DEVICE_ATTRIBUTE_*


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """capability: such as 8.6. n_bytes: all of its memory. shared: it is the processor's too, as on a Jetson."""

    name: str
    capability: str
    n_bytes: int
    shared: bool


def find_device(index: int = 0) -> Device | None:
    """GPU number `index`; None where there is no driver or no such GPU."""
    driver = _driver()
    if driver is None or driver.cuInit(0) != 0:
        return None
    device, major, minor, shared = ctypes.c_int(), ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    n_bytes, name = ctypes.c_size_t(), ctypes.create_string_buffer(256)
    calls = (
        (driver.cuDeviceGet, ctypes.byref(device), index),
        (driver.cuDeviceGetName, name, len(name), device),
        (driver.cuDeviceGetAttribute, ctypes.byref(major), MAJOR, device),
        (driver.cuDeviceGetAttribute, ctypes.byref(minor), MINOR, device),
        (driver.cuDeviceGetAttribute, ctypes.byref(shared), INTEGRATED, device),
        (driver.cuDeviceTotalMem_v2, ctypes.byref(n_bytes), device),
    )
    for function, *arguments in calls:
        if function(*arguments) != 0:
            return None
    return Device(
        name=name.value.decode("utf-8", "replace"),
        capability=f"{major.value}.{minor.value}",
        n_bytes=n_bytes.value,
        shared=bool(shared.value),
    )


def _driver() -> ctypes.CDLL | None:
    for name in LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None
