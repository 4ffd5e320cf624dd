"""What one (routing, seed) means for one rank of the CPU backend: inputs, tables, the fp32 reference, and the check
of an output against it. Nothing is launched here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tktune.core import tables
from tktune.core.problem import Problem
from tktune.core.routing import parse_routing
from tktune.core.tables import ScheduleTables
from tktune.families import glu
from tktune.families.base import GateResult
from tktune.families.bf16 import Bf16, Float32, gemm_tolerance, to_float

POISON = 0x7FE5  # a NaN that no conversion makes
_WEIGHTS, _ROWS = 1, 2  # what a random stream is for


def draw_rows(problem: Problem, seed: int, rank: int) -> Bf16:
    """The token rows of `rank`, (tokens, hidden) bf16; the same on every rank that draws them."""
    stream = np.random.default_rng((_ROWS, seed, rank))
    return draw_steps(stream, (problem.tokens, problem.hidden))


def draw_weights(problem: Problem, rank: int) -> Bf16:
    """The weights of `rank`'s experts, (local_experts, hidden, cols) or (.., cols, hidden) by layout, bf16.

    Where a gate is made of their columns they are smaller by a power of two, so that gates have the size of one.
    """
    ekn = problem.weight_layout == "ekn"
    shape = (problem.hidden, problem.cols) if ekn else (problem.cols, problem.hidden)
    size = 1.0 if problem.finish == "none" else 2.0 ** -round(math.log2(problem.hidden**0.5 / 3))
    weights = np.empty((problem.local_experts, *shape), np.uint16)
    for expert in range(problem.local_experts):
        weights[expert] = draw_steps(np.random.default_rng((_WEIGHTS, rank, expert)), shape, size)
    return weights


def draw_steps(stream: np.random.Generator, shape: tuple[int, ...], size: float = 1.0) -> Bf16:
    """Multiples of size/128 in (−size, size), a power of two: exact in bf16, and sums of their products are nearly always
    exact in fp32.
    """
    steps = stream.integers(-127, 128, shape, dtype=np.int8).astype(np.float32)
    steps *= size / 128
    return (steps.view(np.uint32) >> 16).astype(np.uint16)


@dataclass(frozen=True)
class Case:
    """One (routing, seed) on one rank: its tables as contiguous int32 arrays, and the reference of real rows.

    `real` are the slots that hold a token, in order; `reference` (len(real), out_cols) float32 is in that order.
    """

    routing: str
    seed: int
    tables: ScheduleTables
    real: npt.NDArray[np.intp]
    reference: Float32

    @property
    def bytes(self) -> int:
        return int(self.reference.nbytes)


def make_case(problem: Problem, weights: Bf16, rank: int, routing: str, seed: int) -> Case:
    """The case of `rank` when `routing` is drawn with `seed`."""
    topk_ids = parse_routing(routing).draw(problem, seed)
    return case_of_ids(problem, weights, rank, topk_ids, routing, seed)


def case_of_ids(problem: Problem, weights: Bf16, rank: int, topk_ids: Any, routing: str, seed: int) -> Case:
    """Build the tables of `rank` and compute the reference, expert by expert in fp32."""
    schedule = tables.build(topk_ids, problem, rank).numpy()
    real = np.flatnonzero(schedule.pull_indices[:, 0] >= 0)
    rows = gather_rows(problem, schedule, seed)
    reference = np.empty((len(real), problem.out_cols), np.float32)
    for expert, part in expert_parts(schedule):
        sums = to_float(rows[part]) @ expert_matrix(problem, weights, expert)
        reference[part] = swiglu(*glu.gate_and_up(sums)) if problem.finish == "swiglu" else sums
    return Case(routing, seed, schedule, real, reference)


def swiglu(gate: Float32, up: Float32) -> Float32:
    """silu(gate) · up in fp32."""
    with np.errstate(over="ignore"):  # of the exponential, whose quotient is then zero
        made: Float32 = gate / (1 + np.exp(-gate)) * up
    return made


def gather_rows(problem: Problem, schedule: ScheduleTables, seed: int) -> Bf16:
    """The real rows of the packed buffer, (real rows, hidden), drawn anew: no memory of a launch is read."""
    wanted = schedule.pull_indices[schedule.pull_indices[:, 0] >= 0]
    rows = np.empty((len(wanted), problem.hidden), np.uint16)
    for source in range(problem.expert_ranks):
        mine = wanted[:, 0] == source
        if mine.any():
            rows[mine] = draw_rows(problem, seed, source)[wanted[mine, 1]]
    return rows


def expert_parts(schedule: ScheduleTables) -> Iterator[tuple[int, slice]]:
    """Each expert that has rows, with the slice of its rows among the real ones."""
    begin = 0
    for expert, count in enumerate(schedule.counts.tolist()):
        if count:
            yield expert, slice(begin, begin + count)
        begin += count


def expert_matrix(problem: Problem, weights: Bf16, expert: int) -> Float32:
    """An expert's weights as (hidden, cols) float32."""
    matrix = to_float(weights[expert])
    return matrix if problem.weight_layout == "ekn" else matrix.T


