"""gemm_combine on a rank of the CPU backend: expert rows, partial rows and signal words live in symmetric buffers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import numpy as np

from tktune.core import combine_tables
from tktune.core.config import Config
from tktune.families import abi
from tktune.families.base import GateResult, RankSeat
from tktune.families.bf16 import Bf16, Float32, to_float
from tktune.families.cpu_inputs import POISON, Case, expert_matrix, expert_parts
from tktune.families.cpu_workbench import GemmWorkbench
from tktune.families.gemm_combine.abi import FIXED_COUNTERS, FORMS, Combine
from tktune.families.gemm_combine.inputs import CombineCase, check_combined, make_case, slot_rows
from tktune.families.gemm_combine.layout import PAGE, SymmetricLayout
from tktune.families.grouped_gemm.space_cpu import DEFAULT_BACKOFF

# What a launch of the GEMM alone is told of the sums it does not make.
ALONE = Config(
    form="pull", order="token", rows_in_flight=1, signal_groups=1, num_reduce_sms=1, walk="experts"
)
RASTERS = {"experts": abi.RASTERS["rows"], "columns": abi.RASTERS["cols"]}
GUARD_ROWS = 8  # behind the last token, which nobody may write


class CpuWorkbench(GemmWorkbench):
    """One rank of gemm_combine. Activations are in their slots before a launch, as the layer before leaves them.

    What it shares begins at byte `start` of the symmetric buffer, behind the barrier words and what others have there.
    """

    family = "gemm_combine"
    brings_rows = True

    def __init__(self, seat: RankSeat, start: int = PAGE) -> None:
        self._layout = SymmetricLayout.of(seat.problem, start)
        super().__init__(seat)
        problem, layout = self.problem, self._layout
        mine = self._memory
        self._rows: Bf16 = mine.array(seat.rank, "uint16", (layout.num_rows, problem.cols), layout.rows)
        self._staging: Bf16 = mine.array(
            seat.rank, "uint16", (problem.world, problem.tokens, problem.cols), layout.staging
        )
        self._y = np.full((problem.tokens + GUARD_ROWS, problem.cols), POISON, np.uint16)
        self._combine = Combine(bytes=ctypes.sizeof(Combine))
        self._placed: CombineCase | None = None

    # What the family says.

    def symmetric_bytes(self) -> int:
        return self._layout.bytes

    def rank_of_tables(self) -> int:
        return self.seat.rank

    def fuse(self, config: Config) -> dict[str, int]:
        communicating = config.number("num_comm_sms")
        return {
            "num_comp_blocks": self.seat.device.sm_count - communicating,
            "num_comm_blocks": communicating,
            "order": 0,
            "raster": RASTERS[str(config["walk"])],
            "backoff": DEFAULT_BACKOFF,
            "roles": abi.FUSED,
        }

    def place(self, case: Case) -> None:
        """One launch of the GEMM on all seats leaves every expert row where a sum finds it."""
        assert isinstance(case, CombineCase)
        self._arm(ALONE, case)
        alone = {"num_comp_blocks": self.seat.device.sm_count, "num_comm_blocks": 0, "roles": abi.COMPUTE}
        self._launch({"order": 0, "raster": abi.RASTERS["rows"], "backoff": DEFAULT_BACKOFF, **alone}, 0)

    def new_case(self, routing: str, seed: int) -> CombineCase:
        return make_case(self.problem, self.seat.rank, routing, seed)

    def token_rows(self) -> Bf16:
        return np.empty((0, self.problem.hidden), np.uint16)  # no rank asks for them

    def library_operands(self, case: Case) -> Iterator[tuple[Float32, Float32, Float32]]:
        packed = self._gathered[case.real]
        for expert, part in expert_parts(case.tables):
            rows = to_float(packed[part])
            matrix = expert_matrix(self.problem, self._need_weights(), expert)
            yield rows, matrix, np.empty((len(rows), self.problem.cols), np.float32)

    # The workbench protocol.

    def gate(self, config: Config, routing: str, seed: int, sequence: int) -> GateResult:
        """One fused launch on poisoned buffers, compared with the fp32 reference (`inputs.check_combined`)."""
        case = self._prepare(routing, seed)
        self._arm(config, case)
        for buffer in (self._y, self._out, self._staging):
            buffer.fill(POISON)
        self._meet(sequence)
        self._launch(self.fuse(config), sequence + 1)
        self._meet(sequence + 2)
        return check_combined(self.problem, case, self._y, self._out, self._staging)

    def close(self) -> None:
        self._rows = self._staging = self._out = np.empty((0, 0), np.uint16)
        super().close()

    def buffers(self) -> tuple[Bf16, Bf16, Bf16]:
        """Expert rows (slots and guard rows, cols), partial rows (ranks, tokens, cols), result (tokens, cols)."""
        return self._out, self._staging, self._y[: self.problem.tokens]

    # How a mode is run.

    def _runner(self, config: Config, mode: str, case: Case) -> Callable[[int], int]:
        assert isinstance(case, CombineCase)
        self._arm(config, case)
        if mode != "serial":
            return super()._runner(config, mode, case)
        seats, fused = self.seat.device.sm_count, self.fuse(config)
        # Signals stay on: with pulls, the second launch waits for what peers compute in their first.
        first = {
            **fused,
            "num_comp_blocks": seats,
            "num_comm_blocks": 0,
            "roles": abi.COMPUTE | abi.GATED,
        }
        then = {
            **fused,
            "num_comp_blocks": 0,
            "num_comm_blocks": seats,
            "roles": abi.COMMUNICATE | abi.GATED,
        }
        return lambda sequence: self._launch(first, sequence) + self._launch(then, 0)

    # One launch.

    def _launch(self, arguments: dict[str, int], sequence: int) -> int:
        """As `GemmWorkbench._launch`; a launch without a number of its own goes on in the one before it."""
        if sequence:
            self._combine.epoch = sequence
        return super()._launch(arguments, sequence)

    def _arm(self, config: Config, case: CombineCase) -> None:
        """What a config says beside the launch's split, and its jobs."""
        form, groups = str(config["form"]), config.number("signal_groups")
        words = (str(config["order"]), groups, str(config["walk"]))
        if form == "pull":
            jobs = combine_tables.pull_jobs(case.combine, self.problem, *words)
        else:
            jobs = combine_tables.push_jobs(case.tables, self.problem, *words)
        counters = np.zeros(FIXED_COUNTERS + case.tables.num_pad_blocks * groups, np.int32)
        self._armed = (jobs, counters)
        c = self._combine
        c.form, c.signal_groups = FORMS[form], groups
        c.rows_in_flight = config.number("rows_in_flight")
        c.num_reduce_blocks = config.number("num_reduce_sms")
        c.jobs, c.num_jobs = jobs.ctypes.data, len(jobs)
        c.counters, c.num_counters = counters.ctypes.data, len(counters)

    def _prepare(self, routing: str, seed: int) -> CombineCase:
        """Activations in their slots, tables, buffers and globals for (routing, seed)."""
        case = self._case(routing, seed)
        assert isinstance(case, CombineCase)
        slots = case.tables.rows
        if self._placed is not case:
            self._gathered = np.full((slots + self.problem.pad, self.problem.hidden), POISON, np.uint16)
            self._gathered[:slots] = slot_rows(self.problem, case)
            self._placed = case
        self._out = self._rows[: slots + self.problem.pad]
        self._fill_globals(case)
        self._fill_combine(case)
        return case

    def _fill_combine(self, case: CombineCase) -> None:
        arrays = {
            "topk_weights": np.ascontiguousarray(case.topk_weights, np.float32),
            "push_expected": case.combine.push_expected,
            "final_contrib": case.combine.final_contrib,
            "owners": case.combine.owners,
            "owner_slots": case.combine.owner_slots,
        }
        self._kept.append(arrays)
        c, layout = self._combine, self._layout
        for name, array in arrays.items():
            setattr(c, name, array.ctypes.data)
        c.y = self._y.ctypes.data
        c.landed_stride = layout.landed_stride
        c.counters, c.num_counters = 0, 0
        for rank in range(self.seat.world):
            start = self._memory.peer(rank)
            c.rows[rank], c.staging[rank] = start + layout.rows, start + layout.staging
            c.watermarks[rank], c.landed[rank] = start + layout.watermarks, start + layout.landed
        self._globals.combine = ctypes.addressof(c)
