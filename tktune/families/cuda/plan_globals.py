"""The host mirror of `plan_globals` and `plan_region` (csrc/comm/plan_config.cuh): the one place in Python that knows
their layout. A test compiles the headers and compares every offset.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from typing import Any

from tktune.core.problem import MAX_WORLD, Problem
from tktune.families.cuda.dispatch_globals import NEVER_LAST, packed_guard
from tktune.families.cuda.gemm_globals import GUARD_BYTES, Guard
from tktune.families.formulas import ceil_div, round_up

WARPS, THREADS, MOST_BLOCKS, MOST_EXPERTS = 16, 512, 32, 256
KINDS = 3  # counters of an expert: its rows, tokens of which it is the first here, the last
SIGNALS, IDS = 0, MAX_WORLD * MOST_BLOCKS * 8  # of a rank's plan region
WRONG_IDS, ROWS_WANTED, STATUS_WORDS = 0, 1, 2
STATE_WORDS = 2  # of 64 bits
COUNT_QUAD = 4  # counts of a block are a multiple of so many

REGION, FIRST_POINTER = 0, 8 * MAX_WORLD
_POINTERS = 25
GUARD_AT = FIRST_POINTER + 8 * _POINTERS
WORLD_AT = GUARD_AT + GUARD_BYTES
GLOBALS_BYTES = WORLD_AT + 10 * 4


@dataclass(frozen=True)
class PlanAddresses:
    """Device addresses of what a plan reads and writes, in the order of the kernel's argument; 0 for none.

    The last ones are of ranks that push their rows, all or none of them.
    """

    ids: int
    state: int
    counted: int
    status: int
    words: int
    counts: int
    base: int
    walk: int
    pull_indices: int
    block_expert: int
    slack: int
    own_slack: int
    arrivals: int
    slots: int
    pull_tokens: int
    pull_slots: int
    job_order: int
    queue: int
    dispenser: int
    push_plan: int = 0
    push_tokens: int = 0
    push_blocks: int = 0
    push_expected: int = 0
    missing: int = 0
    gate_sources: int = 0


assert len(fields(PlanAddresses)) == _POINTERS


def packed_plan(
    problem: Problem,
    region: tuple[int, ...],
    addresses: PlanAddresses,
    guard: Guard,
    capacity: int,
    id_bytes: int,
    own_in_place: bool = False,
) -> bytes:
    """The `GLOBALS_BYTES` the kernel takes by value. `region[r]`: rank r's plan region; `guard.rank` is this rank.

    `own_in_place`: arrivals count this rank's own rows from the start, for launches that read them where they are.
    """
    numbers = (problem.world, problem.tokens, problem.top_k, problem.experts, problem.pad)
    return packed_table_kernel(
        region, addresses, guard, (*numbers, capacity, id_bytes, NEVER_LAST, int(own_in_place), 0)
    )


def packed_table_kernel(
    region: tuple[int, ...], addresses: Any, guard: Guard, numbers: tuple[int, ...]
) -> bytes:
    """What a kernel that fills tables takes: every rank's region, a dataclass of addresses, the guard, int32 numbers."""
    padded = (*region, *(0,) * (MAX_WORLD - len(region)))
    pointers = [getattr(addresses, field.name) for field in fields(addresses)]
    return (
        struct.pack(f"<{MAX_WORLD + len(pointers)}Q", *padded, *pointers)
        + packed_guard(guard)
        + struct.pack(f"<{len(numbers)}i", *numbers)
    )


def blocks_of(problem: Problem) -> int:
    """Blocks that build a plan, as many on every rank: one word of 32 tokens a warp, as far as that goes."""
    words = ceil_div(problem.tokens, 32)
    return min(max(1, ceil_div(words, WARPS // problem.world)), MOST_BLOCKS)


def shared_bytes(problem: Problem) -> int:
    """Dynamic shared memory of a block."""
    per_expert = WARPS * (KINDS + 1) + KINDS * (problem.world + 2)
    return 4 * (problem.local_experts * per_expert + KINDS + 1 + 2 * MAX_WORLD)


def counted_words(problem: Problem) -> int:
    """int32 words that blocks exchange their counts through; the last ones where rows are pushed."""
    return blocks_of(problem) * (KINDS + 1) * problem.experts


def region_bytes(problem: Problem) -> int:
    """A rank's part of the symmetric memory: signals, then everybody's ids, twice; then as often how many rows of each
    expert everybody's blocks have, which ranks that push tell each other.
    """
    ids = round_up(2 * 4 * problem.assignments, 16)
    counts = 2 * 4 * problem.world * blocks_of(problem) * round_up(problem.experts, COUNT_QUAD)
    return round_up(IDS + ids + counts, 1024)
