"""A call of the combine on the CPU backend: expert rows, partial rows and signal words in symmetric memory, one launch
that all ranks enter together.
"""

from __future__ import annotations

import ctypes
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tktune.core import combine_tables_torch, tables_torch
from tktune.core.combine_tables import CombineTables
from tktune.core.errors import ArtifactError, LaunchFailed, ProblemError, RoutingError, TktuneError
from tktune.core.problem import Problem
from tktune.families import abi
from tktune.families.abi import CpuKernel, Globals, Machine
from tktune.families.control_page import SLOT_BYTES, ControlPage
from tktune.families.gemm_combine.abi import FIXED_COUNTERS, FORMS, Combine
from tktune.families.gemm_combine.launch import RASTERS
from tktune.families.gemm_combine.layout import SymmetricLayout
from tktune.families.grouped_gemm.space_cpu import DEFAULT_BACKOFF
from tktune.families.parallel_tensor import ParallelTensor
from tktune.runtime.agree import unanimous
from tktune.runtime.choice import Choice
from tktune.runtime.combine_operator import (
    CombinePlan,
    check_ids_given,
    checked_weights,
)
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
        self._group = group
        self._rank = 0
        if group is not None:
            import torch.distributed as dist

            self._rank = dist.get_rank(group)
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                raise ArtifactError(f"{path} changed while it was loaded.", "Run `tktune cache verify`.")
        self._kernel = CpuKernel(path)
        self._layout = layout = SymmetricLayout.of(problem)
        if group is None:
            self._memory = ParallelTensor.attach(ParallelTensor.create_fds(1, layout.bytes), 0, layout.bytes)
        else:
            self._memory = ParallelTensor.from_group(group, layout.bytes)
        self._control = ControlPage.create(1)
        self._sequence = 0
        self._machine = Machine(
            seats=choice.device.sm_count,
            spin_limit_ns=round(spin_limit_s * 1e9),
            abort_word=self._control.abort_address,
            report=self._control.address(0),
        )
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
                _check_ids(topk_ids, problem)
            elif schedule is not None:
                _check_schedule(schedule, problem, self._rank)
        except TktuneError as error:
            failure = error
        self._all_or_none(failure)
        if topk_ids is not None:
            everyones = self._gathered(topk_ids.to(torch.int32))
            tables = tables_torch.build(everyones, problem, self._rank, check_ids=False)
            schedule = Plan(tables, tables.slack.clone(), torch.zeros(4, dtype=torch.int32))
        assert schedule is not None
        slots = self._gathered(schedule.slots)  # (holder, source, tokens, top_k)
        combine = combine_tables_torch.from_slots(schedule.tables, slots[:, self._rank], problem)
        jobs = self._jobs(schedule, combine)
        groups = self.choice.config.number("signal_groups")
        counters = torch.zeros(FIXED_COUNTERS + schedule.tables.num_pad_blocks * groups, dtype=torch.int32)
        return CpuCombinePlan(schedule, combine, self._gathered(topk_weights), jobs, counters)

    def _jobs(self, schedule: Plan, combine: CombineTables) -> torch.Tensor:
        config, problem = self.choice.config, self.problem
        words = (str(config["order"]), config.number("signal_groups"), str(config["walk"]))
        if config["form"] == "pull":
            jobs: torch.Tensor = combine_tables_torch.pull_jobs(combine, problem, *words)
        else:
            jobs = combine_tables_torch.push_jobs(schedule.tables, problem, *words)
        return jobs.contiguous()

    def _all_or_none(self, failure: TktuneError | None) -> None:
        if self._group is not None:
            unanimous(self._group, "plans", "", failure)
        elif failure is not None:
            raise failure

    def _gathered(self, mine: torch.Tensor) -> torch.Tensor:
        """Everybody's, in rank order along a new first dimension."""
        mine = mine.contiguous()
        if self._group is None:
            return mine[None]
        import torch.distributed as dist

        everyone = [torch.empty_like(mine) for _ in range(self.problem.world)]
        dist.all_gather(everyone, mine, group=self._group)
        return torch.stack(everyone)

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
        ekn = problem.weight_layout == "ekn"
        matrix = (problem.hidden, problem.cols) if ekn else (problem.cols, problem.hidden)
        rows = max(activations.shape[0], plan.schedule.rows) if activations.dim() == 2 else plan.schedule.rows
        _expect("activations", activations, (rows, problem.hidden))
        _expect("weights", weights, (problem.local_experts, *matrix))
        if out is None:
            out = torch.empty(problem.tokens, problem.cols, dtype=torch.bfloat16)
        _expect("out", out, (problem.tokens, problem.cols))
        self._launch(activations, weights, plan, out)
        return out

    def _launch(
        self, activations: torch.Tensor, weights: torch.Tensor, plan: CpuCombinePlan, out: torch.Tensor
    ) -> None:
        g, c, schedule = self._globals, self._combine, plan.schedule.tables
        for name in ("pull_indices", "block_expert", "block_rows", "pull_tokens", "pull_slots"):
            setattr(g, name, getattr(schedule, name).data_ptr())
        for name in ("push_expected", "final_contrib", "owners", "owner_slots"):
            setattr(c, name, getattr(plan.tables, name).data_ptr())
        g.num_pad_blocks, g.num_pull_tokens = schedule.num_pad_blocks, schedule.pull_tokens.shape[0]
        g.arrivals = plan.schedule.arrivals.data_ptr()
        dispensers = torch.zeros(4, dtype=torch.int32)
        g.dispensers = dispensers.data_ptr()
        g.gathered, g.weights = activations.data_ptr(), weights.data_ptr()
        c.jobs, c.num_jobs = plan.jobs.data_ptr(), len(plan.jobs)
        c.topk_weights, c.y = plan.topk_weights.data_ptr(), out.data_ptr()
        plan.counters.zero_()  # as every launch leaves them that ends well
        c.counters, c.num_counters = plan.counters.data_ptr(), len(plan.counters)
        self._sequence += 1
        c.epoch = self._sequence
        g.start_sequence = self._sequence if self.problem.world > 1 else 0
        self._raise_unless_done(self._kernel.launch(g, self._machine).end)

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
            start = self._memory.peer(rank)
            c.rows[rank], c.staging[rank] = start + layout.rows, start + layout.staging
            c.watermarks[rank], c.landed[rank] = start + layout.watermarks, start + layout.landed
        return c

    def _launch_globals(self) -> Globals:
        """The launch arguments that no call changes."""
        problem, config = self.problem, self.choice.config
        communicating = config.number("num_comm_sms")
        g = Globals(
            rank=self._rank,
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
        g.out = self._memory.local + self._layout.rows
        for rank in range(problem.world):
            g.barrier[rank] = self._memory.peer(rank)
        return g

    def _raise_unless_done(self, end: int) -> None:
        if end == abi.DONE:
            return
        report = self._control.report(0)
        ctypes.memset(self._control.address(0), 0, SLOT_BYTES)
        if report is not None:
            raise LaunchFailed(
                f"{report.sentence} It gave up.", "Look at that rank's own error, then load again."
            )
        abi.raise_unless_done(end, self._rank)

    def check(self) -> None:
        """Nothing is left to wait for: `plan` and a call raise what goes wrong themselves."""

    def close(self) -> None:
        """End the kernel's threads and let the symmetric memory go. Not collective: a dead peer cannot hold it up."""
        self._kernel.close()
        self._group = None
        self._memory.close()
        self._control.close()


def _check_ids(topk_ids: torch.Tensor, problem: Problem) -> None:
    shape = (problem.tokens, problem.top_k)
    if tuple(topk_ids.shape) != shape:
        raise RoutingError(
            f"topk_ids is {tuple(topk_ids.shape)}, and the problem asks for {shape}.",
            "Pass the ids of this rank's tokens.",
        )
    if bool((topk_ids < 0).any() or (topk_ids >= problem.experts).any()):
        raise RoutingError(f"topk_ids holds ids outside 0..{problem.experts - 1}.", "Use global expert ids.")
    ordered = topk_ids.sort(dim=-1).values
    if bool((ordered[..., 1:] == ordered[..., :-1]).any()):
        raise RoutingError("topk_ids names an expert twice for one token.", "A token picks distinct experts.")


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


def _expect(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != torch.bfloat16 or not tensor.is_contiguous():
        raise ProblemError(
            f"{name} is {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
            f"{'' if tensor.is_contiguous() else ', not contiguous'}, and the operator takes {shape} bfloat16, contiguous."
        )
