"""A toy family whose devices differ: those from 2 on are a tenth slower, and a config may kill its rank."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from toy_family import ToyBench, ToyFamily

from tktune.core.config import Config
from tktune.families.base import RankSeat

SLOWER = 1.1
DEADLY = 80  # this TILE kills whoever times it
NAP_S = 0.02


class LaneBench(ToyBench):
    def __init__(self, seat: RankSeat) -> None:
        super().__init__(seat)
        self.factor = SLOWER if seat.device_index >= 2 else 1.0

    def load(self, artifact: Path, sha256: str, build_part: Config) -> dict[str, Any]:
        return {"pid": os.getpid()}

    def time(self, config: Config, mode: str, seed: int, iterations: int, sequence: int) -> list[float]:
        time.sleep(NAP_S)
        if config["TILE"] == DEADLY:
            os.kill(os.getpid(), signal.SIGKILL)
        return [self.factor * us for us in super().time(config, mode, seed, iterations, sequence)]


class LaneFamily(ToyFamily):
    name = "lane_family:FAMILY"

    def workbench(self, seat: RankSeat) -> LaneBench:
        return LaneBench(seat)


FAMILY = LaneFamily()
