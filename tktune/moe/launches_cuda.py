"""The launches of a layer on one GPU: both kernels, their tables built on the device, and the meetings of ranks, in one
symmetric memory. What a launch reads and writes is made here; who times or judges it is elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.errors import WordsError
from tktune.core.problem import Problem
from tktune.families import glu
from tktune.families.cuda import dispatch_globals as wire
from tktune.families.cuda import plan_globals, push_globals
from tktune.families.cuda.gemm_globals import Guard
from tktune.families.cuda.launch import Launch, Work
from tktune.families.cuda.symmetric import HEADER_BYTES, MEETING, Exchange, SymmetricMemory
from tktune.families.cuda.tensor_map import TensorMaps
from tktune.families.dispatch_gemm.fused_launch import fused_launch
from tktune.families.dispatch_gemm.glu_cuda import glu_pass
from tktune.families.dispatch_gemm.launch_words import token_rows
from tktune.families.dispatch_gemm.module_cuda import DispatchModule
from tktune.families.dispatch_gemm.planner_cuda import Planner, plan_entry
from tktune.families.dispatch_gemm.push_cuda import PushMemory
from tktune.families.dispatch_gemm.tables_cuda import DeviceTables
from tktune.families.dispatch_gemm.transport import is_indexed, is_push
from tktune.families.formulas import round_up
from tktune.families.gemm_combine import plan_globals as sums_globals
from tktune.families.gemm_combine.fused_launch import launch_tables, packed_launch, rank_memory
from tktune.families.gemm_combine.globals_cuda import QUEUE_WORDS
from tktune.families.gemm_combine.layout import PAGE, SymmetricLayout
from tktune.families.gemm_combine.module_cuda import CombineModule
from tktune.families.gemm_combine.planner_cuda import CombinePlanner, combine_plan_entry, listing_of
from tktune.families.gemm_combine.tables_cuda import DeviceCombineTables
from tktune.moe.parts import COMBINE, DISPATCH, part_config, part_problem

_BF16 = torch.bfloat16
GUARD_TOKENS = 8  # behind the last token, which nobody may write
# Roles of the two kernels' launches, and how many blocks compute: those that the split leaves, all, or none.
_FIRST = {
    "fused": (wire.FUSED, "split"),
    "comp": (wire.COMPUTE, "all"),
    "gated": (wire.COMPUTE | wire.GATED, "all"),
    "gather": (wire.COMMUNICATE, "none"),
}
_SECOND = {
    "fused": (wire.FUSED, "split"),
    "comp": (wire.COMPUTE, "all"),
    "announce": (wire.COMPUTE | wire.GATED, "all"),
    "sum": (wire.COMMUNICATE | wire.GATED, "none"),
}


class LayerMemory:
    """Everything that a layer's launches on this rank read and write, but weights. Making it is collective.

    `x` (tokens, hidden) lies where peers read it, `inner` (capacity, intermediate) is what the first kernel leaves, `y`
    (tokens and guard rows, hidden) the result, `staging` (ranks, tokens, hidden) the partial sums of own tokens.
    """

    def __init__(
        self, layer: Problem, rank: int, exchange: Exchange, guard: Guard, device: torch.device
    ) -> None:
        self.layer = layer
        first, second = self.first, self.second = part_problem(layer, DISPATCH), part_problem(layer, COMBINE)
        world, tokens, hidden = layer.world, layer.tokens, layer.hidden
        section = 2 * tokens * hidden
        plans_at = round_up(HEADER_BYTES + world * section, 1024)
        layout = self.layout = SymmetricLayout.of(
            second, round_up(plans_at + plan_globals.region_bytes(first), PAGE)
        )
        sums_at = round_up(layout.bytes, 1024)
        flags_at = round_up(sums_at + sums_globals.region_bytes(second), 1024)
        nbytes = flags_at + sum(push_globals.flag_bytes(first))
        memory = self.memory = SymmetricMemory(nbytes, rank, world, exchange)
        self.everyone = memory.tensor(_BF16, (world * tokens, hidden), HEADER_BYTES)
        self.x = self.everyone[rank * tokens : (rank + 1) * tokens]
        self.rows = memory.tensor(_BF16, (layout.num_rows, hidden), layout.rows)
        self.staging = memory.tensor(_BF16, (world, tokens, hidden), layout.staging)
        self.token_rows = token_rows(memory.addresses(HEADER_BYTES), section)
        capacity = self.capacity = layer.capacity_rows

        def words(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        def bf16(rows: int, cols: int) -> torch.Tensor:
            return torch.zeros(rows, cols, dtype=_BF16, device=device)

        self.gathered, self.inner = bf16(capacity, hidden), bf16(capacity, layer.cols)
        self._packed: torch.Tensor | None = None
        self.y = bf16(tokens + GUARD_TOKENS, hidden)
        self.finished, self.queue, self.dispenser = (
            words(count) for count in (layout.landed_stride, QUEUE_WORDS, 2)
        )
        self.sequence = torch.zeros(1, dtype=torch.int64, device=device)
        self.where = rank_memory(layout, memory, self.finished, self.queue, self.dispenser, self.sequence)
        # The meeting of a call numbers the flags of the next one's pushes.
        self.pushing = PushMemory(first, memory, HEADER_BYTES, flags_at, self.sequence)
        self.planner = Planner(first, memory.addresses(plans_at), guard, device)
        self._schedules = {False: self.planner.tables()}
        self.sums_region = memory.addresses(sums_at)
        self.guard, self.device = guard, device
        self._sums: CombinePlanner | None = None
        self._before_sums = 0
        self._tables: dict[tuple[int, int], DeviceCombineTables] = {}

    def packed(self) -> torch.Tensor:
        """The first GEMM's outputs where SwiGLU is separate, (capacity, 2 × intermediate)."""
        if self._packed is None:
            self._packed = torch.zeros(self.capacity, self.first.cols, dtype=_BF16, device=self.device)
        return self._packed

    def schedule(self, config: Config) -> DeviceTables:
        """The schedule's tables, those of pushes too where rows are pushed."""
        pushes = is_push(part_config(config, DISPATCH))
        if pushes not in self._schedules:
            self._schedules[pushes] = DeviceTables(self.first, self.capacity, self.device, pushes=pushes)
        return self._schedules[pushes]

    def sums(self, config: Config) -> tuple[CombinePlanner, DeviceCombineTables]:
        """The planner of combine tables, which counts on from config to config, and the tables that `config` reads."""
        listing = listing_of(config, self.second)
        if self._sums is None:
            self._sums = CombinePlanner(self.second, self.sums_region, self.guard, self.device, listing)
            self._sums.count_from(self._before_sums)
        self._sums.listing = listing
        size = (listing.groups, listing.passes)
        if size not in self._tables:
            self._tables[size] = self._sums.tables()
        return self._sums, self._tables[size]

    def count_from(self, sequence: int) -> None:
        """Count meetings and plans from `sequence`, with every counter as a launch expects and leaves it.

        The same on every rank, larger than ever before, with nothing under way: a launch that was given up may have left
        ranks with different counts.
        """
        self.sequence.fill_(sequence)
        self.planner.count_from(sequence)
        if self._sums is None:
            self._before_sums = sequence
        else:
            self._sums.count_from(sequence)
        for counter in (self.finished, self.queue, self.dispenser):
            counter.zero_()

    def counters_are_clear(self) -> bool:
        return not any(bool(counter.any()) for counter in (self.finished, self.queue, self.dispenser))

    def close(self) -> None:
        self.memory.close()


