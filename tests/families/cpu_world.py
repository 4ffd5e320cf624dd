"""What tests of the CPU backend share: artifacts built once a session, and one rank's launch of one of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tktune.build.cache import ArtifactCache
from tktune.core.build_spec import BuildSpec
from tktune.core.config import Config
from tktune.core.paths import csrc_root
from tktune.core.problem import Problem
from tktune.families import abi
from tktune.families.bf16 import from_float
from tktune.families.cpu_inputs import (
    POISON,
    Case,
    case_of_ids,
    check_output,
    draw_rows,
    draw_weights,
    gather_rows,
)

NAMES = ("ROW_BLOCK", "COL_BLOCK", "RED_BLOCK", "STAGES", "CONSUMER_WARPS")


def tile(*values: int) -> Config:
    """A build part from its five numbers."""
    return Config(zip(NAMES, values, strict=True))


def spec(
    family: str, part: Config, world: int = 1, layout: str = "ekn", flags: Sequence[str] = ()
) -> BuildSpec:
    defines = {"TKT_WORLD": str(world), "TKT_WEIGHT_LAYOUT": str(abi.LAYOUTS[layout])}
    defines.update({f"TKT_{name}": str(value) for name, value in part.items()})
    return BuildSpec(
        name=f"{family}-w{world}-{layout}-{'x'.join(str(part[name]) for name in NAMES)}",
        kind="shared",
        source=csrc_root() / "cpu" / f"{family}.cpp",
        arch="native",
        defines=defines,
        flags=tuple(flags),
        include_dirs=(csrc_root(),),
    )


class Builder:
    """Builds artifacts into one cache and opens each once."""

    def __init__(self, root: Path) -> None:
        self.cache = ArtifactCache(root)
        self._opened: dict[Path, abi.CpuKernel] = {}

    def build(self, specs: Iterable[BuildSpec]) -> list[Any]:
        artifacts = []
        for outcome in self.cache.build(list(specs)):
            assert outcome.artifact is not None, outcome.error_sentence
            artifacts.append(outcome.artifact)
        return artifacts

    def kernel(self, wanted: BuildSpec) -> abi.CpuKernel:
        path = self.build([wanted])[0].path
        if path not in self._opened:
            self._opened[path] = abi.CpuKernel(path)
        return self._opened[path]

    def close(self) -> None:
        for kernel in self._opened.values():
            kernel.close()


@pytest.fixture(scope="session")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterable[Builder]:
    made = Builder(tmp_path_factory.getbasetemp() / "cpu_artifacts")  # one for all modules that import this
    yield made
    made.close()


class Rank:
    """One rank's buffers and globals. All ranks' token rows are local arrays, so ranks can run one by one."""

    def __init__(self, problem: Problem, topk_ids: Any, rank: int = 0, seed: int = 0) -> None:
        self.problem = problem
        self.weights = draw_weights(problem, rank)
        self.case: Case = case_of_ids(problem, self.weights, rank, topk_ids, "", seed)
        schedule = self.case.tables
        self.x = [draw_rows(problem, seed, r) for r in range(problem.expert_ranks)]
        rows = schedule.rows + problem.pad
        self.out = np.full((rows, problem.cols), POISON, np.uint16)
        self.gathered = np.full((rows, problem.hidden), POISON, np.uint16)
        self.arrivals = schedule.slack.copy()
        self.dispensers = np.zeros(4, np.int32)
        self.abort_word = np.zeros(1, np.uint32)
        self.report = abi.SpinReportStruct()
        self.barrier = [np.zeros(problem.world, np.uint64) for _ in range(problem.world)]
        self.globals = abi.Globals(
            rank=rank if problem.world > 1 else 0,
            world=problem.world,
            hidden=problem.hidden,
            cols=problem.cols,
            tokens=problem.tokens,
            top_k=problem.top_k,
            local_experts=problem.local_experts,
            pad=problem.pad,
            num_pad_blocks=schedule.num_pad_blocks,
            weight_layout=abi.LAYOUTS[problem.weight_layout],
            weights=self.weights.ctypes.data,
            gathered=self.gathered.ctypes.data,
            out=self.out.ctypes.data,
            pull_indices=schedule.pull_indices.ctypes.data,
            block_expert=schedule.block_expert.ctypes.data,
            block_rows=schedule.block_rows.ctypes.data,
            pull_tokens=schedule.pull_tokens.ctypes.data,
            pull_slots=schedule.pull_slots.ctypes.data,
            num_pull_tokens=len(schedule.pull_tokens),
            arrivals=self.arrivals.ctypes.data,
            dispensers=self.dispensers.ctypes.data,
            backoff=16,
        )
        for r, x in enumerate(self.x[: abi.MAX_WORLD]):
            self.globals.x[r] = x.ctypes.data
        for r, words in enumerate(self.barrier):
            self.globals.barrier[r] = words.ctypes.data

    def machine(
        self, seats: int, seating: int = 0, seating_seed: int = 0, limit_s: float = 20.0
    ) -> abi.Machine:
        import ctypes

        return abi.Machine(
            seats=seats,
            seating=seating,
            seating_seed=seating_seed,
            spin_limit_ns=int(limit_s * 1e9),
            abort_word=self.abort_word.ctypes.data,
            report=ctypes.addressof(self.report),
        )

    def place(self) -> None:
        self.gathered[self.case.real] = gather_rows(self.problem, self.case.tables, self.case.seed)

    def launch(self, kernel: abi.CpuKernel, machine: abi.Machine, **arguments: int) -> abi.Result:
        for name, value in arguments.items():
            setattr(self.globals, name, value)
        return kernel.launch(self.globals, machine)

    def assert_right(self) -> None:
        """Within tolerance, padding untouched, and (sums of such inputs are exact in fp32) equal bit for bit."""
        verdict = check_output(self.problem, self.case, self.out, self.gathered)
        assert verdict.passed, verdict.sentence
        assert np.array_equal(self.out[self.case.real], from_float(self.case.reference))

    def assert_seeded(self) -> None:
        """The tail left counters as the next launch of the same plan needs them."""
        assert np.array_equal(self.arrivals, self.case.tables.slack)
        assert not self.dispensers.any()


def ids_of_counts(counts: Sequence[int]) -> Any:
    """Routing of one rank, top_k 1, with exactly these rows an expert; tokens interleaved between experts."""
    ids = np.repeat(np.arange(len(counts)), counts).astype(np.int32)
    np.random.default_rng(3).shuffle(ids)
    return ids.reshape(1, -1, 1)
