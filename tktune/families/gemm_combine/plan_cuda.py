"""What one (routing, seed) means for gemm_combine on one GPU: activations, tables, the fp32 reference of own tokens, and
the check of what a launch left. Drawn and computed by torch on the device; nothing here launches a kernel of ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from tktune.core import combine_tables_torch, tables_torch
from tktune.core.combine_tables import CombineTables
from tktune.core.problem import Problem
from tktune.core.routing import parse_routing
from tktune.core.tables import ScheduleTables
from tktune.families.base import GateResult
from tktune.families.cuda.gemm_globals import walk_entries
from tktune.families.cuda.gemm_inputs import GUARD_ROWS, draw_weights
from tktune.families.gemm_combine.inputs import combine_tolerance

_ACTIVATIONS, _TOPK = 3, 4  # what a random stream is for


def _stream(device: torch.device, purpose: int, rank: int, seed: int) -> torch.Generator:
    stream = torch.Generator(device)
    stream.manual_seed(((seed * 8 + purpose) * 16 + rank) & (2**63 - 1))
    return stream


def draw_activations(problem: Problem, seed: int, source: int, device: torch.device) -> torch.Tensor:
    """The expert inputs of `source`'s assignments, (tokens, top_k, hidden) bf16, normally distributed."""
    shape = (problem.tokens, problem.top_k, problem.hidden)
    stream = _stream(device, _ACTIVATIONS, source, seed)
    return torch.randn(shape, device=device, generator=stream).to(torch.bfloat16)


def draw_topk_weights(problem: Problem, seed: int, device: torch.device) -> torch.Tensor:
    """The routing weights of all ranks, (ranks, tokens, top_k) float32: a softmax, with one in eight 0."""
    shape = (problem.expert_ranks, problem.tokens, problem.top_k)
    stream = _stream(device, _TOPK, 0, seed)
    weights = torch.randn(shape, device=device, generator=stream).softmax(-1)
    weights[torch.rand(shape, device=device, generator=stream) < 1 / 8] = 0
    return weights


