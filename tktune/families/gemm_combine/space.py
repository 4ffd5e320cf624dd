"""The pure half of the family `gemm_combine`: expert rows are multiplied, and those that have landed are already summed,
weighted, into tokens and brought to the tokens' ranks while the grouped GEMM still runs.

The compute half's parameters and rules are the grouped GEMM's. Nothing here imports torch, numpy or a compiler.
"""

from __future__ import annotations

import dataclasses

from tktune.core.build_spec import BuildSpec
from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.device_cpu import cores_of
from tktune.core.problem import Problem
from tktune.core.roles import Role, RoleModel, Wait
from tktune.core.space import Constraint, Parameter, Space
from tktune.families.base import RankSeat, Workbench
from tktune.families.formulas import (
    SPIN_LIMIT_S,
    cpu_smem_bytes,
    deadlock_constraints,
    rank_rows,
    split_values,
    wanted_tokens,
)
from tktune.families.gemm_combine import space_cuda
from tktune.families.gemm_combine.parameters import (
    FORM,
    ORDER,
    REDUCERS_MEANING,
    SPLIT_MEANING,
    WALK,
    canonical,
    groups_divide,
    moved_rows,
    one_walk,
)
from tktune.families.grouped_gemm import space_cpu

CPU_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
CPU_REDUCERS = (1, 2, 4, 8)
ROWS_IN_FLIGHT = Parameter(
    "rows_in_flight", (1, 4), "launch", "sums a thread holds at once; whichever is ready goes first"
)
SIGNAL_GROUPS = Parameter(
    "signal_groups", (1, 2), "launch", "runs of columns in which a pad block is announced and summed"
)
_DEADLOCK_OVER = ("num_comm_sms", "num_reduce_sms", "form")


