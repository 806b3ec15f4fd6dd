"""The GPU at hand, asked through a driver library that we compile ourselves: a double, no GPU is here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DRIVER = """
#include <string.h>
int cuInit(unsigned flags) { return FAILS; }
int cuDeviceGet(int *device, int index) { *device = index; return index; }
int cuDeviceGetName(char *name, int length, int device) { strncpy(name, "Orin", length); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 75 ? 8 : attribute == 76 ? 7 : attribute == 18 ? 1 : -1;
  return 0;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 8ull << 30; return 0; }
"""
ASK = "from semspec.export.engines.device import find_device; print(find_device(), find_device(1))"

needs_compiler = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="needs Linux and a C compiler"
)


def ask(folder: Path, fails: int) -> str:
    (folder / "driver.c").write_text("#include <stddef.h>\n" + DRIVER.replace("FAILS", str(fails)))
    command = ["cc", "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1"), str(folder / "driver.c")]
    subprocess.run(command, check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
    run = subprocess.run(
        [sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, check=True
    )
    return run.stdout.strip()


@needs_compiler
def test_device_is_described(tmp_path: Path) -> None:
    """Name, capability, memory, and that it is the processor's; the second GPU is not there."""
    expected = f"Device(name='Orin', capability='8.7', n_bytes={8 << 30}, shared=True) None"
    assert ask(tmp_path, 0) == expected


@needs_compiler
def test_driver_without_a_gpu_has_no_device(tmp_path: Path) -> None:
    """An engine's runtime must not be touched then."""
    assert ask(tmp_path, 100) == "None None"
