"""One rank of a group that loads the dispatch operator and plays one scene (`python dispatch_operator_rank.py RANK WORLD
FOLDER SCENE`); the last line it prints is JSON: what it found. FOLDER holds the rendezvous and the artifacts.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_places import few, gpu_of, kept_cache

import tktune
from tktune.core import tables
from tktune.core.errors import RoutingError
from tktune.core.routing import parse_routing
from tktune.runtime import operator as runtime
from tktune.runtime.cuda_dispatch_operator import CudaDispatchOperator

SHAPE: dict[str, Any] = {"hidden": 512, "cols": 768, "experts": 16, "top_k": 4, "tokens": 200}
# As a study might have found them.
FORMS: dict[str, dict[str, Any]] = {
    "indexed": {"ACTIVATIONS": "indexed"},
    "pushed": {"ACTIVATIONS": "gathered", "TRANSPORT": "push"},
    "pushed_by_index": {"ACTIVATIONS": "indexed", "TRANSPORT": "push"},
}
ROUTINGS = ("uniform", "hot:0.9@3", "empty:0", "zipf:1.2", "one:3")


class Scene:
    def __init__(self, rank: int, world: int, folder: Path, form: str = "", **changes: Any) -> None:
        self.rank, self.world = rank, world
        torch.cuda.set_device(gpu_of(rank))
        cache = kept_cache(folder / "cache").root
        rendezvous = f"file://{folder}/rendezvous"
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world)
        words = {**SHAPE, "weight_layout": "enk", "db": f"{folder}/none.db"}
        if form:
            choice = tktune.lookup("dispatch_gemm", world=world, **words)
            config = choice.config.replace(DRAW="dispenser", **FORMS[form])
            choice = dataclasses.replace(choice, config=config)
            artifact = runtime._artifact(choice, cache, True)
            group = dist.group.WORLD
            self.operator: Any = CudaDispatchOperator(choice, artifact.path, artifact.sha256, group, 30.0)
        else:
            self.operator = tktune.load(
                "dispatch_gemm",
                group=dist.group.WORLD,
                build=True,
                cache=cache,
                **words,
                **changes,
            )
        self.problem = self.operator.problem
        own = torch.Generator("cuda").manual_seed(rank)
        local = self.problem.local_experts
        shape = (local, self.problem.cols, self.problem.hidden)
        self.weights = torch.randn(shape, device="cuda", generator=own).mul_(512**-0.5).bfloat16()

    def rows(self, seed: int) -> torch.Tensor:
        """Everybody's token rows, the same numbers on every rank: (world × tokens, hidden) bf16."""
        shape = (self.world * self.problem.tokens, self.problem.hidden)
        stream = torch.Generator("cpu").manual_seed(seed)
        return torch.randn(shape, generator=stream).bfloat16().cuda()

    def mine(self, everyone: torch.Tensor) -> torch.Tensor:
        tokens = self.problem.tokens
        return everyone[self.rank * tokens : (self.rank + 1) * tokens].contiguous()

    def ids(self, routing: str, seed: int) -> Any:
        return parse_routing(routing).draw(self.problem, seed)

    def error(self, y: torch.Tensor, plan: Any, rows: torch.Tensor, ids: Any) -> float:
        """‖y − ref‖ ÷ ‖ref‖ over all real rows, the reference in fp32; infinite when the plan is not the golden one."""
        golden = tables.build(ids, self.problem, self.rank)
        found = plan.tables.numpy()
        if found.digest != golden.digest or (plan.slots.cpu().numpy() != golden.slots).any():
            return float("inf")
        real = torch.as_tensor(golden.slot_token >= 0)
        slots = torch.nonzero(real).flatten()
        if not len(slots):
            return 0.0
        expert = torch.as_tensor(golden.block_expert)[slots // self.problem.pad]
        token = torch.as_tensor(golden.slot_token)[slots]
        got = y[slots.cuda()].float()
        wanted = torch.empty_like(got)
        for one in range(self.problem.local_experts):
            of = (expert == one).nonzero().flatten().cuda()
            wanted[of] = rows[token.cuda()[of].long()].float() @ self.weights[one].float().T
        return float((got - wanted).norm() / wanted.norm())


def calls(scene: Scene) -> dict[str, Any]:
    """Eager: rows copied in, rows in place, a fresh plan and one filled anew, out given and made."""
    operator, errors, kept = scene.operator, [], None
    for seed, routing in enumerate(ROUTINGS * 2):
        rows, ids = scene.rows(seed), scene.ids(routing, seed)
        own = torch.as_tensor(ids[scene.rank]).cuda()
        if seed % 3 == 0:
            kept = operator.plan(own)
        plan = operator.plan(own.long(), kept) if seed % 3 else kept
        x = scene.mine(rows)
        if seed % 2:
            operator.input.copy_(x)
            x = operator.input
        out = torch.full((operator.capacity, 768), float("nan"), device="cuda").bfloat16()
        y = operator(x, scene.weights, plan, out) if seed % 4 < 2 else operator(x, scene.weights, plan)
        operator.check()
        errors.append(scene.error(y, plan, rows, ids))
    return {"errors": errors, "capacity": operator.capacity, "y": list(y.shape)}


def replays(scene: Scene) -> dict[str, Any]:
    """One graph of plan and call, replayed with other ids, rows and weights, then many times in a row."""
    operator, errors = scene.operator, []
    ids = torch.zeros(200, 4, dtype=torch.int64, device="cuda")
    x = torch.zeros(200, 512, dtype=torch.bfloat16, device="cuda")
    first = scene.ids("uniform", 99)
    ids.copy_(torch.as_tensor(first[scene.rank]))
    plan = operator.plan(ids)
    out = operator(x, scene.weights, plan)
    operator.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        operator.plan(ids, plan)
        operator(x, scene.weights, plan, out)
    for seed in range(10):
        rows, everyone = scene.rows(seed), scene.ids(ROUTINGS[seed % len(ROUTINGS)], seed)
        ids.copy_(torch.as_tensor(everyone[scene.rank]))
        x.copy_(scene.mine(rows))
        out.fill_(float("nan"))
        graph.replay()
        operator.check()
        errors.append(scene.error(out, plan, rows, everyone))
    for _ in range(few(500, 100)):
        graph.replay()
    operator.check()
    errors.append(scene.error(out, plan, rows, everyone))
    within = torch.cuda.CUDAGraph()  # a plan and an output of the graph's own
    with torch.cuda.graph(within):
        own_plan = operator.plan(ids)
        own_out = operator(x, scene.weights, own_plan)
    for seed in (3, 4):
        rows, everyone = scene.rows(seed), scene.ids("uniform", seed)
        ids.copy_(torch.as_tensor(everyone[scene.rank]))
        x.copy_(scene.mine(rows))
        within.replay()
        operator.check()
        errors.append(scene.error(own_out, own_plan, rows, everyone))
    return {"errors": errors}


def library(scene: Scene) -> dict[str, Any]:
    """The library form, alone and under torch.compile, gives what the eager call gives."""
    operator = scene.operator
    rows, ids = scene.rows(1), scene.ids("uniform", 1)
    x, plan = scene.mine(rows), operator.plan(torch.as_tensor(ids[scene.rank]).cuda())
    eager = operator(x, scene.weights, plan)
    out = torch.zeros_like(eager)
    torch.ops.tktune.dispatch_gemm(x, scene.weights, out, plan.memory, operator.number)
    operator.check()
    real = plan.tables.slot_token >= 0
    rows_used = slice(0, plan.rows)
    same = torch.equal(out[rows_used][real], eager[rows_used][real])
    dist.barrier()

    def step(ids: torch.Tensor, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        operator.plan(ids, plan)
        return operator(x, weights, plan) * 2

    own = torch.as_tensor(ids[scene.rank]).cuda()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(own, x, scene.weights)
    operator.check()
    return {"library": same, "compiled": torch.equal(compiled[rows_used][real], eager[rows_used][real] * 2)}


def mistakes(scene: Scene) -> dict[str, Any]:
    """Wrong ids of rank 1 are raised on every rank; then all goes on."""
    operator = scene.operator
    ids = scene.ids("uniform", 5)
    wrong = ids.copy()
    wrong[1, 7, 0] = 16
    operator.plan(torch.as_tensor(wrong[scene.rank]).cuda())
    try:
        operator.check()
        said = ""
    except RoutingError as error:
        said = str(error)
    shape = ""
    try:
        operator.plan(torch.zeros(3, 4, dtype=torch.int32, device="cuda"))
    except RoutingError as error:
        shape = str(error)
    rows = scene.rows(5)
    plan = operator.plan(torch.as_tensor(ids[scene.rank]).cuda())
    y = operator(scene.mine(rows), scene.weights, plan)
    operator.check()
    return {"said": said, "shape": shape, "errors": [scene.error(y, plan, rows, ids)]}


def crowded(scene: Scene) -> dict[str, Any]:
    """Rank 0 gets more rows than fit: it is told, its plan is empty, and rank 1 is not harmed."""
    operator = scene.operator
    rows, ids = scene.rows(2), scene.ids("one:0", 2)
    plan = operator.plan(torch.as_tensor(ids[scene.rank]).cuda())
    y = operator(scene.mine(rows), scene.weights, plan)
    said = ""
    try:
        operator.check()
    except RoutingError as error:
        said = str(error)
    error = 0.0 if said else scene.error(y, plan, rows, ids)
    return {"said": said, "rows": plan.rows, "errors": [error], "capacity": operator.capacity}


def killed(scene: Scene) -> dict[str, Any]:
    """Rank 1 dies under way; rank 0 has launched calls that wait for it, and closes."""
    operator = scene.operator
    rows, ids = scene.rows(2), scene.ids("uniform", 2)
    plan = operator.plan(torch.as_tensor(ids[scene.rank]).cuda())
    operator(scene.mine(rows), scene.weights, plan)
    operator.check()
    dist.barrier()
    if scene.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    operator.plan(torch.as_tensor(ids[scene.rank]).cuda())
    operator(scene.mine(rows), scene.weights, plan)
    begin = time.monotonic()
    operator.close()
    close_s = time.monotonic() - begin
    try:
        usable = float(torch.ones(3, device="cuda").sum()) == 3.0
    except RuntimeError:  # rows of the dead rank were read after its memory had gone
        usable = False
    return {"close_s": close_s, "usable": usable}


def forms(scene: Scene) -> dict[str, Any]:
    """Rows read by index, where this rank's own stay in its input, and rows that peers push, both ways."""
    found, replayed = calls(scene), replays(scene)
    return {**found, "errors": found["errors"] + replayed["errors"]}


indexed = pushed = pushed_by_index = forms
CHANGES: dict[str, dict[str, Any]] = {
    "crowded": {"capacity": 1024},
    **{name: {"form": name} for name in FORMS},
}


def main() -> None:
    rank, world, folder, name = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    scene = Scene(rank, world, folder, **CHANGES.get(name, {}))
    found = globals()[name](scene)
    begin = time.monotonic()
    scene.operator.close()
    found.setdefault("close_s", time.monotonic() - begin)
    print(json.dumps(found), flush=True)
    os._exit(0)  # a group whose rank was killed would wait for it


if __name__ == "__main__":
    main()
