"""Ranks of a layer in processes of their own, the inputs of all of them, and the comparison with the reference."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from expert_reference import expert_layer, worst_error

WORLD = 2
# Three roundings of the combine, one of the row between the kernels, and gate and up read rounded where SwiGLU is separate;
# sums in fp32 are far below. Relative to the sum of magnitudes.
TOLERANCE = 7.5 * 2.0**-9


def on_two_ranks(scenario: Callable[..., None], folder: Path, *words: Any) -> None:
    mp.spawn(_rank, args=(scenario, str(folder / "rendezvous"), words), nprocs=WORLD)


def _rank(rank: int, scenario: Callable[..., None], rendezvous: str, words: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD)
    scenario(rank, *words)
    gc.collect()  # a caught error's frames still hold the group, and gloo aborts when it outlives the interpreter
    dist.barrier()
    dist.destroy_process_group()


class Inputs:
    """Weights of all experts and tokens of all ranks, the same wherever they are drawn; bf16 values."""

    def __init__(self, hidden: int, intermediate: int, experts: int, seed: int = 0) -> None:
        stream = torch.Generator().manual_seed(seed)
        scale = hidden**-0.5

        def draw(*shape: int) -> torch.Tensor:
            return (torch.randn(*shape, generator=stream) * scale * 1.5).to(torch.bfloat16)

        self.hidden, self.experts = hidden, experts
        self.gate, self.up = draw(experts, intermediate, hidden), draw(experts, intermediate, hidden)
        self.down = draw(experts, hidden, intermediate)

    @property
    def w13(self) -> torch.Tensor:
        return torch.cat([self.gate, self.up], dim=1)

    def tokens(self, count: int, seed: int, rank: int) -> torch.Tensor:
        stream = torch.Generator().manual_seed(1_000_003 * seed + rank)
        return torch.randn(count, self.hidden, generator=stream).to(torch.bfloat16)

    def reference(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Any:
        return expert_layer(*(_array(t) for t in (x, ids, weights, self.gate, self.up, self.down)))


def _array(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.double() if tensor.dtype.is_floating_point else tensor).cpu().numpy()


def routed(kind: str, tokens: int, experts: int, top_k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ids (tokens, top_k) and weights: `uniform`, `hot` (expert 0 in most tokens), `first` and `second` (all experts on that
    rank), `both` (half of each token's experts on either rank), `ragged` (few experts, one of them alone)."""
    stream = torch.Generator().manual_seed(7 * seed + len(kind))
    scores = torch.rand(tokens, experts, generator=stream)
    half = experts // 2
    if kind == "hot":
        scores[:, 0] += (torch.rand(tokens, generator=stream) < 0.9).float()
    elif kind == "first":
        scores[:, :half] += 1
    elif kind == "second":
        scores[:, half:] += 1
    elif kind == "both":
        for part in (scores[:, :half], scores[:, half:]):
            best = part.topk((top_k + 1) // 2, dim=1).indices
            part.scatter_add_(1, best, torch.ones(best.shape))
    elif kind == "ragged":
        scores[:, :: max(1, experts // (top_k + 1))] += 1
    ids = scores.topk(top_k, dim=1).indices
    weights = torch.rand(tokens, top_k, generator=stream)
    weights[torch.rand(tokens, top_k, generator=stream) < 0.125] = 0.0
    return ids, weights


def assert_right(
    y: torch.Tensor, inputs: Inputs, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> float:
    error = worst_error(_array(y), _array(ids), _array(weights), inputs.reference(x, ids, weights))
    assert error <= TOLERANCE, f"a token is off by {error:.3g}"
    return error
