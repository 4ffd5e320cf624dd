"""What the operators of ranks on GPUs share: they open on all ranks or on none, keep their launches, and close."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import torch

from tktune.core.errors import ProblemError, RoutingError, TktuneError
from tktune.families.cuda.dispatch_globals import packed_meeting
from tktune.families.cuda.driver import current_stream, synchronize
from tktune.families.cuda.gemm_globals import Guard
from tktune.families.cuda.launch import Launch
from tktune.families.cuda.ranks_module import RanksModule
from tktune.families.cuda.symmetric import MEETING
from tktune.families.cuda.tensor_map import TensorMaps
from tktune.families.dispatch_gemm.planner_cuda import Planner
from tktune.families.dispatch_gemm.tables_cuda import DeviceTables
from tktune.families.formulas import round_up
from tktune.runtime.choice import Choice
from tktune.runtime.cuda_output import OutputMaker
from tktune.runtime.cuda_seat import CudaSeat

KEPT_LAUNCHES = 256
BF16 = torch.bfloat16
Found = TypeVar("Found")


class CudaRanksOperator:
    """An operator on the current GPU of each rank of a group. Making it is collective.

    A subclass loads its module, lays out symmetric memory, and allocates, in this order; all ranks get through a step or
    all raise. Its schedules come from `_schedules` and the kernel `_schedule_entry` of its artifact.
    """

    _module: RanksModule
    _guard: Guard
    _schedules: Planner
    _schedule_entry: Any
    _own_in_place = False  # whether arrivals of a schedule count this rank's own rows

    def __init__(
        self,
        choice: Choice,
        path: Path,
        sha256: str,
        group: Any,
        spin_limit_s: float,
        capacity: int | None = None,
    ) -> None:
        self.choice = choice
        self.problem = choice.problem
        self.capacity = capacity_of(choice, capacity)
        self._seat = seat = CudaSeat(group, self.problem.world)
        self._open = True
        try:
            seat.guarded(lambda: self._load(path, sha256, spin_limit_s))
            self._share()
            seat.guarded(self._allocate)
            seat.guarded(lambda: seat.trust_peers(self._module.self_test, self._guard))
        except TktuneError:
            self._release()
            raise
        self.number = self._enter()

    def _load(self, path: Path, sha256: str, spin_limit_s: float) -> None:
        """Of this rank alone: the module, and what launches wait under."""
        raise NotImplementedError

    def _share(self) -> None:
        """Symmetric memory. Collective, all or none."""
        raise NotImplementedError

    def _allocate(self) -> None:
        """Of this rank alone: everything else that a plan or a call needs."""
        raise NotImplementedError

    def _enter(self) -> int:
        """The number by which compiled code knows this operator."""
        raise NotImplementedError

    def _leave(self) -> None:
        raise NotImplementedError

    def _make_ready(self, out_shape: tuple[int, int]) -> None:
        """The meeting of all ranks, what launches are kept in, and the shapes of a call; `share` came before."""
        problem, seat = self.problem, self._seat
        assert seat.memory is not None
        self._sequence = torch.zeros(1, dtype=torch.int64, device=seat.device)
        words = seat.memory.addresses(MEETING)
        arguments = packed_meeting(words, self._sequence.data_ptr(), self._guard)
        self._meet = Launch(self._module.meet, 1, 32, 0, arguments)
        self._maps = TensorMaps()
        self._launches: dict[tuple[int, ...], tuple[Any, tuple[Any, ...]]] = {}
        self._plan_launches: dict[tuple[int, ...], Launch] = {}
        ekn = problem.weight_layout == "ekn"
        matrix = (problem.hidden, problem.cols) if ekn else (problem.cols, problem.hidden)
        self._weights_shape = (problem.local_experts, *matrix)
        self._out_shape = out_shape
        self._make_out = OutputMaker(out_shape, seat.index)

    def _expect_ids(self, topk_ids: torch.Tensor) -> None:
        shape = (self.problem.tokens, self.problem.top_k)
        if tuple(topk_ids.shape) != shape:
            raise RoutingError(
                f"topk_ids is {tuple(topk_ids.shape)}, and the problem asks for {shape}.",
                "Pass the ids of this rank's tokens.",
            )

    def enqueue_schedule(self, ids: torch.Tensor, schedule: torch.Tensor) -> None:
        """Fill a schedule's memory on the current stream."""
        if ids.dtype not in (torch.int32, torch.int64) or ids.device != self._seat.device:
            ids = ids.to(self._seat.device, torch.int32)
        ids = ids.contiguous()
        key = (ids.data_ptr(), ids.element_size(), schedule.data_ptr())
        launch = self._plan_launches.get(key)
        if launch is None:
            tables = DeviceTables(self.problem, self.capacity, self._seat.device, schedule)
            launch = self._schedules.launch(
                self._schedule_entry, ids, tables, own_in_place=self._own_in_place
            )
            keep(self._plan_launches, key, launch.without_buffers(self._module, self._schedules))
        launch(current_stream(self._seat.index))

    def _expect(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        device = self._seat.device
        ok = tuple(tensor.shape) == shape and tensor.dtype == BF16 and tensor.device == device
        if not (ok and tensor.is_contiguous()):
            raise self._unfit(name, tensor, shape)

    def _unfit(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> ProblemError:
        return ProblemError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, and the problem asks for contiguous "
            f"bfloat16 {shape} on {self._seat.device}.",
            "Pass that, or load an operator for this shape.",
        )

    def check(self) -> None:
        """Wait for the current stream. Raises `LaunchFailed` when a peer did not come, `RoutingError` for ids that own
        schedules left out (on every rank) and for rows that did not fit `capacity` (on this rank).
        """
        with self._seat.launching():
            synchronize(current_stream(self._seat.index))
        self._schedules.raise_wrong()

    def close(self) -> None:
        """Free everything, together with the other ranks; one that died delays this by seconds and no more.

        Launches under way get a moment to end, then they are told to stop. No graph that captured a plan or a call
        may be replayed, and nothing in symmetric memory be touched, after this.
        """
        if not self._open:
            return
        self._leave()
        self._seat.let_end()
        self._launches.clear()
        self._plan_launches.clear()
        self._release()

    def _release(self) -> None:
        self._open = False
        self._seat.release()


def keep(kept: dict[tuple[int, ...], Found], key: tuple[int, ...], one: Found) -> None:
    """`one` under `key`; all others are forgotten when there are too many."""
    if len(kept) >= KEPT_LAUNCHES:
        kept.clear()
    kept[key] = one


def capacity_of(choice: Choice, asked: int | None) -> int:
    """Rows of a dispatch's output or a combine's input, whole pad blocks."""
    problem = choice.problem
    if asked is None:
        return problem.capacity_rows
    if asked < 1:
        raise ProblemError(f"capacity = {asked} holds no row.", "Give at least one row.")
    return min(round_up(asked, problem.pad), problem.capacity_rows)
