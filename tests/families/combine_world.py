"""What tests of gemm_combine share: the workbenches of all ranks in one process, each with its own copy of an artifact,
and the comparison of every buffer a launch leaves.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.policy import Policy
from tktune.core.problem import Problem
from tktune.families.base import RankSeat
from tktune.families.control_page import ControlPage
from tktune.families.cpu_inputs import POISON
from tktune.families.gemm_combine.inputs import exact_partials, exact_result, exact_rows
from tktune.families.gemm_combine.launch import GUARD_ROWS, CpuWorkbench
from tktune.families.parallel_tensor import ParallelTensor

LAUNCH = Config(
    num_comm_sms=1,
    num_reduce_sms=1,
    form="prereduce",
    order="ready",
    rows_in_flight=1,
    signal_groups=1,
    walk="experts",
)


def problem_of(**changes: Any) -> Problem:
    shape: dict[str, Any] = {
        "hidden": 64,
        "cols": 128,
        "experts": 8,
        "top_k": 2,
        "tokens": 50,
        "world": 2,
        "pad": 32,
    }
    return Problem("gemm_combine", **{**shape, **changes})


def routed(folder: Path, ids: Sequence[Any]) -> str:
    """A routing that gives exactly these ids, (ranks × tokens, top_k), whatever the seed."""
    array = np.asarray(ids, np.int32)
    path = folder / f"{hashlib.sha256(array.tobytes()).hexdigest()[:12]}.npy"
    np.save(path, array)
    return f"trace:{path}"


class Benches:
    """The workbenches of all ranks. Every call runs on all of them at once, a thread each."""

    def __init__(
        self,
        problem: Problem,
        artifact: Any,
        part: Config,
        folder: Path,
        seats: int = 4,
        spin_limit_s: float = 20.0,
    ) -> None:
        self.problem, self.part = problem, part
        self.control = ControlPage.create(problem.world)
        self.fds = ParallelTensor.create_fds(problem.world)
        device = DeviceClass("cpu", "x86-64", seats, 1 << 20, 1 << 25, "shm")
        policy = Policy(flush_bytes=1 << 20, warmup=1)
        self.ranks: list[CpuWorkbench] = []
        for rank in range(problem.world):
            copy = (
                folder / f"rank{rank}-{artifact.path.name}"
            )  # an artifact opened twice would be one machine
            shutil.copy(artifact.path, copy)
            seat = RankSeat(
                problem, device, policy, rank, problem.world, self.fds, self.control.fd, spin_limit_s
            )
            bench = CpuWorkbench(seat)
            bench.load(copy, artifact.sha256, part)
            self.ranks.append(bench)
        self._pool = ThreadPoolExecutor(problem.world)
        self._sequence = 1

    def on_all(self, call: Callable[[CpuWorkbench], Any]) -> list[Any]:
        return [future.result() for future in [self._pool.submit(call, bench) for bench in self.ranks]]

    def config(self, **launch: Any) -> Config:
        return Config({**self.part, **LAUNCH, **launch})

    def sequence(self) -> int:
        self._sequence += 1 << 20
        return self._sequence

    def gate(self, routing: str = "uniform", seed: int = 0, late_s: float = 0.0, **launch: Any) -> None:
        """Gate on all ranks, each up to `late_s` late, and compare every buffer bit for bit."""
        config, sequence = self.config(**launch), self.sequence()

        def one(bench: CpuWorkbench) -> Any:
            time.sleep(random.random() * late_s)
            return bench.gate(config, routing, seed, sequence)

        for verdict in self.on_all(one):
            assert verdict.passed, (verdict.sentence, config)
        self.assert_exact(routing, seed, str(config["form"]))

    def assert_exact(self, routing: str, seed: int, form: str) -> None:
        for bench in self.ranks:
            case = bench._prepare(routing, seed)
            rows, staging, y = bench.buffers()
            expected = exact_rows(self.problem, case)
            np.testing.assert_array_equal(rows[: len(expected)], expected, "expert rows")
            assert (rows[len(expected) :] == POISON).all()
            partial = exact_partials(self.problem, case)
            wanted = partial if form == "prereduce" else np.full_like(partial, POISON)
            np.testing.assert_array_equal(staging, wanted, "partial rows")
            np.testing.assert_array_equal(y, exact_result(partial), "result")
            assert (bench._y[self.problem.tokens :] == POISON).all() and len(bench._y) == len(y) + GUARD_ROWS

    def assert_exact_result(self, routing: str, seed: int) -> None:
        for bench in self.ranks:
            partial = exact_partials(self.problem, bench._prepare(routing, seed))
            np.testing.assert_array_equal(bench.buffers()[2], exact_result(partial), "result")

    def results(self) -> list[Any]:
        return [bench.buffers()[2].copy() for bench in self.ranks]

    def close(self) -> None:
        self._pool.shutdown()
        for bench in self.ranks:
            bench.close()
        self.control.close()
        for fd in self.fds:
            os.close(fd)
