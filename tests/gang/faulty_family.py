"""A test-only family whose workbench misbehaves on request: which rank, in which command, in which way.

Config values: FAULT (a word of FAULTS, or "none"), AT (a command), RANK, US (the microseconds it claims to take).
Numpy only. Every launch meets all ranks at a barrier in symmetric memory, as real kernels do.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from tktune.core.build_spec import BuildSpec
from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.errors import ConstraintRefused, DeviceAbsent, LaunchFailed
from tktune.core.problem import Problem
from tktune.families.base import GateResult, RankSeat
from tktune.families.control_page import ControlPage

FAULTS = (
    *("hang", "stuck", "interrupt", "sigkill", "sigstop", "raise", "exit", "segv", "babble"),
    *("nan", "wrong_rows", "refuse", "absent"),
)
REPORT = struct.Struct("iii16s24siqq")


class FaultyBench:
    """`hang` waits for the abort word; `stuck` ignores even that; `interrupt` sends SIGINT to the driver and hangs;
    `babble` speaks on the control socket out of turn; the others are as they are called.
    """

    def __init__(self, seat: RankSeat) -> None:
        self.seat = seat
        self.page = ControlPage(seat.control_fd)
        own = seat.symmetric_fds[seat.rank]
        os.ftruncate(own, 4096)
        self.own = np.frombuffer(mmap.mmap(own, 4096), np.uint64)
        self.peers: list[Any] = []
        self.loads = 0
        self.timed = False
        if os.environ.get("FAULTY_PREPARE_RANK") == str(seat.rank):
            self._misbehave(os.environ["FAULTY_PREPARE"])

    def load(self, artifact: Path, sha256: str, build_part: Config) -> dict[str, Any]:
        self._maybe(build_part, "load")
        self.peers = [np.frombuffer(mmap.mmap(fd, 4096), np.uint64) for fd in self.seat.symmetric_fds]
        self.loads += 1
        self.timed = False
        return {"smem_bytes": np.int64(build_part.get("SMEM", 64)), "loads": self.loads, "path": artifact}

    def gate(self, config: Config, routing: str, seed: int, sequence: int) -> GateResult:
        output = np.ones(8, np.float32)
        fault = self._maybe(config, "recheck" if self.timed else "gate")
        self._barrier(sequence)
        if fault == "nan":
            output[3] = np.nan
        if fault == "wrong_rows" and (config.get("ROUTING", routing) == routing):
            output[5] = 7
        error = float(np.linalg.norm(output - 1) / np.linalg.norm(np.ones(8)))
        return GateResult(
            error <= 0.01, error, 0.01, "" if error <= 0.01 else f"Row {3 if fault == 'nan' else 5} differs"
        )

    def time(self, config: Config, mode: str, seed: int, iterations: int, sequence: int) -> list[float]:
        print("timing begins", mode)
        self.timed = True
        fault = self._maybe(config, "time")
        for at in range(iterations):
            self._barrier(sequence + at)
        us = float(config.get("US", 100)) * (1 + 0.01 * self.seat.rank)
        if fault == "nan":
            return [float("nan")] * iterations
        return [np.float64(us + at % 2) for at in range(iterations)]

    def close(self) -> None:
        self.page.close()
        if os.environ.get("FAULTY_CLOSE_RANK") == str(self.seat.rank):
            raise RuntimeError("asked to raise")

    def _maybe(self, config: Config, command: str) -> str:
        """Misbehave when the config asks this rank to do so in this command."""
        if config.get("AT") != command or config.get("RANK", 0) not in (self.seat.rank, -1):
            return "none"
        return self._misbehave(str(config["FAULT"]))

    def _misbehave(self, fault: str) -> str:
        if fault == "interrupt":
            # Once more later: Python loses a signal that comes while it runs a finaliser.
            while not self.page.aborted:
                os.kill(os.getppid(), signal.SIGINT)
                again = time.monotonic() + 10.0
                while not self.page.aborted and time.monotonic() < again:
                    time.sleep(0.001)
            fault = "hang"
        if fault == "hang":
            while not self.page.aborted:
                time.sleep(0.001)
            raise LaunchFailed("the launch was aborted", code="aborted")
        if fault == "stuck":
            while True:
                signal.pause()
        if fault == "babble":
            os.write(int(sys.argv[2]), b"hello\n")
        if fault == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "sigstop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        if fault == "exit":
            print("leaving now", file=sys.stderr)
            sys.exit(3)
        if fault == "raise":
            raise RuntimeError("the faulty family was asked to raise")
        if fault == "refuse":
            raise ConstraintRefused("D1", "4 blocks wait and 4 can be resident.")
        if fault == "absent":
            raise DeviceAbsent("There is no device 7.", "Use fewer ranks.")
        return fault

    def _barrier(self, sequence: int) -> None:
        """Meet all ranks at `sequence`, bounded by the abort word and the spin limit."""
        self.own[0] = sequence
        give_up = time.monotonic() + self.seat.spin_limit_s
        for rank, words in enumerate(self.peers):
            while int(words[0]) < sequence:
                if self.page.aborted:
                    raise LaunchFailed("the launch was aborted", code="aborted")
                if time.monotonic() > give_up:
                    self._report(rank, sequence, int(words[0]))
                    raise LaunchFailed("a wait was out of its spin limit", code="spin_limit")
                time.sleep(0.0005)

    def _report(self, index: int, expected: int, seen: int) -> None:
        with mmap.mmap(self.seat.control_fd, 0) as memory:
            at = self.page.address(self.seat.rank) - self.page.abort_address
            REPORT.pack_into(memory, at, 1, self.seat.rank, 0, b"comp", b"barrier", index, expected, seen)


class FaultyFamily:
    name = "faulty_family:FAMILY"

    def build_spec(self, build_part: Config, problem: Problem, device: DeviceClass) -> BuildSpec:
        return BuildSpec("faulty", "shared", Path("faulty.cpp"), "native", facts={"smem_bytes": 64})

    def workbench(self, seat: RankSeat) -> FaultyBench:
        return FaultyBench(seat)


FAMILY = FaultyFamily()
