"""One rank of a group that loads the combine operator and plays scenes (`python combine_operator_rank.py RANK WORLD FOLDER
SCENE...`); after each it prints a line of JSON: the scene and what it found. FOLDER holds the rendezvous and the artifacts.
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
from tktune.core import combine_tables, tables
from tktune.core.errors import ProblemError, RoutingError
from tktune.core.routing import parse_routing
from tktune.families.gemm_combine.inputs import combine_tolerance
from tktune.runtime import operator as runtime

ROUTING: dict[str, Any] = {"experts": 16, "top_k": 4, "tokens": 200, "weight_layout": "enk"}
SHAPE: dict[str, Any] = {**ROUTING, "hidden": 512, "cols": 768}
LARGE: dict[str, Any] = {**SHAPE, "hidden": 1536, "cols": 4096, "experts": 128, "top_k": 8, "tokens": 2048}
ROUTINGS = ("uniform", "hot:0.9@3", "empty:0", "zipf:1.2", "one:3")
# As studies might have found them: what the operator's own plan must list differently.
FORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "columns": {"signal_groups": 2, "walk": "columns", "COL_BLOCK": 128, "num_comm_sms": 8},
    "groups": {"signal_groups": 2, "COL_BLOCK": 128, "order": "remote", "num_reduce_sms": 96},
    "pull": {"form": "pull", "num_reduce_sms": 32, "order": "remote"},
    "pull columns": {"form": "pull", "num_reduce_sms": 32, "signal_groups": 2, "walk": "columns", "COL_BLOCK": 128},
}  # fmt: skip


class Scene:
    def __init__(self, rank: int, world: int, folder: Path) -> None:
        self.rank, self.world, self.folder = rank, world, folder
        torch.cuda.set_device(gpu_of(rank))
        rendezvous = f"file://{folder}/rendezvous"
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world)

    def open(self, form: str = "default", shape: Any = SHAPE, **words: Any) -> None:
        """Load the operator, with weights of everybody's experts."""
        self.operator: Any = self.loaded("gemm_combine", FORMS[form], shape, **words)
        self.problem = self.operator.problem
        local, k, n = self.problem.local_experts, self.problem.hidden, self.problem.cols
        self.everyones = [
            torch.randn(local, n, k, device="cuda", generator=torch.Generator("cuda").manual_seed(r))
            .mul_(k**-0.5)
            .bfloat16()
            for r in range(self.world)
        ]
        self.weights = self.everyones[self.rank]

    def loaded(self, family: str, changes: Any, shape: Any, **words: Any) -> Any:
        choice = tktune.lookup(family, world=self.world, **shape, db=f"{self.folder}/none.db")
        choice = dataclasses.replace(choice, config=choice.config.replace(**changes))
        group = dist.group.WORLD
        return runtime.operator_of(
            choice, group, cache=kept_cache(self.folder / "cache").root, build=True, **words
        )

    def ids(self, routing: str, seed: int) -> Any:
        return parse_routing(routing).draw(self.problem, seed)

    def topk_weights(self, seed: int) -> torch.Tensor:
        """Everybody's, (world, tokens, top_k), the same numbers on every rank; one in eight 0."""
        stream = torch.Generator("cpu").manual_seed(seed)
        shape = (self.world, self.problem.tokens, self.problem.top_k)
        weights = torch.rand(shape, generator=stream)
        weights[torch.rand(shape, generator=stream) < 1 / 8] = 0
        return weights.cuda()

    def rows(self, seed: int) -> torch.Tensor:
        """What every assignment's expert is given, (world, tokens, top_k, hidden) bf16, the same on every rank."""
        stream = torch.Generator("cuda").manual_seed(1000 + seed)
        shape = (self.world, self.problem.tokens, self.problem.top_k, self.problem.hidden)
        return torch.randn(shape, device="cuda", generator=stream).bfloat16()

    def packed(self, rows: torch.Tensor, ids: Any) -> torch.Tensor:
        """The rows in the slots of this rank by the golden tables; NaN elsewhere."""
        shape = (self.operator.capacity, self.problem.hidden)
        made = torch.full(shape, float("nan"), dtype=torch.bfloat16, device="cuda")
        slots = torch.as_tensor(tables.build(ids, self.problem, self.rank).slots).cuda().long()
        made[slots[slots >= 0]] = rows[slots >= 0]
        return made

    def error(self, y: torch.Tensor, rows: torch.Tensor, ids: Any, weights: torch.Tensor) -> float:
        """The largest error of an own token, in units of the tolerance of its terms' magnitudes."""
        total = torch.zeros(self.problem.tokens, self.problem.cols, device="cuda")
        size = torch.zeros_like(total)
        own, local = torch.as_tensor(ids[self.rank]).cuda().long(), self.problem.local_experts
        torch.set_float32_matmul_precision("highest")
        for expert in range(self.problem.experts):
            token, x = torch.nonzero(own == expert, as_tuple=True)
            matrix = self.everyones[expert // local][expert % local].float().T
            term = weights[self.rank, token, x][:, None] * (rows[self.rank, token, x].float() @ matrix)
            total.index_add_(0, token, term)
            size.index_add_(0, token, term.abs())
        allowed = combine_tolerance(self.problem.hidden) * size.norm(dim=1) + 1e-30
        return float(((y.float() - total).norm(dim=1) / allowed).max())

    def wrong_tables(self, plan: Any, ids: Any, weights: torch.Tensor) -> str:
        """The first table of a plan that is not the golden one."""
        golden, combine = (b.build(ids, self.problem, self.rank) for b in (tables, combine_tables))
        if plan.schedule.tables.numpy().digest != golden.digest:
            return "schedule"
        found = plan.tables.numpy().arrays()
        for name, array in combine.arrays().items():
            if (found[name] != array).any():
                return name
        config = self.operator.choice.config
        words = (str(config["order"]), config.number("signal_groups"), str(config["walk"]))
        if config["form"] == "pull":
            jobs = combine_tables.pull_jobs(combine, self.problem, *words)
        else:
            jobs = combine_tables.push_jobs(golden, self.problem, *words)
        if plan.device_tables.jobs().cpu().tolist() != jobs.tolist():
            return "jobs"
        return "" if torch.equal(plan.topk_weights, weights) else "topk_weights"


def calls(scene: Scene) -> dict[str, Any]:
    """Eager: plans of ids and plans filled anew, out given and made; every table is the golden one; bits repeat."""
    operator, errors, tables_wrong, same, kept = scene.operator, [], [], [], None
    for seed, routing in enumerate(ROUTINGS * 2):
        ids, weights, rows = scene.ids(routing, seed), scene.topk_weights(seed), scene.rows(seed)
        own = torch.as_tensor(ids[scene.rank]).cuda()
        kept = operator.plan(own if seed % 2 else own.long(), weights[scene.rank], kept if seed % 3 else None)
        activations = scene.packed(rows, ids)
        out = torch.full((scene.problem.tokens, scene.problem.cols), float("nan"), device="cuda").bfloat16()
        y = (
            operator(activations, scene.weights, kept, out)
            if seed % 4 < 2
            else operator(activations, scene.weights, kept)
        )
        again = operator(activations, scene.weights, kept)
        operator.check()
        errors.append(scene.error(y, rows, ids, weights))
        tables_wrong.append(scene.wrong_tables(kept, ids, weights))
        same.append(torch.equal(y, again))
    return {"errors": errors, "tables": tables_wrong, "same": same}


def replays(scene: Scene) -> dict[str, Any]:
    """One graph of plan and call, replayed with other ids, weights and rows, then many times in a row."""
    operator, errors, problem = scene.operator, [], scene.problem
    ids = torch.as_tensor(scene.ids("uniform", 99)[scene.rank]).cuda()
    topk_weights = scene.topk_weights(99)[scene.rank].clone()
    activations = torch.zeros(operator.capacity, problem.hidden, dtype=torch.bfloat16, device="cuda")
    plan = operator.plan(ids, topk_weights)
    out = operator(activations, scene.weights, plan)
    operator.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        operator.plan(ids, topk_weights, plan)
        operator(activations, scene.weights, plan, out)
    for seed in range(10):
        everyone, weights = scene.ids(ROUTINGS[seed % len(ROUTINGS)], seed), scene.topk_weights(seed)
        rows = scene.rows(seed)
        ids.copy_(torch.as_tensor(everyone[scene.rank]))
        topk_weights.copy_(weights[scene.rank])
        activations.copy_(scene.packed(rows, everyone))
        out.fill_(float("nan"))
        graph.replay()
        operator.check()
        errors.append(scene.error(out, rows, everyone, weights))
    for _ in range(few(500, 100)):
        graph.replay()
    operator.check()
    errors.append(scene.error(out, rows, everyone, weights))
    return {"errors": errors}


def forms(scene: Scene) -> dict[str, Any]:
    first, second = calls(scene), replays(scene)
    return {**first, "errors": first["errors"] + second["errors"]}


columns = groups = pulls = pulls_columns = forms


def layer(scene: Scene) -> dict[str, Any]:
    """Both GEMMs of a layer by one schedule that the dispatch plans, in one graph, with other ids each time."""
    shape = {**ROUTING, "hidden": 768, "cols": 512}
    first, second = scene.loaded("dispatch_gemm", {}, shape), scene.operator
    problem, errors = second.problem, []
    w1 = [
        torch.randn(problem.local_experts, 512, 768, device="cuda", generator=torch.Generator("cuda").manual_seed(50 + r))
        .mul_(768**-0.5)
        .bfloat16()
        for r in range(scene.world)
    ]  # fmt: skip
    ids = torch.as_tensor(scene.ids("uniform", 99)[scene.rank]).cuda()
    topk_weights = scene.topk_weights(99)[scene.rank].clone()
    x = torch.zeros(200, 768, dtype=torch.bfloat16, device="cuda")

    schedule = first.plan(ids)
    plan = second.plan(None, topk_weights, schedule=schedule)
    inner = first(x, w1[scene.rank], schedule)
    y = second(inner, scene.weights, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first.plan(ids, schedule)
        second.plan(None, topk_weights, plan)
        first(x, w1[scene.rank], schedule, inner)
        second(inner, scene.weights, plan, y)
    for seed in range(8):
        everyone, weights = scene.ids(ROUTINGS[seed % len(ROUTINGS)], seed), scene.topk_weights(seed)
        stream = torch.Generator("cuda").manual_seed(seed)
        xs = torch.randn(scene.world, 200, 768, device="cuda", generator=stream).bfloat16()
        ids.copy_(torch.as_tensor(everyone[scene.rank]))
        topk_weights.copy_(weights[scene.rank])
        x.copy_(xs[scene.rank])
        graph.replay()
        first.check()
        second.check()
        rows = torch.zeros(scene.world, 200, 4, 512, dtype=torch.bfloat16, device="cuda")
        own = torch.as_tensor(everyone[scene.rank]).cuda().long()
        for expert in range(problem.experts):
            token, i = torch.nonzero(own == expert, as_tuple=True)
            matrix = w1[expert // problem.local_experts][expert % problem.local_experts].T
            rows[scene.rank, token, i] = xs[scene.rank, token] @ matrix
        errors.append(scene.error(y, rows, everyone, weights) / 3)  # inner rows differ by a rounding
    first.close()
    return {"errors": errors}


def library(scene: Scene) -> dict[str, Any]:
    """The library form, alone and under torch.compile, gives what the eager call gives."""
    operator = scene.operator
    ids, weights, rows = scene.ids("uniform", 1), scene.topk_weights(1), scene.rows(1)
    own, mine, activations = (
        torch.as_tensor(ids[scene.rank]).cuda(),
        weights[scene.rank],
        scene.packed(rows, ids),
    )
    plan = operator.plan(own, mine)
    eager = operator(activations, scene.weights, plan)
    out = torch.zeros_like(eager)
    torch.ops.tktune.gemm_combine(
        activations, scene.weights, out, plan.schedule.memory, plan.memory, operator.number
    )
    operator.check()
    dist.barrier()

    def step(ids: torch.Tensor, mine: torch.Tensor, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        operator.plan(ids, mine, plan)
        return operator(x, weights, plan) * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(own, mine, activations, scene.weights)
    operator.check()
    return {"library": torch.equal(out, eager), "compiled": torch.equal(compiled, eager * 2)}


def mistakes(scene: Scene) -> dict[str, Any]:
    """Wrong ids of rank 1 are raised on every rank and left out; too little room too; then all goes on."""
    operator, said = scene.operator, []
    ids, weights, rows = scene.ids("uniform", 5), scene.topk_weights(5), scene.rows(5)
    wrong = ids.copy()
    wrong[1, 7, :] = (16, -1, 17, 99)
    activations = scene.packed(rows, ids)
    plan = operator.plan(torch.as_tensor(wrong[scene.rank]).cuda(), weights[scene.rank])
    y = operator(activations, scene.weights, plan)  # nobody hangs, and a token without experts gets nothing
    try:
        operator.check()
    except RoutingError as error:
        said.append(str(error))
    emptied = bool((y[7] == 0).all())
    for bad in (activations[:-1], activations.float()):
        try:
            operator(bad, scene.weights, plan)
        except ProblemError as error:
            said.append(str(error))
    plan = operator.plan(torch.as_tensor(ids[scene.rank]).cuda(), weights[scene.rank])
    y = operator(activations, scene.weights, plan)
    operator.check()
    return {"said": said, "emptied": emptied, "errors": [scene.error(y, rows, ids, weights)]}


def crowded(scene: Scene) -> dict[str, Any]:
    """Rank 0 gets more rows than fit: it is told, its rows are left out everywhere, and nobody waits for it."""
    operator = scene.operator
    ids, weights = scene.ids("one:0", 2), scene.topk_weights(2)
    activations = torch.ones(operator.capacity, 512, dtype=torch.bfloat16, device="cuda")
    plan = operator.plan(torch.as_tensor(ids[scene.rank]).cuda(), weights[scene.rank])
    y = operator(activations, scene.weights, plan)
    said = ""
    try:
        operator.check()
    except RoutingError as error:
        said = str(error)
    owes_nothing = bool((plan.tables.final_contrib[:, 0] == 0).all())
    return {"said": said, "owes_nothing": owes_nothing, "finite": bool(torch.isfinite(y.float()).all())}


def killed(scene: Scene) -> dict[str, Any]:
    """Rank 1 dies under way; rank 0 has launched calls that wait for it, and closes."""
    operator = scene.operator
    ids, weights, rows = scene.ids("uniform", 2), scene.topk_weights(2), scene.rows(2)
    own, activations = torch.as_tensor(ids[scene.rank]).cuda(), scene.packed(rows, ids)
    operator(activations, scene.weights, operator.plan(own, weights[scene.rank]))
    operator.check()
    dist.barrier()
    if scene.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    operator(activations, scene.weights, operator.plan(own, weights[scene.rank]))
    begin = time.monotonic()
    operator.close()
    return {"close_s": time.monotonic() - begin}


def timed(scene: Scene) -> dict[str, Any]:
    """Microseconds of a plan, of its tables alone, and of a call in a graph; and of the host's part of an eager call."""
    operator, problem = scene.operator, scene.problem
    ids = torch.as_tensor(scene.ids("uniform", 0)[scene.rank]).cuda()
    weights = scene.topk_weights(0)[scene.rank].clone()
    activations = torch.zeros(operator.capacity, problem.hidden, dtype=torch.bfloat16, device="cuda")
    plan = operator.plan(ids, weights)
    over = operator.plan(None, weights, schedule=plan.schedule)
    out = operator(activations, scene.weights, plan)
    operator.check()
    found = {}
    works = {
        "plan": lambda: operator.plan(ids, weights, plan),
        "tables": lambda: operator.plan(None, weights, over),
        "call": lambda: operator(activations, scene.weights, plan, out),
    }
    for name, work in works.items():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(10):
                work()
        graph.replay()
        operator.check()
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(20):
            graph.replay()
        end.record()
        operator.check()
        found[name] = begin.elapsed_time(end) * 1e3 / 200
    dist.barrier()
    before = time.perf_counter()
    for _ in range(50):
        operator(activations, scene.weights, plan, out)
    found["host"] = (time.perf_counter() - before) * 1e6 / 50
    operator.check()
    return found


CHANGES: dict[str, dict[str, Any]] = {
    "columns": {"form": "columns"},
    "groups": {"form": "groups"},
    "pulls": {"form": "pull"},
    "pulls_columns": {"form": "pull columns"},
    "crowded": {"capacity": 1024},
    "timed": {"shape": LARGE},
}


def main() -> None:
    rank, world, folder, *names = sys.argv[1:]
    scene = Scene(int(rank), int(world), Path(folder))
    for name in names:
        scene.open(**CHANGES.get(name, {}))
        found = globals()[name](scene)
        begin = time.monotonic()
        scene.operator.close()
        found.setdefault("close_s", time.monotonic() - begin)
        print(json.dumps([name, found]), flush=True)
    os._exit(0)  # a group whose rank was killed would wait for it


if __name__ == "__main__":
    main()