def peer_operands(problem: Problem, weights: Bf16, case: Case) -> Iterator[tuple[Float32, Float32, Float32]]:
    """For a library GEMM: rows, weights and an output of each expert in fp32, one expert at a time."""
    rows = gather_rows(problem, case.tables, case.seed)
    for expert, part in expert_parts(case.tables):
        packed = to_float(rows[part])
        yield (
            packed,
            expert_matrix(problem, weights, expert),
            np.empty((len(packed), problem.cols), np.float32),
        )


def check_output(
    problem: Problem, case: Case, out: Bf16, gathered: Bf16 | None, tolerance: float | None = None
) -> GateResult:
    """Compare `out` (slots and guard rows, out_cols) with the reference; `tolerance` None is `bf16.gemm_tolerance`.

    Passes when the error over all real rows and that of the worst row are within the tolerance, and when padding
    and guard rows of `out`, and of `gathered` when given, still hold the poison they were filled with.
    """
    tolerance = gemm_tolerance(problem.hidden) if tolerance is None else tolerance
    for name, rows in (("out", out), ("the gathered rows", gathered)):
        untouched = np.ones(0 if rows is None else len(rows), bool)
        untouched[case.real[: len(untouched)]] = False
        if rows is not None and (bad := np.flatnonzero((rows[untouched] != POISON).any(axis=1))).size:
            where = int(np.flatnonzero(untouched)[bad[0]])
            return GateResult(
                False, float("inf"), tolerance, f"Row {where} of {name} is padding, and it was written."
            )
    error, size = _squares(case, out)
    with np.errstate(invalid="ignore", divide="ignore"):
        by_row = np.sqrt(np.where(size > 0, error / size, np.where(error > 0, np.inf, error)))
    total = float(np.sqrt(error.sum() / size.sum())) if size.sum() > 0 else float(np.sqrt(error.sum()))
    bad_rows = np.flatnonzero(~(by_row <= tolerance))  # NaN is bad
    if not bad_rows.size:
        return GateResult(total <= tolerance, total, tolerance)
    return GateResult(False, total, tolerance, _name_rows(case, by_row, bad_rows))


def _squares(case: Case, out: Bf16) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """‖out − ref‖² and ‖ref‖² of every real row, in float64."""
    error = np.empty(len(case.real))
    size = np.empty(len(case.real))
    step = max(1, (1 << 22) // case.reference.shape[1])
    for begin in range(0, len(case.real), step):
        part = slice(begin, begin + step)
        reference = case.reference[part]
        difference = to_float(out[case.real[part]]) - reference
        error[part] = np.einsum("rc,rc->r", difference, difference, dtype=np.float64)
        size[part] = np.einsum("rc,rc->r", reference, reference, dtype=np.float64)
    return error, size


def _name_rows(case: Case, by_row: npt.NDArray[Any], bad: npt.NDArray[Any]) -> str:
    named = []
    for row in bad[:3]:
        slot = int(case.real[row])
        source, token = case.tables.pull_indices[slot].tolist()
        named.append(f"row {slot} (token {token} of rank {source}) by {by_row[row]:.3g}")
    more = f" and {len(bad) - len(named)} more" if len(bad) > len(named) else ""
    return f"{len(bad)} of {len(by_row)} rows differ: {', '.join(named)}{more}."
