"""dispatch_gemm for a driver without GPUs: the real space, roles and cost model, and ranks that sleep for as long as a GPU
would be at work. `bench/driver_time.py` tunes it.

NAPS in the environment says how long things take, in milliseconds: "process,seat,load,gate,launch".
"""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

from tktune.core.build_spec import BuildSpec
from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.problem import Problem
from tktune.core.roles import RoleModel
from tktune.core.space import Space
from tktune.families.base import GateResult, RankSeat
from tktune.families.dispatch_gemm.space import FAMILY as DISPATCH

DEFAULT_NAPS = "5500,2500,20,1.25,0.5"
_SPREAD = 0.2  # how far what a config takes lies from what the cost model says
_warm = False  # this process has done what it does once


def naps_s() -> list[float]:
    return [float(one) / 1000 for one in os.environ.get("NAPS", DEFAULT_NAPS).split(",")]


def true_us(config: Config, problem: Problem, device: DeviceClass) -> float:
    """What the model says, changed by up to `_SPREAD` in a way that the config's name alone decides."""
    share = int(hashlib.sha256(config.digest.encode()).hexdigest()[:8], 16) / 2**32
    return DISPATCH.cost_us(config, problem, device) * (1 + _SPREAD * share)


class SleepingBench:
    """A rank that sleeps. Modules are kept, so that loading one twice takes no time."""

    def __init__(self, seat: RankSeat) -> None:
        global _warm
        self._seat, self._held = seat, set[str]()
        process, inputs, self._load_s, self._gate_s, self._launch_s = naps_s()
        time.sleep(inputs if _warm else process + inputs)
        _warm = True

    def load(self, artifact: Path, sha256: str, build_part: Config) -> dict[str, Any]:
        if sha256 not in self._held:
            time.sleep(self._load_s)
        self._held.add(sha256)
        return {}

    def gate(self, config: Config, routing: str, seed: int, sequence: int) -> GateResult:
        time.sleep(self._gate_s)
        return GateResult(True, 0.001, 0.01)

    def time(self, config: Config, mode: str, seed: int, iterations: int, sequence: int) -> list[float]:
        policy, seat = self._seat.policy, self._seat
        time.sleep(self._launch_s * (iterations + policy.warmup))
        us = true_us(config, seat.problem, seat.device)
        return [us * (1 + 0.002 * ((sequence + 7 * at) % 5)) for at in range(iterations)]

    def close(self) -> None:
        return None


class SleepingFamily:
    name = "sleeping_family:FAMILY"

    def space(self, problem: Problem, device: DeviceClass) -> Space:
        return DISPATCH.space(problem, device)

    def roles(self, config: Config, problem: Problem, device: DeviceClass) -> RoleModel:
        return DISPATCH.roles(config, problem, device)

    def cost_us(self, config: Config, problem: Problem, device: DeviceClass) -> float:
        return DISPATCH.cost_us(config, problem, device)

    def build_spec(self, build_part: Config, problem: Problem, device: DeviceClass) -> BuildSpec:
        return DISPATCH.build_spec(build_part, problem, device)

    def workbench(self, seat: RankSeat) -> SleepingBench:
        return SleepingBench(seat)


FAMILY = SleepingFamily()
