"""What workbenches of families whose launches meet other ranks' share: their place at a GPU, the meeting, and timing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from tktune.core.config import Config
from tktune.core.errors import ArtifactError
from tktune.families.base import RankSeat
from tktune.families.control_page import ControlPage
from tktune.families.cuda.control import Control
from tktune.families.cuda.dispatch_globals import packed_meeting
from tktune.families.cuda.driver import attach, current_stream, load_lazily
from tktune.families.cuda.gemm_globals import Guard
from tktune.families.cuda.launch import Graph, Launch, Work
from tktune.families.cuda.module import Modules, verified
from tktune.families.cuda.ranks_module import RanksModule
from tktune.families.cuda.stopwatch import Stopwatch
from tktune.families.cuda.symmetric import MEETING, Exchange, MemfdExchange, SymmetricMemory, trust_peers
from tktune.families.cuda.tensor_map import TensorMaps

EXCHANGE_S = 45.0  # below the driver's deadline for seating a rank
PATIENCE_S = (
    120.0  # of meetings between ranks that prepare at their own pace: the driver's deadline comes first
)
Loaded = TypeVar("Loaded", bound=RanksModule)


class RankAtGpu:
    """The GPU of one rank, its control page, and how it exchanges words with the other ranks while it opens.

    `exchange_s` bounds that exchange, `patience_s` the waits of meetings; launches wait as long as the seat says.
    """

    _memory: SymmetricMemory
    _sequence: torch.Tensor  # (1) int64: meetings so far

    def __init__(
        self,
        seat: RankSeat,
        exchange: Exchange | None = None,
        exchange_s: float = EXCHANGE_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.seat, self.problem = seat, seat.problem
        self._index = seat.device_index
        load_lazily()  # everything is used once before ranks meet, so that nothing is loaded while one waits
        attach(self._index)
        self._device = torch.device("cuda", self._index)
        self._page = page = ControlPage(seat.control_fd)
        self._control = Control(page, seat.rank, seat.spin_limit_s)
        guard = self._control.guard
        self._patient = Guard(patience_s, guard.rank, guard.report, guard.abort_word)
        if exchange is None:
            exchange = MemfdExchange(seat.symmetric_fds, seat.rank, exchange_s, lambda: page.aborted)
        self._exchange: Exchange = exchange
        self._maps = TensorMaps()

    def _meeting_of(self, module: RanksModule) -> Launch:
        """All ranks leave it together; each call of it is the next one, also when a graph replays it."""
        words = self._memory.addresses(MEETING)
        arguments = packed_meeting(words, self._sequence.data_ptr(), self._patient)
        return Launch(module.meet, 1, 32, 0, arguments, (self._sequence, self._memory))

    def _leave(self) -> None:
        """Not before views of symmetric memory are gone."""
        self._memory.close()
        self._control.close()
        self._page.close()


class RanksWorkbench(RankAtGpu, Generic[Loaded]):
    """One that runs artifacts of one kind: `kind(content, sm_count, smem_bytes)` loads them, and they stay loaded."""

    _stopwatch: Stopwatch

    def __init__(
        self, seat: RankSeat, kind: Callable[[bytes, int, int], Loaded], exchange: Exchange | None = None
    ) -> None:
        super().__init__(seat, exchange)
        self._kind = kind
        self._modules = Modules[Loaded]()
        self._module: Loaded | None = None
        self._peers_tried = False

    def load(self, artifact: Path, sha256: str, build_part: Config) -> dict[str, Any]:
        """Verify the file's SHA-256, load it whole; the first time, try the peers' memory. Raises `ArtifactError`."""
        self._module = None
        device = self.seat.device
        module = self._modules.get(
            sha256,
            lambda: self._kind(verified(artifact, sha256), device.sm_count, device.smem_optin_bytes),
        )
        module.expect_world(self.seat.world, artifact)
        if not self._peers_tried:
            stream = current_stream(self._index)
            trust_peers(module.self_test, self._memory, self._patient, self._control.launching(), stream)
            self._peers_tried = True
        self._module = module
        facts = module.facts
        return {
            "smem_bytes": facts.smem_bytes,
            "threads": facts.threads,
            "cluster": facts.cluster,
            "resident_blocks": module.resident_blocks,
        }

    def _need_module(self) -> Loaded:
        if self._module is None:
            raise ArtifactError("No artifact is loaded.", "Send a load before gate or time.")
        return self._module

    def _meeting(self) -> Launch:
        return self._meeting_of(self._need_module())

    def _timed(self, launches: Sequence[Work], iterations: int, meeting: Launch) -> list[float]:
        """Microseconds of these launches in their order, made as the policy says; ranks meet just before each time."""
        policy = self.seat.policy

        def work(stream: int) -> None:
            for launch in launches:
                launch(stream)

        if policy.launch_mode == "direct":
            return self._stopwatch.time(work, iterations, policy.warmup, meeting)
        graph = Graph(work)
        try:
            return self._stopwatch.time(graph, iterations, policy.warmup, meeting)
        finally:
            graph.close()
