"""A test-only family on the GPU: its one kernel waits until a word reaches WANTED (0: at once; else never).

A rank that LEAVES refuses its command instead of launching, so that its peer has to be told to abort.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from tktune.core.build_spec import BuildSpec
from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.errors import ConstraintRefused
from tktune.core.paths import csrc_root
from tktune.core.problem import Problem
from tktune.families.base import GateResult, RankSeat
from tktune.families.control_page import ControlPage


class WaitingBench:
    def __init__(self, seat: RankSeat) -> None:
        import torch

        from tktune.families.cuda.control import Control
        from tktune.families.cuda.driver import attach

        attach(seat.device_index)
        self.seat = seat
        self.page = ControlPage(seat.control_fd)
        self.control = Control(self.page, seat.rank, seat.spin_limit_s)
        self.word = torch.zeros(1, dtype=torch.int32, device=f"cuda:{seat.device_index}")

    def load(self, artifact: Path, sha256: str, build_part: Config) -> dict[str, Any]:
        from tktune.families.cuda.module import Module, verified

        self.module = Module(verified(artifact, sha256), "waiting", 1)
        return {"threads": self.module.facts.threads}

    def gate(self, config: Config, routing: str, seed: int, sequence: int) -> GateResult:
        from tktune.families.cuda.driver import current_stream, synchronize
        from tktune.families.cuda.launch import Launch

        if config["LEAVES"] == self.seat.rank:
            raise ConstraintRefused("leaves", "This rank does not launch.")
        guard = self.control.guard
        packed = struct.pack(
            "<QQQIii4x",
            self.word.data_ptr(),
            *(guard.report, guard.abort_word, guard.limit_kilo_ns, guard.rank),
            config.number("WANTED"),
        )
        assert len(packed) == self.module.facts.globals_bytes
        facts = self.module.facts
        launch = Launch(self.module.function, 1, facts.threads, facts.smem_bytes, packed, (self.word,))
        with self.control.launching():
            stream = current_stream(self.seat.device_index)
            launch(stream)
            synchronize(stream)
        return GateResult(True, 0.0, 1.0)

    def time(self, config: Config, mode: str, seed: int, iterations: int, sequence: int) -> list[float]:
        return [1.0] * iterations

    def close(self) -> None:
        self.control.close()
        self.page.close()


class WaitingFamily:
    name = "waiting"

    def build_spec(self, build_part: Config, problem: Problem, device: DeviceClass) -> BuildSpec:
        return BuildSpec(
            "waiting",
            "cubin",
            Path(__file__).with_name("waiting.cu"),
            device.arch,
            include_dirs=(csrc_root(),),
        )

    def workbench(self, seat: RankSeat) -> WaitingBench:
        return WaitingBench(seat)


FAMILY = WaitingFamily()
