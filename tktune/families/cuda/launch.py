"""One launch with everything prebuilt, and its capture into a CUDA graph."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from cuda.bindings import driver as cu

from tktune.families.cuda.driver import INVALID_CONTEXT, SUCCESS, Handle, check, failed, make_current
from tktune.families.cuda.tensor_map import aligned

Work = Callable[[int], None]  # enqueues on the stream whose handle it gets
_KEPT_STREAMS = 16


class Launch:
    """A kernel with its grid and its one by-value argument; calling it enqueues it on a stream.

    `arguments` are copied into storage of this launch, aligned to 64 bytes. `kept` holds whatever the argument
    points into.
    """

    __slots__ = ("_fires", "_function", "_kept", "_parameters", "_pointers", "_shape", "_storage", "grid")

    def __init__(
        self,
        function: Handle,
        grid: int,
        threads: int,
        smem_bytes: int,
        arguments: bytes,
        kept: tuple[Any, ...] = (),
    ) -> None:
        self.grid = grid
        self._function, self._shape = function, (grid, threads, smem_bytes)
        self._storage, address = aligned(len(arguments))
        ctypes.memmove(address, arguments, len(arguments))
        self._parameters = (ctypes.c_void_p * 1)(address)
        self._pointers = ctypes.addressof(self._parameters)
        self._kept = kept
        self._fires: dict[int, Callable[[], tuple[Any, ...]]] = {}

    def without_buffers(self, *kept: Any) -> Launch:
        """This launch, keeping only `kept`: for callers who answer for the life of what the argument points into."""
        self._kept = kept
        return self

    def __call__(self, stream: int) -> None:
        """Enqueue on `stream`. Raises `DeviceError` when the driver refuses."""
        code = (self._fires.get(stream) or self._fire_on(stream))()[0]
        if code is not SUCCESS and code != SUCCESS:
            self._again(code, stream)

    def _fire_on(self, stream: int) -> Callable[[], tuple[Any, ...]]:
        """The driver's call with everything converted once: that is a sixth of what a launch costs the host."""
        config = cu.CUlaunchConfig()
        config.gridDimX, config.blockDimX, config.sharedMemBytes = self._shape
        config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
        config.hStream = cu.CUstream(stream)
        fire = functools.partial(cu.cuLaunchKernelEx, config, self._function, self._pointers, 0)
        if len(self._fires) >= _KEPT_STREAMS:
            self._fires.clear()
        self._fires[stream] = fire
        return fire

    def _again(self, code: Any, stream: int) -> None:
        """A thread that has not used the device yet has no context; give it one, once."""
        if code != INVALID_CONTEXT:
            raise failed(code)
        make_current(torch.cuda.current_device())
        check(self._fire_on(stream)())


class Graph:
    """Work captured once and replayed; `kept` and the work itself live as long as it does."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._executable: Handle | None = None
        stream = check(cu.cuStreamCreate(int(cu.CUstream_flags.CU_STREAM_NON_BLOCKING)))
        graph = None
        try:
            mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
            check(cu.cuStreamBeginCapture(stream, mode))
            try:
                work(int(stream))
            finally:
                graph = check(cu.cuStreamEndCapture(stream))
            self._executable = check(cu.cuGraphInstantiate(graph, 0))
            check(cu.cuGraphUpload(self._executable, stream))
            check(cu.cuStreamSynchronize(stream))
        finally:
            if graph is not None:
                cu.cuGraphDestroy(graph)
            cu.cuStreamDestroy(stream)

    def __call__(self, stream: int) -> None:
        """Replay on `stream`. Raises `DeviceError` when the driver refuses."""
        code = cu.cuGraphLaunch(self._executable, stream)[0]
        if code != SUCCESS:
            raise failed(code)

    def close(self) -> None:
        if self._executable is not None:
            cu.cuGraphExecDestroy(self._executable)
            self._executable = None
