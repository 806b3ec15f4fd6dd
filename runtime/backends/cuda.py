"""Memory of one NVIDIA GPU and the work on it, through its driver: buffers, copies, one stream, graphs. No engine.

The driver's interface and not the runtime's: it is the same on every CUDA that a device may have, and without a driver
it says so instead of crashing. All work goes through one stream, in the order it was asked for.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from semspec.runtime.errors import BackendError
from semspec.runtime.records import Array

try:
    from cuda.bindings import driver
except ImportError as error:
    raise BackendError(
        f"buffers on an NVIDIA GPU need cuda-bindings, which cannot be imported ({error}); install it with: "
        "pip install 'semspec[rtx]' (or 'semspec[tensorrt]'; on Jetson 'semspec[jetson]')"
    ) from None

__all__ = ["DeviceTensor", "Gpu", "Graph", "item_size"]

NON_BLOCKING = 1  # a stream that does not wait for the default one
MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
THREAD_LOCAL = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
BFLOAT16 = "bfloat16"  # numpy has none: read as fp32


class Gpu:
    """One GPU. Not for use by several threads at once.

    Raises BackendError where there is no driver, no such GPU, or no memory left.
    """

    def __init__(self, index: int = 0) -> None:
        try:
            _call(driver.cuInit, 0)
        except RuntimeError as error:  # cuda-bindings found no library of the driver
            raise BackendError(
                f"there is no NVIDIA driver here ({_first_line(error)}); use backend 'cpu', or install the driver"
            ) from None
        device = _call(driver.cuDeviceGet, index)
        self.name: str = _call(driver.cuDeviceGetName, 256, device).split(b"\0")[0].decode("utf-8", "replace")
        self.capability = ".".join(
            str(_call(driver.cuDeviceGetAttribute, driver.CUdevice_attribute(code), device))
            for code in (MAJOR, MINOR)
        )
        context = _call(driver.cuDevicePrimaryCtxRetain, device)
        _call(driver.cuCtxSetCurrent, context)
        self._context = context
        stream = _call(driver.cuStreamCreate, NON_BLOCKING)
        self.stream = int(stream)
        self._end = weakref.finalize(self, _release, stream, device)

    def use(self) -> None:
        """Make this GPU the calling thread's."""
        _call(driver.cuCtxSetCurrent, self._context)

    def empty(self, shape: tuple[int, ...], dtype: str) -> DeviceTensor:
        """Memory with whatever is in it."""
        n_bytes = max(math.prod(shape) * item_size(dtype), 1)
        address = int(_call(driver.cuMemAlloc, n_bytes))
        return DeviceTensor(self, _Block(address, self._context), address, shape, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: str) -> DeviceTensor:
        """Memory full of zeros."""
        tensor = self.empty(shape, dtype)
        _call(driver.cuMemsetD8Async, tensor.address, 0, tensor.n_bytes, self.stream)
        return tensor

    def write(self, values: Array | DeviceTensor, to: int) -> None:
        """Copy to an address: a contiguous array, which may change when this returns, or other memory of this GPU."""
        if isinstance(values, DeviceTensor):
            _call(driver.cuMemcpyDtoDAsync, to, values.address, values.n_bytes, self.stream)
        elif values.nbytes:
            _call(driver.cuMemcpyHtoDAsync, to, values.ctypes.data, values.nbytes, self.stream)

    def read(self, address: int, out: Array) -> None:
        """Copy from an address, after all work asked for before; the values are there when this returns."""
        if out.nbytes:
            _call(driver.cuMemcpyDtoHAsync, out.ctypes.data, address, out.nbytes, self.stream)
        self.wait()

    def write_rows(self, rows: DeviceTensor, buffer: DeviceTensor, at: int) -> None:
        """Copy rows (.., S, D) into buffer (.., C, D) behind its first `at` rows, in one strided copy on the device."""
        *outer, n_rows, size = rows.shape
        row_bytes = size * item_size(rows.dtype)
        capacity = buffer.shape[-2]
        copy = driver.CUDA_MEMCPY2D()
        copy.srcMemoryType = copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        copy.srcDevice, copy.srcPitch = rows.address, n_rows * row_bytes
        copy.dstDevice, copy.dstPitch = buffer.address + at * row_bytes, capacity * row_bytes
        copy.WidthInBytes, copy.Height = n_rows * row_bytes, math.prod(outer)
        _call(driver.cuMemcpy2DAsync, copy, self.stream)

    def record(self, ask: Callable[[], None]) -> Graph:
        """What `ask` puts on the stream, recorded instead of done; launched, it works on the addresses of now.

        Other threads may use the GPU meanwhile; this one may wait for nothing, allocate and free nothing. Raises what
        `ask` raises, and BackendError for what cannot be recorded and where there was nothing; the stream goes on
        working after either.
        """
        with _nothing_collected():
            _call(driver.cuStreamBeginCapture, self.stream, THREAD_LOCAL)
            try:
                ask()
            except BaseException:
                _, graph = driver.cuStreamEndCapture(self.stream)
                if graph is not None:
                    driver.cuGraphDestroy(graph)
                raise
            graph = _call(driver.cuStreamEndCapture, self.stream)
        try:
            # replayed, an empty one would leave old results where new ones belong
            if not _call(driver.cuGraphGetNodes, graph):
                raise BackendError("the NVIDIA driver recorded nothing")
            return Graph(self, _call(driver.cuGraphInstantiate, graph, 0), self._context)
        finally:
            driver.cuGraphDestroy(graph)

    def wait(self) -> None:
        """Until all that was asked for is done."""
        _call(driver.cuStreamSynchronize, self.stream)


