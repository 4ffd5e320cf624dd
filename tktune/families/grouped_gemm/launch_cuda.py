"""grouped_gemm on a rank with a GPU: the rows one rank owns are packed by torch before any launch."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tktune.core.config import Config
from tktune.core.errors import ArtifactError, ConstraintRefused, WordsError
from tktune.families.base import GateResult, RankSeat
from tktune.families.control_page import ControlPage
from tktune.families.cuda.control import Control
from tktune.families.cuda.driver import attach, current_stream, load_lazily, memory_bytes, synchronize
from tktune.families.cuda.gemm_globals import (
    DISPENSER_WORDS,
    GLOBALS_BYTES,
    Box,
    GemmGlobals,
    Guard,
    View,
    boxes_of,
)
from tktune.families.cuda.gemm_inputs import GUARD_ROWS, Case, check_output, draw_weights, make_case
from tktune.families.cuda.launch import Graph, Launch, Work
from tktune.families.cuda.module import Module, Modules, verified
from tktune.families.cuda.stopwatch import Stopwatch
from tktune.families.cuda.tensor_map import MapKey, TensorMaps

KEPT_CASES_SHARE = 8  # inputs and references may take 1/8 of the device's memory


def matrix_view(maps: TensorMaps, matrix: torch.Tensor, box: Box) -> View:
    """A contiguous bf16 tensor as its rows × last dimension."""
    cols = matrix.shape[-1]
    rows = matrix.numel() // cols if cols else 0
    encoded = maps.get(MapKey(matrix.data_ptr(), rows, cols, *box))
    return View(encoded, matrix.data_ptr(), rows, cols)


def gemm_launch(
    module: Module,
    config: Config,
    weight_layout: str,
    pad: int,
    maps: TensorMaps,
    guard: Guard,
    blocks: int,
    activations: torch.Tensor,
    weights: torch.Tensor,
    outputs: torch.Tensor,
    walk: torch.Tensor,
    dispenser: torch.Tensor,
) -> Launch:
    """The launch of `config` on at most `blocks` blocks. Shapes: (P, K), the weights of all local experts in
    `weight_layout`, (P, N), (experts, 4) int32, 2 int32 words that are zero.
    """
    boxes = boxes_of(config, weight_layout)
    arguments = GemmGlobals(
        activations=matrix_view(maps, activations, boxes.activations),
        weights=matrix_view(maps, weights, boxes.weights),
        outputs=matrix_view(maps, outputs, boxes.outputs),
        walk=walk.data_ptr(),
        dispenser=dispenser.data_ptr(),
        guard=guard,
        num_experts=weights.shape[0],
        reduction=activations.shape[1],
        cols=outputs.shape[1],
        pad=pad,
        raster_rows=config.number("raster_rows"),
        turn_back=config.number("turn_back"),
    ).packed()
    facts = module.facts
    grid = min(blocks, module.resident_blocks) // facts.cluster * facts.cluster
    kept = (module, activations, weights, outputs, walk, dispenser)
    return Launch(module.function, grid, facts.threads, facts.smem_bytes, arguments, kept)


class CudaWorkbench:
    """One rank's seat at a GPU. Inputs and references are kept per (routing, seed), modules per artifact."""

    family = "grouped_gemm"

    def __init__(self, seat: RankSeat) -> None:
        self.seat = seat
        self.problem = seat.problem
        self._index = seat.device_index
        load_lazily()
        attach(self._index)
        self._device = torch.device("cuda", self._index)
        self._page = ControlPage(seat.control_fd)
        self._control = Control(self._page, seat.rank, seat.spin_limit_s)
        self._modules = Modules[Module]()
        self._module: Module | None = None
        self._build_part = Config()
        self._maps = TensorMaps()
        self._cases: OrderedDict[tuple[str, int], Case] = OrderedDict()
        self._kept_bytes = memory_bytes(self._index) // KEPT_CASES_SHARE
        policy = seat.policy
        flush = policy.flush_bytes if policy.cache_state == "cold" else 0
        with self._control.launching():
            self._weights = draw_weights(self.problem, self.problem.ep_rank or 0, self._device)
            self._out = torch.empty(0, self.problem.cols, dtype=torch.bfloat16, device=self._device)
            self._dispenser = torch.zeros(DISPENSER_WORDS, dtype=torch.int32, device=self._device)
            self._stopwatch = Stopwatch(self._index, flush)
            self._case(self.problem.routing, policy.routing_seeds[0])  # library kernels are loaded now
            synchronize(current_stream(self._index))

    # The workbench protocol.

    def load(self, artifact: Path, sha256: str, build_part: Config) -> dict[str, Any]:
        """Verify the file's SHA-256, load it whole, compare its facts with `build_part`. Raises `ArtifactError`."""
        self._module = None
        sm_count = torch.cuda.get_device_properties(self._index).multi_processor_count
        module = self._modules.get(sha256, lambda: Module(verified(artifact, sha256), self.family, sm_count))
        facts = module.facts
        if facts.globals_bytes != GLOBALS_BYTES:
            raise ArtifactError(
                f"{artifact} takes launch arguments of {facts.globals_bytes} bytes, and {GLOBALS_BYTES} are made.",
                "Build it with the sources of this version.",
            )
        self._module, self._build_part = module, build_part
        return {
            "smem_bytes": facts.smem_bytes,
            "threads": facts.threads,
            "cluster": facts.cluster,
            "resident_blocks": module.resident_blocks,
        }

    def gate(self, config: Config, routing: str, seed: int, sequence: int) -> GateResult:
        """One launch on an output full of NaN, compared with the fp32 reference."""
        with self._control.launching():
            case = self._case(routing, seed)
            out = self._output(case).fill_(math.nan)
            self._dispenser.zero_()
            stream = current_stream(self._index)
            self._launch(config, case)(stream)
            synchronize(stream)
        return check_output(case, out)

    def time(self, config: Config, mode: str, seed: int, iterations: int, sequence: int) -> list[float]:
        """Microseconds of each launch; `fused` and `comp` are the same, `peer` is `torch._grouped_mm`.

        Raises `ConstraintRefused` for comm and serial.
        """
        if mode in ("comm", "serial"):
            raise ConstraintRefused(
                "no_communication",
                f"grouped_gemm communicates nothing, so there is no {mode} to time.",
                "Use fused, comp or peer.",
            )
        if mode not in ("fused", "comp", "peer"):
            raise WordsError(f"There is no mode {mode!r}.", "Use fused, comp or peer.")
        policy = self.seat.policy
        with self._control.launching():
            case = self._case(self.problem.routing, seed)
            self._dispenser.zero_()
            if mode == "peer":
                return self._stopwatch.time(self._peer(case), iterations, policy.warmup)
            launch = self._launch(config, case)
            if policy.launch_mode == "direct":
                return self._stopwatch.time(launch, iterations, policy.warmup)
            graph = Graph(launch)
            try:
                return self._stopwatch.time(graph, iterations, policy.warmup)
            finally:
                graph.close()

    def close(self) -> None:
        """Leave the device; after a fault its calls fail, and nothing is left to free."""
        self._modules.close()
        self._control.close()
        self._page.close()

    # One launch.

    def _launch(self, config: Config, case: Case) -> Launch:
        module = self._module
        if module is None:
            raise ArtifactError("No artifact is loaded.", "Send a load before gate or time.")
        return gemm_launch(
            module,
            config,
            self.problem.weight_layout,
            self.problem.pad,
            self._maps,
            self._control.guard,
            self.seat.device.sm_count,
            case.activations,
            self._weights,
            self._output(case),
            case.walks[str(config["walk"])],
            self._dispenser,
        )

    def _peer(self, case: Case) -> Work:
        """The library's grouped GEMM on the same rows, launched as the policy launches ours."""
        rows = case.activations[: case.rows]
        weights = self._weights if self.problem.weight_layout == "ekn" else self._weights.transpose(1, 2)

        def multiply() -> Any:
            return torch._grouped_mm(rows, weights, offs=case.offsets)

        return library_work(multiply, self.seat.policy.launch_mode)

    # Inputs.

    def _case(self, routing: str, seed: int) -> Case:
        key = (routing, seed)
        case = self._cases.pop(key, None)
        if case is None:
            case = make_case(self.problem, self._weights, self.problem.ep_rank or 0, routing, seed)
        self._cases[key] = case
        while len(self._cases) > 1 and sum(c.bytes for c in self._cases.values()) > self._kept_bytes:
            self._cases.popitem(last=False)
        return case

    def _output(self, case: Case) -> torch.Tensor:
        rows = case.rows + GUARD_ROWS
        if len(self._out) < rows:
            self._out = torch.empty(rows, self.problem.cols, dtype=torch.bfloat16, device=self._device)
        return self._out[:rows]


def library_work(call: Callable[[], Any], launch_mode: str) -> Work:
    """A torch call as work for the stopwatch: run once for its lazy parts, then captured where graphs are asked for."""
    call()
    torch.cuda.synchronize()
    if launch_mode == "direct":
        return lambda stream: call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return lambda stream: graph.replay()
