"""The toy family with ranks that say who they are and for which problem; with OVERLAP_ABSENT they cannot sit down, and with
OVERLAP_DEADLY one config kills whoever times it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from toy_family import ToyBench, ToyFamily

from tktune.core.config import Config
from tktune.core.errors import DeviceAbsent
from tktune.families.base import RankSeat

DEADLY = Config(TILE=80, num_comm_sms=2, backoff=3)


class OverlapBench(ToyBench):
    def __init__(self, seat: RankSeat) -> None:
        super().__init__(seat)
        self.seat = seat
        if os.environ.get("OVERLAP_ABSENT"):
            raise DeviceAbsent("There is no GPU.", "Look for one.")

    def load(self, artifact: Path, sha256: str, build_part: Config) -> dict[str, Any]:
        return {"pid": os.getpid(), "tokens": self.seat.problem.tokens}

    def time(self, config: Config, mode: str, seed: int, iterations: int, sequence: int) -> list[float]:
        if config == DEADLY and os.environ.get("OVERLAP_DEADLY"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().time(config, mode, seed, iterations, sequence)


class OverlapFamily(ToyFamily):
    name = "overlap_family:FAMILY"

    def workbench(self, seat: RankSeat) -> OverlapBench:
        return OverlapBench(seat)


FAMILY = OverlapFamily()