class LayerLaunches:
    """Launches of one pair of artifacts in one memory, for one rank's weights, ids and routing weights."""

    def __init__(
        self,
        memory: LayerMemory,
        modules: tuple[DispatchModule, CombineModule],
        device: DeviceClass,
        maps: TensorMaps,
        w13: torch.Tensor,
        w2: torch.Tensor,
        ids: torch.Tensor,
        topk_weights: torch.Tensor,
        x: torch.Tensor,
    ) -> None:
        self._memory, self._modules, self._device, self._maps = memory, modules, device, maps
        self._w13, self._w2, self._ids, self._topk_weights, self._x = w13, w2, ids, topk_weights, x

    def layer(self, config: Config) -> list[Work]:
        """All of a call: rows to where peers read them, tables, the first kernel, one meeting, the second kernel.

        The tables' launch is a meeting too: it ends when the ids of all ranks are there, which each of them gives after its
        rows. The meeting between the kernels lets ranks overwrite rows that all have read by then, and partial sums that
        all have added.
        """
        return [self.copied(), *self.plans(config), *self.first(config), self.meeting(), self.second(config)]

    def serial(self, config: Config) -> list[Work]:
        """The same with each kernel's communication before or after its computing, on all SMs. Rows by index that peers push
        come when they come: compute alone, but not before them.
        """
        own = part_config(config, DISPATCH)
        alone = "gated" if is_push(own) and is_indexed(own) else "comp"
        return [
            self.copied(),
            *self.plans(config),
            self._first(config, "gather"),
            *self.first(config, alone),
            self.meeting(),
            self.second(config, "announce"),
            self.second(config, "sum"),
        ]

    def computing(self, config: Config) -> list[Work]:
        """Both GEMMs alone on all SMs, with data in place."""
        return [*self.first(config, "comp"), self.second(config, "comp")]

    # Pieces.

    def copied(self) -> Work:
        """Rows from ordinary memory to where peers read them."""
        source, target = self._x, self._memory.x
        return self._by_torch(lambda: target.copy_(source))

    def _by_torch(self, call: Callable[[], object]) -> Work:
        """A call of torch that allocates nothing, on whichever stream it is to run."""
        device = self._memory.device

        def work(stream: int) -> None:
            external = torch.cuda.ExternalStream(stream, device=device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(external):
                call()

        return work

    def plans(self, config: Config) -> list[Work]:
        return [self.schedule(config), self.sums(config)]

    def schedule(self, config: Config) -> Launch:
        memory, own = self._memory, part_config(config, DISPATCH)
        entry = plan_entry(self._modules[0], plan_globals.shared_bytes(memory.first), is_push(own))
        return memory.planner.launch(
            entry, self._ids, memory.schedule(config), (self._modules[0],), own_in_place=is_indexed(own)
        )

    def sums(self, config: Config) -> Launch:
        memory = self._memory
        planner, tables = memory.sums(part_config(config, COMBINE))
        entry = combine_plan_entry(self._modules[1], memory.second)
        schedule = memory.schedule(config)
        return planner.launch(entry, self._topk_weights, schedule, tables, (self._modules[1],))

    def first(self, config: Config, mode: str = "fused") -> list[Work]:
        """The first kernel and, where SwiGLU is separate, its pass."""
        launches: list[Work] = [self._first(config, mode)]
        if glu.is_separate(part_config(config, DISPATCH)):
            memory, module, at = self._memory, self._modules[0], self._memory.schedule(config).at
            launches.append(
                glu_pass(
                    module.glu_pass, self._device.sm_count, memory.packed(), memory.inner, at["words"],
                    at["pull_indices"], (module, memory),
                )
            )  # fmt: skip
        return launches

    def _first(self, config: Config, mode: str) -> Launch:
        own, memory = part_config(config, DISPATCH), self._memory
        rows = memory.everyone if is_indexed(own) else memory.gathered
        roles, who = _known(_FIRST, mode)
        return fused_launch(
            self._modules[0],
            own,
            memory.first,
            self._device.sm_count,
            self._maps,
            memory.guard,
            memory.token_rows,
            rows,
            self._w13,
            memory.packed() if glu.is_separate(own) else memory.inner,
            memory.schedule(config),
            roles=roles,
            computing={"split": None, "all": self._device.sm_count, "none": 0}[who],
            pushing=memory.pushing,
        )

    def second(self, config: Config, mode: str = "fused") -> Launch:
        own, memory, module = part_config(config, COMBINE), self._memory, self._modules[1]
        roles, who = _known(_SECOND, mode)
        cluster = module.facts.cluster
        grid = self._device.sm_count // cluster * cluster
        computing = {"all": grid, "none": 0, "split": grid - own.number("num_comm_sms")}[who]
        tables = memory.sums(own)[1]
        arguments = packed_launch(
            own, memory.second, self._maps, memory.guard, memory.where, launch_tables(own, memory.schedule(config), tables), memory.inner, self._w2,
            memory.rows, memory.y, roles, computing,
        )  # fmt: skip
        kept = (module, memory, tables.memory, self._w2)
        return Launch(module.function, grid, module.facts.threads, module.smem_bytes, arguments, kept)

    def meeting(self, guard: Guard | None = None) -> Launch:
        """All ranks leave it together; each call of it is the next one, also when a graph replays it."""
        memory, module = self._memory, self._modules[0]
        words = memory.memory.addresses(MEETING)
        arguments = wire.packed_meeting(words, memory.sequence.data_ptr(), guard or memory.guard)
        return Launch(module.meet, 1, 32, 0, arguments, (module, memory))

    def reduced(self) -> Work:
        """The final sum of own tokens alone, by torch: all partial sums read once, the result written once."""
        planes, y = self._memory.staging, self._memory.y[: self._memory.layer.tokens]
        if len(planes) == 2:
            return self._by_torch(lambda: torch.add(planes[0], planes[1], out=y))
        return self._by_torch(lambda: torch.sum(planes, 0, out=y))


def _known(modes: dict[str, tuple[int, str]], mode: str) -> Any:
    if mode not in modes:
        raise WordsError(f"There is no mode {mode!r}.", "Use fused, comp or serial.")
    return modes[mode]
