"""gemm_combine on a rank with a GPU: expert rows, partial rows and signal words live in the ranks' symmetric memory."""

from __future__ import annotations

import math
from collections import OrderedDict

import torch

from tktune.core.config import Config
from tktune.core.errors import WordsError
from tktune.families.base import GateResult, RankSeat
from tktune.families.cuda import dispatch_globals as wire
from tktune.families.cuda.driver import (
    current_stream,
    memory_bytes,
    synchronize,
)
from tktune.families.cuda.gemm_inputs import draw_weights
from tktune.families.cuda.launch import Launch
from tktune.families.cuda.ranks_workbench import RanksWorkbench
from tktune.families.cuda.stopwatch import Stopwatch
from tktune.families.cuda.symmetric import HEADER_BYTES, SymmetricMemory
from tktune.families.gemm_combine import debug_cuda
from tktune.families.gemm_combine.fused_launch import packed_launch, rank_memory
from tktune.families.gemm_combine.globals_cuda import QUEUE_WORDS
from tktune.families.gemm_combine.layout import SymmetricLayout
from tktune.families.gemm_combine.module_cuda import CombineModule
from tktune.families.gemm_combine.plan_cuda import CombinePlan, check_combined, make_plan
from tktune.families.grouped_gemm.launch_cuda import KEPT_CASES_SHARE, library_work

GUARD_TOKENS = 8  # behind the last token, which nobody may write
# Roles and the lowest blocks that compute: all of them, or those that the split leaves.
MODES = {
    "fused": (wire.FUSED, "split"),
    "comp": (wire.COMPUTE, "all"),
    "comm": (wire.COMMUNICATE, "split"),
    "announce": (wire.COMPUTE | wire.GATED, "all"),
    "sum": (wire.COMMUNICATE | wire.GATED, "none"),
}


