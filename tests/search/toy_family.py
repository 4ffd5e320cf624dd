"""A family without a kernel: every rank answers from a formula after a short nap, and its artifacts are one-line
sources. Standard library only, so that gangs start at once."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from tktune.core.build_spec import BuildSpec
from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.problem import Problem
from tktune.core.roles import Role, RoleModel
from tktune.core.space import Parameter, Space
from tktune.families.base import GateResult, RankSeat

NAP_S = 0.004
SOURCE = Path(__file__).with_name("toy.cpp")


class ToyBench:
    def __init__(self, seat: RankSeat) -> None:
        self.random = random.Random(seat.rank)

    def load(self, artifact: Path, sha256: str, build_part: Config) -> dict[str, Any]:
        return {}

    def gate(self, config: Config, routing: str, seed: int, sequence: int) -> GateResult:
        time.sleep(NAP_S)
        return GateResult(config["TILE"] != 48, 0.001, 0.01, "Row 0 differs")

    def time(self, config: Config, mode: str, seed: int, iterations: int, sequence: int) -> list[float]:
        time.sleep(NAP_S)
        us = (
            100.0
            + abs(config.number("TILE") - 64)
            + 5 * config.number("num_comm_sms")
            + config.number("backoff")
        )
        return [us * (1 + 0.01 * self.random.random()) for _ in range(iterations)]

    def close(self) -> None:
        return None


class ToyFamily:
    name = "toy_family:FAMILY"

    def space(self, problem: Problem, device: DeviceClass) -> Space:
        return Space(
            problem,
            device,
            [
                Parameter("TILE", (16, 32, 48, 64, 80, 96), "build", "a size"),
                Parameter("num_comm_sms", (1, 2, 3), "launch", "a split"),
                Parameter("backoff", (1, 2, 3, 4), "launch", "a pause"),
            ],
            [],
            Config(TILE=32, num_comm_sms=1, backoff=2),
        )

    def roles(self, config: Config, problem: Problem, device: DeviceClass) -> RoleModel:
        return RoleModel((Role("gemm", 1),), 4, 2.0)

    def cost_us(self, config: Config, problem: Problem, device: DeviceClass) -> float:
        return 1.0

    def build_spec(self, build_part: Config, problem: Problem, device: DeviceClass) -> BuildSpec:
        return BuildSpec(
            f"toy-{build_part['TILE']}", "shared", SOURCE, "native", {"TILE": str(build_part["TILE"])}
        )

    def workbench(self, seat: RankSeat) -> ToyBench:
        return ToyBench(seat)


FAMILY = ToyFamily()
