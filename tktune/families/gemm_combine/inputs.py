"""What one (routing, seed) means for one rank of gemm_combine: activations and weights of every assignment, tables, the
fp32 reference of own tokens, and the check of what a launch left. Nothing is launched here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tktune.core import combine_tables, tables
from tktune.core.combine_tables import CombineTables
from tktune.core.problem import Problem
from tktune.core.routing import parse_routing
from tktune.families.base import GateResult
from tktune.families.bf16 import Bf16, Float32, from_float, to_float
from tktune.families.cpu_inputs import POISON, Case, draw_steps, draw_weights, expert_matrix

_ACTIVATIONS, _TOPK = 3, 4  # what a random stream is for
WEIGHT_STEPS = 256


def draw_activations(problem: Problem, seed: int, source: int) -> Bf16:
    """The expert inputs of `source`'s assignments, (tokens, top_k, hidden) bf16; the same wherever they are drawn."""
    stream = np.random.default_rng((_ACTIVATIONS, seed, source))
    return draw_steps(stream, (problem.tokens, problem.top_k, problem.hidden))


def draw_topk_weights(problem: Problem, seed: int) -> Float32:
    """The routing weights of all ranks, (ranks, tokens, top_k) float32.

    Multiples of 1/256 in [0, 1), one in eight 0: their products with bf16 are exact, so that a sum in a given order has
    the same bits with and without fused multiply-adds.
    """
    stream = np.random.default_rng((_TOPK, seed))
    shape = (problem.expert_ranks, problem.tokens, problem.top_k)
    steps = stream.integers(1, WEIGHT_STEPS, shape)
    steps[stream.random(shape) < 1 / 8] = 0
    return (steps / WEIGHT_STEPS).astype(np.float32)


@dataclass(frozen=True)
class CombineCase(Case):
    """One (routing, seed) on one rank.

    `reference` (tokens, cols) float32 are the weighted sums of own tokens, `size` (tokens,) float64 the squared norms of
    the sums of magnitudes behind them: errors are measured against those, because terms may cancel. `topk_ids` and
    `topk_weights` (ranks, tokens, top_k) are everybody's. `real` are the slots that hold a row.
    """

    combine: CombineTables
    topk_ids: npt.NDArray[np.int32]
    topk_weights: Float32
    size: npt.NDArray[np.float64]


def make_case(problem: Problem, rank: int, routing: str, seed: int) -> CombineCase:
    """The case of `rank` when `routing` and the weights are drawn with `seed`."""
    topk_ids = parse_routing(routing).draw(problem, seed)
    return case_of_ids(problem, rank, topk_ids, draw_topk_weights(problem, seed), routing, seed)


def case_of_ids(
    problem: Problem, rank: int, topk_ids: Any, topk_weights: Float32, routing: str, seed: int
) -> CombineCase:
    """Build the tables of `rank`, and the reference from the ids alone: no table has a part in it."""
    schedule = tables.build(topk_ids, problem, rank).numpy()
    reference = np.zeros((problem.tokens, problem.cols), np.float32)
    magnitude = np.zeros_like(reference)
    for token, x, product in products(problem, topk_ids, seed, rank):
        weighted = topk_weights[rank, token, x][:, None] * product
        reference[token] += weighted
        magnitude[token] += np.abs(weighted)
    return CombineCase(
        routing,
        seed,
        schedule,
        np.flatnonzero(schedule.pull_indices[:, 0] >= 0),
        reference,
        combine_tables.build(topk_ids, problem, rank),
        np.asarray(topk_ids, np.int32),
        topk_weights,
        np.einsum("tc,tc->t", magnitude, magnitude, dtype=np.float64),
    )


def products(
    problem: Problem, topk_ids: Any, seed: int, source: int, experts: range | None = None
) -> Iterator[tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], Float32]]:
    """For each expert that tokens of `source` picked: those tokens, at which place, and their products in fp32."""
    ids = np.asarray(topk_ids)[source]
    activations = draw_activations(problem, seed, source)
    for rank in range(problem.expert_ranks):
        weights = None
        for local in range(problem.local_experts):
            expert = rank * problem.local_experts + local
            token, x = np.nonzero(ids == expert)  # a token has an expert at most once
            if not len(token) or (experts is not None and expert not in experts):
                continue
            if weights is None:
                weights = draw_weights(problem, rank)
            yield token, x, to_float(activations[token, x]) @ expert_matrix(problem, weights, local)


def slot_rows(problem: Problem, case: CombineCase) -> Bf16:
    """The packed activations, (rows, hidden) bf16: what the layer before leaves in the slots; padding is poison."""
    rows = np.full((case.tables.rows, problem.hidden), POISON, np.uint16)
    for source in range(problem.expert_ranks):
        slots = case.tables.slots[source]
        here = slots >= 0
        if here.any():
            rows[slots[here]] = draw_activations(problem, case.seed, source)[here]
    return rows