class CudaCombineWorkbench(RanksWorkbench[CombineModule]):
    """One rank's seat at a GPU, beside its peers. Plans are kept per (routing, seed), modules per artifact.

    Sequence numbers: `gate` takes two, `time` one for each launch and two more.
    """

    family = "gemm_combine"

    def __init__(self, seat: RankSeat) -> None:
        super().__init__(seat, CombineModule)
        problem = self.problem
        self._layout = layout = SymmetricLayout.of(problem, HEADER_BYTES)
        self._memory = SymmetricMemory(layout.bytes, seat.rank, seat.world, self._exchange)
        self._rows = self._memory.tensor(torch.bfloat16, (layout.num_rows, problem.cols), layout.rows)
        shape = (seat.world, problem.tokens, problem.cols)
        self._staging = self._memory.tensor(torch.bfloat16, shape, layout.staging)
        self._plans: OrderedDict[tuple[str, int], CombinePlan] = OrderedDict()
        self._kept_bytes = memory_bytes(self._index) // KEPT_CASES_SHARE
        policy = seat.policy
        with self._control.launching():
            self._weights = draw_weights(problem, seat.rank, self._device)
            self._y = torch.empty(
                problem.tokens + GUARD_TOKENS, problem.cols, dtype=torch.bfloat16, device=self._device
            )
            self._finished, self._queue, self._dispenser = (
                torch.zeros(n, dtype=torch.int32, device=self._device)
                for n in (layout.landed_stride, QUEUE_WORDS, 2)
            )
            self._sequence = torch.zeros(1, dtype=torch.int64, device=self._device)
            self._where = rank_memory(
                layout, self._memory, self._finished, self._queue, self._dispenser, self._sequence
            )
            flush = policy.flush_bytes if policy.cache_state == "cold" else 0
            self._stopwatch = Stopwatch(self._index, flush)
            self._prepare(problem.routing, policy.routing_seeds[0])  # library kernels are loaded now
            synchronize(current_stream(self._index))

    # The workbench protocol.

    def gate(self, config: Config, routing: str, seed: int, sequence: int) -> GateResult:
        """One fused launch on buffers full of NaN, compared with the fp32 reference (`plan_cuda.check_combined`)."""
        with self._control.launching():
            plan = self._prepare(routing, seed)
            for buffer in (self._y, self._staging, self._rows[: len(plan.activations)]):
                buffer.fill_(math.nan)
            self._seed(sequence)
            launch, meeting = self._launch(config, plan, "fused"), self._meeting()
            stream = current_stream(self._index)
            meeting(stream)  # every rank's buffers are ready
            launch(stream)
            meeting(stream)  # nobody changes its buffers while a peer still reads or writes them
            synchronize(stream)
            rows = self._rows[: len(plan.activations)]
            verdict = check_combined(
                self.problem, plan, self._y, rows, self._staging, config["form"] == "pull"
            )
            counters = (self._finished, self._queue, self._dispenser)
            if any(bool(counter.any()) for counter in counters):
                said = f"The launch left its counters other than it found them. {verdict.sentence}".strip()
                verdict = GateResult(False, verdict.worst_error, verdict.tolerance, said)
            if debug_cuda.asked():
                said = debug_cuda.first_wrong_buffer(
                    self.problem,
                    plan,
                    self._weights,
                    self.seat.rank,
                    self._y,
                    rows,
                    self._staging,
                    config["form"] == "pull",
                )
                if said:
                    verdict = GateResult(
                        False, math.inf, verdict.tolerance, f"{said} {verdict.sentence}".strip()
                    )
        return verdict

    def time(self, config: Config, mode: str, seed: int, iterations: int, sequence: int) -> list[float]:
        """Microseconds of each launch on this rank; all ranks meet on the device just before each.

        `comm` keeps the split and leaves compute out, with its rows in place; `serial` is the GEMM on all SMs, then the
        sums on all; `peer` is `torch._grouped_mm`.
        """
        policy = self.seat.policy
        with self._control.launching():
            plan = self._prepare(self.problem.routing, seed)
            self._seed(sequence)
            stream, meeting = current_stream(self._index), self._meeting()
            meeting(stream)
            self._launch(config, plan, "comp")(stream)  # rows are in place for whoever only sums
            synchronize(stream)
            if mode == "peer":
                rows = plan.activations[: plan.rows]
                ekn = self.problem.weight_layout == "ekn"
                weights = self._weights if ekn else self._weights.transpose(1, 2)
                work = library_work(
                    lambda: torch._grouped_mm(rows, weights, offs=plan.offsets), policy.launch_mode
                )
                samples = self._stopwatch.time(work, iterations, policy.warmup, meeting)
            else:
                names = ["announce", "sum"] if mode == "serial" else [mode]
                launches = [self._launch(config, plan, name) for name in names]
                samples = self._timed(launches, iterations, meeting)
            meeting(stream)  # nobody changes its buffers while a peer still reads or writes them
            synchronize(stream)
        return samples

    def result(self) -> torch.Tensor:
        """What the last launch left, (tokens, cols) bf16."""
        return self._y[: self.problem.tokens]

    def close(self) -> None:
        """Leave the device; after a fault its calls fail, and nothing is left to free."""
        self._modules.close()
        del self._rows, self._staging
        self._leave()

    # One launch.

    def _launch(self, config: Config, plan: CombinePlan, mode: str) -> Launch:
        if mode not in MODES:
            raise WordsError(f"There is no mode {mode!r}.", "Use fused, comp, comm, serial or peer.")
        module, problem = self._need_module(), self.problem
        roles, who = MODES[mode]
        cluster = module.facts.cluster
        grid = self.seat.device.sm_count // cluster * cluster
        computing = {"all": grid, "none": 0, "split": grid - config.number("num_comm_sms")}[who]
        arguments = packed_launch(
            config,
            problem,
            self._maps,
            self._control.guard,
            self._where,
            plan.tables_of(config, problem),
            plan.activations,
            self._weights,
            self._rows[: len(plan.activations)],
            self._y,
            roles,
            computing,
        )
        kept = (module, plan, self._weights, self._y, self._finished, self._queue, self._dispenser)
        return Launch(
            module.function,
            grid,
            module.facts.threads,
            module.smem_bytes,
            arguments,
            (*kept, self._sequence, self._memory),
        )

    def _seed(self, sequence: int) -> None:
        """Count from `sequence`, with every counter as a launch expects and leaves it."""
        self._sequence.fill_(sequence)
        for counter in (self._finished, self._queue, self._dispenser):
            counter.zero_()

    # Inputs.

    def _prepare(self, routing: str, seed: int) -> CombinePlan:
        """The plan with its activations in their slots."""
        key = (routing, seed)
        plan = self._plans.pop(key, None)
        if plan is None:
            plan = make_plan(self.problem, self._weights, self.seat.rank, routing, seed)
        self._plans[key] = plan
        while len(self._plans) > 1 and sum(p.bytes for p in self._plans.values()) > self._kept_bytes:
            self._plans.popitem(last=False)
        return plan
