"""What one (routing, seed) means for a grouped GEMM on one GPU: packed rows, walk, the fp32 reference, and the check
of an output against it. Everything is drawn and computed by torch on the device; nothing here launches a kernel of ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from tktune.core import tables_torch
from tktune.core.problem import Problem
from tktune.core.routing import parse_routing
from tktune.families import glu
from tktune.families.base import GateResult
from tktune.families.bf16 import gemm_tolerance
from tktune.families.cuda.gemm_globals import WALKS, walk_entries

GUARD_ROWS = 128  # beyond the last expert; nobody may write them
_CHUNK_ELEMENTS = 1 << 27
_WEIGHTS, _ROWS = 1, 2  # what a random stream is for


def draw_weights(problem: Problem, rank: int, device: torch.device) -> torch.Tensor:
    """The weights of `rank`'s experts, (local_experts, hidden, cols) or (.., cols, hidden), bf16 of size 1/√hidden."""
    ekn = problem.weight_layout == "ekn"
    shape = (problem.hidden, problem.cols) if ekn else (problem.cols, problem.hidden)
    weights = torch.empty(problem.local_experts, *shape, dtype=torch.bfloat16, device=device)
    stream = _stream(device, _WEIGHTS, rank, 0)
    for matrix in weights:
        matrix.copy_(torch.randn(shape, device=device, generator=stream).mul_(problem.hidden**-0.5))
    return weights


