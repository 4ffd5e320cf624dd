"""Symmetric memory of GPUs: one allocation a rank, opened by every other rank through CUDA IPC, so that a peer's row is
an address. Plain unicast access only; each rank allocates its own memory, never out of torch's pool.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from cuda.bindings import driver as cu

from tktune.core.errors import DeviceError, GangError
from tktune.families.cuda.dispatch_globals import packed_self_test
from tktune.families.cuda.driver import Handle, check, failed
from tktune.families.cuda.gemm_globals import Guard
from tktune.families.cuda.launch import Launch
from tktune.families.formulas import round_up

# `symmetric_layout` of csrc/comm/self_test.cuh: what lies at the start of every rank's memory.
MEETING, FLAGS, ACKNOWLEDGED, INBOX, INBOX_BYTES, HEADER_BYTES = 0, 1024, 2048, 4096, 16384, 262144
GRANULE_BYTES = 1 << 21  # IPC exports whole allocations; smaller ones could share theirs with strangers
HANDLE_BYTES = 64
SELF_TEST_THREADS, SELF_TEST_SMEM_BYTES = 256, 2 * INBOX_BYTES + 16
SELF_TEST_ROUNDS = 64  # when ranks first meet
FAREWELL_S = 1.0  # how long a leaving rank waits for peers to close its memory first

Exchange = Callable[[bytes], list[bytes]]  # gives a payload to all ranks, returns those of all ranks in order


class MemfdExchange:
    """All ranks' payloads, through the memfds of a gang (`RankSeat.symmetric_fds`): rank r writes into its own only.

    The n-th call of each rank belongs to the n-th of every other; it waits at most `deadline_s`, looking at `stopped`
    meanwhile. Raises `GangError` that names who is missing. No sockets, and nothing is left behind.
    """

    SLOT_BYTES = 1024
    _HEAD = struct.Struct("<II")  # call number from 1, bytes; written after the payload

    def __init__(
        self,
        fds: Sequence[int],
        rank: int,
        deadline_s: float,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._fds, self._rank, self._deadline_s, self._stopped = tuple(fds), rank, deadline_s, stopped
        self._calls = 0

    def __call__(self, payload: bytes, deadline_s: float | None = None) -> list[bytes]:
        if len(payload) > self.SLOT_BYTES - self._HEAD.size:
            raise ValueError(f"{len(payload)} bytes are more than a slot holds")
        at = self._calls * self.SLOT_BYTES
        self._calls += 1
        mine = self._fds[self._rank]
        os.pwrite(mine, payload, at + self._HEAD.size)
        os.pwrite(mine, self._HEAD.pack(self._calls, len(payload)), at)
        patience = self._deadline_s if deadline_s is None else deadline_s
        end = time.monotonic() + patience
        found: dict[int, bytes] = {}
        while True:
            for rank, fd in enumerate(self._fds):
                if rank not in found:
                    slot = os.pread(fd, self.SLOT_BYTES, at)
                    if len(slot) >= self._HEAD.size and self._HEAD.unpack_from(slot)[0] == self._calls:
                        size = self._HEAD.unpack_from(slot)[1]
                        found[rank] = slot[self._HEAD.size : self._HEAD.size + size]
            if len(found) == len(self._fds):
                return [found[rank] for rank in range(len(self._fds))]
            if self._stopped() or time.monotonic() > end:
                missing = ", ".join(str(rank) for rank in range(len(self._fds)) if rank not in found)
                raise GangError(
                    f"Rank {self._rank} waited {patience:g} s for rank {missing} to share its memory.",
                    "Look for what that rank said.",
                )
            time.sleep(0.0005)


class SymmetricMemory:
    """`nbytes` or more on every rank's current device, zeroed, all of them mapped here. `peer(r)` is rank r's address.

    Making it is collective through `exchange`; a rank that fails makes all of them raise `GangError`. Closing is not:
    a dead peer holds nobody up.
    """

    def __init__(self, nbytes: int, rank: int, world: int, exchange: Exchange) -> None:
        self.rank, self.world = rank, world
        self.bytes = round_up(max(nbytes, GRANULE_BYTES), GRANULE_BYTES)
        self._exchange = exchange
        self._own = 0
        self._peers: dict[int, int] = {}
        failure = ""
        handle = bytes(HANDLE_BYTES)
        try:
            self._own = int(check(cu.cuMemAlloc(self.bytes)))
            check(cu.cuMemsetD8(self._own, 0, self.bytes))
            check(cu.cuCtxSynchronize())
            handle = _exported(self._own)
        except DeviceError as error:
            failure = error.sentence
        handles = self._agree(handle, failure)
        try:
            for peer in range(world):
                if peer != rank:
                    self._peers[peer] = _opened(handles[peer])
        except DeviceError as error:
            failure = error.sentence
        self._agree(b"", failure)

    def _agree(self, payload: bytes, failure: str) -> list[bytes]:
        """Everybody's payloads, or `GangError` on every rank when one has failed."""
        said = self._exchange(bytes([bool(failure)]) + (failure.encode()[:500] if failure else payload))
        for rank, one in enumerate(said):
            if one[0]:
                self._release()
                raise GangError(
                    f"Rank {rank} has no symmetric memory of {self.bytes} bytes: {one[1:].decode(errors='replace')}",
                    "Run `tktune doctor`; ranks need peer access and CUDA IPC.",
                )
        return [one[1:] for one in said]

    @property
    def local(self) -> int:
        return self._own

    def peer(self, rank: int) -> int:
        """The address, in this process, of `rank`'s memory."""
        return self._own if rank == self.rank else self._peers[rank]

    def addresses(self, offset: int = 0) -> tuple[int, ...]:
        return tuple(self.peer(rank) + offset for rank in range(self.world))

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int = 0) -> torch.Tensor:
        """A view of this rank's own memory from byte `offset`; no copy. It must not outlive this."""
        size = math.prod(shape) * dtype.itemsize
        if offset + size > self.bytes:
            raise ValueError(f"{offset} + {size} bytes are more than the {self.bytes} there are")
        return torch.as_tensor(_Span(self._own + offset, size), device="cuda").view(dtype).view(shape)

    def close(self) -> None:
        """Unmap the peers, give them a moment to unmap us, free. After a fault every call fails and nothing is left."""
        if not self._own:
            return
        for address in self._peers.values():
            cu.cuIpcCloseMemHandle(address)
        self._peers.clear()
        with contextlib.suppress(GangError):
            if isinstance(self._exchange, MemfdExchange):
                self._exchange(b"", FAREWELL_S)
        self._release()

    def _release(self) -> None:
        for address in self._peers.values():
            cu.cuIpcCloseMemHandle(address)
        self._peers.clear()
        if self._own:
            cu.cuMemFree(self._own)
            self._own = 0


