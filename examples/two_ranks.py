"""Two ranks load the tuned dispatch ⊕ grouped GEMM operator, run it on fresh routing and check it against torch.

    python examples/two_ranks.py                 # looks up, builds the artifact if it is missing, runs, compares

With two GPUs each rank runs on one of them, else both on the CPU. Each rank prints where its config came from and the largest relative error of its rows.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from ranks import WORLD, meet, options, start

import tktune


def reference(
    x_all: torch.Tensor, weights: torch.Tensor, topk_ids: torch.Tensor, rank: int
) -> dict[tuple[int, int], torch.Tensor]:
    """fp32 rows of this rank's experts by (token, expert): (tokens of all ranks, hidden) × (experts, hidden, cols)."""
    local = weights.shape[0]
    rows = {}
    for token, experts in enumerate(topk_ids.reshape(-1, topk_ids.shape[-1]).tolist()):
        for expert in experts:
            if rank * local <= expert < (rank + 1) * local:
                rows[token, expert] = x_all[token].float() @ weights[expert - rank * local].float()
    return rows


def everyones(mine: torch.Tensor) -> torch.Tensor:
    """All ranks' tensors on top of each other."""
    gathered = [torch.empty_like(mine, device="cpu") for _ in range(WORLD)]
    dist.all_gather(gathered, mine.cpu())
    return torch.cat(gathered).to(mine.device)


def run(rank: int, shape: argparse.Namespace, rendezvous: str) -> None:
    device, gpus = meet(rank, shape, rendezvous), shape.device == "cuda"
    operator = tktune.load(
        "dispatch_gemm",
        hidden=shape.hidden,
        cols=shape.cols,
        experts=shape.experts,
        top_k=shape.top_k,
        tokens=shape.tokens,
        pad=shape.pad,
        device=None if gpus else "cpu",
        group=dist.group.WORLD,
        build=True,
    )
    print(f"rank {rank}: {operator.choice.provenance} config {operator.choice.config}", flush=True)

    generator = torch.Generator().manual_seed(1000 + rank)
    local = shape.experts // WORLD
    weights = torch.randn(local, shape.hidden, shape.cols, generator=generator) / shape.hidden**0.5
    weights = weights.to(device, torch.bfloat16)
    worst = 0.0
    for _ in range(shape.rounds):
        x = torch.randn(shape.tokens, shape.hidden, generator=generator).to(device, torch.bfloat16)
        scores = torch.rand(shape.tokens, shape.experts, generator=generator).to(device)
        topk_ids = scores.topk(shape.top_k, dim=1).indices.to(torch.int32)
        plan = operator.plan(topk_ids)
        y = operator(x, weights, plan)
        operator.check()

        ids = everyones(topk_ids)
        picked, slots = ids.tolist(), plan.slots.reshape(-1, shape.top_k).tolist()
        for (token, expert), row in reference(everyones(x), weights, ids, rank).items():
            slot = slots[token][picked[token].index(expert)]
            worst = max(worst, float((y[slot].float() - row).norm() / row.norm()))
    print(
        f"rank {rank}: largest relative error {worst:.2e} over {shape.rounds} rounds on {device}", flush=True
    )
    operator.close()
    dist.destroy_process_group()
    if not worst < 1e-2:
        raise SystemExit(f"rank {rank}: the operator does not match torch")


if __name__ == "__main__":
    start(run, options(__doc__, hidden=512, cols=512, experts=8, top_k=2, tokens=512, pad=64, rounds=3))
