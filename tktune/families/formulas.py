"""Arithmetic that families share: divisibility, shared-memory and register formulas, the deadlock rules as
constraints, and the terms of the cost models. Pure; nothing here knows a compiler or runs anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.problem import Problem
from tktune.core.roles import RULES, RoleModel, broken_rules
from tktune.core.space import Constraint

WEIGHT_LAYOUT_CODES = {"ekn": 0, "enk": 1}
SPIN_LIMIT_S = 2.0
Roles = Callable[[Config, Problem, DeviceClass], RoleModel]


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def floor8(value: int) -> int:
    return value // 8 * 8


def divides(parameter: str, of: str) -> Constraint:
    """The constraint that `parameter` divides the problem's field `of` (named like red_block_divides_hidden)."""

    def broken(config: Config, problem: Problem, device: DeviceClass) -> str | None:
        block, whole = config.number(parameter), getattr(problem, of)
        return f"{parameter} {block} does not divide {of} {whole}" if whole % block else None

    def way_out(config: Config, problem: Problem, device: DeviceClass) -> str:
        block, whole = config.number(parameter), getattr(problem, of)
        return f"use {of} = {ceil_div(whole, block) * block}, or another that {block} divides"

    def excess(config: Config, problem: Problem, device: DeviceClass) -> float:
        block, whole = config.number(parameter), getattr(problem, of)
        return float(-whole % block / whole)

    name, meaning = f"{parameter.lower()}_divides_{of}", f"{parameter} divides {of}"
    return Constraint(name, meaning, broken, (parameter,), way_out, excess)


def within_bytes(
    bytes_of: Callable[[Config], int], over: tuple[str, ...], cap: Callable[[DeviceClass], int]
) -> Constraint:
    """The constraint `smem`: what a block's shared memory needs is what the device gives, or less."""

    def broken(config: Config, problem: Problem, device: DeviceClass) -> str | None:
        needed, given = bytes_of(config), cap(device)
        if needed <= given:
            return None
        return f"a block needs {needed} bytes of shared memory, the device gives {given}"

    def way_out(config: Config, problem: Problem, device: DeviceClass) -> str:
        return f"use a device that gives a block {bytes_of(config)} bytes"

    def excess(config: Config, problem: Problem, device: DeviceClass) -> float:
        return bytes_of(config) / cap(device) - 1

    return Constraint("smem", "a block's shared memory fits the device", broken, over, way_out, excess)


def deadlock_constraints(roles: Roles, over: tuple[str, ...]) -> list[Constraint]:
    """One constraint for each deadlock rule that a config alone can break, named D1 … D8.

    `over` names the parameters that `roles` looks at.
    """

    def constraint(rule: str) -> Constraint:
        def broken(config: Config, problem: Problem, device: DeviceClass) -> str | None:
            found = [b.sentence for b in broken_rules(roles(config, problem, device)) if b.rule == rule]
            return "; ".join(found) or None

        return Constraint(rule, RULES[rule], broken, over, _more_seats)

    return [constraint(rule) for rule in RULES if rule != "D5"]


def _more_seats(config: Config, problem: Problem, device: DeviceClass) -> str:
    how = "set TKTUNE_CPU_SEATS to 2 or more" if device.backend == "cpu" else "use a device with more SMs"
    return f"{how} ({device.sm_count} here)"


def split_values(resident_blocks: int, preferred: tuple[int, ...]) -> tuple[int, ...]:
    """The communication-block counts worth trying where `resident_blocks` can be resident: at least one value,
    and none that leaves compute without a block where that can be helped.
    """
    return tuple(c for c in preferred if c < resident_blocks) or (preferred[0],)


def rank_rows(problem: Problem) -> float:
    """Expected real rows of one rank under even routing."""
    return problem.assignments / problem.expert_ranks


def busy_experts(problem: Problem) -> float:
    """Expected local experts with at least one row under even routing."""
    local = problem.local_experts
    return local * -math.expm1(-rank_rows(problem) / local)


def tile_rows(problem: Problem, row_block: int) -> float:
    """Expected rows that tiles of `row_block` rows cover on one rank: real rows and half a tile an expert."""
    return rank_rows(problem) + busy_experts(problem) * (row_block - 1) / 2


def wanted_tokens(problem: Problem) -> float:
    """Expected distinct tokens that one rank wants, over all source ranks."""
    elsewhere = (1 - problem.local_experts / problem.experts) ** problem.top_k
    return problem.expert_ranks * problem.tokens * (1 - elsewhere)


def waves(tasks: float, blocks: int) -> float:
    """Rounds that `blocks` blocks need for `tasks` equal tasks dealt in turn."""
    return math.ceil(tasks / max(1, blocks)) if tasks > 0 else 0.0


# --- CPU blocks ------------------------------------------------------------------------------------------


def cpu_smem_bytes(config: Config) -> int:
    """Stage ring of packed fp32 tiles and the fp32 output tile of one CPU block, in bytes."""
    row, col, red = config.number("ROW_BLOCK"), config.number("COL_BLOCK"), config.number("RED_BLOCK")
    return config.number("STAGES") * (row * red + red * col) * 4 + row * col * 4


# --- CUDA blocks (research/fused_kernels.md §2.3) ------------------------------------------------------------


def launch_register_cap(threads: int, registers_per_sm: int = 65536) -> int:
    """R1: registers of a thread that a launch of one block of `threads` can have, a multiple of 8, at most 255.

    Both the whole file and one of its four partitions bind: 288 threads → 168, 160 → 255, 384 → 168.
    """
    warps_of_partition = ceil_div(ceil_div(threads, 32), 4)
    whole, partition = registers_per_sm // threads, registers_per_sm // 4 // (32 * warps_of_partition)
    return min(255, floor8(whole), floor8(partition))


def round_up(value: int, unit: int) -> int:
    return ceil_div(value, unit) * unit
