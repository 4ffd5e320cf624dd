"""The plan of a dispatch on GPUs: tables in device memory that a launch fills, and that a replayed graph fills anew."""

from __future__ import annotations

import torch

from tktune.core.tables import ScheduleTables
from tktune.families.dispatch_gemm.tables_cuda import DeviceTables
from tktune.runtime.operator import Plan


class CudaDispatchPlan(Plan):
    """`slots`, `arrivals` and `dispensers` are views of what the device holds; `rows` and `tables` wait for it.

    `memory` (int32) is all of it, counters that launches use and leave as they found them included; `address` is
    where it lies. What is read here is the plan of the last launch that filled it.
    """

    memory: torch.Tensor
    address: int

    def __init__(self, tables: DeviceTables, rank: int) -> None:
        put = object.__setattr__  # the base is frozen
        put(self, "_tables", tables)
        put(self, "_rank", rank)
        put(self, "memory", tables.memory)
        put(self, "address", tables.memory.data_ptr())

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        held: DeviceTables = self._tables  # type: ignore[attr-defined]
        return f"CudaDispatchPlan(up to {held.capacity} rows at {self.address:#x})"

    @property
    def device_tables(self) -> DeviceTables:
        found: DeviceTables = self._tables  # type: ignore[attr-defined]
        return found

    @property
    def tables(self) -> ScheduleTables:
        """A copy of the tables as they are now. Waits for the device."""
        return self.device_tables.schedule(self._rank)  # type: ignore[attr-defined]

    @property
    def slots(self) -> torch.Tensor:
        return self.device_tables.view("slots")

    @property
    def rows(self) -> int:
        return self.device_tables.used()[0]

    @property
    def arrivals(self) -> torch.Tensor:
        return self.device_tables.view("arrivals")

    @property
    def dispensers(self) -> torch.Tensor:
        return self.device_tables.view("dispenser")