def combine_tolerance(hidden: int) -> float:
    """The error allowed of a combined token, relative to the sum of its terms' magnitudes.

    Three roundings to bf16 lie between the accumulators and the result: of the expert's row, of the rank's partial sum
    and of the token. Each errs by at most 2⁻⁹ of what it rounds, and none of these is more than the magnitudes. Summing
    K products in fp32 is allowed as much as in `bf16.gemm_tolerance`.
    """
    return 3 * 2.0**-9 + hidden * 2.0**-22


def check_combined(
    problem: Problem,
    case: CombineCase,
    y: Bf16,
    rows: Bf16,
    staging: Bf16,
    tolerance: float | None = None,
) -> GateResult:
    """Compare `y` (tokens and guard rows, cols) with the reference; `tolerance` None is `combine_tolerance`.

    Fails too when a guard row of `y`, a padding or guard row of `rows` (slots, cols), or a row of `staging` (ranks,
    tokens, cols) that nobody owes does not hold the poison it was filled with.
    """
    tolerance = combine_tolerance(problem.hidden) if tolerance is None else tolerance
    unowed = case.combine.final_contrib.T == 0
    padding = np.ones(len(rows), bool)
    padding[case.real] = False
    for name, wrong in (
        ("the result is beyond the last token", _touched(y[problem.tokens :])),
        ("the expert rows is padding", np.flatnonzero(padding)[_touched(rows[padding])]),
        ("the partial rows is owed by nobody", np.flatnonzero(unowed)[_touched(staging[unowed])]),
    ):
        if len(wrong):
            sentence = f"Row {wrong[0]} of {name}, and it was written."
            return GateResult(False, float("inf"), tolerance, sentence)
    difference = to_float(y[: problem.tokens]) - case.reference
    error = np.einsum("tc,tc->t", difference, difference, dtype=np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        by_token = np.sqrt(np.where(case.size > 0, error / case.size, np.where(error > 0, np.inf, error)))
        total = float(np.sqrt(error.sum() / case.size.sum())) if case.size.any() else float(error.sum())
    bad = np.flatnonzero(~(by_token <= tolerance))  # NaN is bad
    if not len(bad):
        return GateResult(total <= tolerance, total, tolerance)
    named = [f"token {token} by {by_token[token]:.3g}" for token in bad[:3]]
    more = f" and {len(bad) - len(named)} more" if len(bad) > len(named) else ""
    sentence = f"{len(bad)} of {problem.tokens} tokens differ: {', '.join(named)}{more}."
    return GateResult(False, total, tolerance, sentence)


def _touched(rows: Bf16) -> npt.NDArray[np.intp]:
    return np.flatnonzero((rows != POISON).any(axis=1))


# What every buffer must hold, bit for bit: for tests and debug runs.


def exact_rows(problem: Problem, case: CombineCase) -> Bf16:
    """The expert rows of this rank, (slots, cols): rounded products where a token is, poison elsewhere."""
    rank, local = case.tables.rank, problem.local_experts
    out = np.full((case.tables.rows, problem.cols), POISON, np.uint16)
    for source in range(problem.expert_ranks):
        here = range(rank * local, (rank + 1) * local)
        for token, x, product in products(problem, case.topk_ids, case.seed, source, here):
            out[case.tables.slots[source][token, x]] = from_float(product)
    return out


def exact_partials(problem: Problem, case: CombineCase) -> Bf16:
    """The partial rows of own tokens, (ranks, tokens, cols): sums of rounded rows in the order of a token's experts,
    rounded; poison where a rank owes nothing. The order of products, not of tables, decides.
    """
    rank, ids = case.tables.rank, case.topk_ids[case.tables.rank]
    rows = np.zeros((problem.tokens, problem.top_k, problem.cols), np.float32)
    for tokens, places, product in products(problem, case.topk_ids, case.seed, rank):
        rows[tokens, places] = to_float(from_float(product))
    partial = np.full((problem.expert_ranks, problem.tokens, problem.cols), POISON, np.uint16)
    for owner in range(problem.expert_ranks):
        held = np.asarray(ids // problem.local_experts == owner)
        total = np.zeros((problem.tokens, problem.cols), np.float32)
        for x in range(problem.top_k):
            at = held[:, x]
            total[at] += case.topk_weights[rank, at, x][:, None] * rows[at, x]
        partial[owner, held.any(1)] = from_float(total[held.any(1)])
    return partial


def exact_result(partial: Bf16) -> Bf16:
    """The result, (tokens, cols), of `exact_partials`: sums in rank order, rounded."""
    total = np.zeros(partial.shape[1:], np.float32)
    for plane in partial:
        owed = (plane != POISON).any(axis=1)
        total[owed] += to_float(plane[owed])
    return from_float(total)
