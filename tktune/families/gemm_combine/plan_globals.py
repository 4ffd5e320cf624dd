"""The host mirror of `combine_plan_globals` and `combine_region` (csrc/comm/combine_plan_config.cuh): the one place in
Python that knows their layout. A test compiles the headers and compares every offset.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from tktune.core.problem import MAX_WORLD, Problem
from tktune.families.cuda.gemm_globals import GUARD_BYTES, Guard
from tktune.families.cuda.plan_globals import packed_table_kernel
from tktune.families.formulas import ceil_div, round_up

WARPS, THREADS, MOST_BLOCKS, KEYS = 16, 512, 32, 4096
STATE_WORDS = 2  # of 64 bits
SIGNALS, OWED = 0, MAX_WORLD * MOST_BLOCKS * 8  # of a rank's region
PLANES = OWED + 2 * MAX_WORLD * 4

REGION, FIRST_POINTER = 0, 8 * MAX_WORLD
_POINTERS, _NUMBERS = 19, 10
GUARD_AT = FIRST_POINTER + 8 * _POINTERS
WORLD_AT = GUARD_AT + GUARD_BYTES
GLOBALS_BYTES = WORLD_AT + 4 * _NUMBERS


@dataclass(frozen=True)
class CombinePlanAddresses:
    """Device addresses of what a plan reads and writes, in the order of the kernel's argument."""

    topk_weights: int
    state: int
    words: int
    counts: int
    base: int
    slots: int
    pull_tokens: int
    pull_slots: int
    job_order: int
    plan: int
    experts: int
    walk: int
    jobs: int
    push_expected: int
    recv_from: int
    final_contrib: int
    owners: int
    owner_slots: int
    everyones: int


assert len(fields(CombinePlanAddresses)) == _POINTERS


@dataclass(frozen=True)
class Listing:
    """How jobs are listed: the form's number, whether own tokens come last, runs of columns, walks over the experts, and
    the column tiles of a run.
    """

    form: int
    own_last: bool
    groups: int
    passes: int
    group_tiles: int


def packed_plan(
    problem: Problem, region: tuple[int, ...], addresses: CombinePlanAddresses, guard: Guard, listing: Listing
) -> bytes:
    """The `GLOBALS_BYTES` the kernel takes by value. `region[r]`: rank r's region; `guard.rank` is this rank."""
    numbers = (problem.world, problem.tokens, problem.top_k, problem.local_experts, problem.pad)
    listed = (listing.form, int(listing.own_last), listing.groups, listing.passes, listing.group_tiles)
    return packed_table_kernel(region, addresses, guard, numbers + listed)


def blocks_of(problem: Problem) -> int:
    """Blocks that build a plan, as many on every rank: 64 tokens each, as far as that goes."""
    return min(ceil_div(problem.tokens, 64), MOST_BLOCKS)


def shared_bytes(problem: Problem) -> int:
    """Dynamic shared memory of a block."""
    jobs = problem.world * problem.tokens
    listed = ceil_div(jobs, blocks_of(problem)) + 2 * problem.pad + 2 * (ceil_div(jobs, 32) + 1)
    return 4 * (max(listed, KEYS) + MAX_WORLD)


def region_bytes(problem: Problem) -> int:
    """A rank's part of the symmetric memory: signals, what each owes, then weights and slots from everybody, twice."""
    return round_up(PLANES + 2 * 2 * 4 * problem.assignments, 1024)
