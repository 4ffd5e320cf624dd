"""An expert layer on two ranks: FusedMoE beside the same layer in plain torch, on fresh tokens each round.

    python examples/moe_layer.py                 # looks up, builds the artifacts if they are missing, runs, compares

With two GPUs each rank runs on one of them, and the layer is also captured in a CUDA graph; else both run on the CPU. Each
rank prints where its configs came from and the largest relative error of its tokens. `tktune run STUDY` on a study of the
family moe_layer makes the configs exact (docs/moe-layer.md).
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from ranks import meet, options, start
from torch.nn.functional import silu

from tktune.moe import FusedMoE


def plain(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    """The layer in fp32, expert by expert; x (tokens, hidden), w13 (experts, 2 × intermediate, hidden), w2 (experts, hidden,
    intermediate) of all ranks."""
    y = torch.zeros(x.shape, device=x.device)
    for expert in range(len(w13)):
        token, place = torch.nonzero(ids == expert, as_tuple=True)
        gate, up = (x[token].float() @ w13[expert].float().T).chunk(2, dim=1)
        y[token] += weights[token, place, None] * ((silu(gate) * up) @ w2[expert].float().T)
    return y


def run(rank: int, shape: argparse.Namespace, rendezvous: str) -> None:
    device, gpus = meet(rank, shape, rendezvous), shape.device == "cuda"

    drawn = torch.Generator().manual_seed(1)  # the same weights of all experts on both ranks
    size = (shape.experts, 2 * shape.intermediate, shape.hidden)
    w13 = (torch.randn(size, generator=drawn) / shape.hidden**0.5).to(device, torch.bfloat16)
    size = (shape.experts, shape.hidden, shape.intermediate)
    w2 = (torch.randn(size, generator=drawn) / shape.intermediate**0.5).to(device, torch.bfloat16)

    moe = FusedMoE.from_weights(
        w13,
        w2,
        experts=shape.experts,
        top_k=shape.top_k,
        tokens=shape.tokens,
        group=dist.group.WORLD,
        pad=shape.pad,
        device=None if gpus else "cpu",
        build=True,
    )
    print(f"rank {rank}: {moe.operator.explain()}", flush=True)

    drawn = torch.Generator().manual_seed(100 + rank)  # this rank's tokens
    worst = 0.0
    replayed = None
    with torch.inference_mode():
        for _ in range(shape.rounds):
            x = torch.randn(shape.tokens, shape.hidden, generator=drawn).to(device, torch.bfloat16)
            router = torch.randn(shape.tokens, shape.experts, generator=drawn).to(device)
            weights, ids = router.softmax(dim=1).topk(shape.top_k, dim=1)
            y = moe(x, ids, weights)
            moe.check()
            expected = plain(x, ids, weights, w13, w2)
            worst = max(worst, float((y.float() - expected).norm() / expected.norm()))
            if gpus:
                replayed = replayed or Replayed(moe, x, ids, weights)
                again = replayed(x, ids, weights)
                moe.check()
                if not torch.equal(again, y):
                    raise SystemExit(f"rank {rank}: the graph's result differs")
    print(
        f"rank {rank}: largest relative error {worst:.2e} over {shape.rounds} rounds on {device}", flush=True
    )
    moe.close()
    dist.destroy_process_group()
    if not worst < 1e-2:
        raise SystemExit(f"rank {rank}: the layer does not match torch")


class Replayed:
    """The layer as a CUDA graph: tables, both kernels and their meetings, on inputs that are copied in."""

    def __init__(self, moe: FusedMoE, *inputs: torch.Tensor) -> None:
        self.inputs = [torch.empty_like(one) for one in inputs]
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.y = moe(*self.inputs)

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        for mine, given in zip(self.inputs, inputs, strict=True):
            mine.copy_(given)
        self.graph.replay()
        return self.y


if __name__ == "__main__":
    start(
        run, options(__doc__, hidden=512, intermediate=256, experts=8, top_k=2, tokens=256, pad=64, rounds=3)
    )