class GemmCombine:
    """The grouped GEMM of expert rows fused with their weighted sum into tokens."""

    name = "gemm_combine"
    purpose = "multiply expert rows, sum them weighted into tokens and bring those to their ranks"

    def space(self, problem: Problem, device: DeviceClass) -> Space:
        if device.backend != "cpu":
            return space_cuda.space(problem, device, self.roles)
        return Space(
            problem,
            device,
            (
                *space_cpu.BUILD_PARAMETERS,
                Parameter(
                    "num_comm_sms",
                    split_values(device.sm_count, CPU_SPLITS),
                    "launch",
                    f"seats {SPLIT_MEANING}",
                ),
                Parameter(
                    "num_reduce_sms",
                    split_values(device.sm_count - 1, CPU_REDUCERS),
                    "launch",
                    f"seats {REDUCERS_MEANING}",
                ),
                FORM,
                ORDER,
                ROWS_IN_FLIGHT,
                SIGNAL_GROUPS,
                WALK,
            ),
            [
                *space_cpu.build_constraints(),
                Constraint(
                    "groups_divide_columns",
                    "runs of announced columns are whole tiles",
                    groups_divide,
                    ("COL_BLOCK", "signal_groups"),
                ),
                Constraint(
                    "row_slots",
                    "the row slots of a block fit over its pipeline memory",
                    _slots_fit,
                    (
                        *(p.name for p in space_cpu.BUILD_PARAMETERS),
                        "rows_in_flight",
                        "signal_groups",
                        "form",
                    ),
                    lambda config, problem, device: f"use cols ≤ {_widest(config)}",
                ),
                *(
                    dataclasses.replace(rule, way_out=_more_seats)
                    for rule in deadlock_constraints(self.roles, _DEADLOCK_OVER)
                ),
            ],
            space_cpu.DEFAULT_BUILD.replace(
                num_comm_sms=1,
                num_reduce_sms=1,
                form="prereduce",
                order="ready",
                rows_in_flight=1,
                signal_groups=1,
                walk="experts",
            ),
            lambda config: one_walk(canonical(config, problem, CPU_REDUCERS[0])),
            canonical_over=(),
        )

    def roles(self, config: Config, problem: Problem, device: DeviceClass) -> RoleModel:
        """Compute waits for nothing and then joins the sums, which wait for tiles; the pre-reduce form ends in the
        reduce, which waits for peers' sums. Whoever drains a queue leaves no work that no seated block holds.
        """
        communicate = config.number("num_comm_sms")
        compute = Role("gemm", device.sm_count - communicate, resident=False, becomes="combine", drains=True)
        pulls = config["form"] == "pull"
        landed = Wait("landed", "gemm", "peer" if pulls else "local")
        combine = Role("combine", communicate, (landed,), becomes=None if pulls else "reduce", drains=True)
        roles: tuple[Role, ...] = (compute, combine)
        reducers = 0
        if not pulls:
            reducers = config.number("num_reduce_sms")
            watermark = Wait("watermark", "combine", "peer")
            roles = (*roles, Role("reduce", reducers, (watermark,), taken_up=True))
        return RoleModel(
            roles=roles,
            resident_blocks=device.sm_count,
            spin_limit_s=SPIN_LIMIT_S,
            world=problem.world,
            auxiliary_grid=reducers,
            protocol=(
                f"cols={problem.cols}",
                f"pad={problem.pad}",
                f"world={problem.world}",
                f"form={config['form']}",
                f"signal_groups={config['signal_groups']}",
            ),
        )

    def cost_us(self, config: Config, problem: Problem, device: DeviceClass) -> float:
        """The GEMM on its own blocks, then the sums that were not ready while it ran, on all of them, then the reduce.

        A sum waits for m rows; with even routing it is ready, on average, at m ÷ (m + 1) of the GEMM
        (research/fused_kernels.md §1.11, §2.2).
        """
        if device.backend != "cpu":
            return space_cuda.cost_us(config, problem, device)
        seats, communicate = device.sm_count, config.number("num_comm_sms")
        gemm = config.replace(backoff=space_cpu.DEFAULT_BACKOFF)  # waits of this family take the default
        comp = space_cpu.compute_us(gemm, problem, device, seats - communicate)
        read, written, reduced = moved_rows(config, problem)
        row_us = 1e6 * 2 * problem.cols / space_cpu.CORE_COPIED
        work = (read + written) * row_us
        items = wanted_tokens(problem) if config["form"] == "prereduce" else problem.tokens
        rows_of_a_sum = rank_rows(problem) / items
        late = 1.0 if config["order"] == "token" else rows_of_a_sum / (rows_of_a_sum + 1)
        hidden = min(work, communicate * comp * (1 - late))
        cores = max(1.0, cores_of(device) / problem.world)
        reducers = min(cores, config.number("num_reduce_sms") * (1 + config.number("CONSUMER_WARPS")))
        signals = config.number("signal_groups") * items * 0.05
        return comp + (work - hidden) / min(cores, seats) + reduced * row_us / reducers + signals

    def build_spec(self, build_part: Config, problem: Problem, device: DeviceClass) -> BuildSpec:
        if device.backend == "cpu":
            return space_cpu.build_spec(self.name, build_part, problem)
        return space_cuda.build_spec(self.name, build_part, problem, device)

    def workbench(self, seat: RankSeat) -> Workbench:
        bench: Workbench
        if seat.device.backend == "cuda":
            from tktune.families.gemm_combine.launch_cuda import CudaCombineWorkbench

            bench = CudaCombineWorkbench(seat)
        else:
            from tktune.families.gemm_combine.launch import CpuWorkbench

            bench = CpuWorkbench(seat)
        return bench


def _slot_bytes(config: Config, cols: int) -> int:
    threads = 1 + config.number("CONSUMER_WARPS")
    return threads * config.number("rows_in_flight") * 2 * (cols // config.number("signal_groups"))


def _slots_fit(config: Config, problem: Problem, device: DeviceClass) -> str | None:
    """M3: row slots of all threads overlay the stage ring and the output tile."""
    needed, given = _slot_bytes(config, problem.cols), cpu_smem_bytes(config)
    if config["form"] == "pull" or needed <= given:
        return None
    return f"row slots need {needed} bytes, and the pipeline they overlay has {given}"


def _widest(config: Config) -> int:
    groups = config.number("signal_groups")
    return cpu_smem_bytes(config) // _slot_bytes(config, groups) * groups


def _more_seats(config: Config, problem: Problem, device: DeviceClass) -> str:
    return f"set TKTUNE_CPU_SEATS to 3 or more ({device.sm_count} here)"


FAMILY = GemmCombine()