class DeviceTensor:
    """Memory of a Gpu, or a part of such memory."""

    def __init__(self, gpu: Gpu, block: _Block, address: int, shape: tuple[int, ...], dtype: str) -> None:
        self._gpu, self._block = gpu, block
        self.address, self.shape, self.dtype = address, shape, dtype

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * item_size(self.dtype)

    def part(self, index: int | slice) -> DeviceTensor:
        """The memory of self[index], a slice without a step. Raises IndexError where there is no such part."""
        found = range(self.shape[0])[index]
        first, outer = (found, ()) if isinstance(found, int) else (found.start, (len(found),))
        shape = self.shape[1:]
        address = self.address + first * math.prod(shape) * item_size(self.dtype)
        return DeviceTensor(self._gpu, self._block, address, (*outer, *shape), self.dtype)

    def shaped(self, shape: tuple[int, ...]) -> DeviceTensor:
        """The same memory, of which `shape` takes the beginning."""
        return DeviceTensor(self._gpu, self._block, self.address, shape, self.dtype)

    def numpy(self) -> Array:
        """A copy of the values, bf16 as fp32, after all work asked for before."""
        narrow = self.dtype == BFLOAT16
        values = np.empty(self.shape, np.uint16 if narrow else self.dtype)
        self._gpu.read(self.address, values)
        return (values.astype(np.uint32) << 16).view(np.float32) if narrow else values


class Graph:
    """Recorded work of a Gpu, to be launched as a whole any number of times. Destroyed when nobody refers to it."""

    def __init__(self, gpu: Gpu, executable: Any, context: Any) -> None:
        self._gpu, self._executable = gpu, executable
        weakref.finalize(self, _destroy, executable, context)

    def launch(self) -> None:
        """Put it on the stream."""
        _call(driver.cuGraphLaunch, self._executable, self._gpu.stream)


class _Block:
    """Memory of the driver, given back when nobody refers to it."""

    def __init__(self, address: int, context: Any) -> None:
        weakref.finalize(self, _free, address, context)


def item_size(dtype: str) -> int:
    """Bytes of one value."""
    return 2 if dtype == BFLOAT16 else np.dtype(dtype).itemsize


def _call(function: Any, *arguments: Any) -> Any:
    """What the driver answers, the last of it. Raises BackendError with its own name of what went wrong."""
    status, *found = function(*arguments)
    if int(status) != 0:
        raise BackendError(
            f"the NVIDIA driver failed in {function.__name__}: {status.name}{_hint(status.name)}"
        )
    return found[-1] if found else None


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Garbage may hold memory of the GPU, and giving that back breaks a recording."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _hint(status: str) -> str:
    if status.endswith("OUT_OF_MEMORY"):
        return "; free memory of the GPU, or export with fewer bits or a smaller --max-context"
    if status.endswith(("NO_DEVICE", "INVALID_DEVICE")):
        return "; there is no such GPU: use backend 'cpu'"
    return ""


def _free(address: int, context: Any) -> None:
    driver.cuCtxSetCurrent(context)  # it may be any thread that drops the last reference
    driver.cuMemFree(address)  # at a process's end the context may be gone before, and the memory with it


def _destroy(executable: Any, context: Any) -> None:
    driver.cuCtxSetCurrent(context)
    driver.cuGraphExecDestroy(executable)


def _release(stream: Any, device: Any) -> None:
    driver.cuStreamDestroy(stream)
    driver.cuDevicePrimaryCtxRelease(device)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
