"""A debug run of gemm_combine on GPUs: with TKTUNE_DEBUG=buffers in the environment, a gate compares every intermediate
buffer, so that a wrong result names the first step that went wrong.
"""

from __future__ import annotations

import os

import torch

from tktune.core.problem import Problem
from tktune.families.gemm_combine.plan_cuda import CombinePlan, products


def asked() -> bool:
    """Whether gates compare every buffer."""
    return "buffers" in os.environ.get("TKTUNE_DEBUG", "").split(",")


def first_wrong_buffer(
    problem: Problem,
    plan: CombinePlan,
    weights: torch.Tensor,
    rank: int,
    y: torch.Tensor,
    rows: torch.Tensor,
    staging: torch.Tensor,
    pulls: bool,
) -> str:
    """A sentence about the first of expert rows, partial rows and result that does not follow, or an empty text.

    `rows` (rows and guard rows, cols) may err by the rounding of a product; `staging` (ranks, tokens, cols) by that and
    its own, against the magnitudes summed; `y` must be the sum of the partial rows in rank order, bit for bit.
    """
    product_error = 2.0**-9 + problem.hidden * 2.0**-22
    for expert in range(problem.local_experts):
        first, count = plan.experts[expert].tolist()
        if not count:
            continue
        matrix = weights[expert] if problem.weight_layout == "ekn" else weights[expert].T
        wanted = plan.activations[first : first + count].float() @ matrix.float()
        error = (rows[first : first + count].float() - wanted).norm(dim=1)
        bad = torch.nonzero(~(error <= 2 * product_error * wanted.norm(dim=1) + 1e-30)).flatten()
        if len(bad):
            slot = first + int(bad[0])
            return f"Expert row {slot} of expert {expert} is not its product; {len(bad)} of {count} are not."
    if pulls:
        return ""
    total = torch.zeros(problem.expert_ranks, problem.tokens, problem.cols, device=y.device)
    size = torch.zeros_like(total)
    owners = plan.ids[rank].to(y.device).div(problem.local_experts, rounding_mode="floor").long()
    for token, x, product in products(problem, weights, rank, plan.ids, plan.seed):
        term = plan.topk_weights[rank, token, x][:, None] * product
        total[owners[token, x], token] += term  # a token has an expert at most once
        size[owners[token, x], token] += term.abs()
    owed = plan.tables["final_contrib"].T == 1
    error = (staging.float() - total).norm(dim=2)
    allowed = 2 * (2 * product_error) * size.norm(dim=2) + 1e-30
    bad = torch.nonzero(owed & ~(error <= allowed))
    if len(bad):
        owner, token = bad[0].tolist()
        return f"The partial row of token {token} that rank {owner} owes is not its sum; {len(bad)} are not."
    summed = torch.zeros(problem.tokens, problem.cols, device=y.device)
    for owner in range(problem.expert_ranks):
        summed += torch.where(owed[owner][:, None], staging[owner].float(), 0.0)
    bad = torch.nonzero((summed.to(torch.bfloat16) != y[: problem.tokens]).any(1)).flatten()
    if len(bad):
        return f"The result of token {int(bad[0])} is not the sum of its partial rows; {len(bad)} are not."
    return ""
