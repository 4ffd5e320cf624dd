"""The serial layer: NCCL all-gather, tables, gather, grouped GEMM, silu · up, grouped GEMM, combine, NCCL reduce-scatter.

Everything is counted, but it is told how many rows its experts get, which a program would have to wait for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import silu

from moe_bench.figures import FORMS
from tktune.core.problem import Problem
from tktune.moe.cases_cuda import LayerCase
from tktune.runtime.glu_weights import unpack_glu


class Serial:
    """The calls of one case on one rank; `steps[form]` is run as it stands, `result` holds the last one's tokens."""

    def __init__(
        self, layer: Problem, rank: int, case: LayerCase, w13: torch.Tensor, w2: torch.Tensor
    ) -> None:
        self._layer, self._case = layer, case
        self._first = layer.local_experts * rank
        mine = case.everyones_ids // layer.local_experts == rank
        self._rows = int(mine.sum())
        plain = unpack_glu(w13, layer.weight_layout)
        enk = layer.weight_layout == "enk"
        self._w13, self._w2 = (w.transpose(1, 2) if enk else w for w in (plain, w2))
        device = case.x.device
        everyone = layer.world * layer.tokens
        self._x = torch.empty(everyone, layer.hidden, dtype=torch.bfloat16, device=device)
        self._picked = torch.empty(everyone, 2 * layer.top_k, dtype=torch.int32, device=device)
        self._experts = torch.arange(layer.local_experts, device=device)
        self.result = torch.empty(layer.tokens, layer.hidden, dtype=torch.bfloat16, device=device)
        self.calls: dict[str, Callable[[], Any]] = {form: self._call(form) for form in FORMS}

    def _call(self, form: str) -> Callable[[], Any]:
        combine = {FORMS[0]: self._added, FORMS[1]: self._gathered}[form]

        def call() -> Any:
            layer, case, rows = self._layer, self._case, self._rows
            dist.all_gather_into_tensor(self._x, case.x)
            mine = torch.cat([case.ids, case.topk_weights.view(torch.int32)], dim=1)
            dist.all_gather_into_tensor(self._picked, mine)
            ids, weights = self._picked.split(layer.top_k, dim=1)
            weights = weights.view(torch.float32)
            local = ids.reshape(-1) - self._first
            key = torch.where((local >= 0) & (local < layer.local_experts), local, layer.local_experts)
            ordered, by_expert = key.sort(stable=True)
            ends = torch.searchsorted(ordered, self._experts, right=True).int()
            taken = by_expert[:rows]
            token = taken.div(layer.top_k, rounding_mode="floor")
            packed = self._x.index_select(0, token)
            gate, up = torch._grouped_mm(packed, self._w13, offs=ends).chunk(2, dim=1)
            out = torch._grouped_mm(silu(gate).mul_(up), self._w2, offs=ends)
            sums = combine(out, weights, token, taken, by_expert)
            dist.reduce_scatter_tensor(self.result, sums)

        return call

    def _added(
        self,
        out: torch.Tensor,
        weights: torch.Tensor,
        token: torch.Tensor,
        taken: torch.Tensor,
        _: torch.Tensor,
    ) -> torch.Tensor:
        """index_add in fp32."""
        weighted = out.float().mul_(weights.reshape(-1)[taken][:, None])
        sums = torch.zeros(self._x.shape, dtype=torch.float32, device=out.device)
        return sums.index_add_(0, token, weighted).to(torch.bfloat16)

    def _gathered(
        self,
        out: torch.Tensor,
        weights: torch.Tensor,
        token: torch.Tensor,
        taken: torch.Tensor,
        by_expert: torch.Tensor,
    ) -> torch.Tensor:
        """The rows of each token side by side, then their weighted sum; rows that are elsewhere weigh nothing."""
        top_k = self._layer.top_k
        place = torch.empty_like(by_expert)
        place[by_expert] = torch.arange(len(by_expert), device=out.device)
        here = place < self._rows
        rows = out.index_select(0, torch.where(here, place, 0)).view(-1, top_k, out.shape[1])
        weighing = torch.where(here.view(-1, top_k), weights, 0.0).to(torch.bfloat16)
        return torch.bmm(weighing[:, None], rows).squeeze(1)
