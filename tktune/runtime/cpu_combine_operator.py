"""A call of the combine on the CPU backend: expert rows, partial rows and signal words in symmetric memory, one launch
that all ranks enter together.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tktune.core import combine_tables_torch, tables_torch
from tktune.core.combine_tables import CombineTables
from tktune.core.errors import ProblemError, TktuneError
from tktune.core.problem import Problem
from tktune.families import abi
from tktune.families.abi import Globals
from tktune.families.gemm_combine.abi import FIXED_COUNTERS, FORMS, Combine
from tktune.families.gemm_combine.launch import RASTERS
from tktune.families.gemm_combine.layout import SymmetricLayout
from tktune.families.grouped_gemm.space_cpu import DEFAULT_BACKOFF
from tktune.runtime.choice import Choice
from tktune.runtime.combine_operator import CombinePlan, check_ids_given, checked_weights
from tktune.runtime.cpu_seat import CpuSeat, check_ids, expect, point, weights_shape
from tktune.runtime.operator import Plan

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class CpuCombinePlan:
    """`tktune.runtime.combine_operator.CombinePlan`; `jobs` (int32) is in the order of the operator's config."""

    schedule: Plan
    tables: CombineTables
    topk_weights: torch.Tensor
    jobs: torch.Tensor
    counters: torch.Tensor


