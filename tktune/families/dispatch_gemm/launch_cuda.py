"""dispatch_gemm on a rank with a GPU: the launch itself pulls the rows from the peers' symmetric memory."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import torch

from tktune.core.config import Config
from tktune.core.errors import WordsError
from tktune.families import glu
from tktune.families.base import GateResult, RankSeat
from tktune.families.bf16 import gemm_tolerance, swiglu_tolerance
from tktune.families.cuda import dispatch_globals as mirror
from tktune.families.cuda import push_globals
from tktune.families.cuda.dispatch_globals import DispatchGlobals
from tktune.families.cuda.driver import (
    current_stream,
    memory_bytes,
    synchronize,
)
from tktune.families.cuda.gemm_globals import GemmGlobals, boxes_of
from tktune.families.cuda.gemm_inputs import check_output, draw_weights
from tktune.families.cuda.launch import Launch, Work
from tktune.families.cuda.plan_globals import region_bytes
from tktune.families.cuda.ranks_workbench import RanksWorkbench
from tktune.families.cuda.stopwatch import Stopwatch
from tktune.families.cuda.symmetric import (
    HEADER_BYTES,
    Exchange,
    SymmetricMemory,
)
from tktune.families.dispatch_gemm import glu_cuda
from tktune.families.dispatch_gemm.launch_words import (
    beside_of,
    head_of,
    openers_of,
    opening_of,
    slots_of,
    token_rows,
    wave_of,
)
from tktune.families.dispatch_gemm.module_cuda import DispatchModule
from tktune.families.dispatch_gemm.plan_cuda import Plan, Workspace, make_plan
from tktune.families.dispatch_gemm.push_cuda import PushMemory
from tktune.families.dispatch_gemm.rows_cuda import (
    GatheredRows,
    IndexedRows,
    Rows,
    StagedRows,
    is_indexed,
    walk_own_first,
)
from tktune.families.dispatch_gemm.timed_plan import TimedPlans
from tktune.families.dispatch_gemm.transport import is_push
from tktune.families.formulas import round_up
from tktune.families.grouped_gemm.launch_cuda import KEPT_CASES_SHARE, library_work, matrix_view


class CudaDispatchWorkbench(RanksWorkbench[DispatchModule]):
    """One rank's seat at a GPU, beside its peers. Plans are kept per (routing, seed), modules per artifact.

    Sequence numbers: `gate` takes two, `time` one for each launch and two more; plans have their own words
    and take one for each launch.
    """

    family = "dispatch_gemm"
    _timed_plans: TimedPlans | None = None  # where the policy times the plan too

    def __init__(self, seat: RankSeat, exchange: Exchange | None = None) -> None:
        super().__init__(seat, DispatchModule, exchange)
        tokens, hidden = self.problem.tokens, self.problem.hidden
        # One section for each rank's rows; a rank reads the others' own ones.
        self._section_bytes = tokens * hidden * 2
        plans_at = round_up(HEADER_BYTES + seat.world * self._section_bytes, 1024)
        flags_at = round_up(plans_at + (region_bytes(self.problem) if seat.policy.include_plan else 0), 1024)
        nbytes = flags_at + sum(push_globals.flag_bytes(self.problem))
        self._memory = SymmetricMemory(nbytes, seat.rank, seat.world, self._exchange)
        self._everyone = self._memory.tensor(torch.bfloat16, (seat.world * tokens, hidden), HEADER_BYTES)
        self._x = self._everyone[seat.rank * tokens : (seat.rank + 1) * tokens]
        self._plans: OrderedDict[tuple[str, int], Plan] = OrderedDict()
        self._kept_bytes = memory_bytes(self._index) // KEPT_CASES_SHARE
        policy = seat.policy
        with self._control.launching():
            self._weights = draw_weights(self.problem, seat.rank, self._device)
            self._space = Workspace(self.problem, self._device)
            self._sequence = torch.zeros(1, dtype=torch.int64, device=self._device)
            self._push = PushMemory(self.problem, self._memory, HEADER_BYTES, flags_at, self._sequence)
            self._stopwatch = Stopwatch(
                self._index, policy.flush_bytes if policy.cache_state == "cold" else 0
            )
            if policy.include_plan:
                region = self._memory.addresses(plans_at)
                self._timed_plans = TimedPlans(self.problem, region, self._patient, self._device)
            self._prepare(self.problem.routing, policy.routing_seeds[0])  # library kernels are loaded now
            synchronize(current_stream(self._index))

    # The workbench protocol.

    def gate(self, config: Config, routing: str, seed: int, sequence: int) -> GateResult:
        """One fused launch on buffers full of NaN, compared with the fp32 reference; the rows also bit by bit."""
        with self._control.launching():
            plan = self._prepare(routing, seed)
            rows = self._placed(config, plan)
            rows.poison()
            self._space.out.fill_(math.nan)
            self._space.packed.fill_(math.nan)
            launches = self._planned(config, plan, ["fused"])
            self._count_from(sequence)
            stream = current_stream(self._index)
            meeting = self._meeting()
            meeting(stream)
            for launch in launches:
                launch(stream)
            meeting(stream)  # nobody changes its rows while a peer still reads them
            synchronize(stream)
        return self._judge(plan, rows, config, sequence + 1 if is_push(config) else 0)

    def time(self, config: Config, mode: str, seed: int, iterations: int, sequence: int) -> list[float]:
        """Microseconds of each launch on this rank; all ranks meet on the device just before each.

        `comm` keeps the split and leaves compute out; `serial` is communication on all SMs, then compute on all;
        `comp` and `peer` (`torch._grouped_mm`) find their rows in place.
        """
        with self._control.launching():
            plan = self._prepare(self.problem.routing, seed)
            self._placed(config, plan)
            stream = current_stream(self._index)
            self._count_from(sequence)
            meeting = self._meeting()
            meeting(stream)  # every rank's rows are in place
            self._launch(config, plan, "gather")(stream)
            synchronize(stream)
            samples = self._measure(config, plan, mode, iterations, meeting)
            meeting(stream)  # nobody changes its rows while a peer still reads them
            synchronize(stream)
        return samples

    def _measure(
        self, config: Config, plan: Plan, mode: str, iterations: int, meeting: Launch
    ) -> list[float]:
        policy = self.seat.policy
        if mode == "peer":
            return self._stopwatch.time(self._peer(plan), iterations, policy.warmup, meeting)
        # Rows by index that peers push come when they come: compute alone, but not before them.
        alone = "gated" if is_push(config) and is_indexed(config) else "comp"
        names = ["gather", alone] if mode == "serial" else [mode]
        if mode in ("fused", "serial"):
            launches = self._planned(config, plan, names)
        else:  # a part, whose plan is there
            launches = self._launches(config, plan, names)
        return self._timed(launches, iterations, meeting)

    def close(self) -> None:
        """Leave the device; after a fault its calls fail, and nothing is left to free."""
        self._modules.close()
        del self._x, self._everyone
        self._leave()

    # One launch.

    def _launch(self, config: Config, plan: Plan, mode: str) -> Launch:
        """`mode`: fused, comp, comm, ungated, which is fused without gates on rows that are in place, or of a serial path:
        gather, communication on all SMs, and gated, comp behind gates.
        """
        sms = self.seat.device.sm_count
        computing = sms - config.number("num_comm_sms")
        roles, blocks = {
            "fused": (mirror.FUSED, computing),
            "comm": (mirror.COMMUNICATE, computing),
            "gather": (mirror.COMMUNICATE, 0),
            "ungated": (mirror.COMMUNICATE | mirror.COMPUTE, computing),
            "comp": (mirror.COMPUTE, sms),
            "gated": (mirror.COMPUTE | mirror.GATED, sms),
        }.get(mode, (0, 0))
        if not roles:
            raise WordsError(f"There is no mode {mode!r}.", "Use fused, comp, comm, serial or peer.")
        module = self._need_module()
        cluster = module.facts.cluster
        grid = sms // cluster * cluster
        experts = config.number("own_first") if "own_first" in config else 0
        walk = walk_own_first(plan, self.problem.pad, experts) if experts else plan.walk
        arguments = self._arguments(config, plan, roles, min(blocks, grid), module, walk)
        kept = (module, plan, (self._weights, walk), self._space, self._memory)
        return Launch(module.function, grid, module.facts.threads, module.smem_bytes, arguments, kept)

    def _planned(self, config: Config, plan: Plan, names: list[str]) -> list[Launch]:
        """Launches of these modes, after the one that builds their plan where the policy times that too."""
        if self._timed_plans is None:
            return self._launches(config, plan, names)
        arrivals, indexed, pushes = self._space.arrivals.data_ptr(), is_indexed(config), is_push(config)
        first = self._timed_plans.launch(self._need_module(), plan, arrivals, indexed, pushes)
        return [first, *self._launches(config, self._built(config, plan), names)]

    def _built(self, config: Config, plan: Plan) -> Plan:
        """The plan whose tables a whole launch reads: built on the device where the policy times that too."""
        timed = self._timed_plans
        return plan if timed is None else timed.built(plan, is_push(config))

    def _launches(self, config: Config, plan: Plan, names: list[str]) -> list[Launch]:
        """Launches of these modes; after one that computes comes the pass over its outputs where SwiGLU is separate."""
        made: list[Launch] = []
        for name in names:
            made.append(self._launch(config, plan, name))
            if glu.is_separate(config) and name in ("fused", "comp", "gated"):
                made.append(self._glu_pass(plan))
        return made

    def _glu_pass(self, plan: Plan) -> Launch:
        module, space = self._need_module(), self._space
        tables = plan.words.data_ptr(), plan.pull_indices.data_ptr()
        return glu_cuda.glu_pass(
            module.glu_pass, self.seat.device.sm_count, space.packed, space.out, *tables, (module, plan)
        )

    def _arguments(
        self,
        config: Config,
        plan: Plan,
        roles: int,
        computing: int,
        module: DispatchModule,
        walk: torch.Tensor,
    ) -> bytes:
        problem, space, boxes = self.problem, self._space, boxes_of(config, self.problem.weight_layout)
        rows = self._rows(config, plan)
        gemm = GemmGlobals(
            activations=matrix_view(self._maps, rows.buffer, boxes.activations),
            weights=matrix_view(self._maps, self._weights, boxes.weights),
            outputs=matrix_view(
                self._maps, space.packed if glu.is_separate(config) else space.out, boxes.outputs
            ),
            walk=walk.data_ptr(),
            dispenser=space.dispenser.data_ptr(),
            guard=self._control.guard,
            num_experts=len(walk),
            reduction=problem.hidden,
            cols=problem.cols,
            pad=problem.pad,
            raster_rows=config.number("raster_rows"),
        )
        warps = module.facts.threads // 32
        arguments = DispatchGlobals(
            gemm=gemm,
            gathered=rows.buffer.data_ptr(),
            plan=plan.words.data_ptr(),
            pull_indices=plan.pull_indices.data_ptr(),
            pull_tokens=plan.pull_tokens.data_ptr(),
            pull_slots=plan.pull_slots.data_ptr(),
            slack=rows.slack.data_ptr(),
            arrivals=space.arrivals.data_ptr(),
            queue=space.queue.data_ptr(),
            roles=roles,
            num_comp_blocks=computing,
            head=head_of(config, problem, computing),
            top_k=problem.top_k,
            wave=wave_of(config),
            opening=opening_of(config),
            slots=slots_of(config, problem, module.smem_bytes, warps),
            tokens=token_rows(self._memory.addresses(HEADER_BYTES), self._section_bytes),
            token_rows=problem.tokens,
            beside=beside_of(config, problem, module.smem_bytes, module.facts.smem_bytes),
            openers=openers_of(config),
        ).packed()
        if not is_push(config):
            return arguments
        communicating = self.seat.device.sm_count - computing
        return self._push.behind(arguments, plan.pushes.at, config, communicating)

    def _count_from(self, sequence: int) -> None:
        self._sequence.fill_(sequence)
        if self._timed_plans is not None:
            self._timed_plans.count_from(sequence)

    def _peer(self, plan: Plan) -> Work:
        """The library's grouped GEMM on the gathered rows, launched as the policy launches ours; with SwiGLU also torch's
        two kernels for it, on columns that are [gate | up] to the library."""
        case = plan.case
        rows = case.activations[: case.rows]
        weights = self._weights if self.problem.weight_layout == "ekn" else self._weights.transpose(1, 2)

        def multiply() -> Any:
            columns = torch._grouped_mm(rows, weights, offs=case.offsets)
            if self.problem.finish == "none":
                return columns
            gate, up = columns.chunk(2, dim=-1)
            return torch.nn.functional.silu(gate).mul_(up)

        return library_work(multiply, self.seat.policy.launch_mode)

    def _judge(self, plan: Plan, rows: Rows, config: Config | None = None, pushed: int = 0) -> GateResult:
        """`pushed`: the sequence number of the launch, where it pushed."""
        hidden, separate = self.problem.hidden, config is not None and glu.is_separate(config)
        tolerance = (
            gemm_tolerance(hidden) if self.problem.finish == "none" else swiglu_tolerance(hidden, separate)
        )
        verdict = check_output(plan.case, self._space.out, tolerance)
        said = rows.wrong()
        if not said and not self._space.left_as_found(rows.slack):
            said = "The launch left its counters other than it found them."
        if not said and separate and not bool(torch.isnan(self._space.packed[plan.case.rows :]).all()):
            said = "The GEMM wrote a row behind the last expert."
        if not said and self._timed_plans is not None:
            said = self._timed_plans.wrong_table(plan, pushed > 0)
        if not said and pushed and config is not None:
            pushes = self._built(config, plan).pushes
            said = self._push.wrong(config, pushes, plan.pull_tokens, self.seat.rank, pushed)
        if not said:
            return verdict
        sentence = f"{said} {verdict.sentence}".strip()
        return GateResult(False, verdict.worst_error, verdict.tolerance, sentence)

    # Inputs.

    def _prepare(self, routing: str, seed: int) -> Plan:
        """The plan with its buffers, counters and this rank's rows in place; peers may read them after a meeting."""
        key = (routing, seed)
        plan = self._plans.pop(key, None)
        if plan is None:
            plan = make_plan(self.problem, self._weights, self.seat.rank, routing, seed)
        self._plans[key] = plan
        while len(self._plans) > 1 and sum(p.bytes for p in self._plans.values()) > self._kept_bytes:
            self._plans.popitem(last=False)
        self._space.fit(plan)
        self._x.copy_(plan.x)
        return plan

    def _rows(self, config: Config, plan: Plan) -> Rows:
        if is_indexed(config):
            return IndexedRows(plan, self._everyone, self.seat.rank)
        if is_push(config):
            return StagedRows(plan, self._space, self._everyone, self.seat.rank)
        return GatheredRows(plan, self._space)

    def _placed(self, config: Config, plan: Plan) -> Rows:
        """Where rows of this config go, with the counters seeded for it."""
        rows = self._rows(config, plan)
        self._space.seed(rows.slack)
        if is_push(config):
            plan.pushes.seed()
        return rows
