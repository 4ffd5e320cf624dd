"""A layer on a rank with a GPU: both kernels' artifacts at one seat, timed as a call of the layer runs them."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tktune.build.pairs import parts_of
from tktune.core.config import Config
from tktune.core.errors import ArtifactError, ConstraintRefused, GangError
from tktune.families.base import GateResult, RankSeat
from tktune.families.control_page import ControlPage
from tktune.families.cuda.control import Control
from tktune.families.cuda.driver import attach, current_stream, load_lazily, memory_bytes, synchronize
from tktune.families.cuda.gemm_globals import Guard
from tktune.families.cuda.launch import Graph, Work
from tktune.families.cuda.module import verified
from tktune.families.cuda.stopwatch import Stopwatch
from tktune.families.cuda.symmetric import MemfdExchange, try_peers
from tktune.families.cuda.tensor_map import TensorMaps
from tktune.families.dispatch_gemm.module_cuda import DispatchModule
from tktune.families.gemm_combine.module_cuda import CombineModule
from tktune.families.grouped_gemm.launch_cuda import KEPT_CASES_SHARE
from tktune.moe.cases_cuda import LayerCase, check_layer, make_case, weights_of
from tktune.moe.launches_cuda import LayerLaunches, LayerMemory
from tktune.moe.parts import PARTS

EXCHANGE_S = 45.0  # below the driver's deadline for seating a rank
PATIENCE_S = 120.0  # of meetings between ranks that prepare at their own pace
SELF_TEST_ROUNDS = 64


class CudaLayerWorkbench:
    """One rank's seat at a GPU, beside its peers. Cases are kept per (routing, seed), modules per artifact.

    A timed launch of the mode `fused` is a whole call of the layer: rows copied to where peers read them, tables, both
    kernels, the meeting between them. `comp` is both GEMMs alone, `serial` each kernel's communication on all SMs beside
    its computing on all SMs. Sequence numbers: one for each meeting.
    """

    def __init__(self, seat: RankSeat) -> None:
        self.seat, self.problem = seat, seat.problem
        self._index = seat.device_index
        load_lazily()  # everything is used once before ranks meet, so that nothing is loaded while one waits
        attach(self._index)
        self._device = torch.device("cuda", self._index)
        self._page = ControlPage(seat.control_fd)
        self._control = Control(self._page, seat.rank, seat.spin_limit_s)
        guard = self._control.guard
        self._patient = Guard(PATIENCE_S, guard.rank, guard.report, guard.abort_word)
        exchange = MemfdExchange(seat.symmetric_fds, seat.rank, EXCHANGE_S, lambda: self._page.aborted)
        self._modules: dict[str, Any] = {}
        self._pair: tuple[DispatchModule, CombineModule] | None = None
        self._peers_tried = False
        self._maps = TensorMaps()
        self._cases: OrderedDict[tuple[str, int], LayerCase] = OrderedDict()
        self._kept_bytes = memory_bytes(self._index) // KEPT_CASES_SHARE
        policy = seat.policy
        with self._control.launching():
            self._memory = LayerMemory(self.problem, seat.rank, exchange, guard, self._device)
            self._weights = weights_of(self.problem, seat.rank, self._device)
            flush = policy.flush_bytes if policy.cache_state == "cold" else 0
            self._stopwatch = Stopwatch(self._index, flush)
            self._case(self.problem.routing, policy.routing_seeds[0])  # library kernels are loaded now
            synchronize(current_stream(self._index))

    # The workbench protocol.

    def load(self, artifact: Path, sha256: str, build_part: Config) -> dict[str, Any]:
        """Load the two artifacts that the pair names; the first time, try the peers' memory. Raises `ArtifactError`."""
        self._pair = None
        parts = parts_of(artifact, sha256)
        if len(parts) != len(PARTS):
            raise ArtifactError(f"{artifact} names {len(parts)} artifacts.", "Build it again.")
        first, second = (
            self._module(kind, part.path, part.sha256)
            for kind, part in zip((DispatchModule, CombineModule), parts, strict=True)
        )
        if not self._peers_tried:
            self._try_peers(first)
        self._pair = first, second
        return {
            name: {"smem_bytes": module.facts.smem_bytes, "resident_blocks": module.resident_blocks}
            for name, module in zip(PARTS, self._pair, strict=True)
        }

    def gate(self, config: Config, routing: str, seed: int, sequence: int) -> GateResult:
        """One call on buffers full of NaN, compared with the fp32 reference of the layer."""
        memory = self._memory
        with self._control.launching():
            case = self._case(routing, seed)
            for buffer in (
                memory.y,
                memory.staging,
                memory.rows,
                memory.inner,
                memory.gathered,
                memory.everyone,
            ):
                buffer.fill_(math.nan)
            launches, stream = self.launches(case), current_stream(self._index)
            memory.count_from(sequence)
            meeting = launches.meeting(self._patient)
            works: list[Work] = [meeting, *launches.layer(config), meeting]
            for work in works:
                work(stream)
            synchronize(stream)
            verdict = check_layer(self.problem, case, memory.y)
            if not memory.counters_are_clear():
                said = f"The launch left its counters other than it found them. {verdict.sentence}".strip()
                verdict = GateResult(False, verdict.worst_error, verdict.tolerance, said)
        return verdict

    def time(self, config: Config, mode: str, seed: int, iterations: int, sequence: int) -> list[float]:
        """Microseconds of each call on this rank; all ranks meet on the device just before each."""
        if mode in ("comm", "peer"):
            raise ConstraintRefused("mode", f"A layer has no mode {mode}.")
        with self._control.launching():
            case = self._case(self.problem.routing, seed)
            launches = self.launches(case)
            works = {
                "fused": launches.layer,
                "comp": launches.computing,
                "serial": launches.serial,
            }[mode](config)
            return self.timed(launches, config, works, iterations, sequence)

    def timed(
        self, launches: LayerLaunches, config: Config, works: Sequence[Work], iterations: int, sequence: int
    ) -> list[float]:
        """Microseconds of `works` in this order, launched as the policy says, after a whole call has left its data."""
        policy, stream = self.seat.policy, current_stream(self._index)
        self._memory.count_from(sequence)
        meeting = launches.meeting(self._patient)
        before: list[Work] = [meeting, *launches.layer(config)]
        for work in before:
            work(stream)
        synchronize(stream)

        def run(on: int) -> None:
            for work in works:
                work(on)

        if policy.launch_mode == "direct":
            samples = self._stopwatch.time(run, iterations, policy.warmup, meeting)
        else:
            graph = Graph(run)
            try:
                samples = self._stopwatch.time(graph, iterations, policy.warmup, meeting)
            finally:
                graph.close()
        meeting(stream)  # nobody changes its buffers while a peer still reads or writes them
        synchronize(stream)
        return samples

    def launches(self, case: LayerCase) -> LayerLaunches:
        if self._pair is None:
            raise ArtifactError("No artifact is loaded.", "Send a load before gate or time.")
        device = self.seat.device
        return LayerLaunches(
            self._memory, self._pair, device, self._maps, *self._weights, case.ids, case.topk_weights, case.x
        )

    def case(self, routing: str, seed: int) -> LayerCase:
        return self._case(routing, seed)

    def close(self) -> None:
        """Leave the device; after a fault its calls fail, and nothing is left to free."""
        self._pair = None
        self._modules.clear()
        self._memory.close()
        self._control.close()
        self._page.close()

    # Below.

    def _module(self, kind: Any, path: Path, sha256: str) -> Any:
        module = self._modules.get(sha256)
        if module is None:
            device = self.seat.device
            module = kind(verified(path, sha256), device.sm_count, device.smem_optin_bytes)
            self._modules[sha256] = module
        if module.world != self.seat.world:
            raise ArtifactError(
                f"{path} was built for {module.world} ranks, and there are {self.seat.world}.",
                "Build it for this world.",
            )
        return module

    def _try_peers(self, module: DispatchModule) -> None:
        stream = current_stream(self._index)
        with self._control.launching():
            memory = self._memory.memory
            wrong = try_peers(module.self_test, memory, self._patient, 0, SELF_TEST_ROUNDS, stream)
        if wrong:
            raise GangError(wrong, "Check the topology and the IOMMU settings; run `tktune doctor`.")
        self._peers_tried = True

    def _case(self, routing: str, seed: int) -> LayerCase:
        key = (routing, seed)
        case = self._cases.pop(key, None)
        if case is None:
            case = make_case(self.problem, self.seat.rank, routing, seed, self._device)
        self._cases[key] = case
        while len(self._cases) > 1 and sum(c.bytes for c in self._cases.values()) > self._kept_bytes:
            self._cases.popitem(last=False)
        return case
