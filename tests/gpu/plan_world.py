"""All ranks of a small world as buffers of one process on one GPU, each rank with a stream of its own, that build plans
together. Run as a program: one rank plans alone, and says how that ended.
"""

from __future__ import annotations

import os

os.environ.setdefault(
    "CUDA_DEVICE_MAX_CONNECTIONS", "32"
)  # ranks that wait for each other need queues of their own

import tempfile
from pathlib import Path
from typing import Any

from tktune.build.cache import ArtifactCache
from tktune.core import push_tables, tables
from tktune.core.device_cuda import cuda_device_classes
from tktune.core.errors import LaunchFailed
from tktune.core.problem import Problem


def problem_of(world: int, experts: int = 8, top_k: int = 2, tokens: int = 64, pad: int = 128) -> Problem:
    """`experts` of each rank."""
    return Problem("dispatch_gemm", 64, 64, experts * world, top_k, tokens, world=world, pad=pad)


def load_module(root: Path) -> Any:
    """The table kernel alone, built into `root` and loaded on device 0."""
    from tktune.families.cuda.driver import attach
    from tktune.families.cuda.module import Module
    from tktune.families.dispatch_gemm.planner_cuda import plan_build_spec

    device = cuda_device_classes()[0]
    (outcome,) = ArtifactCache(root).build([plan_build_spec(device)])
    assert outcome.artifact is not None, outcome.error_sentence
    attach(0)
    return Module(outcome.artifact.path.read_bytes(), "dispatch_plan", device.sm_count)


class World:
    """All ranks of `problem` on one GPU."""

    def __init__(
        self,
        module: Any,
        problem: Problem,
        capacity: int | None = None,
        limit_s: float = 2.0,
        pushes: bool = False,
    ) -> None:
        import torch

        from tktune.families.control_page import ControlPage
        from tktune.families.cuda import plan_globals as mirror
        from tktune.families.cuda.control import Control
        from tktune.families.cuda.gemm_globals import Guard
        from tktune.families.dispatch_gemm.planner_cuda import Planner, plan_entry

        self.problem, self.pushes = problem, pushes
        device = torch.device("cuda", torch.cuda.current_device())
        self.function = plan_entry(module, mirror.shared_bytes(problem), pushes)
        nbytes = mirror.region_bytes(problem)
        self.regions = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(problem.world)]
        addresses = tuple(region.data_ptr() for region in self.regions)
        self.page = ControlPage.create(problem.world)
        self.control = Control(self.page, 0, limit_s)
        guard = self.control.guard
        self.planners: list[Any] = []
        self.tables: list[Any] = []
        self.ids: list[Any] = []
        self.launches: list[Any] = []
        for rank in range(problem.world):
            of_rank = Guard(limit_s, rank, guard.report, guard.abort_word)
            planner = Planner(problem, addresses, of_rank, device, capacity, pushes=pushes)
            ids = torch.zeros(problem.tokens, problem.top_k, dtype=torch.int64, device=device)
            made = planner.tables()
            self.planners.append(planner)
            self.tables.append(made)
            self.ids.append(ids)
            self.launches.append(planner.launch(self.function, ids, made, (module,)))
        self.streams = [torch.cuda.Stream() for _ in range(problem.world)]
        torch.cuda.synchronize()

    def give(self, ids: Any) -> None:
        import torch

        for mine, given in zip(self.ids, ids, strict=True):
            mine.copy_(torch.as_tensor(given))
        torch.cuda.synchronize()

    def launch(self, ranks: Any = None) -> None:
        for rank in range(self.problem.world) if ranks is None else ranks:
            self.launches[rank](self.streams[rank].cuda_stream)

    def plan(self, ids: Any) -> None:
        import torch

        self.give(ids)
        self.launch()
        torch.cuda.synchronize()

    def check(self, ids: Any) -> None:
        """Every table of every rank is the golden one."""
        for rank, (built, planner) in enumerate(zip(self.tables, self.planners, strict=True)):
            planner.raise_wrong()
            golden = tables.build(ids, self.problem, rank).arrays()
            found = built.schedule(rank).numpy().arrays()
            for name, array in golden.items():
                assert (found[name] == array).all() and found[name].shape == array.shape, (
                    f"{name} of rank {rank}, {self.problem}"
                )
            walk = built.view("walk").cpu().numpy()
            assert (walk[:, 0] == range(self.problem.local_experts)).all()
            assert (walk[:, 1] == golden["base"]).all() and (walk[:, 2] == golden["counts"]).all()
            assert (built.view("arrivals").cpu().numpy()[: len(golden["slack"])] == golden["slack"]).all()
            assert built.view("queue").tolist() == [0, 0, 0]
            assert built.view("dispenser").tolist() == [0, 1 << 20]
            if self.pushes:
                self._check_pushes(ids, rank, built)

    def _check_pushes(self, ids: Any, rank: int, built: Any) -> None:
        """Against the vectorised builder's, and those against the golden builder's where its loops over all ranks are short."""
        import torch

        from tktune.families.dispatch_gemm.push_cuda import Pushes

        made = Pushes.of_ids(ids, self.problem, rank, torch.device("cpu"))
        if self.problem.world <= 2 and self.problem.tokens <= 100:
            golden = push_tables.build(ids, self.problem, rank)
            assert made.plan.tolist() == [*golden.offsets, golden.turns]
            for name in ("tokens", "blocks", "expected", "gate_sources"):
                assert getattr(made, name).equal(torch.as_tensor(getattr(golden, name))), name
        there = Pushes(**{name: table.to(built.memory.device) for name, table in vars(made).items()})
        wrong = Pushes.within(built, there).wrong_table(there)
        assert not wrong, f"{wrong} of rank {rank}, {self.problem}"

    def close(self) -> None:
        self.control.close()
        self.page.close()


def main() -> None:
    """Rank 0 of two; rank 1 never comes."""
    from tktune.families.cuda.driver import synchronize

    world = World(load_module(Path(tempfile.mkdtemp())), problem_of(2), limit_s=0.3)
    try:
        with world.control.launching():
            world.launch([0])
            synchronize(world.streams[0].cuda_stream)
    except LaunchFailed as error:
        print(error.code, error)


if __name__ == "__main__":
    main()
