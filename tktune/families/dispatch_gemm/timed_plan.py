"""Plans that a workbench builds on the device inside the timed region (`include_plan` of a policy), and whether they
are what the host builds.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from tktune.core.problem import Problem
from tktune.families.cuda.gemm_globals import Guard
from tktune.families.cuda.launch import Launch
from tktune.families.cuda.module import Module
from tktune.families.cuda.plan_globals import shared_bytes
from tktune.families.dispatch_gemm.plan_cuda import Plan
from tktune.families.dispatch_gemm.planner_cuda import Planner, plan_entry
from tktune.families.dispatch_gemm.push_cuda import Pushes
from tktune.families.dispatch_gemm.tables_cuda import DeviceTables

_TABLES = ("words", "pull_indices", "pull_tokens", "pull_slots", "slack", "own_slack", "walk")


class TimedPlans:
    """Tables on the device, filled anew by every launch of `launch`: one set for rows that are pulled and, from the first
    such launch on, one for those that are pushed. See `Planner` for the arguments.
    """

    def __init__(self, problem: Problem, region: tuple[int, ...], guard: Guard, device: torch.device) -> None:
        self._problem, self._device = problem, device
        self._planner = Planner(problem, region, guard, device)
        self._tables = {False: self._planner.tables()}

    def tables(self, pushes: bool) -> DeviceTables:
        if pushes not in self._tables:
            capacity = self._planner.capacity
            self._tables[pushes] = DeviceTables(self._problem, capacity, self._device, pushes=pushes)
        return self._tables[pushes]

    def launch(self, module: Module, plan: Plan, arrivals: int, own_in_place: bool, pushes: bool) -> Launch:
        """Fill the tables from the ids of `plan`, and the counters at `arrivals` with its slack or own slack. The artifact
        of a config with `pushes` makes those tables too.
        """
        function = plan_entry(module, shared_bytes(self._problem), pushes)
        kept = (module, plan)
        return self._planner.launch(
            function,
            plan.ids,
            self.tables(pushes),
            kept,
            own_in_place=own_in_place,
            arrivals=arrivals,
            queue=0,
            dispenser=0,
        )

    def built(self, plan: Plan, pushes: bool) -> Plan:
        """`plan` with the tables that a launch builds, in its own sizes."""
        tables = self.tables(pushes)
        views: dict[str, Any] = {name: tables.view(name)[: len(getattr(plan, name))] for name in _TABLES}
        if pushes:
            views["built_pushes"] = Pushes.within(tables, plan.pushes)
        return dataclasses.replace(plan, **views)

    def wrong_table(self, plan: Plan, pushes: bool) -> str:
        """A sentence on the first table that differs from the host's, or an empty text. Waits for the device."""
        built = self.built(plan, pushes)
        differ = (name for name in _TABLES if not getattr(built, name).equal(getattr(plan, name)))
        name = next(differ, "") or (built.pushes.wrong_table(plan.pushes) if pushes else "")
        return f"The table {name} that the device built differs from the host's." if name else ""

    def count_from(self, sequence: int) -> None:
        """The next plan has number `sequence` + 1, on every rank."""
        self._planner.count_from(sequence)
