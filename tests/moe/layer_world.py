"""What tests of the layer share: a small problem, artifacts, and the workbenches of all ranks in one process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tktune.build.artifact import Artifact
from tktune.build.cache import ArtifactCache
from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.policy import Policy
from tktune.core.problem import Problem
from tktune.families.base import GateResult, RankSeat, family
from tktune.families.control_page import ControlPage
from tktune.families.parallel_tensor import ParallelTensor
from tktune.moe.bench_cpu import CpuLayerWorkbench

DEVICE = DeviceClass("cpu", "test", 4, 1 << 20, 1 << 22, "shm")
POLICY = Policy(flush_bytes=1 << 20, warmup=1, first_iterations=2, iterations=3)


def layer_of(**changes: Any) -> Problem:
    shape: dict[str, Any] = {
        "hidden": 128, "cols": 64, "experts": 8, "top_k": 2, "tokens": 40, "world": 2, "pad": 32,
    }  # fmt: skip
    return Problem("moe_layer", **{**shape, **changes})


def default_of(layer: Problem) -> tuple[Config, Config]:
    """The default config and its build part."""
    space = family("moe_layer").space(layer, DEVICE)
    return space.default, space.build_part(space.default)


def built(cache: ArtifactCache, layer: Problem, part: Config) -> Artifact:
    outcome = cache.build([family("moe_layer").build_spec(part, layer, DEVICE)])[0]
    assert outcome.artifact is not None, outcome.error_sentence
    return outcome.artifact


class Benches:
    """The workbenches of all ranks; every call runs on all of them at once, a thread each.

    Each rank opens its own copy of the cache: one artifact opened twice in a process would be one machine.
    """

    def __init__(self, layer: Problem, cache: Path, artifact: Artifact, part: Config, folder: Path) -> None:
        self.layer = layer
        self.control = ControlPage.create(layer.world)
        self.fds = ParallelTensor.create_fds(layer.world)
        self.ranks: list[CpuLayerWorkbench] = []
        for rank in range(layer.world):
            copy = folder / f"rank{rank}"
            shutil.copytree(cache / "artifacts", copy)
            seat = RankSeat(layer, DEVICE, POLICY, rank, layer.world, self.fds, self.control.fd, 20.0)
            bench = CpuLayerWorkbench(seat)
            bench.load(copy / artifact.digest / artifact.path.name, artifact.sha256, part)
            self.ranks.append(bench)
        self._pool = ThreadPoolExecutor(layer.world)
        self._sequence = 1

    def on_all(self, call: Callable[[CpuLayerWorkbench], Any]) -> list[Any]:
        return [future.result() for future in [self._pool.submit(call, bench) for bench in self.ranks]]

    def gate(self, config: Config, routing: str, seed: int) -> list[GateResult]:
        self._sequence += 4096
        return self.on_all(lambda bench: bench.gate(config, routing, seed, self._sequence))

    def time(self, config: Config, mode: str, iterations: int = 2) -> list[list[float]]:
        self._sequence += 4096
        return self.on_all(lambda bench: bench.time(config, mode, 0, iterations, self._sequence))

    def close(self) -> None:
        self._pool.shutdown()
        for bench in self.ranks:
            bench.close()
        self.control.close()
        for fd in self.fds:
            os.close(fd)
