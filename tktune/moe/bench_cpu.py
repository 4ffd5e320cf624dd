"""A layer on a rank of the CPU backend: both kernels' workbenches at one symmetric buffer, launched one after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tktune.build.pairs import parts_of
from tktune.core.config import Config
from tktune.core.errors import ArtifactError, ConstraintRefused
from tktune.families.base import GateResult, RankSeat
from tktune.families.bf16 import Bf16
from tktune.families.cpu_inputs import POISON, Case
from tktune.families.dispatch_gemm.launch import CpuWorkbench as DispatchWorkbench
from tktune.families.formulas import round_up
from tktune.families.gemm_combine.inputs import CombineCase, check_combined
from tktune.families.gemm_combine.launch import CpuWorkbench as CombineWorkbench
from tktune.families.gemm_combine.layout import PAGE
from tktune.moe.cases import layer_cases, layer_tolerance
from tktune.moe.parts import COMBINE, DISPATCH, PARTS, part_config, part_problem

# Sequence numbers of a timed iteration: the meeting after the flush, and one launch of each kernel.
_PER_ITERATION = 3


class _First(DispatchWorkbench):
    """The dispatch half. `cases` makes what both halves need of a (routing, seed)."""

    def __init__(self, seat: RankSeat, cases: Callable[[str, int], Case]) -> None:
        self._cases_of = cases
        super().__init__(seat)

    def new_case(self, routing: str, seed: int) -> Case:
        return self._cases_of(routing, seed)

    @property
    def rows(self) -> Bf16:
        """What the last launch left, (slots and guard rows, intermediate)."""
        return self._out

    def poison(self) -> None:
        for buffer in (self._out, self._gathered, self._packed):
            buffer.fill(POISON)

    def prepare(self, routing: str, seed: int) -> Case:
        return self._prepare(routing, seed)

    def meet(self, sequence: int) -> None:
        self._meet(sequence)

    def flush(self, number: int) -> None:
        if self._flush_buffer is not None:
            self._flush_buffer.fill(number)

    def run(self, config: Config, sequence: int) -> int:
        """Nanoseconds of the fused launch."""
        return self._compute(config, self.fuse(config), sequence)

    def runner(self, config: Config, mode: str, case: Case) -> Callable[[int], int]:
        return self._runner(config, mode, case)


class _Second(CombineWorkbench):
    """The combine half: its activations are the rows that the first half leaves."""

    def __init__(
        self, seat: RankSeat, start: int, first: _First, cases: Callable[[str, int], CombineCase]
    ) -> None:
        self._first, self._cases_of = first, cases
        super().__init__(seat, start)

    def new_case(self, routing: str, seed: int) -> CombineCase:
        return self._cases_of(routing, seed)

    def _prepare(self, routing: str, seed: int) -> CombineCase:
        case = self._case(routing, seed)
        assert isinstance(case, CombineCase)
        self._gathered = self._first.rows
        self._out = self._rows[: case.tables.rows + self.problem.pad]
        self._fill_globals(case)
        self._fill_combine(case)
        return case

    def prepare(self, routing: str, seed: int) -> CombineCase:
        return self._prepare(routing, seed)

    def poison(self) -> None:
        for buffer in (self._y, self._out, self._staging):
            buffer.fill(POISON)

    def run(self, config: Config, case: CombineCase, sequence: int) -> int:
        self._arm(config, case)
        return self._launch(self.fuse(config), sequence)

    def runner(self, config: Config, mode: str, case: CombineCase) -> Callable[[int], int]:
        return self._runner(config, mode, case)

    def judge(self, case: CombineCase, tolerance: float) -> GateResult:
        return check_combined(self.problem, case, self._y, self._out, self._staging, tolerance)


class CpuLayerWorkbench:
    """One rank's seat at a layer. The time of a launch is that of both kernels; tables are built beforehand."""

    def __init__(self, seat: RankSeat) -> None:
        self.seat, self.problem = seat, seat.problem
        self._drawn: tuple[str, int, tuple[Case, CombineCase]] | None = None
        seats = {part: dataclasses.replace(seat, problem=part_problem(self.problem, part)) for part in PARTS}
        self._first = _First(seats[DISPATCH], lambda routing, seed: self._both(routing, seed)[0])
        start = round_up(self._first.symmetric_bytes(), PAGE)
        self._second = _Second(
            seats[COMBINE], start, self._first, lambda routing, seed: self._both(routing, seed)[1]
        )

    def _both(self, routing: str, seed: int) -> tuple[Case, CombineCase]:
        if self._drawn is None or self._drawn[:2] != (routing, seed):
            self._drawn = (routing, seed, layer_cases(self.problem, self.seat.rank, routing, seed))
        return self._drawn[2]

    # The workbench protocol.

    def load(self, artifact: Path, sha256: str, build_part: Config) -> dict[str, Any]:
        """Open the two artifacts that the pair names. Raises `ArtifactError`."""
        parts = parts_of(artifact, sha256)
        if len(parts) != len(PARTS):
            raise ArtifactError(f"{artifact} names {len(parts)} artifacts.", "Build it again.")
        facts = {}
        for name, bench, part in zip(PARTS, (self._first, self._second), parts, strict=True):
            facts[name] = bench.load(part.path, part.sha256, part_config(build_part, name))
        return facts

    def gate(self, config: Config, routing: str, seed: int, sequence: int) -> GateResult:
        """Both launches on poisoned buffers, compared with the fp32 reference of the whole layer."""
        first, second = self._first, self._second
        first.prepare(routing, seed)
        case = second.prepare(routing, seed)
        first.poison()
        second.poison()
        first.meet(sequence)
        first.run(part_config(config, DISPATCH), sequence + 1)
        second.run(part_config(config, COMBINE), case, sequence + 2)
        first.meet(sequence + 3)
        return second.judge(case, layer_tolerance(self.problem))

    def time(self, config: Config, mode: str, seed: int, iterations: int, sequence: int) -> list[float]:
        """Microseconds of both launches together; `comp` and `serial` are both kernels' own, one after the other."""
        if mode in ("comm", "peer"):
            raise ConstraintRefused("mode", f"A layer has no mode {mode}.")
        first, second = self._first, self._second
        given = first.prepare(self.problem.routing, seed)
        case = second.prepare(self.problem.routing, seed)
        first.meet(sequence)
        first.run(part_config(config, DISPATCH), sequence + 1)  # rows are in place for whoever only computes
        runs = (
            first.runner(part_config(config, DISPATCH), mode, given),
            second.runner(part_config(config, COMBINE), mode, case),
        )
        samples = []
        warmup = self.seat.policy.warmup
        for iteration in range(warmup + iterations):
            at = sequence + 2 + _PER_ITERATION * iteration
            first.flush(iteration)
            first.meet(at)
            samples.append((runs[0](at + 1) + runs[1](at + 2)) / 1000)
        return samples[warmup:]

    def close(self) -> None:
        self._second.close()
        self._first.close()

    def buffers(self) -> tuple[Bf16, Bf16]:
        """The rows between the kernels, and the result (tokens, hidden)."""
        return self._first.rows, np.asarray(self._second.buffers()[2])
