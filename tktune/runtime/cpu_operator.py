"""A call on the CPU backend: symmetric memory among the ranks of a group, one launch between two barriers."""

from __future__ import annotations

import ctypes
import hashlib
from pathlib import Path
from typing import Any

import torch

from tktune.core import tables_torch
from tktune.core.errors import ArtifactError, LaunchFailed, ProblemError, RoutingError
from tktune.core.tables import ScheduleTables
from tktune.families import abi, glu
from tktune.families.abi import CpuKernel, Globals, Machine
from tktune.families.control_page import SLOT_BYTES, ControlPage
from tktune.families.parallel_tensor import ParallelTensor
from tktune.runtime.agree import unanimous
from tktune.runtime.choice import Choice
from tktune.runtime.operator import Plan

NO_EXPERT = -1  # an id that picks none, of tokens that are not there
BARRIER_BYTES = 4096  # the barrier words lead a symmetric buffer; token rows follow


class CpuOperator:
    """`tktune.runtime.operator.Operator` on the CPU backend; tensors live on the CPU."""

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
        nbytes = BARRIER_BYTES + problem.tokens * problem.hidden * 2
        if group is None:
            self._memory = ParallelTensor.attach(ParallelTensor.create_fds(1, nbytes), 0, nbytes)
        else:
            self._memory = ParallelTensor.from_group(group, nbytes)
        self._input = torch.frombuffer(
            self._memory.buffer(self._rank), dtype=torch.bfloat16, offset=BARRIER_BYTES
        ).view(problem.tokens, problem.hidden)
        fused = problem.family == "dispatch_gemm"
        self._gathered = torch.empty((self.capacity, problem.hidden) if fused else (0,), dtype=torch.bfloat16)
        self._separate = glu.is_separate(choice.config)
        self._packed = torch.empty(
            (self.capacity, problem.cols) if self._separate else (0,), dtype=torch.bfloat16
        )
        self._control = ControlPage.create(1)
        self._sequence = 0
        self._machine = Machine(
            seats=choice.device.sm_count,
            spin_limit_ns=round(spin_limit_s * 1e9),
            abort_word=self._control.abort_address,
            report=self._control.address(0),
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
        ekn = problem.weight_layout == "ekn"
        matrix = (problem.hidden, problem.cols) if ekn else (problem.cols, problem.hidden)
        _expect("weights", weights, (problem.local_experts, *matrix))
        if out is None:
            out = torch.empty(self.capacity, problem.out_cols, dtype=torch.bfloat16)
        _expect("out", out, (self.capacity, problem.out_cols))
        if problem.family == "dispatch_gemm":
            _expect("x", x, (problem.tokens, problem.hidden))
            if x.data_ptr() != self._input.data_ptr():
                self._input.copy_(x)
            gathered = self._gathered
        else:
            _expect("x", x, (max(x.shape[0], plan.rows), problem.hidden))
            gathered = x
        self._launch(gathered, weights, plan, out)
        if problem.family == "dispatch_gemm":
            self._barrier()  # whoever returns may write `input` again: all peers have read it
        return out

    def check(self) -> None:
        """Nothing is left to wait for: `plan` and a call raise what goes wrong themselves."""

    def close(self) -> None:
        """End the kernel's threads and let the symmetric memory go. Not collective: a dead peer cannot hold it up."""
        self._kernel.close()
        self._group = None
        self._input = torch.empty(0, dtype=torch.bfloat16)
        self._memory.close()
        self._control.close()

    @property
    def _table_rank(self) -> int:
        return self._rank if self.problem.ep_rank is None else self.problem.ep_rank

    def _everyones_ids(self, topk_ids: torch.Tensor) -> torch.Tensor:
        """(ranks, tokens, top_k) int32, checked; wrong ids on one rank are an error on all."""
        problem = self.problem
        mine = (problem.tokens, problem.top_k)
        shape = (problem.expert_ranks, *mine) if self._group is None else mine
        if self._group is None and problem.expert_ranks == 1 and tuple(topk_ids.shape) == mine:
            topk_ids = topk_ids[None]
        failure = None
        if tuple(topk_ids.shape) != shape:
            failure = RoutingError(f"topk_ids is {tuple(topk_ids.shape)}, and the problem asks for {shape}.")
        else:
            ordered = topk_ids.sort(dim=-1).values
            if bool((topk_ids < NO_EXPERT).any() or (topk_ids >= problem.experts).any()):
                failure = RoutingError(
                    f"topk_ids holds ids outside 0..{problem.experts - 1}.", "Use global expert ids."
                )
            elif bool(((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != NO_EXPERT)).any()):
                failure = RoutingError(
                    "topk_ids names an expert twice for one token.", "A token picks distinct experts."
                )
        if self._group is None:
            if failure is not None:
                raise failure
            return topk_ids.to(torch.int32)
        import torch.distributed as dist

        unanimous(self._group, "plans", "", failure)
        ids = topk_ids.to(torch.int32).contiguous()
        everyone = [torch.empty_like(ids) for _ in range(problem.world)]
        dist.all_gather(everyone, ids, group=self._group)
        return torch.stack(everyone)

    def _launch_globals(self) -> Globals:
        """The launch arguments that no call changes."""
        problem, config = self.problem, self.choice.config
        seats = self.choice.device.sm_count
        fused = problem.family == "dispatch_gemm"
        communicating = config.number("num_comm_sms") if fused else 0
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
            num_comp_blocks=seats - communicating,
            num_comm_blocks=communicating,
            order=abi.ORDERS[str(config["order"])] if fused else 0,
            raster=0 if fused else abi.RASTERS[str(config["order"])],
            backoff=config.number("backoff"),
            roles=abi.FUSED if fused else abi.COMPUTE,
        )
        for rank in range(problem.world):
            g.barrier[rank] = self._memory.peer(rank)
            g.x[rank] = self._memory.peer(rank) + BARRIER_BYTES
        return g

    def _launch(self, gathered: torch.Tensor, weights: torch.Tensor, plan: Plan, out: torch.Tensor) -> None:
        g, tables = self._globals, plan.tables
        _point(g, tables)
        g.num_pad_blocks, g.num_pull_tokens = tables.num_pad_blocks, tables.pull_tokens.shape[0]
        g.arrivals, g.dispensers = plan.arrivals.data_ptr(), plan.dispensers.data_ptr()
        g.gathered, g.weights, g.out = gathered.data_ptr(), weights.data_ptr(), out.data_ptr()
        g.packed = self._packed.data_ptr() if self._separate else None
        g.start_sequence = self._next_sequence() if self.problem.world > 1 else 0
        roles = g.roles
        self._raise_unless_done(self._kernel.launch(g, self._machine).end)
        if self._separate:
            g.roles, g.start_sequence = abi.FINISH, 0
            try:
                self._raise_unless_done(self._kernel.launch(g, self._machine).end)
            finally:
                g.roles = roles

    def _barrier(self) -> None:
        if self.problem.world > 1:
            self._raise_unless_done(self._kernel.barrier(self._globals, self._machine, self._next_sequence()))

    def _next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence

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


def _point(g: Globals, tables: ScheduleTables) -> None:
    for name in ("pull_indices", "block_expert", "block_rows", "pull_tokens", "pull_slots"):
        setattr(g, name, getattr(tables, name).data_ptr())


def _expect(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != torch.bfloat16 or not tensor.is_contiguous():
        raise ProblemError(
            f"{name} is {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
            f"{'' if tensor.is_contiguous() else ', not contiguous'}, and the operator takes {shape} bfloat16, contiguous."
        )