def try_peers(
    function: Handle, memory: SymmetricMemory, guard: Guard, first: int, rounds: int, stream: int
) -> str:
    """Run the self-test entry of a dispatch artifact on all pairs at once; every rank calls it with the same numbers.

    Returns what is wrong in a sentence, or an empty text. `first` grows by `rounds` from call to call.
    """
    errors = torch.zeros(2, dtype=torch.int32, device="cuda")
    arguments = packed_self_test(memory.addresses(), errors.data_ptr(), first, guard, rounds)
    launch = Launch(
        function, memory.world, SELF_TEST_THREADS, SELF_TEST_SMEM_BYTES, arguments, (errors, memory)
    )
    launch(stream)
    returned, arrived = errors.tolist()
    if not returned and not arrived:
        return ""
    return (
        f"Rank {memory.rank} cannot trust its peers' memory: of {rounds} patterns a peer, {returned} words came back "
        f"wrong and {arrived} were wrong when their flag was seen."
    )


def trust_peers(
    function: Handle,
    memory: SymmetricMemory,
    guard: Guard,
    launching: contextlib.AbstractContextManager[None],
    stream: int,
) -> None:
    """The first self-test of all pairs, within `launching`. Raises `GangError` when this rank cannot trust its peers' memory."""
    with launching:
        wrong = try_peers(function, memory, guard, 0, SELF_TEST_ROUNDS, stream)
    if wrong:
        raise GangError(wrong, "Check the topology and the IOMMU settings; run `tktune doctor`.")


class _Span:
    """Device bytes as torch takes them."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _exported(address: int) -> bytes:
    handle: Any = check(cu.cuIpcGetMemHandle(address))
    return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)


def _opened(handle: bytes) -> int:
    """Map a peer's allocation. Raises `DeviceError`, also when the process that exported it is this one."""
    opened = cu.CUipcMemHandle()
    if len(handle) != HANDLE_BYTES:
        raise failed(cu.CUresult.CUDA_ERROR_INVALID_VALUE)
    ctypes.memmove(opened.getPtr(), handle, HANDLE_BYTES)
    flags = cu.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    return int(check(cu.cuIpcOpenMemHandle(opened, int(flags))))
