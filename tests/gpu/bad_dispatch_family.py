"""A test-only dispatch over symmetric memory in which one rank misbehaves as its config says: BEHAVES is a place in
`BEHAVIOURS`, RANK whose it is. The kernel's part is `bad_dispatch.cu`, the host's (a rank that exits) is here.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

from tktune.core.build_spec import BuildSpec
from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.paths import csrc_root
from tktune.core.problem import Problem
from tktune.families.base import GateResult, RankSeat
from tktune.families.control_page import ControlPage

# The first six are `behaviour` of the kernel; what follows is the host's, beside a kernel that is good.
BEHAVIOURS = (
    "good",
    "silent",
    "stale",
    "keeps_reading",
    "traps",
    "wild",
    "exits_before",
    "exits_meanwhile",
    "raises",
)
_KERNEL_KNOWS = 6
WORDS_BYTES = 4096  # of the header in each rank's memory; rows follow
EXIT_CODE = 7


def misbehaving(what: str, rank: int) -> Config:
    return Config(BEHAVES=BEHAVIOURS.index(what), RANK=rank)


class BadBench:
    def __init__(self, seat: RankSeat) -> None:
        import torch

        from tktune.families.cuda.control import Control
        from tktune.families.cuda.driver import attach
        from tktune.families.cuda.symmetric import MemfdExchange, SymmetricMemory

        attach(seat.device_index)
        self.seat = seat
        self.page = ControlPage(seat.control_fd)
        self.control = Control(self.page, seat.rank, seat.spin_limit_s)
        self.count = seat.problem.tokens * seat.problem.hidden
        exchange = MemfdExchange(seat.symmetric_fds, seat.rank, 30.0, lambda: self.page.aborted)
        self.memory = SymmetricMemory(WORDS_BYTES + 4 * self.count, seat.rank, seat.world, exchange)
        self.rows = self.memory.tensor(torch.int32, (self.count,), WORDS_BYTES)
        self.gathered = torch.empty_like(self.rows)

    def load(self, artifact: Path, sha256: str, build_part: Config) -> dict[str, Any]:
        from tktune.families.cuda.module import Module, verified

        self.module = Module(verified(artifact, sha256), "bad_dispatch", 1)
        return {"threads": self.module.facts.threads}

    def gate(self, config: Config, routing: str, seed: int, sequence: int) -> GateResult:
        from tktune.families.cuda.driver import current_stream, synchronize

        behaves = BEHAVIOURS[config.number("BEHAVES")] if config["RANK"] == self.seat.rank else "good"
        if behaves == "exits_before":
            os._exit(EXIT_CODE)
        if behaves == "raises":
            raise ValueError("this rank has no rows today")
        with self.control.launching():
            self.rows.copy_(self._rows(self.seat.rank, seed))
            self.gathered.fill_(-1)
            stream = current_stream(self.seat.device_index)
            self._launch(behaves, sequence)(stream)
            if behaves == "exits_meanwhile":
                os._exit(EXIT_CODE)
            synchronize(stream)
        wrong = int((self.gathered != self._rows(1 - self.seat.rank, seed)).sum())
        return GateResult(not wrong, float(wrong), 0.0, f"{wrong} words differ." if wrong else "")

    def _rows(self, rank: int, seed: int) -> Any:
        import torch

        device = self.rows.device
        return torch.arange(self.count, dtype=torch.int32, device=device) * 2 + rank + 1000 * seed

    def _launch(self, behaves: str, sequence: int) -> Any:
        from tktune.families.cuda.dispatch_globals import packed_guard
        from tktune.families.cuda.launch import Launch

        peer = self.memory.peer(1 - self.seat.rank)
        number = BEHAVIOURS.index(behaves)
        packed = struct.pack(
            "<QQQQQ",
            *(peer + WORDS_BYTES, self.gathered.data_ptr()),
            *(self.memory.local, peer, sequence),
        )
        packed += packed_guard(self.control.guard)
        packed += struct.pack("<ii", self.count, number if number < _KERNEL_KNOWS else 0)
        facts = self.module.facts
        assert len(packed) == facts.globals_bytes
        kept = (self.gathered, self.memory)
        return Launch(self.module.function, 1, facts.threads, facts.smem_bytes, packed, kept)

    def time(self, config: Config, mode: str, seed: int, iterations: int, sequence: int) -> list[float]:
        return [1.0] * iterations

    def close(self) -> None:
        del self.rows
        self.memory.close()
        self.control.close()
        self.page.close()


class BadFamily:
    name = "bad_dispatch"

    def build_spec(self, build_part: Config, problem: Problem, device: DeviceClass) -> BuildSpec:
        source = Path(__file__).with_name("bad_dispatch.cu")
        return BuildSpec("bad_dispatch", "cubin", source, device.arch, include_dirs=(csrc_root(),))

    def workbench(self, seat: RankSeat) -> BadBench:
        return BadBench(seat)


FAMILY = BadFamily()
