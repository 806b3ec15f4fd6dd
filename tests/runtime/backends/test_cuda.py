"""Buffers and copies through real cuda-bindings, over a DOUBLE of the driver that we compile: no GPU is here."""

from __future__ import annotations

from pathlib import Path

import pytest
from doubled import make_driver, needs_doubles, run

pytestmark = needs_doubles
HEAD = "import numpy as np\nfrom semspec.runtime.backends.cuda import Gpu\n"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_driver(tmp_path_factory.mktemp("driver"))


def said(driver: Path, script: str) -> str:
    """What a program printed; the error's last line where it broke."""
    done = run(driver, "-c", HEAD + script)
    return (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()[-1]


def test_gpu_is_described_and_zeros_are_zeros(driver: Path) -> None:
    """Memory that nobody cleared holds what was there before: the double fills it with something else."""
    script = "gpu = Gpu()\nzeros, any = gpu.zeros((3, 5), 'float16'), gpu.empty((3, 5), 'float16')\n"
    assert (
        said(driver, f"{script}print(gpu.capability, zeros.numpy().any(), any.numpy().any())")
        == "8.6 False True"
    )


def test_rows_are_stored_behind_the_first(driver: Path) -> None:
    """One copy for all layers and heads, each at its own place, nothing else touched."""
    script = """
gpu = Gpu()
cache, rows = gpu.zeros((4, 1, 2, 7, 3), "float32"), gpu.empty((4, 1, 2, 2, 3), "float32")
values = np.arange(48, dtype=np.float32).reshape(rows.shape) + 1
gpu.write(values, rows.address)
gpu.write_rows(rows, cache, 4)
found = cache.numpy()
part = cache.part(2).numpy()
print((found[..., 4:6, :] == values).all(), found.sum() == values.sum(), (part == found[2]).all())
"""
    assert said(driver, script) == "True True True"


def test_bf16_is_read_as_fp32(driver: Path) -> None:
    """numpy has no such type, and the runtime brings no package that has."""
    script = """
gpu = Gpu()
tensor = gpu.empty((3,), "bfloat16")
gpu.write(np.array([0x3F80, 0x4000, 0xC040], np.uint16), tensor.address)
print(tensor.numpy().tolist(), tensor.numpy().dtype)
"""
    assert said(driver, script) == "[1.0, 2.0, -3.0] float32"


def test_memory_of_the_gpu_is_copied_on_it(driver: Path) -> None:
    """Part by part, at what address it lies; nothing beside it is touched, and no part lies outside of it."""
    script = """
gpu = Gpu()
source, to = gpu.empty((1, 4, 3), "float32"), gpu.zeros((2, 3), "float32")
gpu.write(np.arange(12, dtype=np.float32), source.address)
rows = source.part(0)
gpu.write(rows.part(slice(1, 2)), to.part(1).address)
found = [to.numpy().tolist(), rows.part(slice(1, 3)).numpy().tolist() == [[3, 4, 5], [6, 7, 8]]]
found += [rows.part(slice(3, 9)).shape, rows.part(-1).numpy().tolist()]
try:
    rows.part(4)
except IndexError:
    print(found)
"""
    assert said(driver, script) == "[[[0.0, 0.0, 0.0], [3.0, 4.0, 5.0]], True, (1, 3), [9.0, 10.0, 11.0]]"


def test_memory_is_given_back(driver: Path) -> None:
    """A part keeps the whole alive; the last of them frees it."""
    script = """
import ctypes
live = ctypes.CDLL("libcuda.so.1").double_live
gpu = Gpu()
whole = gpu.empty((4, 2), "float32")
part = whole.part(1)
counts = [live()]
del whole
counts.append(live())
del part
print([*counts, live()])
"""
    assert said(driver, script) == "[1, 1, 0]"


RECORD = """
import ctypes
double = ctypes.CDLL("libcuda.so.1")
gpu = Gpu()
cache, rows = gpu.zeros((1, 4, 1), "float32"), gpu.empty((1, 2, 1), "float32")
def put(*values):
    gpu.write(np.array(values, np.float32), rows.address)
def store():
    gpu.write_rows(rows, cache, 1)
def held():
    return cache.numpy().ravel().tolist()
"""


def test_recorded_work_is_done_when_launched(driver: Path) -> None:
    """Not before; and with what lies at its addresses then."""
    script = """
put(1, 2)
graph = gpu.record(store)
found = [held()]
for values in ((3, 4), (5, 6)):
    put(*values)
    graph.launch()
    found.append(held())
print(found)
"""
    found = [[0.0, 0.0, 0.0, 0.0], [0.0, 3.0, 4.0, 0.0], [0.0, 5.0, 6.0, 0.0]]
    assert said(driver, RECORD + script) == str(found)


def test_recorded_work_is_given_back(driver: Path) -> None:
    """A graph keeps its launchable form alone, until nobody refers to it; a failed one leaves nothing."""
    script = """
graph = gpu.record(store)
counts = [double.double_graphs()]
del graph
counts.append(double.double_graphs())
try:
    gpu.record(lambda: [store(), 1 / 0])
except ZeroDivisionError:
    counts.append(double.double_graphs())
put(7, 8)
store()
print(counts, held())
"""
    assert said(driver, RECORD + script) == "[1, 0, 0] [0.0, 7.0, 8.0, 0.0]"


def test_garbage_does_not_break_a_recording(driver: Path) -> None:
    """Memory of the GPU in a ring of objects is given back whenever Python collects, which may be just then."""
    script = """
import gc
tensors = [gpu.empty((2,), "int64")]
before = double.double_live()
gc.set_threshold(1)
def ask():
    store()
    ring = [tensors.pop()]
    ring.append(ring)
    del ring
    return [[] for _ in range(1000)]
graph = gpu.record(ask)
gc.collect()
print(double.double_live() - before, double.double_graphs(), gc.isenabled())
"""
    assert said(driver, RECORD + script) == "-1 1 True"


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        ("gpu.wait", "failed in cuStreamSynchronize: CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"),
        ("lambda: gpu.empty((2,), 'int64')", "failed in cuMemAlloc: CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"),
        (
            "lambda: double.cuCtxSynchronize()",
            "failed in cuStreamEndCapture: CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
        ),
        ("lambda: None", "the NVIDIA driver recorded nothing"),
    ],
)
def test_what_cannot_be_recorded_is_told_and_the_stream_works_on(
    driver: Path, ask: str, message: str
) -> None:
    """What an engine does in a pass is not ours to know: it may wait, allocate, or be on another device."""
    script = f"""
from semspec.runtime.errors import BackendError
try:
    gpu.record({ask})
except BackendError as error:
    put(1, 2)
    store()
    print(error, held(), double.double_graphs())
"""
    assert said(driver, RECORD + script).endswith(f"{message} [0.0, 1.0, 2.0, 0.0] 0")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            "Gpu(1)",
            "the NVIDIA driver failed in cuDeviceGet: CUDA_ERROR_INVALID_DEVICE; there is no such GPU",
        ),
        (
            "Gpu().empty((1 << 33,), 'float32')",
            "CUDA_ERROR_OUT_OF_MEMORY; free memory of the GPU, or export with",
        ),
    ],
)
def test_what_the_driver_refuses_is_one_line(driver: Path, script: str, message: str) -> None:
    """The driver's own name of it, and what to do."""
    assert message in said(driver, script)


def test_driver_without_a_gpu_is_told(tmp_path: Path) -> None:
    """As in a container that was started without one."""
    driver = make_driver(tmp_path, fails=100)
    assert "failed in cuInit: CUDA_ERROR_NO_DEVICE; there is no such GPU: use backend 'cpu'" in said(
        driver, "Gpu()"
    )


def test_no_driver_is_told(tmp_path: Path) -> None:
    """The usual machine without a GPU: one line, and no crash of an engine's runtime."""
    assert "there is no NVIDIA driver here (" in said(tmp_path, "Gpu()")
