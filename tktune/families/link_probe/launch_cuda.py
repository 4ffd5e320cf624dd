"""The link probe on a rank with a GPU: each way is first gated on poisoned memory, then timed with all ranks at once."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver as cu

from tktune.core.config import Config
from tktune.core.errors import ArtifactError, ConstraintRefused, WordsError
from tktune.families.base import GateResult, RankSeat
from tktune.families.bf16 import gemm_tolerance
from tktune.families.cuda import probe_globals as mirror
from tktune.families.cuda.dispatch_globals import meeting_bytes
from tktune.families.cuda.driver import check, current_stream, synchronize
from tktune.families.cuda.gemm_globals import DISPENSER_WORDS, walk_entries
from tktune.families.cuda.launch import Launch, Work
from tktune.families.cuda.module import Module, verified
from tktune.families.cuda.probe_globals import ProbeGlobals, packed_echo
from tktune.families.cuda.ranks_module import RanksModule
from tktune.families.cuda.ranks_workbench import RankAtGpu
from tktune.families.cuda.stopwatch import Stopwatch
from tktune.families.cuda.symmetric import FLAGS, HEADER_BYTES, SymmetricMemory
from tktune.families.grouped_gemm.launch_cuda import gemm_launch
from tktune.families.link_model import WAYS
from tktune.families.link_probe import space

EXCHANGE_S = 30.0
PATIENCE_S = 30.0  # of meetings: the driver's deadline comes first
STRIDE = 0x9E3779B1  # odd: scattered stores go to rows far apart
ECHO_NUMBERS = 4096  # signal numbers for each sequence number
LAUNCHES = 200  # timed together for one sample of the host's cost
GATED_ROWS, GATED_PIECES = 4001, 200_003  # no multiple of anything
POISON = -1


class LinkModule(RanksModule):
    """The probe's artifact: the copying entry, the meeting of ranks, and the echo."""

    def __init__(self, content: bytes, sm_count: int, smem_bytes: int) -> None:
        super().__init__(content, "link_probe", sm_count)
        self.world, *argument_bytes = self._words("tktune_link_probe_world", 3)
        made = [mirror.GLOBALS_BYTES, meeting_bytes(self.world), mirror.ECHO_BYTES]
        self._complete(smem_bytes, [self.facts.globals_bytes, *argument_bytes], made)
        self.echo = self._entry("echo")


@dataclass(frozen=True)
class GemmPlace:
    """The GEMM that is slowed down: its module and everything that a launch of it reads and writes."""

    module: Module
    config: Config
    activations: torch.Tensor
    weights: torch.Tensor
    outputs: torch.Tensor
    walk: torch.Tensor
    dispenser: torch.Tensor