def draw_tokens(problem: Problem, seed: int, device: torch.device) -> torch.Tensor:
    """The token rows of all ranks, (ranks × tokens, hidden) bf16, normally distributed."""
    stream = _stream(device, _ROWS, 0, seed)
    rows = problem.expert_ranks * problem.tokens
    tokens = torch.empty(rows, problem.hidden, dtype=torch.bfloat16, device=device)
    step = max(1, _CHUNK_ELEMENTS // problem.hidden)
    for begin in range(0, rows, step):
        part = tokens[begin : begin + step]
        part.copy_(torch.randn(part.shape, device=device, generator=stream))
    return tokens


def _stream(device: torch.device, purpose: int, rank: int, seed: int) -> torch.Generator:
    stream = torch.Generator(device)
    stream.manual_seed(((seed * 8 + purpose) * 16 + rank) & (2**63 - 1))
    return stream


@dataclass(frozen=True)
class Case:
    """One (routing, seed) on one rank; P rows, R of them real.

    `activations` (P + GUARD_ROWS, hidden) bf16 hold NaN in rows without a token. `slots` (R) are the rows that hold
    one, `slot_token` (P) says which (source × tokens + token). `reference` (R, out_cols) float32. `walks[order]`
    (experts, 4) and `offsets` (experts), the padded ends of the experts, are int32.
    """

    problem: Problem
    rows: int
    activations: torch.Tensor
    slots: torch.Tensor
    slot_token: torch.Tensor
    reference: torch.Tensor
    walks: dict[str, torch.Tensor]
    offsets: torch.Tensor

    @property
    def bytes(self) -> int:
        return self.activations.nbytes + self.reference.nbytes

    @property
    def real_rows(self) -> int:
        return len(self.slots)


def make_case(
    problem: Problem, weights: torch.Tensor, rank: int, routing: str, seed: int, topk_ids: Any = None
) -> Case:
    """The case of `rank` when `routing` is drawn with `seed`, or of these `topk_ids` (ranks, tokens, top_k)."""
    device = weights.device
    ids = parse_routing(routing).draw(problem, seed) if topk_ids is None else topk_ids
    tables = tables_torch.build(torch.as_tensor(ids), problem, rank)  # on the host: a few small tables
    rows = tables.rows
    slot_token = tables.slot_token.long()
    slots = torch.nonzero(slot_token >= 0).flatten()
    tokens = draw_tokens(problem, seed, device)
    activations = torch.full(
        (rows + GUARD_ROWS, problem.hidden), math.nan, dtype=torch.bfloat16, device=device
    )
    slots_there = slots.to(device)
    activations[slots_there] = tokens[slot_token[slots].to(device)]
    counts, base = tables.counts.tolist(), tables.base.tolist()
    walks = {
        walk: torch.tensor(walk_entries(counts, base, walk), dtype=torch.int32, device=device)
        for walk in WALKS
    }
    offsets = tables.padded.cumsum(0).to(torch.int32).to(device)
    reference = reference_of(problem, activations, weights, counts, base)
    return Case(problem, rows, activations, slots_there, slot_token, reference, walks, offsets)


def reference_of(
    problem: Problem, activations: torch.Tensor, weights: torch.Tensor, counts: list[int], base: list[int]
) -> torch.Tensor:
    """Rows of each expert times its matrix in fp32 (never tf32), one expert at a time, and their finish: (real rows,
    out_cols) float32."""
    reference = torch.empty(sum(counts), problem.out_cols, dtype=torch.float32, device=weights.device)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        begin = 0
        for expert, (count, first) in enumerate(zip(counts, base, strict=True)):
            if count:
                matrix = weights[expert] if problem.weight_layout == "ekn" else weights[expert].T
                rows = activations[first : first + count].float()
                part = reference[begin : begin + count]
                if problem.finish == "swiglu":
                    gate, up = glu.gate_and_up(rows @ matrix.float())
                    torch.mul(torch.nn.functional.silu(gate), up, out=part)
                else:
                    torch.mm(rows, matrix.float(), out=part)
                begin += count
    finally:
        torch.set_float32_matmul_precision(before)
    return reference


def check_output(case: Case, out: torch.Tensor, tolerance: float | None = None) -> GateResult:
    """Compare `out` (P + GUARD_ROWS, out_cols), poisoned with NaN before the launch, with the reference.

    Passes when ‖out − ref‖ ÷ ‖ref‖ over all real rows and over the worst of them are within `tolerance` (None:
    `gemm_tolerance`), and when the guard rows still hold NaN. Rows that only pad an expert may hold anything.
    """
    tolerance = gemm_tolerance(case.problem.hidden) if tolerance is None else tolerance
    if not bool(torch.isnan(out[case.rows :]).all()):
        row = case.rows + int((~torch.isnan(out[case.rows :])).any(1).nonzero()[0])
        return GateResult(
            False, math.inf, tolerance, f"Row {row} lies behind the last expert, and it was written."
        )
    if case.real_rows == 0:
        return GateResult(True, 0.0, tolerance)
    error = torch.empty(case.real_rows, dtype=torch.float64, device=out.device)
    size = torch.empty_like(error)
    step = max(1, _CHUNK_ELEMENTS // out.shape[1])
    for begin in range(0, case.real_rows, step):
        part = slice(begin, begin + step)
        reference = case.reference[part]
        error[part] = (out[case.slots[part]].float() - reference).square_().sum(1, dtype=torch.float64)
        size[part] = reference.square().sum(1, dtype=torch.float64)
    by_row = (error / size).sqrt()
    total = float((error.sum() / size.sum()).sqrt())
    bad = torch.nonzero(~(by_row <= tolerance)).flatten()  # NaN is bad
    if not len(bad):
        return GateResult(total <= tolerance, total, tolerance)
    return GateResult(False, total, tolerance, _name_rows(case, by_row, bad))


def _name_rows(case: Case, by_row: torch.Tensor, bad: torch.Tensor) -> str:
    named = []
    for row in bad[:3].tolist():
        slot = int(case.slots[row])
        source, token = divmod(int(case.slot_token[slot]), case.problem.tokens)
        named.append(f"row {slot} (token {token} of rank {source}) by {float(by_row[row]):.3g}")
    more = f" and {len(bad) - len(named)} more" if len(bad) > len(named) else ""
    return f"{len(bad)} of {case.real_rows} rows differ: {', '.join(named)}{more}."
