"""A small family for lookup tests: two parameters, one constraint that depends on the problem, no kernels."""

from __future__ import annotations

from typing import Any

from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.problem import Problem
from tktune.core.space import Constraint, Parameter, Space

NAME = "lookup_family:FAMILY"


def _rows(config: Config, problem: Problem, device: DeviceClass) -> str | None:
    rows = config.number("ROW_BLOCK")
    return None if problem.pad % rows == 0 else f"pad {problem.pad} is no multiple of ROW_BLOCK {rows}"


def _memory(config: Config, problem: Problem, device: DeviceClass) -> str | None:
    needed = config.number("ROW_BLOCK") * config.number("STAGES") * problem.tokens
    if needed <= device.smem_optin_bytes:
        return None
    return f"needs {needed} bytes, the device gives {device.smem_optin_bytes}"


class LookupFamily:
    name = NAME

    def space(self, problem: Problem, device: DeviceClass) -> Space:
        return Space(
            problem,
            device,
            [
                Parameter("ROW_BLOCK", (16, 32, 64), "build", "rows of a tile"),
                Parameter("STAGES", (1, 2, 4), "build", "pipeline depth"),
            ],
            [
                Constraint("row_block", "ROW_BLOCK divides pad", _rows),
                Constraint("memory", "a toy limit that grows with tokens", _memory),
            ],
            Config(ROW_BLOCK=32, STAGES=2),
        )

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"a lookup needs the space alone, not {name}")


FAMILY = LookupFamily()
