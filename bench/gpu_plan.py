"""What a plan costs on two GPUs: expert ids exchanged and tables built by one captured launch a rank, of rows that are pulled
and of rows that are pushed; beside it, the pull's tables by torch operations after a gather of the ids.

    python bench/gpu_plan.py [--out bench/results/NAME.json]

Each iteration begins with a meeting of both ranks on the device; its time is that of the slower rank; medians.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import shlex
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import tktune
from tktune.core import tables, tables_torch
from tktune.core.device_cuda import cuda_device_classes
from tktune.core.routing import parse_routing
from tktune.families.cuda.launch import Graph
from tktune.families.cuda.plan_globals import blocks_of
from tktune.families.cuda.stopwatch import Stopwatch
from tktune.families.dispatch_gemm.push_cuda import Pushes
from tktune.runtime.operator import operator_of

WORLD, TOKENS, TOP_K, ITERATIONS, WARMUP = 2, 2048, 8, 200, 20
SHAPES: dict[int, dict[str, Any]] = {
    64: {"hidden": 512, "cols": 256, "experts": 64},
    128: {"hidden": 512, "cols": 256, "experts": 128},
}
ROUTINGS = ("uniform", "zipf:1.2", "hot:0.9@3")


def slowest(samples: list[float]) -> float:
    """The median over iterations of the slower rank, microseconds."""
    everyone: list[Any] = [None] * WORLD
    dist.all_gather_object(everyone, samples)
    return round(statistics.median(max(pair) for pair in zip(*everyone, strict=True)), 2)


def measure(rank: int, shape: dict[str, Any], transport: str, folder: Path) -> dict[str, Any]:
    choice = tktune.lookup(
        "dispatch_gemm", **shape, tokens=TOKENS, top_k=TOP_K, world=WORLD, db=f"{folder}/none.db"
    )
    choice = dataclasses.replace(choice, config=choice.config.replace(TRANSPORT=transport))
    operator: Any = operator_of(choice, dist.group.WORLD, cache=folder / "cache", build=True)
    problem = operator.problem
    warm, cold = Stopwatch(rank, 0), Stopwatch(rank, 1 << 27)
    found: dict[str, Any] = {"blocks": blocks_of(problem)}
    for routing in ROUTINGS:
        everyone = parse_routing(routing).draw(problem, 1)
        ids = torch.as_tensor(everyone[rank]).cuda()
        plan = operator.plan(ids)
        operator.check()
        if plan.tables.numpy().digest != tables.build(everyone, problem, rank).digest:
            raise SystemExit(f"The plan of rank {rank} is not the golden one for {routing}.")
        if transport == "push":
            wanted = Pushes.of_ids(everyone, problem, rank, torch.device("cuda", rank))
            if wrong := Pushes.within(plan.device_tables, wanted).wrong_table(wanted):
                raise SystemExit(f"The table {wrong} of rank {rank} is not the golden one for {routing}.")
        graph = Graph(next(iter(operator._plan_launches.values())))
        found[f"{routing}, warm"] = slowest(warm.time(graph, ITERATIONS, WARMUP, operator._meet))
        found[f"{routing}, cold"] = slowest(cold.time(graph, ITERATIONS, WARMUP, operator._meet))
        gathered = torch.as_tensor(everyone).cuda()

        def by_torch(stream: int, gathered: torch.Tensor = gathered) -> None:
            tables_torch.build(gathered, problem, rank, check_ids=False)

        if routing == "uniform" and transport == "pull":
            found["torch operations, ids gathered already"] = slowest(warm.time(by_torch, 20, 3))
        operator._plan_launches.clear()
    operator.check()
    operator.close()
    return found


def run(rank: int, folder: str, out: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    measured = {
        f"{experts} {transport}": measure(rank, shape, transport, Path(folder))
        for experts, shape in SHAPES.items()
        for transport in ("pull", "push")
    }
    if rank == 0:
        for name, found in measured.items():
            experts, transport = name.split()
            for what, us in found.items():
                print(
                    f"{experts:>4} experts, top-{TOP_K}, {WORLD} × {TOKENS} tokens, {transport}: {what:42} {us:8.2f}"
                )
        if out:
            facts = {
                "device": torch.cuda.get_device_name(0),
                "torch": torch.__version__,
                "date": datetime.date.today().isoformat(),
                "command": shlex.join(["python", *sys.argv]),
                "policy": f"slower rank, median of {ITERATIONS} graph launches after a meeting on the device",
            }
            Path(out).write_text(json.dumps({**facts, "us": measured}, indent=1) + "\n")
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--out", default="", help="write JSON here")
    arguments = parser.parse_args()
    if len(cuda_device_classes()) < WORLD:
        print("Fewer than two GPUs answer here, so there is nothing to measure. Run this on a host with two.")
        return 1
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(folder, arguments.out), nprocs=WORLD)
    return 0


if __name__ == "__main__":
    sys.exit(main())