class CpuCombineOperator:
    """`tktune.runtime.combine_operator.CombineOperator` on the CPU backend; tensors live on the CPU."""

    def __init__(self, choice: Choice, path: Path, sha256: str, group: Any, spin_limit_s: float) -> None:
        self.choice = choice
        self.problem = problem = choice.problem
        self.capacity = problem.capacity_rows
        self._layout = layout = SymmetricLayout.of(problem)
        self._seat = CpuSeat(group, path, sha256, layout.bytes, choice.device.sm_count, spin_limit_s)
        self._combine = self._launch_combine()
        self._globals = self._launch_globals()

    # Plans.

    def plan(
        self,
        topk_ids: torch.Tensor | None,
        topk_weights: torch.Tensor,
        out: CombinePlan | None = None,
        *,
        schedule: Plan | None = None,
    ) -> CpuCombinePlan:
        """See `CombineOperator.plan`. Every rank raises when one rank's ids, weights or schedule are wrong; there is
        nothing to fill anew here, so `out` only lends its schedule.
        """
        problem = self.problem
        if out is not None and schedule is None and topk_ids is None:
            schedule = out.schedule
        failure: TktuneError | None = None
        try:
            check_ids_given(topk_ids, schedule)
            topk_weights = checked_weights(problem, topk_weights, _CPU)
            if topk_ids is not None:
                check_ids(topk_ids, (problem.tokens, problem.top_k), problem)
            elif schedule is not None:
                _check_schedule(schedule, problem, self._seat.rank)
        except TktuneError as error:
            failure = error
        self._seat.all_or_none(failure)
        if topk_ids is not None:
            everyones = self._seat.gathered(topk_ids.to(torch.int32))
            tables = tables_torch.build(everyones, problem, self._seat.rank, check_ids=False)
            schedule = Plan(tables, tables.slack.clone(), torch.zeros(4, dtype=torch.int32))
        assert schedule is not None
        slots = self._seat.gathered(schedule.slots)  # (holder, source, tokens, top_k)
        combine = combine_tables_torch.from_slots(schedule.tables, slots[:, self._seat.rank], problem)
        jobs = self._jobs(schedule, combine)
        groups = self.choice.config.number("signal_groups")
        counters = torch.zeros(FIXED_COUNTERS + schedule.tables.num_pad_blocks * groups, dtype=torch.int32)
        return CpuCombinePlan(schedule, combine, self._seat.gathered(topk_weights), jobs, counters)

    def _jobs(self, schedule: Plan, combine: CombineTables) -> torch.Tensor:
        config, problem = self.choice.config, self.problem
        words = (str(config["order"]), config.number("signal_groups"), str(config["walk"]))
        if config["form"] == "pull":
            jobs: torch.Tensor = combine_tables_torch.pull_jobs(combine, problem, *words)
        else:
            jobs = combine_tables_torch.push_jobs(schedule.tables, problem, *words)
        return jobs.contiguous()

    # Calls.

    def __call__(
        self,
        activations: torch.Tensor,
        weights: torch.Tensor,
        plan: CombinePlan,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `CombineOperator.__call__`."""
        assert isinstance(plan, CpuCombinePlan)
        problem = self.problem
        rows = max(activations.shape[0], plan.schedule.rows) if activations.dim() == 2 else plan.schedule.rows
        expect("activations", activations, (rows, problem.hidden))
        expect("weights", weights, weights_shape(problem))
        if out is None:
            out = torch.empty(problem.tokens, problem.cols, dtype=torch.bfloat16)
        expect("out", out, (problem.tokens, problem.cols))
        self._launch(activations, weights, plan, out)
        return out

    def _launch(
        self, activations: torch.Tensor, weights: torch.Tensor, plan: CpuCombinePlan, out: torch.Tensor
    ) -> None:
        g, c, schedule = self._globals, self._combine, plan.schedule.tables
        point(g, schedule)
        for name in ("push_expected", "final_contrib", "owners", "owner_slots"):
            setattr(c, name, getattr(plan.tables, name).data_ptr())
        g.arrivals = plan.schedule.arrivals.data_ptr()
        dispensers = torch.zeros(4, dtype=torch.int32)
        g.dispensers = dispensers.data_ptr()
        g.gathered, g.weights = activations.data_ptr(), weights.data_ptr()
        c.jobs, c.num_jobs = plan.jobs.data_ptr(), len(plan.jobs)
        c.topk_weights, c.y = plan.topk_weights.data_ptr(), out.data_ptr()
        plan.counters.zero_()  # as every launch leaves them that ends well
        c.counters, c.num_counters = plan.counters.data_ptr(), len(plan.counters)
        c.epoch = self._seat.next_sequence()
        g.start_sequence = c.epoch if self.problem.world > 1 else 0
        self._seat.launch(g)

    def _launch_combine(self) -> Combine:
        """What no call changes of the combine's own arguments."""
        config, layout = self.choice.config, self._layout
        c = Combine(bytes=ctypes.sizeof(Combine))
        c.form, c.signal_groups = FORMS[str(config["form"])], config.number("signal_groups")
        c.rows_in_flight, c.num_reduce_blocks = (
            config.number("rows_in_flight"),
            config.number("num_reduce_sms"),
        )
        c.landed_stride = layout.landed_stride
        for rank in range(self.problem.world):
            start = self._seat.memory.peer(rank)
            c.rows[rank], c.staging[rank] = start + layout.rows, start + layout.staging
            c.watermarks[rank], c.landed[rank] = start + layout.watermarks, start + layout.landed
        return c

    def _launch_globals(self) -> Globals:
        """The launch arguments that no call changes."""
        problem, config = self.problem, self.choice.config
        communicating = config.number("num_comm_sms")
        g = Globals(
            rank=self._seat.rank,
            world=problem.world,
            hidden=problem.hidden,
            cols=problem.cols,
            tokens=problem.tokens,
            top_k=problem.top_k,
            local_experts=problem.local_experts,
            pad=problem.pad,
            weight_layout=abi.LAYOUTS[problem.weight_layout],
            num_comp_blocks=self.choice.device.sm_count - communicating,
            num_comm_blocks=communicating,
            order=0,
            raster=RASTERS[str(config["walk"])],
            backoff=DEFAULT_BACKOFF,
            roles=abi.FUSED,
            combine=ctypes.addressof(self._combine),
        )
        g.out = self._seat.memory.local + self._layout.rows
        for rank in range(problem.world):
            g.barrier[rank] = self._seat.memory.peer(rank)
        return g

    def check(self) -> None:
        """Nothing is left to wait for: `plan` and a call raise what goes wrong themselves."""

    def close(self) -> None:
        """End the kernel's threads and let the symmetric memory go. Not collective: a dead peer cannot hold it up."""
        self._seat.close()


def _check_schedule(schedule: Plan, problem: Problem, rank: int) -> None:
    wanted = (problem.world, problem.tokens, problem.top_k)
    tables = schedule.tables
    if tuple(schedule.slots.shape) != wanted or len(tables.counts) != problem.local_experts:
        raise ProblemError(
            f"The schedule is of {tuple(schedule.slots.shape)} ids and {len(tables.counts)} experts here, and this "
            f"operator's problem has {wanted} and {problem.local_experts}.",
            "Load both operators with the same routing words and pad.",
        )
    if tables.rank != rank or tables.rows != tables.num_pad_blocks * problem.pad:
        raise ProblemError(
            "The schedule is of another rank or pad.", "Load both operators with the same group and pad."
        )
