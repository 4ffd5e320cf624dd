"""Warps that bring rows beside a block's computing, as data: the order that has them, where there are any, what they cost.
Pure.
"""

from __future__ import annotations

import dataclasses

from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.problem import Problem
from tktune.core.space import Constraint, Parameter
from tktune.families.dispatch_gemm import transport
from tktune.families.grouped_gemm import space_cuda

WORD = "beside"
MEANING = "beside: tokens, of which each warp of every block brings one before it computes, and two idle warps the others"
WARPS = 2
MOST_BLOCKS = 8  # of their own, besides: 0 to 8 are alike on four shapes, 12 are slower (bench/NOTES.md)
# Rough rates for ranking only (H200): bytes/s that one block's warps beside gather, and the share of that time which the
# GEMM loses to it.
GATHERED_BESIDE, LOST_BESIDE = 12.5e9, 0.25


def order(without: Parameter) -> Parameter:
    """The orders `without` warps beside, and this one."""
    return dataclasses.replace(
        without, values=(*without.values, WORD), meaning=f"{without.meaning}; {MEANING}"
    )


def constraints() -> list[Constraint]:
    """Where the GEMM leaves no shared memory for row slots, the warps beside bring nothing, and the blocks all."""
    return [
        Constraint(
            "idle_warps_beside",
            "rows are brought beside by producers that the GEMM leaves idle",
            _idle,
            ("order", "ACTIVATIONS", "CLUSTER", "TRANSPORT"),
        ),
        Constraint(
            "few_blocks_of_their_own",
            "blocks that only communicate are few where others bring rows beside",
            _few,
            ("order", "num_comm_sms"),
        ),
    ]


def _idle(config: Config, problem: Problem, device: DeviceClass) -> str | None:
    """wgmma blocks have four producer warps: one walks and loads, one stores, and two load by index where rows are not
    gathered. Those of a cluster leave together, and pushed rows are brought by blocks of their own.
    """
    if config["order"] != WORD:
        return None
    if config.get("ACTIVATIONS") == "indexed":
        return "where rows are loaded by index, all producers have work"
    if space_cuda.cluster(config) > 1:
        return f"the producers of {space_cuda.cluster(config)} blocks of a cluster leave together"
    if transport.is_push(config):
        return "pushed rows are brought by blocks of their own"
    return None


def _few(config: Config, problem: Problem, device: DeviceClass) -> str | None:
    if config["order"] != WORD or config.number("num_comm_sms") <= MOST_BLOCKS:
        return None
    return f"{config['num_comm_sms']} blocks, more than {MOST_BLOCKS}, win nothing with order = {WORD}"


def gathered_us(gathered_bytes: float, device: DeviceClass) -> float:
    """Microseconds until the warps beside all blocks have stored `gathered_bytes` of rows."""
    return 1e6 * gathered_bytes / (GATHERED_BESIDE * device.sm_count)
