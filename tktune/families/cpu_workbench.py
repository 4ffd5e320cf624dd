"""The rank-side half of the CPU families: load an artifact, gate it, time it. numpy only, so that ranks start fast.

What a family adds (where rows come from, how a config becomes launch arguments) is in its launch.py.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tktune.core.config import Config
from tktune.core.errors import ArtifactError, WordsError
from tktune.families import abi, glu
from tktune.families.abi import CpuKernel, Globals, Machine
from tktune.families.base import GateResult, RankSeat
from tktune.families.bf16 import Bf16, Float32, gemm_tolerance, swiglu_tolerance
from tktune.families.control_page import ControlPage
from tktune.families.cpu_inputs import (
    POISON,
    Case,
    check_output,
    draw_rows,
    draw_weights,
    make_case,
    peer_operands,
    swiglu,
)
from tktune.families.parallel_tensor import ParallelTensor

BARRIER_BYTES = 4096  # the barrier words lead a symmetric buffer; token rows follow
PATIENCE_S = 600.0  # of the barrier after host-side preparation: the driver's deadline comes first
KEPT_CASES_BYTES = 1 << 30


class GemmWorkbench:
    """One rank's seat on the CPU backend. A family overrides `rank_of_tables`, `fuse` and `place`.

    `brings_rows`: the fused launch brings its rows itself; else they are placed before. Inputs and references
    are kept per (routing, seed). Sequence numbers: `gate` takes three, `time` one and two for each launch.
    """

    family = ""
    brings_rows = False

    def __init__(self, seat: RankSeat) -> None:
        self.seat = seat
        self.problem = seat.problem
        self.kernel: CpuKernel | None = None
        self._control = ControlPage(seat.control_fd)
        self._memory = ParallelTensor.attach(seat.symmetric_fds, seat.rank, self.symmetric_bytes())
        self._x = self.token_rows()
        self._x_seed: int | None = None
        self._weights: Bf16 | None = None
        self._cases: OrderedDict[tuple[str, int], Case] = OrderedDict()
        # Gathered rows, outputs and (with a finish) the GEMM's own outputs, as large as any case has needed.
        self._buffers = self._poisoned(0)
        self._gathered, self._out, self._packed = self._buffers
        self._arrivals = self._dispensers = np.zeros(4, np.int32)
        self._flush_buffer: npt.NDArray[np.uint64] | None = None
        self._kept: list[Any] = []  # arrays that the globals point into
        self._globals = Globals()
        self._machine = self._make_machine(seat.spin_limit_s)
        self._patient = self._make_machine(PATIENCE_S)

    # What a family says.

    def symmetric_bytes(self) -> int:
        """Bytes of a rank's symmetric buffer: barrier words, then its token rows, then what a family adds."""
        return BARRIER_BYTES + self.problem.tokens * self.problem.hidden * 2

    def token_rows(self) -> Bf16:
        """This rank's token rows, (tokens, hidden) bf16, as peers see them."""
        shape = (self.problem.tokens, self.problem.hidden)
        return self._memory.array(self.seat.rank, "uint16", shape, BARRIER_BYTES)

    def rank_of_tables(self) -> int:
        """The rank whose tables this rank runs."""
        raise NotImplementedError

    def fuse(self, config: Config) -> dict[str, int]:
        """The launch arguments of the fused mode under `config`, as fields of `Globals`."""
        raise NotImplementedError

    def new_case(self, routing: str, seed: int) -> Case:
        """Inputs, tables and reference of (routing, seed)."""
        return make_case(self.problem, self._need_weights(), self.rank_of_tables(), routing, seed)

    def library_operands(self, case: Case) -> Iterator[tuple[Float32, Float32, Float32]]:
        """What the mode `peer` multiplies: `cpu_inputs.peer_operands`."""
        return peer_operands(self.problem, self._need_weights(), case)

    def place(self, case: Case) -> None:
        """Bring the rows of `case` into `self._gathered` before a launch that finds its data in place."""
        raise NotImplementedError

    # The workbench protocol.

    def load(self, artifact: Path, sha256: str, build_part: Config) -> dict[str, Any]:
        """Verify the file's SHA-256, open it, compare its facts with `build_part`. Raises `ArtifactError`."""
        if self.kernel is not None:
            self.kernel.close()
            self.kernel = None
        try:
            with artifact.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise ArtifactError(f"{artifact} cannot be read: {error}.", "Build it again.") from error
        if found != sha256:
            raise ArtifactError(
                f"{artifact} is not what was built: its SHA-256 is {found}, recorded is {sha256}.",
                "Run `tktune cache verify`, then build it again.",
            )
        kernel = CpuKernel(artifact)
        stated = {"family": kernel.facts.family, "world": kernel.facts.world, **kernel.facts.build_part()}
        wanted = {"family": self.family, "world": self.problem.world, **build_part}
        if stated != wanted:
            kernel.close()
            raise ArtifactError(f"{artifact} states {stated}, and {wanted} was asked for.", "Build it again.")
        self.kernel = kernel
        if self._weights is None:
            self._weights = draw_weights(self.problem, self.rank_of_tables())
            flush = self.seat.policy.flush_bytes if self.seat.policy.cache_state == "cold" else 0
            self._flush_buffer = np.zeros(flush // 8, np.uint64) if flush else None
        return kernel.facts.as_dict()

    def gate(self, config: Config, routing: str, seed: int, sequence: int) -> GateResult:
        """One fused launch on poisoned outputs, compared with the fp32 reference (`cpu_inputs.check_output`)."""
        case = self._prepare(routing, seed)
        for buffer in (self._out, self._gathered, self._packed):
            buffer.fill(POISON)
        if not self.brings_rows:
            self.place(case)
        self._meet(sequence)
        self._compute(config, self.fuse(config), sequence + 1)
        self._meet(sequence + 2)
        return check_output(self.problem, case, self._out, self._gathered, self.tolerance(config))

    def tolerance(self, config: Config) -> float:
        """What a gate allows under `config`."""
        if self.problem.finish == "none":
            return gemm_tolerance(self.problem.hidden)
        return swiglu_tolerance(self.problem.hidden, glu.is_separate(config))

    def time(self, config: Config, mode: str, seed: int, iterations: int, sequence: int) -> list[float]:
        """Microseconds of each launch; the policy's warm-up launches are made in the same way and left out."""
        case = self._prepare(self.problem.routing, seed)
        self._meet(sequence)
        if mode != "fused" or not self.brings_rows:
            self.place(case)
        run = self._runner(config, mode, case)
        samples = []
        for iteration in range(self.seat.policy.warmup + iterations):
            if self._flush_buffer is not None:
                self._flush_buffer.fill(iteration)
            self._meet(sequence + 1 + 2 * iteration)  # a slow flush is no fault of the launch
            samples.append(run(sequence + 2 + 2 * iteration) / 1000)
        return samples[self.seat.policy.warmup :]

    def close(self) -> None:
        if self.kernel is not None:
            self.kernel.close()
            self.kernel = None
        self._x = np.empty((0, 0), np.uint16)
        self._memory.close()
        self._control.close()

    # How a mode is run: a function from a sequence number to nanoseconds.

    def _runner(self, config: Config, mode: str, case: Case) -> Callable[[int], int]:
        seats = self.seat.device.sm_count
        fused = self.fuse(config)
        compute = {**fused, "num_comp_blocks": seats, "num_comm_blocks": 0, "roles": abi.COMPUTE}
        communicate = {**fused, "roles": abi.COMMUNICATE}
        communicate_on_all = {**communicate, "num_comp_blocks": 0, "num_comm_blocks": seats}
        if mode == "fused":
            return lambda sequence: self._compute(config, fused, sequence)
        if mode == "comp":
            return lambda sequence: self._compute(config, compute, sequence)
        if mode == "comm":
            return lambda sequence: self._launch(communicate, sequence)
        if mode == "serial":
            return lambda sequence: (
                self._launch(communicate_on_all, sequence) + self._compute(config, compute, 0)
            )
        if mode == "peer":
            return lambda sequence: self._peer(case, sequence)
        raise WordsError(f"There is no mode {mode!r}.", "Use fused, comp, comm, serial or peer.")

    def _peer(self, case: Case, sequence: int) -> int:
        """numpy's matmul per expert, fp32, on this rank's share of the cores, and numpy's SwiGLU where that is asked for.

        Only these count: rows are already packed, and bf16 operands are widened before the clock starts,
        one expert at a time to keep memory small. The library's columns are [gate | up].
        """
        finish = self.problem.finish
        self._meet(sequence)
        threads = max(1, len(os.sched_getaffinity(0)) // self.seat.world)
        spent = 0
        with ThreadPoolExecutor(threads) as pool:
            for rows, matrix, out in self.library_operands(case):
                parts = [
                    slice(i * len(rows) // threads, (i + 1) * len(rows) // threads) for i in range(threads)
                ]
                begin = time.monotonic_ns()
                list(pool.map(lambda part: _multiply(rows[part], matrix, out[part], finish), parts))  # noqa: B023
                spent += time.monotonic_ns() - begin
        return spent

    # One launch.

    def _compute(self, config: Config, arguments: dict[str, int], sequence: int) -> int:
        """Nanoseconds of a launch that computes and, where SwiGLU is separate, of the second one that makes it."""
        spent = self._launch(arguments, sequence)
        if glu.is_separate(config):
            spent += self._launch({**arguments, "roles": abi.FINISH}, 0)
        return spent

    def _launch(self, arguments: dict[str, int], sequence: int) -> int:
        """Nanoseconds of one launch. Raises `LaunchFailed`; counters are seeded again however it ends."""
        for name, value in arguments.items():
            setattr(self._globals, name, value)
        self._globals.start_sequence = sequence
        result = self._need_kernel().launch(self._globals, self._machine)
        abi.raise_unless_done(result.end, self.seat.rank)
        return int(result.time_ns)

    def _meet(self, sequence: int) -> None:
        """Meet all ranks once they are done preparing, however long that takes one of them."""
        end = self._need_kernel().barrier(self._globals, self._patient, sequence)
        abi.raise_unless_done(end, self.seat.rank)

    def _make_machine(self, spin_limit_s: float) -> Machine:
        return Machine(
            seats=self.seat.device.sm_count,
            spin_limit_ns=round(spin_limit_s * 1e9),
            abort_word=self._control.abort_address,
            report=self._control.address(self.seat.rank),
        )

    # What a launch reads and writes.

    def _prepare(self, routing: str, seed: int) -> Case:
        """Inputs, tables, buffers and globals for (routing, seed); nothing is built twice in a row."""
        case = self._case(routing, seed)
        if self._x_seed != seed:
            self._x[:] = draw_rows(self.problem, seed, self.seat.rank)
            self._x_seed = seed
        rows = case.tables.rows + self.problem.pad  # guard rows that nobody may write
        if len(self._buffers[0]) < rows:
            self._buffers = self._poisoned(rows)
        self._gathered, self._out, self._packed = (buffer[:rows] for buffer in self._buffers)
        self._fill_globals(case)
        return case

    def _poisoned(self, rows: int) -> tuple[Bf16, Bf16, Bf16]:
        problem = self.problem
        packed = problem.cols if problem.finish != "none" else 0
        gathered, out, inner = (
            np.full((rows, cols), POISON, np.uint16) for cols in (problem.hidden, problem.out_cols, packed)
        )
        return gathered, out, inner

    def _case(self, routing: str, seed: int) -> Case:
        key = (routing, seed)
        case = self._cases.pop(key, None)
        if case is None:
            case = self.new_case(routing, seed)
        self._cases[key] = case
        while len(self._cases) > 1 and sum(c.bytes for c in self._cases.values()) > KEPT_CASES_BYTES:
            self._cases.popitem(last=False)
        return case

    def _fill_globals(self, case: Case) -> None:
        problem, seat, schedule = self.problem, self.seat, case.tables
        tables = {
            name: np.ascontiguousarray(getattr(schedule, name), np.int32)
            for name in ("pull_indices", "block_expert", "block_rows", "pull_tokens", "pull_slots")
        }
        self._arrivals = np.ascontiguousarray(schedule.slack, np.int32).copy()
        self._dispensers = np.zeros(4, np.int32)
        self._kept = [tables, self._arrivals, self._dispensers]
        g = self._globals
        g.rank, g.world = seat.rank, seat.world
        g.hidden, g.cols, g.tokens, g.top_k = problem.hidden, problem.cols, problem.tokens, problem.top_k
        g.local_experts, g.pad, g.num_pad_blocks = problem.local_experts, problem.pad, schedule.num_pad_blocks
        g.weight_layout = abi.LAYOUTS[problem.weight_layout]
        g.num_pull_tokens = len(schedule.pull_tokens)
        for name, array in tables.items():
            setattr(g, name, array.ctypes.data)
        g.arrivals, g.dispensers = self._arrivals.ctypes.data, self._dispensers.ctypes.data
        g.weights = self._need_weights().ctypes.data
        g.gathered, g.out = self._gathered.ctypes.data, self._out.ctypes.data
        g.packed = self._packed.ctypes.data if self._packed.size else None
        for rank in range(seat.world):
            g.barrier[rank] = self._memory.peer(rank)
            g.x[rank] = self._memory.peer(rank) + BARRIER_BYTES

    def _need_kernel(self) -> CpuKernel:
        if self.kernel is None:
            raise ArtifactError("No artifact is loaded.", "Send a load before gate or time.")
        return self.kernel

    def _need_weights(self) -> Bf16:
        if self._weights is None:
            raise ArtifactError("No artifact is loaded.", "Send a load before gate or time.")
        return self._weights


def _multiply(rows: Float32, matrix: Float32, out: Float32, finish: str) -> None:
    np.matmul(rows, matrix, out=out)
    if finish == "swiglu":
        half = out.shape[1] // 2
        swiglu(out[:, :half], out[:, half:])
