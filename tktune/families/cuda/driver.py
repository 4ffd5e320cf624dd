"""The CUDA driver as this package speaks to it: calls of cuda-bindings whose errors become ours, the device's primary
context, and host memory that kernels may reach. Nothing here knows a kernel.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from cuda.bindings import driver as cu

from tktune.core.errors import DeviceAbsent, DeviceError
from tktune.core.sharing import VARIABLE

SUCCESS = cu.CUresult.CUDA_SUCCESS
INVALID_CONTEXT = cu.CUresult.CUDA_ERROR_INVALID_CONTEXT

Handle = Any  # an opaque object of cuda-bindings: a module, a function, a stream, a graph


def check(result: tuple[Any, ...]) -> Any:
    """The values of a driver call: None, one, or a tuple. Raises `DeviceError` when the call failed."""
    if result[0] != SUCCESS:
        raise failed(result[0])
    if len(result) == 1:
        return None
    return result[1] if len(result) == 2 else result[1:]


def failed(code: Any) -> DeviceError:
    """The error that a driver's result code stands for."""
    name = error_name(code)
    return DeviceError(f"The CUDA driver answers {name}.", "Run `tktune doctor`.", name)


def error_name(code: Any) -> str:
    """CUDA_ERROR_LAUNCH_FAILED → launch_failed."""
    name = getattr(code, "name", str(code))
    return str(name).removeprefix("CUDA_ERROR_").lower()


def attach(index: int) -> None:
    """Make device `index` this thread's, with its primary context (that of torch). Raises `DeviceAbsent`."""
    found = torch.cuda.device_count()
    if not 0 <= index < found:
        raise DeviceAbsent(
            f"There is no GPU number {index}; {found} answer here.",
            f"Use a device index below that, or fewer ranks; {VARIABLE}=1 lets ranks share a GPU to check results.",
        )
    torch.cuda.set_device(index)
    torch.empty(1, device=f"cuda:{index}")  # the primary context exists from here on
    make_current(index)


def load_lazily() -> None:
    """Let this process load library kernels when they are first used, whatever its environment says; call it first.

    For ranks whose launches wait for no one: nothing spins that a late load could block (rule D6), and a context is
    ready seconds sooner.
    """
    os.environ["CUDA_MODULE_LOADING"] = "LAZY"


def make_current(index: int) -> None:
    """Make the primary context of device `index` current in this thread."""
    device = check(cu.cuDeviceGet(index))
    context = check(cu.cuDevicePrimaryCtxRetain(device))
    try:
        check(cu.cuCtxSetCurrent(context))
    finally:
        check(cu.cuDevicePrimaryCtxRelease(device))  # torch holds it for the life of the process


def synchronize(stream: int) -> None:
    """Wait until `stream` is done. Raises `DeviceError` when a launch in it failed."""
    check(cu.cuStreamSynchronize(stream))


def memory_bytes(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).total_memory)


class MappedHost:
    """Host memory at `address`, registered so that kernels of this process may read and write it.

    `device(address)` is where a kernel finds a byte of it. The memory must outlive this.
    """

    def __init__(self, address: int, nbytes: int) -> None:
        self._host, self._bytes = address, nbytes
        flags = cu.CU_MEMHOSTREGISTER_DEVICEMAP | cu.CU_MEMHOSTREGISTER_PORTABLE
        code = cu.cuMemHostRegister(address, nbytes, flags)[0]
        if code == cu.CUresult.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED:
            # A mapping that stood here before was unmapped without a word to the driver.
            check(cu.cuMemHostUnregister(address))
            code = cu.cuMemHostRegister(address, nbytes, flags)[0]
        check((code,))
        self._device = int(check(cu.cuMemHostGetDevicePointer(address, 0)))

    def device(self, address: int) -> int:
        if not self._host <= address < self._host + self._bytes:
            raise ValueError(f"{address:#x} is outside the mapped memory")
        return self._device + (address - self._host)

    def close(self) -> None:
        """Give the mapping up. After a fault the context is gone, and the mapping with it."""
        if self._bytes:
            cu.cuMemHostUnregister(self._host)
            self._bytes = 0


def current_stream(index: int) -> int:
    """The handle of torch's current stream on device `index`."""
    return torch._C._cuda_getCurrentRawStream(index)