class LinkWorkbench(RankAtGpu):
    """One rank's seat. Rows lie in symmetric memory: first those that are read, then those that are written.

    A rank's peer is the next one; whoever writes here is the one before. Sequence numbers: `gate` takes two meetings,
    `time` one for each launch and one more; an echo counts `ECHO_NUMBERS` to each.
    """

    def __init__(self, seat: RankSeat) -> None:
        super().__init__(seat, exchange_s=EXCHANGE_S, patience_s=PATIENCE_S)
        nbytes = HEADER_BYTES + space.SOURCE_BYTES + space.TARGET_BYTES
        self._memory = SymmetricMemory(nbytes, seat.rank, seat.world, self._exchange)
        self._next, self._before = (seat.rank + 1) % seat.world, (seat.rank - 1) % seat.world
        self._link: LinkModule | None = None
        self._gemm: GemmPlace | None = None
        with self._control.launching():
            self._sequence = torch.zeros(1, dtype=torch.int64, device=self._device)
            self._echoes = torch.zeros(1, dtype=torch.int64, device=self._device)
            self._stopwatch = Stopwatch(self._index, 0)
            self._words(HEADER_BYTES, space.SOURCE_BYTES).copy_(self._pattern(seat.rank))
            synchronize(current_stream(self._index))

    # The workbench protocol.

    def load(self, artifact: Path, sha256: str, build_part: Config) -> dict[str, Any]:
        """Load the probe, or the GEMM that is slowed down; both stay. Raises `ArtifactError`."""
        content, device = verified(artifact, sha256), self.seat.device
        if build_part == space.LINK_BUILD:
            self._link = LinkModule(content, device.sm_count, device.smem_optin_bytes)
            self._link.expect_world(self.seat.world, artifact)
            return {"resident_blocks": self._link.resident_blocks}
        with self._control.launching():
            self._gemm = self._place_gemm(Module(content, "grouped_gemm", device.sm_count))
            synchronize(current_stream(self._index))
        facts = self._gemm.module.facts
        return {"smem_bytes": facts.smem_bytes, "threads": facts.threads}

    def gate(self, config: Config, routing: str, seed: int, sequence: int) -> GateResult:
        """Is every row where it belongs, and nothing else touched? For `gemm`: one expert against fp32."""
        with self._control.launching():
            if config["way"] == "gemm":
                return self._gate_gemm(config)
            stream = current_stream(self._index)
            row_bytes = space.PIECE_BYTES if self._plain(config) else config.number("row_bytes")
            target = self._words(HEADER_BYTES + space.SOURCE_BYTES, space.TARGET_BYTES)
            target.fill_(POISON)
            self._sequence.fill_(sequence)
            meeting = self._meeting()
            meeting(stream)
            wanted = GATED_PIECES if self._plain(config) else GATED_ROWS
            items = min(wanted, space.rows_within(space.TARGET_BYTES, row_bytes) // config.number("fan"))
            self._copy(config, items)(stream)
            meeting(stream)
            synchronize(stream)
            return self._compare(config, target, row_bytes, items)

    def time(self, config: Config, mode: str, seed: int, iterations: int, sequence: int) -> list[float]:
        """Microseconds of each launch (of one round trip, of one launch on the host) on this rank; `mode` is comm.

        All ranks meet on the device just before each. Raises `ConstraintRefused` where there is no peer.
        """
        if config["way"] in space.NEEDS_PEER and self.seat.world == 1:
            raise ConstraintRefused("no_peer", f"{config['way']} needs a peer.", "Use two GPUs.")
        warmup = self.seat.policy.warmup
        with self._control.launching():
            self._sequence.fill_(sequence)
            self._echoes.fill_(sequence * ECHO_NUMBERS)
            meeting = self._meeting()
            if config["way"] == "launch":
                return self._time_host(iterations, warmup)
            if config["way"] == "echo":
                times = self._stopwatch.time(self._echo(), iterations, warmup, meeting)
                return [one / space.ECHO_ROUNDS for one in times]
            return self._stopwatch.time(self._work(config), iterations, warmup, meeting)

    def close(self) -> None:
        """Leave the device; after a fault its calls fail, and nothing is left to free."""
        self._link = self._gemm = None
        self._leave()

    # Launches.

    @staticmethod
    def _plain(config: Config) -> bool:
        return str(config["way"]).startswith("plain")

    def _work(self, config: Config) -> Work:
        way = config["way"]
        if way == "gemm":
            return self._gemm_launch(config)
        if way == "copy_engine":
            source, target = self._places(peer_reads=True)

            def copy(stream: int) -> None:
                check(cu.cuMemcpyDtoDAsync(target, source, space.SOURCE_BYTES, stream))

            return copy
        return self._copy(config, space.items_of(config))

    def _places(self, peer_reads: bool = False, peer_writes: bool = False) -> tuple[int, int]:
        """Where rows are read and where they are written."""
        source = self._memory.peer(self._next if peer_reads else self.seat.rank) + HEADER_BYTES
        target = self._memory.peer(self._next if peer_writes else self.seat.rank)
        return source, target + HEADER_BYTES + space.SOURCE_BYTES

    def _copy(self, config: Config, items: int) -> Launch:
        way, plain = str(config["way"]), self._plain(config)
        if way not in WAYS:
            raise WordsError(f"There is no way {way!r} to copy.", f"Use one of: {', '.join(WAYS)}.")
        source, target = self._places(way in ("pull", "plain_pull", "scatter"), way in ("push", "plain_push"))
        row_bytes = mirror.PIECE_BYTES if plain else config.number("row_bytes")
        module = self._need_link()
        warps, of_warp, pending = self._slots(config, module.smem_bytes)
        arguments = ProbeGlobals(
            source=source,
            target=target,
            guard=self._control.guard,
            way=mirror.PLAIN if plain else mirror.BULK,
            items=items,
            source_rows=space.rows_within(space.SOURCE_BYTES, row_bytes),
            target_rows=space.rows_within(space.TARGET_BYTES, row_bytes),
            row_bytes=row_bytes,
            fan=config.number("fan"),
            stride=STRIDE if way.startswith("scatter") else 1,
            warps=warps,
            warp_slots=of_warp,
            pending=pending,
        ).packed()
        grid, threads = config.number("sms"), module.facts.threads
        return Launch(module.function, grid, threads, module.smem_bytes, arguments, (module, self._memory))

    def _slots(self, config: Config, smem_bytes: int) -> tuple[int, int, int]:
        """Warps of a block that copy, rows of each on their way (pieces of a thread when plain), and those pending."""
        if self._plain(config):
            return 0, space.THREAD_PIECES, 0
        return space.WARPS, *space.row_slots(config.number("row_bytes"), smem_bytes)

    def _meeting(self) -> Launch:
        return self._meeting_of(self._need_link())

    def _echo(self) -> Work:
        """Ranks echo in pairs; the odd one out has nothing to do."""
        partner = self.seat.rank ^ 1
        if partner >= self.seat.world:
            return lambda stream: None
        mine = self._memory.local + FLAGS + 8 * partner
        theirs = self._memory.peer(partner) + FLAGS + 8 * self.seat.rank
        opens = self.seat.rank < partner
        guard, counter = self._control.guard, self._echoes.data_ptr()
        arguments = packed_echo(mine, theirs, counter, guard, space.ECHO_ROUNDS, opens)
        return Launch(self._need_link().echo, 1, 32, 0, arguments, (self._echoes, self._memory))

    def _time_host(self, iterations: int, warmup: int) -> list[float]:
        """Host microseconds of one launch of a kernel that does nothing, over `LAUNCHES` of them."""
        launch = self._copy(Config(way="own", sms=1, fan=1, row_bytes=space.USUAL_ROW_BYTES), 0)
        stream = current_stream(self._index)
        samples = []
        for _ in range(warmup + iterations):
            synchronize(stream)
            begin = time.perf_counter()
            for _ in range(LAUNCHES):
                launch(stream)
            samples.append((time.perf_counter() - begin) * 1e6 / LAUNCHES)
        synchronize(stream)
        return samples[warmup:]

    def _need_link(self) -> LinkModule:
        if self._link is None:
            raise ArtifactError("The probe is not loaded.", "Send a load before gate or time.")
        return self._link

    # What is copied, and whether it came.

    def _words(self, offset: int, nbytes: int) -> torch.Tensor:
        """This rank's own memory from `offset`, as int32."""
        return self._memory.tensor(torch.int32, (nbytes // 4,), offset)

    def _pattern(self, rank: int) -> torch.Tensor:
        """The int32 words of the rows that `rank` has to read: all different, and different on every rank."""
        count = space.SOURCE_BYTES // 4
        return torch.arange(count, dtype=torch.int32, device=self._device) + (rank + 1) * count

    def _compare(self, config: Config, target: torch.Tensor, row_bytes: int, items: int) -> GateResult:
        """Row d of the target holds the row of its store, and poison where there was none."""
        fan, way = config.number("fan"), str(config["way"])
        source_rows = space.rows_within(space.SOURCE_BYTES, row_bytes)
        target_rows = space.rows_within(space.TARGET_BYTES, row_bytes)
        writer = self._before if way in ("push", "plain_push") else self.seat.rank
        reads_from = (writer + 1) % self.seat.world if way in ("pull", "plain_pull", "scatter") else writer
        stride = STRIDE if way.startswith("scatter") else 1
        rows = torch.arange(target_rows, dtype=torch.int64, device=self._device)
        stores = (rows * pow(stride, -1, target_rows)) & (target_rows - 1)
        written = stores < items * fan
        came_from = (stores // fan) & (source_rows - 1)
        words = row_bytes // 4
        found = target[: target_rows * words].view(target_rows, words)
        expected = self._pattern(reads_from)[: source_rows * words].view(source_rows, words)
        wrong = int((found[written] != expected[came_from[written]]).any(1).sum())
        touched = int((found[~written] != POISON).any(1).sum())
        wrong_share = (wrong + touched) / max(1, int(written.sum()))
        sentence = f"{way}: {wrong} of {int(written.sum())} rows came wrong, {touched} others were touched."
        return GateResult(wrong + touched == 0, wrong_share, 0.0, sentence if wrong + touched else "")

    # The GEMM on fewer SMs.

    def _place_gemm(self, module: Module) -> GemmPlace:
        inner = space.gemm_problem(self.problem)
        config = space.gemm_config(self.problem, self.seat.device)
        stream = torch.Generator(self._device)
        stream.manual_seed(1)
        experts = inner.local_experts
        shapes = {
            "activations": (inner.tokens, inner.hidden),
            "weights": (experts, inner.hidden, inner.cols),
        }
        drawn = {
            name: torch.randn(shape, device=self._device, dtype=torch.bfloat16, generator=stream)
            for name, shape in shapes.items()
        }
        rows = inner.tokens // experts
        entries = walk_entries([rows] * experts, [rows * one for one in range(experts)], str(config["walk"]))
        return GemmPlace(
            module,
            config,
            drawn["activations"],
            drawn["weights"].mul_(inner.hidden**-0.5),
            torch.empty(inner.tokens, inner.cols, dtype=torch.bfloat16, device=self._device),
            torch.tensor(entries, dtype=torch.int32, device=self._device),
            torch.zeros(DISPENSER_WORDS, dtype=torch.int32, device=self._device),
        )

    def _gemm_launch(self, config: Config) -> Launch:
        place = self._gemm
        if place is None:
            raise ArtifactError("The GEMM is not loaded.", "Send a load before gate or time.")
        inner = space.gemm_problem(self.problem)
        return gemm_launch(
            place.module,
            place.config,
            inner.weight_layout,
            inner.pad,
            self._maps,
            self._control.guard,
            config.number("sms"),
            place.activations,
            place.weights,
            place.outputs,
            place.walk,
            place.dispenser,
        )

    def _gate_gemm(self, config: Config) -> GateResult:
        """The last expert's rows against an fp32 product, and no row without a number."""
        launch, place = self._gemm_launch(config), self._gemm
        assert place is not None
        place.outputs.fill_(math.nan)
        stream = current_stream(self._index)
        launch(stream)
        synchronize(stream)
        rows = len(place.activations) // len(place.weights)
        reference = place.activations[-rows:].float() @ place.weights[-1].float()
        error = float((place.outputs[-rows:].float() - reference).norm() / reference.norm())
        empty = int(torch.isnan(place.outputs).any(1).sum())
        tolerance = gemm_tolerance(place.activations.shape[1])
        sentence = f"{empty} rows of the GEMM were not written." if empty else ""
        return GateResult(
            error <= tolerance and not empty, error if not empty else math.nan, tolerance, sentence
        )
