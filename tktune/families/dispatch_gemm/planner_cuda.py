"""Building schedule tables on the GPUs: one launch a rank exchanges the ids through symmetric memory and fills the
tables. Nothing is allocated, nothing waits for the host, and a graph that replays it goes on counting.
"""

from __future__ import annotations

from typing import Any

import torch

from tktune.core.build_spec import BuildSpec
from tktune.core.device import DeviceClass
from tktune.core.errors import ArtifactError, DeviceError, RoutingError
from tktune.core.paths import csrc_root
from tktune.core.problem import Problem
from tktune.families.cuda import plan_globals as mirror
from tktune.families.cuda.driver import Handle
from tktune.families.cuda.gemm_globals import Guard
from tktune.families.cuda.launch import Launch
from tktune.families.cuda.module import Module
from tktune.families.dispatch_gemm.tables_cuda import DeviceTables

ENTRY = "tktune_dispatch_plan"


def plan_build_spec(device: DeviceClass) -> BuildSpec:
    """The table kernel alone, for whoever needs tables without a dispatch, those of pushes too; every dispatch artifact
    contains one.
    """
    root = csrc_root()
    return BuildSpec(
        name=f"dispatch_plan-{device.arch}",
        kind="cubin",
        source=root / "kernels" / "dispatch_plan.cu",
        arch=device.arch,
        defines={"TKT_PLAN_PUSHES": "1"},
        include_dirs=(root,),
        facts={"registers": 65536 // mirror.THREADS, "static_smem_bytes": 0},
    )


def plan_entry(module: Module, most_shared_bytes: int, pushes: bool = False) -> Handle:
    """The table kernel of an artifact, allowed `most_shared_bytes`. Raises `ArtifactError` when there is none of this version,
    or none that makes the tables of `pushes`.
    """
    found = table_kernel(module, ENTRY, (mirror.THREADS, mirror.GLOBALS_BYTES), most_shared_bytes)
    if pushes and module.words(f"{ENTRY}_pushes", 1) != [1]:
        raise ArtifactError(
            f"The artifact's kernel {ENTRY} makes no tables of pushes.",
            "Load the artifact of a config with TRANSPORT=push.",
        )
    return found


def table_kernel(module: Module, entry: str, facts: tuple[int, int], shared_bytes: int) -> Handle:
    """A kernel that fills tables, of these threads and bytes of arguments. Raises `ArtifactError` when there is none such."""
    try:
        _, *found, _ = module.words(f"{entry}_facts", 4)
        if tuple(found) == facts:
            return module.entry(entry, shared_bytes)
    except DeviceError:
        pass
    raise ArtifactError(f"The artifact has no kernel {entry} of this version.", "Build it again.")


class Planner:
    """What plans of one rank share: its place among the ranks, its counters, and what it heard of wrong ids.

    `region[r]` is the address here of rank r's plan region, `mirror.region_bytes(problem)` of symmetric memory that
    were zero when the first plan was made. Every rank launches its n-th plan for the n-th of every other, in one
    stream. `capacity`: rows that fit, as many on every rank; the plan of a rank that needs more is empty. `pushes`: its
    plans have the tables of a rank that pushes, too.
    """

    def __init__(
        self,
        problem: Problem,
        region: tuple[int, ...],
        guard: Guard,
        device: torch.device,
        capacity: int | None = None,
        *,
        pushes: bool = False,
    ) -> None:
        self.problem, self._region, self._guard, self._device = problem, region, guard, device
        self.pushes = pushes
        self.capacity = problem.capacity_rows if capacity is None else capacity
        self._state = torch.zeros(mirror.STATE_WORDS, dtype=torch.int64, device=device)
        self._counted = torch.empty(mirror.counted_words(problem), dtype=torch.int32, device=device)
        pinned = device.type == "cuda"  # such memory has one address here and there
        self._status = torch.zeros(mirror.STATUS_WORDS, dtype=torch.int32, pin_memory=pinned)

    def tables(self) -> DeviceTables:
        return DeviceTables(self.problem, self.capacity, self._device, pushes=self.pushes)

    def launch(
        self,
        function: Handle,
        ids: torch.Tensor,
        tables: DeviceTables,
        kept: tuple[Any, ...] = (),
        *,
        own_in_place: bool = False,
        **other: int,
    ) -> Launch:
        """The launch that fills `tables` from `ids` (tokens, top_k), int32 or int64 and contiguous, of this rank. Tables of
        pushes need the `function` of an artifact that makes them (`plan_entry`), on every rank.

        `own_in_place`: the arrivals it leaves count own rows, for launches that read those where they are.
        `other` gives addresses of counters that lie elsewhere: arrivals, queue, dispenser (0: leave them alone).
        """
        addresses = mirror.PlanAddresses(
            ids=ids.data_ptr(),
            state=self._state.data_ptr(),
            counted=self._counted.data_ptr(),
            status=self._status.data_ptr(),
            **{**tables.at, **other},
        )
        arguments = mirror.packed_plan(
            self.problem,
            self._region,
            addresses,
            self._guard,
            self.capacity,
            ids.element_size(),
            own_in_place,
        )
        return Launch(
            function,
            mirror.blocks_of(self.problem),
            mirror.THREADS,
            mirror.shared_bytes(self.problem),
            arguments,
            (self, ids, tables.memory, *kept),
        )

    def count_from(self, sequence: int) -> None:
        """The next plan is number `sequence` + 1: larger than any before, the same on every rank, nothing under way."""
        self._state.copy_(torch.tensor([sequence, sequence * mirror.blocks_of(self.problem)]))

    def raise_wrong(self) -> None:
        """Raise `RoutingError` for what plans found wrong since the last time; the device must be done with them."""
        wrong, wanted = self._status.tolist()
        self._status.zero_()
        if wrong:
            raise RoutingError(
                f"topk_ids of some rank held ids outside 0..{self.problem.experts - 1}, or an expert twice for one token; "
                "they were left out.",
                "Use global expert ids, distinct within a token.",
            )
        if wanted:
            raise RoutingError(
                f"A plan needed {wanted} rows, and {self.capacity} fit; it was left empty.",
                "Load the operator with a larger capacity.",
            )
