"""A call on the CPU backend: symmetric memory among the ranks of a group, one launch between two barriers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tktune.core import tables_torch
from tktune.core.errors import RoutingError
from tktune.families import abi, glu
from tktune.families.abi import Globals
from tktune.runtime.choice import Choice
from tktune.runtime.cpu_seat import NO_EXPERT, CpuSeat, check_ids, expect, point, weights_shape
from tktune.runtime.operator import Plan

BARRIER_BYTES = 4096  # the barrier words lead a symmetric buffer; token rows follow


class CpuOperator:
    """`tktune.runtime.operator.Operator` on the CPU backend; tensors live on the CPU."""

    def __init__(self, choice: Choice, path: Path, sha256: str, group: Any, spin_limit_s: float) -> None:
        self.choice = choice
        self.problem = problem = choice.problem
        self.capacity = problem.capacity_rows
        nbytes = BARRIER_BYTES + problem.tokens * problem.hidden * 2
        self._seat = CpuSeat(group, path, sha256, nbytes, choice.device.sm_count, spin_limit_s)
        self._input = torch.frombuffer(
            self._seat.memory.buffer(self._seat.rank), dtype=torch.bfloat16, offset=BARRIER_BYTES
        ).view(problem.tokens, problem.hidden)
        fused = problem.family == "dispatch_gemm"
        self._gathered = torch.empty((self.capacity, problem.hidden) if fused else (0,), dtype=torch.bfloat16)
        self._separate = glu.is_separate(choice.config)
        self._packed = torch.empty(
            (self.capacity, problem.cols) if self._separate else (0,), dtype=torch.bfloat16
        )
        self._globals = self._launch_globals()

    @property
    def input(self) -> torch.Tensor:
        return self._input

    def plan(self, topk_ids: torch.Tensor) -> Plan:
        schedule = tables_torch.build(
            self._everyones_ids(topk_ids), self.problem, self._table_rank, check_ids=False
        )
        return Plan(schedule, schedule.slack.clone(), torch.zeros(4, dtype=torch.int32))

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, plan: Plan, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        problem = self.problem
        expect("weights", weights, weights_shape(problem))
        if out is None:
            out = torch.empty(self.capacity, problem.out_cols, dtype=torch.bfloat16)
        expect("out", out, (self.capacity, problem.out_cols))
        if problem.family == "dispatch_gemm":
            expect("x", x, (problem.tokens, problem.hidden))
            if x.data_ptr() != self._input.data_ptr():
                self._input.copy_(x)
            gathered = self._gathered
        else:
            expect("x", x, (max(x.shape[0], plan.rows), problem.hidden))
            gathered = x
        self._launch(gathered, weights, plan, out)
        if problem.family == "dispatch_gemm":
            self._barrier()  # whoever returns may write `input` again: all peers have read it
        return out

    def check(self) -> None:
        """Nothing is left to wait for: `plan` and a call raise what goes wrong themselves."""

    def close(self) -> None:
        """End the kernel's threads and let the symmetric memory go. Not collective: a dead peer cannot hold it up."""
        self._input = torch.empty(0, dtype=torch.bfloat16)
        self._seat.close()

    @property
    def _table_rank(self) -> int:
        return self._seat.rank if self.problem.ep_rank is None else self.problem.ep_rank

    def _everyones_ids(self, topk_ids: torch.Tensor) -> torch.Tensor:
        """(ranks, tokens, top_k) int32, checked; wrong ids on one rank are an error on all."""
        problem, seat = self.problem, self._seat
        mine = (problem.tokens, problem.top_k)
        shape = (problem.expert_ranks, *mine) if seat.alone else mine
        if seat.alone and problem.expert_ranks == 1 and tuple(topk_ids.shape) == mine:
            topk_ids = topk_ids[None]
        failure = None
        try:
            check_ids(topk_ids, shape, problem, NO_EXPERT)
        except RoutingError as error:
            failure = error
        seat.all_or_none(failure)
        ids = topk_ids.to(torch.int32)
        return ids if seat.alone else seat.gathered(ids)

    def _launch_globals(self) -> Globals:
        """The launch arguments that no call changes."""
        problem, config = self.problem, self.choice.config
        seats = self.choice.device.sm_count
        fused = problem.family == "dispatch_gemm"
        communicating = config.number("num_comm_sms") if fused else 0
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
            num_comp_blocks=seats - communicating,
            num_comm_blocks=communicating,
            order=abi.ORDERS[str(config["order"])] if fused else 0,
            raster=0 if fused else abi.RASTERS[str(config["order"])],
            backoff=config.number("backoff"),
            roles=abi.FUSED if fused else abi.COMPUTE,
        )
        for rank in range(problem.world):
            g.barrier[rank] = self._seat.memory.peer(rank)
            g.x[rank] = self._seat.memory.peer(rank) + BARRIER_BYTES
        return g

    def _launch(self, gathered: torch.Tensor, weights: torch.Tensor, plan: Plan, out: torch.Tensor) -> None:
        g, tables = self._globals, plan.tables
        point(g, tables)
        g.arrivals, g.dispensers = plan.arrivals.data_ptr(), plan.dispensers.data_ptr()
        g.gathered, g.weights, g.out = gathered.data_ptr(), weights.data_ptr(), out.data_ptr()
        g.packed = self._packed.data_ptr() if self._separate else None
        g.start_sequence = self._seat.next_sequence() if self.problem.world > 1 else 0
        roles = g.roles
        self._seat.launch(g)
        if self._separate:
            g.roles, g.start_sequence = abi.FINISH, 0
            try:
                self._seat.launch(g)
            finally:
                g.roles = roles

    def _barrier(self) -> None:
        if self.problem.world > 1:
            self._seat.barrier(self._globals)
