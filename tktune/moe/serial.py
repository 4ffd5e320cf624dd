"""The layer in plain torch, one step after the other: all-gather, gather, grouped GEMM, silu · up, grouped GEMM, combine,
reduce-scatter. It stands in where no kernel of ours can run. On GPUs it never waits for the host, so it can be captured.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import silu

from tktune.core.errors import ProblemError
from tktune.core.problem import Problem
from tktune.core.tables import refuse_ids
from tktune.moe import library
from tktune.moe.call import LayerCall
from tktune.moe.parts import GATE_AND_UP, NO_EXPERT


class SerialLayer:
    """The same calls as `moe.operator.TunedLayer`, without kernels of ours.

    Partial sums are formed in fp32, rounded to bf16 for their way to the token's rank, and added there.
    """

    packs = False

    def __init__(self, layer: Problem, group: Any, why: str = "", device: str | None = None) -> None:
        self.problem = layer
        self.why = why
        self.group = group
        self.rank = 0
        gpus = torch.cuda.is_available() and device != "cpu"
        self.device = torch.device("cuda", torch.cuda.current_device()) if gpus else torch.device("cpu")
        self.workspace = torch.empty(0, device=self.device)
        self._wrong_ids = torch.zeros((), dtype=torch.bool, device=self.device)
        if group is not None:
            import torch.distributed as dist

            self.rank = dist.get_rank(group)
        self.number = library.enter(self)
        self._closed = False

    def packed(self, w13: torch.Tensor) -> torch.Tensor:
        return w13

    def plain(self, w13: torch.Tensor) -> torch.Tensor:
        return w13

    def explain(self) -> str:
        return f"Plain torch: {self.why}" if self.why else "Plain torch."

    def run(self, call: LayerCall) -> torch.Tensor:
        """Fill `call.out` and return it; `w13` is gate, then up, not packed. Collective."""
        if self._closed:
            raise closed()
        x, topk_ids, topk_weights, w13, w2, out = call
        self._judge(topk_ids)
        everyone = everyones(x, self.group)
        ids, weights = everyones(topk_ids, self.group), everyones(topk_weights, self.group)
        layer = self.problem
        if layer.weight_layout == "enk":
            w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
        local = ids.long() - self.rank * layer.local_experts
        here = (local >= 0) & (local < layer.local_experts)
        weights = torch.where(here, weights.float(), 0.0)
        if x.is_cuda:
            sums = _grouped(everyone, local, here, weights, w13, w2)
        else:
            sums = _by_expert(everyone, local, weights, w13, w2)
        return self._scattered(sums.to(torch.bfloat16), out)

    def _judge(self, topk_ids: torch.Tensor) -> None:
        """Ids that are none are left out by what follows. Raises `RoutingError` where the host can look at once."""
        wrong = (topk_ids < NO_EXPERT) | (topk_ids >= self.problem.experts)
        self._wrong_ids.logical_or_(wrong.any())
        if self.device.type == "cpu":
            ranked = topk_ids.sort(1).values
            twice = (ranked[:, 1:] == ranked[:, :-1]) & (ranked[:, 1:] != NO_EXPERT)
            self._wrong_ids.logical_or_(twice.any())
            self.check()

    def check(self) -> None:
        """Raises `RoutingError` when a call since the last check was given ids that are no experts."""
        if bool(self._wrong_ids):
            self._wrong_ids.zero_()
            raise refuse_ids(self.problem)

    def close(self) -> None:
        self._closed = True
        library.leave(self.number)
        self.group = None

    def _scattered(self, sums: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Each token's partial sums of all ranks, on the token's rank."""
        if self.group is None:
            return out.copy_(sums)
        import torch.distributed as dist

        if (
            dist.get_backend(self.group) == "gloo"
        ):  # speaks of host memory, and has no reduce-scatter everywhere
            wide = sums.float().cpu()
            dist.all_reduce(wide, group=self.group)
            return out.copy_(wide.view(-1, *out.shape)[self.rank])
        dist.reduce_scatter_tensor(out, sums, group=self.group)
        return out


def closed() -> ProblemError:
    """The error of a call after `close`."""
    return ProblemError("The layer was closed.", "Make it again, or keep it open as long as it is called.")


def everyones(mine: torch.Tensor, group: Any) -> torch.Tensor:
    """All ranks' tensors on top of each other, in rank order."""
    mine = mine.contiguous()
    if group is None:
        return mine
    import torch.distributed as dist

    world = dist.get_world_size(group)
    if dist.get_backend(group) == "gloo":
        here = mine.cpu()
        parts = [torch.empty_like(here) for _ in range(world)]
        dist.all_gather(parts, here, group=group)
        return torch.cat(parts).to(mine.device)
    gathered = mine.new_empty((world * mine.shape[0], *mine.shape[1:]))
    dist.all_gather_into_tensor(gathered, mine, group=group)
    return gathered


def _by_expert(
    x: torch.Tensor, local: torch.Tensor, weights: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    """(tokens of all ranks, hidden) fp32: expert by expert."""
    sums = torch.zeros(x.shape[0], x.shape[1], dtype=torch.float32, device=x.device)
    for expert in range(w13.shape[0]):
        token, place = torch.nonzero(local == expert, as_tuple=True)
        if len(token):
            gate, up = (x[token] @ w13[expert]).chunk(GATE_AND_UP, dim=1)
            row = (silu(gate.float()) * up.float()).to(torch.bfloat16) @ w2[expert]
            sums[token] += weights[token, place, None] * row.float()
    return sums


def _grouped(
    x: torch.Tensor,
    local: torch.Tensor,
    here: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
) -> torch.Tensor:
    """As `_by_expert`, by two grouped GEMMs; rows of others' experts stand last and are in no group."""
    top_k, experts = local.shape[1], w13.shape[0]
    key, by_expert = torch.where(here, local, experts).reshape(-1).sort(stable=True)
    ends = torch.searchsorted(key, torch.arange(experts, device=x.device), right=True).int()
    token = by_expert.div(top_k, rounding_mode="floor")
    gate, up = torch._grouped_mm(x[token], w13, offs=ends).chunk(GATE_AND_UP, dim=1)
    rows = torch._grouped_mm((silu(gate.float()) * up.float()).to(torch.bfloat16), w2, offs=ends)
    weighted = rows.float() * weights.reshape(-1)[by_expert, None]
    weighted = torch.where((key < experts)[:, None], weighted, 0.0)  # what is in no group may hold anything
    return torch.zeros(x.shape, dtype=torch.float32, device=x.device).index_add_(0, token, weighted)
