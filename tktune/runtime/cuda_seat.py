"""One rank's place among ranks on GPUs: the control page, the files they share, symmetric memory, and a clean way out."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

import torch

from tktune.core.errors import LaunchFailed, ProblemError, TktuneError
from tktune.families.control_page import ControlPage
from tktune.families.cuda.control import Control
from tktune.families.cuda.driver import Handle, attach, current_stream
from tktune.families.cuda.gemm_globals import Guard
from tktune.families.cuda.symmetric import MemfdExchange, SymmetricMemory, trust_peers
from tktune.runtime.agree import unanimous
from tktune.runtime.cuda_exchange import each_on_its_own_gpu, shared_files

EXCHANGE_S = 120.0  # ranks load and allocate at their own pace
LAST_CALLS_S = 5.0  # what a closing operator grants its launches before it tells them to stop


class CudaSeat:
    """The current GPU of this rank of `group` (None: alone), taken until `release`. Making it is collective.

    Steps that all must get through go through `guarded`: when one rank fails, all raise. Raises `TktuneError`s.
    """

    def __init__(self, group: Any, world: int) -> None:
        self.group, self.world, self.rank = group, world, 0
        if group is not None:
            import torch.distributed as dist

            self.rank = dist.get_rank(group)
        self.index = torch.cuda.current_device()
        self.device = torch.device("cuda", self.index)
        self.memory: SymmetricMemory | None = None
        self._control: Control | None = None
        self._fds: tuple[int, ...] = ()
        each_on_its_own_gpu(group, self.index)
        self._page = ControlPage.create(world)
        try:
            self._fds = shared_files(group)
        except TktuneError:
            self._page.close()
            raise

    def guarded(self, step: Callable[[], None]) -> None:
        """A step of this rank alone that all must get through."""
        failure: TktuneError | None = None
        try:
            step()
        except TktuneError as error:
            failure = error
        if self.group is not None:
            unanimous(self.group, "artifacts", "", failure)
        elif failure is not None:
            raise failure

    def attach(self, sm_count: int, spin_limit_s: float) -> Guard:
        """Make the GPU current and its waits bounded. Raises `ProblemError` when it has fewer than `sm_count` SMs."""
        found = int(torch.cuda.get_device_properties(self.index).multi_processor_count)
        if found < sm_count:
            raise ProblemError(
                f"The config is for {sm_count} SMs, and GPU {self.index} has {found}.",
                "Use GPUs of one kind.",
            )
        attach(self.index)
        self._control = Control(self._page, self.rank, spin_limit_s)
        return self._control.guard

    def share(self, nbytes: int) -> SymmetricMemory:
        """Symmetric memory of `nbytes`. Collective, all or none."""
        exchange = MemfdExchange(self._fds, self.rank, EXCHANGE_S)
        self.memory = SymmetricMemory(nbytes, self.rank, self.world, exchange)
        return self.memory

    def trust_peers(self, self_test: Handle, guard: Guard) -> None:
        """The self-test of all pairs. Raises `GangError` when this rank cannot trust its peers' memory."""
        assert self.memory is not None
        trust_peers(self_test, self.memory, guard, self.launching(), current_stream(self.index))

    def launching(self) -> contextlib.AbstractContextManager[None]:
        """Around launches and the wait for them: raises `LaunchFailed` for a fault."""
        assert self._control is not None
        return self._control.launching()

    def let_end(self) -> None:
        """Grant launches under way a moment, then tell them to stop, and wait for them."""
        with contextlib.suppress(LaunchFailed), self.launching():
            last = torch.cuda.Event()  # type: ignore[no-untyped-call]
            last.record()
            until = time.monotonic() + LAST_CALLS_S
            while not last.query():  # type: ignore[no-untyped-call]
                if time.monotonic() > until:
                    self._page.abort()
                    break
                time.sleep(0.0005)
            torch.cuda.synchronize(self.index)

    def release(self) -> None:
        """Not collective: what peers do not close in time is freed all the same."""
        if self.memory is not None:
            self.memory.close()
        if self._control is not None:
            self._control.close()
        self._page.close()
        for fd in self._fds:
            os.close(fd)
        self._fds = ()
