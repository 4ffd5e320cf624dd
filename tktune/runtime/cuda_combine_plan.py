"""The plan of a combine on GPUs: a schedule and combine tables in device memory, which launches fill and fill anew."""

from __future__ import annotations

import torch

from tktune.core.combine_tables import CombineTables
from tktune.families.gemm_combine.tables_cuda import DeviceCombineTables
from tktune.runtime.cuda_dispatch_plan import CudaDispatchPlan


class CudaCombinePlan:
    """`schedule` and this family's own tables, `memory` (int32). What is read here is the plan of the last launch.

    `owns_schedule`: the combine operator fills it; else a dispatch operator does.
    """

    def __init__(
        self, schedule: CudaDispatchPlan, tables: DeviceCombineTables, rank: int, owns_schedule: bool
    ) -> None:
        self.schedule = schedule
        self.owns_schedule = owns_schedule
        self.device_tables = tables
        self.memory = tables.memory
        self._rank = rank

    def __repr__(self) -> str:
        return f"CudaCombinePlan(over {self.schedule!r})"

    @property
    def tables(self) -> CombineTables:
        """A copy of the tables as they are now. Waits for the device."""
        return self.device_tables.combine(self._rank)

    @property
    def topk_weights(self) -> torch.Tensor:
        """Everybody's weights, (ranks, tokens, top_k) float32."""
        return self.device_tables.topk_weights
