"""Building combine tables on the GPUs: one launch a rank, after the schedule's, exchanges weights and slots through
symmetric memory and fills the tables. Nothing is allocated, nothing waits for the host, and a graph that replays it goes
on counting.
"""

from __future__ import annotations

from typing import Any

import torch

from tktune.core.config import Config
from tktune.core.problem import Problem
from tktune.families.cuda.driver import Handle
from tktune.families.cuda.gemm_globals import Guard
from tktune.families.cuda.launch import Launch
from tktune.families.cuda.module import Module
from tktune.families.dispatch_gemm.planner_cuda import table_kernel
from tktune.families.dispatch_gemm.tables_cuda import DeviceTables
from tktune.families.formulas import ceil_div
from tktune.families.gemm_combine import plan_globals as mirror
from tktune.families.gemm_combine.abi import FORMS
from tktune.families.gemm_combine.tables_cuda import DeviceCombineTables

ENTRY = "tktune_combine_plan"


def combine_plan_entry(module: Module, problem: Problem) -> Handle:
    """The kernel of combine tables in an artifact. Raises `ArtifactError` when there is none of this version."""
    facts = mirror.THREADS, mirror.GLOBALS_BYTES
    return table_kernel(module, ENTRY, facts, mirror.shared_bytes(problem))


def listing_of(config: Config, problem: Problem) -> mirror.Listing:
    """How the jobs of a config are listed."""
    groups = config.number("signal_groups")
    return mirror.Listing(
        form=FORMS[str(config["form"])],
        own_last=config["order"] == "remote",
        groups=groups,
        passes=groups if config["walk"] == "columns" else 1,
        group_tiles=ceil_div(problem.cols, config.number("COL_BLOCK")) // groups,
    )


class CombinePlanner:
    """What combine plans of one rank share: its place among the ranks and its counter.

    `region[r]` is the address here of rank r's region, `mirror.region_bytes(problem)` of symmetric memory that were
    zero when the first plan was made. Every rank launches its n-th plan for the n-th of every other, in one stream,
    each after the launch that made the schedule it is over.
    """

    def __init__(
        self,
        problem: Problem,
        region: tuple[int, ...],
        guard: Guard,
        device: torch.device,
        listing: mirror.Listing,
    ) -> None:
        self.problem, self.listing = problem, listing
        self._region, self._guard, self._device = region, guard, device
        self._state = torch.zeros(mirror.STATE_WORDS, dtype=torch.int64, device=device)

    def count_from(self, sequence: int) -> None:
        """The next plan is number `sequence` + 1: larger than any before, the same on every rank, nothing under way."""
        self._state.copy_(torch.tensor([sequence, sequence * mirror.blocks_of(self.problem)]))

    def tables(self, memory: torch.Tensor | None = None) -> DeviceCombineTables:
        """Empty tables of a plan, or those that `memory` holds."""
        listing = self.listing
        return DeviceCombineTables(self.problem, listing.groups, listing.passes, self._device, memory)

    def launch(
        self,
        function: Handle,
        topk_weights: torch.Tensor,
        schedule: DeviceTables,
        tables: DeviceCombineTables,
        kept: tuple[Any, ...] = (),
    ) -> Launch:
        """The launch that fills `tables` from this rank's `topk_weights` (tokens, top_k), float32 and contiguous."""
        of_schedule = ("words", "counts", "base", "slots", "pull_tokens", "pull_slots", "job_order")
        made = (
            *("plan", "experts", "walk", "jobs", "push_expected", "recv_from", "final_contrib"),
            *("owners", "owner_slots", "everyones"),
        )
        addresses = mirror.CombinePlanAddresses(
            topk_weights=topk_weights.data_ptr(),
            state=self._state.data_ptr(),
            **{name: schedule.at[name] for name in of_schedule},
            **{name: tables.at[name] for name in made},
        )
        arguments = mirror.packed_plan(self.problem, self._region, addresses, self._guard, self.listing)
        return Launch(
            function,
            mirror.blocks_of(self.problem),
            mirror.THREADS,
            mirror.shared_bytes(self.problem),
            arguments,
            (self, topk_weights, schedule.memory, tables.memory, *kept),
        )