@dataclass(frozen=True)
class CombinePlan:
    """One (routing, seed) on one rank; everything lies on the device, tables are int32.

    `activations` (rows + GUARD_ROWS, hidden) bf16, NaN in padding; `reference` (tokens, cols) float32; `size` (tokens,)
    float64, the squared norms of the sums of magnitudes behind it. `experts` (local, 2): first row and real rows;
    `walk` (local, 4); `offsets` (local): padded ends. `padding` (rows + GUARD_ROWS): rows without a token.
    """

    rows: int
    blocks: int
    activations: torch.Tensor
    topk_weights: torch.Tensor
    reference: torch.Tensor
    size: torch.Tensor
    padding: torch.Tensor
    experts: torch.Tensor
    walk: torch.Tensor
    offsets: torch.Tensor
    schedule: ScheduleTables
    combine: CombineTables
    tables: dict[str, torch.Tensor]
    jobs: dict[tuple[str, str, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return self.activations.nbytes + self.reference.nbytes

    def jobs_of(
        self, problem: Problem, form: str, order: str, groups: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The list of jobs, and the two words that tell a launch how long it is."""
        key = (form, order, groups)
        if key not in self.jobs:
            if form == "pull":
                listed = combine_tables_torch.pull_jobs(self.combine, problem, order, groups)
            else:
                listed = combine_tables_torch.push_jobs(self.schedule, problem, order, groups)
            words = torch.tensor([self.blocks, len(listed)], dtype=torch.int32)
            there = self.activations.device
            self.jobs[key] = (listed.to(there), words.to(there))
        return self.jobs[key]


def make_plan(problem: Problem, weights: torch.Tensor, rank: int, routing: str, seed: int) -> CombinePlan:
    """The plan of `rank` when `routing` and weights are drawn with `seed`; the reference knows no table."""
    device = weights.device
    ids = torch.as_tensor(parse_routing(routing).draw(problem, seed))
    schedule = tables_torch.build(ids, problem, rank)  # on the host: small tables
    combine = combine_tables_torch.build(ids, problem, rank)
    topk_weights = draw_topk_weights(problem, seed, device)
    size = schedule.rows + GUARD_ROWS
    activations = torch.full((size, problem.hidden), math.nan, dtype=torch.bfloat16, device=device)
    padding = torch.ones(size, dtype=torch.bool, device=device)
    for source in range(problem.expert_ranks):
        slots = schedule.slots[source].long()
        here = slots >= 0
        if bool(here.any()):
            there = slots[here].to(device)
            activations[there] = draw_activations(problem, seed, source, device)[here.to(device)]
            padding[there] = False
    reference = torch.zeros(problem.tokens, problem.cols, dtype=torch.float32, device=device)
    magnitude = torch.zeros_like(reference)
    for token, x, product in products(problem, weights, rank, ids, seed):
        product.mul_(topk_weights[rank, token, x][:, None])
        reference[token] += product
        magnitude[token] += product.abs_()
    counts, base = schedule.counts.tolist(), schedule.base.tolist()
    tables = {
        "block_expert": schedule.block_expert,
        "pull_tokens": schedule.pull_tokens,
        "pull_slots": schedule.pull_slots,
        **combine.arrays(),
    }
    return CombinePlan(
        schedule.rows,
        schedule.num_pad_blocks,
        activations,
        topk_weights,
        reference,
        magnitude.double().square_().sum(1),
        padding,
        torch.stack([schedule.base, schedule.counts], 1).contiguous().to(device),
        torch.tensor(walk_entries(counts, base, "index"), dtype=torch.int32, device=device),
        schedule.padded.cumsum(0).to(torch.int32).to(device),
        schedule,
        combine,
        {name: table.to(device) for name, table in tables.items()},
    )


def products(
    problem: Problem, weights: torch.Tensor, rank: int, ids: torch.Tensor, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """For each expert that own tokens picked: those tokens, at which place, and their products in fp32 (never tf32)."""
    device = weights.device
    own = ids[rank].long().to(device)
    activations = draw_activations(problem, seed, rank, device)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        for owner in range(problem.expert_ranks):
            theirs = weights if owner == rank else draw_weights(problem, owner, device)
            for local in range(problem.local_experts):
                token, x = torch.nonzero(own == owner * problem.local_experts + local, as_tuple=True)
                if len(token):
                    matrix = theirs[local] if problem.weight_layout == "ekn" else theirs[local].T
                    yield token, x, activations[token, x].float() @ matrix.float()
    finally:
        torch.set_float32_matmul_precision(before)


def check_combined(
    problem: Problem,
    plan: CombinePlan,
    y: torch.Tensor,
    rows: torch.Tensor,
    staging: torch.Tensor,
    pulls: bool,
) -> GateResult:
    """Compare `y` (tokens and guard rows, cols) with the reference; see `inputs.combine_tolerance`.

    Fails too when guard rows of `y` or `rows`, or rows of `staging` (ranks, tokens, cols) that nobody owes, do not hold
    the NaN they were filled with. Rows that only pad an expert may hold anything.
    """
    tolerance = combine_tolerance(problem.hidden)
    owed: Any = plan.tables["final_contrib"].T == 1
    unowed = torch.ones_like(owed) if pulls else ~owed
    for name, part in (
        ("of the result lies behind the last token", y[problem.tokens :]),
        ("lies behind the last expert", rows[plan.rows :]),
        ("of the partial rows is owed by nobody", staging[unowed]),
    ):
        if not bool(torch.isnan(part).all()):
            return GateResult(False, math.inf, tolerance, f"A row {name}, and it was written.")
    error = (y[: problem.tokens].float() - plan.reference).double().square_().sum(1)
    by_token = torch.where(plan.size > 0, (error / plan.size).sqrt(), torch.where(error > 0, math.inf, error))
    total = float((error.sum() / plan.size.sum()).sqrt()) if bool(plan.size.any()) else float(error.sum())
    bad = torch.nonzero(~(by_token <= tolerance)).flatten()  # NaN is bad
    if not len(bad):
        return GateResult(total <= tolerance, total, tolerance)
    named = [f"token {token} by {float(by_token[token]):.3g}" for token in bad[:3].tolist()]
    more = f" and {len(bad) - len(named)} more" if len(bad) > len(named) else ""
    sentence = f"{len(bad)} of {problem.tokens} tokens differ: {', '.join(named)}{more}."
    return GateResult(False, total, tolerance, sentence)
