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
from tktune.core.config import Config
from tktune.core.problem import Problem
from tktune.core.routing import parse_routing
from tktune.core.tables import ScheduleTables
from tktune.families.base import GateResult
from tktune.families.cuda.gemm_globals import walk_entries
from tktune.families.cuda.gemm_inputs import GUARD_ROWS, draw_weights
from tktune.families.formulas import ceil_div
from tktune.families.gemm_combine.fused_launch import LaunchTables
from tktune.families.gemm_combine.inputs import combine_tolerance
from tktune.families.gemm_combine.space_cuda import passes_of

Listed = tuple[str, str, int, str, int]  # form, order, runs of columns, walk, columns of a tile

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

    `ids` (ranks, tokens, top_k) are everybody's, on the host. `activations` (rows + GUARD_ROWS, hidden) bf16, NaN in
    padding; `reference` (tokens, cols) float32; `size` (tokens,) float64, the squared norms of the sums of magnitudes
    behind it. `experts` (local, 2): first row and real rows; `walk` (local, 4); `offsets` (local): padded ends.
    `padding` (rows + GUARD_ROWS): rows without a token.
    """

    rows: int
    blocks: int
    ids: torch.Tensor
    seed: int
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
    listed: dict[Listed, LaunchTables] = field(default_factory=dict)
    kept: list[torch.Tensor] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return self.activations.nbytes + self.reference.nbytes

    def jobs_of(self, problem: Problem, form: str, order: str, groups: int, walk: str) -> torch.Tensor:
        """The list of jobs, on the host."""
        if form == "pull":
            jobs: torch.Tensor = combine_tables_torch.pull_jobs(self.combine, problem, order, groups, walk)
        else:
            jobs = combine_tables_torch.push_jobs(self.schedule, problem, order, groups, walk)
        return jobs

    def tables_of(self, config: Config, problem: Problem) -> LaunchTables:
        """The tables that a launch of `config` reads; those that depend on it are made once and kept."""
        form, order, walk = (str(config[name]) for name in ("form", "order", "walk"))
        groups = config.number("signal_groups")
        key = (form, order, groups, walk, config.number("COL_BLOCK"))
        if key not in self.listed:
            there = self.activations.device
            jobs = self.jobs_of(problem, form, order, groups, walk).to(there)
            words = torch.tensor([self.blocks, len(jobs)], dtype=torch.int32).to(there)
            walked = self.walk_of(config, problem).to(there)
            self.kept.extend((jobs, words, walked))
            at = {name: table.data_ptr() for name, table in self.tables.items()}
            self.listed[key] = LaunchTables(
                plan=words.data_ptr(),
                block_expert=at["block_expert"],
                experts=self.experts.data_ptr(),
                walk=walked.data_ptr(),
                jobs=jobs.data_ptr(),
                pull_tokens=at["pull_tokens"],
                slots=at["owner_slots" if form == "pull" else "pull_slots"],
                owners=at["owners"],
                topk_weights=self.topk_weights.data_ptr(),
                push_expected=at["push_expected"],
                recv_from=at["recv_from"],
                final_contrib=at["final_contrib"],
            )
        return self.listed[key]

    def walk_of(self, config: Config, problem: Problem) -> torch.Tensor:
        """Entries of the GEMM's walk, (passes × local experts, 4): expert, first row, real rows, columns of the pass."""
        passes = passes_of(config)
        if passes == 1:
            return self.walk.cpu()
        tiles = ceil_div(problem.cols, config.number("COL_BLOCK")) // passes
        entries = self.walk.cpu().repeat(passes, 1)
        run = torch.arange(passes).repeat_interleave(len(self.walk))
        entries[:, 3] = (run * tiles << 16 | tiles).to(torch.int32)
        return entries


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
        ids,
        seed,
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
