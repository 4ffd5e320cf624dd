"""What one (routing, seed) means for one rank of a layer on the CPU backend: everybody's ids and weights, and the fp32
reference of own tokens, formed expert by expert from the ids alone. Nothing is launched here.
"""

from __future__ import annotations

import numpy as np

from tktune.core import combine_tables, tables
from tktune.core.problem import Problem
from tktune.core.routing import parse_routing
from tktune.families import glu
from tktune.families.bf16 import Float32, to_float
from tktune.families.cpu_inputs import Case, draw_rows, draw_weights, expert_matrix, swiglu
from tktune.families.gemm_combine.inputs import CombineCase, combine_tolerance, draw_topk_weights
from tktune.moe.parts import COMBINE, DISPATCH, part_problem


def layer_tolerance(layer: Problem) -> float:
    """The error allowed of a token, relative to the sum of its terms' magnitudes.

    The combine's three roundings, and before them silu(gate) · up, rounded once, of gate and up that a separate pass reads
    rounded; a rounding errs by 2⁻⁹ at most, and silu's slope times its argument is within 1.1 of its value where the value
    counts. Summing `hidden` products in fp32 is allowed as much as in `bf16.gemm_tolerance`, for gate and for up.
    """
    return combine_tolerance(layer.cols) + 3.2 * 2.0**-9 + 2 * layer.hidden * 2.0**-22


def layer_cases(layer: Problem, rank: int, routing: str, seed: int) -> tuple[Case, CombineCase]:
    """What the first launch needs, and what the second one needs with the reference of the whole layer.

    The first has no reference of its own: its kernel was judged alone.
    """
    ids = parse_routing(routing).draw(layer, seed)
    weights = draw_topk_weights(layer, seed)
    schedule = tables.build(ids, layer, rank).numpy()
    real = np.flatnonzero(schedule.pull_indices[:, 0] >= 0)
    reference, magnitude = _reference(layer, rank, ids[rank], weights[rank], seed)
    nothing = np.empty((0, layer.cols), np.float32)
    return Case(routing, seed, schedule, real, nothing), CombineCase(
        routing,
        seed,
        schedule,
        real,
        reference,
        combine_tables.build(ids, layer, rank),
        np.asarray(ids, np.int32),
        weights,
        np.einsum("tc,tc->t", magnitude, magnitude, dtype=np.float64),
    )


def _reference(
    layer: Problem, rank: int, ids: np.ndarray, weights: Float32, seed: int
) -> tuple[Float32, Float32]:
    """The results of own tokens (tokens, hidden), and the sums of their terms' magnitudes."""
    first, second = (part_problem(layer, part) for part in (DISPATCH, COMBINE))
    x = to_float(draw_rows(first, seed, rank))
    reference = np.zeros((layer.tokens, layer.hidden), np.float32)
    magnitude = np.zeros_like(reference)
    for owner in range(layer.expert_ranks):
        into, back = draw_weights(first, owner), draw_weights(second, owner)
        for local in range(layer.local_experts):
            token, place = np.nonzero(ids == owner * layer.local_experts + local)
            if len(token):
                gate, up = glu.gate_and_up(x[token] @ expert_matrix(first, into, local))
                term = swiglu(gate, up) @ expert_matrix(second, back, local)
                term *= weights[token, place, None]
                reference[token] += term  # a token has an expert at most once
                magnitude[token] += np.abs(term)
    return reference, magnitude
