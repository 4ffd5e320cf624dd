"""What one (routing, seed) means for one rank of a layer on a GPU: its inputs, the fp32 reference of own tokens, and the
check of a result. Drawn and computed by torch on the device; nothing here launches a kernel of ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tktune.core.problem import Problem
from tktune.core.routing import parse_routing
from tktune.families import glu
from tktune.families.base import GateResult
from tktune.families.cuda.gemm_inputs import draw_tokens, draw_weights
from tktune.families.gemm_combine.plan_cuda import draw_topk_weights
from tktune.moe.cases import layer_tolerance
from tktune.moe.parts import COMBINE, DISPATCH, part_problem


@dataclass(frozen=True)
class LayerCase:
    """One (routing, seed) on one rank.

    `x` (tokens, hidden) bf16, `ids` (tokens, top_k) int32, `topk_weights` (tokens, top_k) float32 are this rank's, all on
    the device; `everyones_ids` (ranks, tokens, top_k) int32 on the host. `reference` (tokens, hidden) float32, `size`
    (tokens,) float64: the squared norms of the sums of magnitudes behind it.
    """

    x: torch.Tensor
    ids: torch.Tensor
    topk_weights: torch.Tensor
    everyones_ids: torch.Tensor
    reference: torch.Tensor
    size: torch.Tensor

    @property
    def bytes(self) -> int:
        return self.x.nbytes + self.reference.nbytes


def weights_of(layer: Problem, rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of `rank`'s experts as the kernels take them: gate and up packed, and down."""
    return (
        draw_weights(part_problem(layer, DISPATCH), rank, device),
        draw_weights(part_problem(layer, COMBINE), rank, device),
    )


def make_case(layer: Problem, rank: int, routing: str, seed: int, device: torch.device) -> LayerCase:
    ids = torch.as_tensor(parse_routing(routing).draw(layer, seed))
    weights = draw_topk_weights(layer, seed, device)[rank].contiguous()
    x = draw_tokens(layer, seed, device).view(layer.world, layer.tokens, layer.hidden)[rank].clone()
    own = ids[rank].to(device)
    reference, magnitude = _reference(layer, x, own.long(), weights)
    return LayerCase(
        x, own.int().contiguous(), weights, ids.int(), reference, magnitude.double().square_().sum(1)
    )


def _reference(
    layer: Problem, x: torch.Tensor, own: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Results of own tokens and the sums of their terms' magnitudes, expert by expert in fp32 (never tf32)."""
    reference = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    magnitude = torch.zeros_like(reference)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        for owner in range(layer.expert_ranks):
            into, back = weights_of(layer, owner, x.device)
            if layer.weight_layout == "enk":
                into, back = into.transpose(1, 2), back.transpose(1, 2)
            for local in range(layer.local_experts):
                token, place = torch.nonzero(own == owner * layer.local_experts + local, as_tuple=True)
                if len(token):
                    gate, up = glu.gate_and_up(x[token].float() @ into[local].float())
                    term = (gate * torch.sigmoid(gate) * up) @ back[local].float()
                    term *= weights[token, place][:, None]
                    reference[token] += term
                    magnitude[token] += term.abs_()
    finally:
        torch.set_float32_matmul_precision(before)
    return reference, magnitude


def check_layer(layer: Problem, case: LayerCase, y: torch.Tensor) -> GateResult:
    """Compare `y` (tokens and guard rows, hidden) with the reference; guard rows must hold the NaN they were filled with."""
    tolerance = layer_tolerance(layer)
    if not bool(torch.isnan(y[layer.tokens :]).all()):
        return GateResult(
            False, math.inf, tolerance, "A row behind the last token of the result was written."
        )
    error = (y[: layer.tokens].float() - case.reference).double().square_().sum(1)
    size = case.size
    by_token = torch.where(size > 0, (error / size).sqrt(), torch.where(error > 0, math.inf, error))
    total = float((error.sum() / size.sum()).sqrt()) if bool(size.any()) else float(error.sum())
    bad = torch.nonzero(~(by_token <= tolerance)).flatten()  # NaN is bad
    if not len(bad):
        return GateResult(total <= tolerance, total, tolerance)
    named = [f"token {token} by {float(by_token[token]):.3g}" for token in bad[:3].tolist()]
    more = f" and {len(bad) - len(named)} more" if len(bad) > len(named) else ""
    return GateResult(
        False, total, tolerance, f"{len(bad)} of {layer.tokens} tokens differ: {', '.join(named)}{more}."
    )
