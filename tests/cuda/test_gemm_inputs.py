"""Inputs, reference and check of the GPU workbench, on the CPU: they are torch code and know no device."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed (the extra `cuda`)")

from cuda_artifacts import problem_of

from tktune.core import tables
from tktune.core.routing import parse_routing
from tktune.families.bf16 import gemm_tolerance
from tktune.families.cuda.gemm_inputs import GUARD_ROWS, check_output, draw_tokens, draw_weights, make_case

CPU = torch.device("cpu")


def small(**changes):
    return problem_of(
        **{"hidden": 72, "cols": 40, "experts": 8, "top_k": 2, "tokens": 24, "pad": 16, **changes}
    )


@pytest.fixture(params=["ekn", "enk"])
def case_and_weights(request):
    problem = small(weight_layout=request.param, ep_rank=1)
    weights = draw_weights(problem, 1, CPU)
    return make_case(problem, weights, 1, "empty:5", 3), weights


def right_output(case):
    out = torch.full((case.rows + GUARD_ROWS, case.problem.cols), math.nan, dtype=torch.bfloat16)
    out[case.slots] = case.reference.bfloat16()
    return out


def test_the_reference_is_each_token_times_its_experts_matrix(case_and_weights):
    case, weights = case_and_weights
    problem = case.problem
    ids = parse_routing("empty:5").draw(problem, 3)
    golden = tables.build(ids, problem, 1)
    tokens = draw_tokens(problem, 3, CPU).double()
    assert case.rows == golden.rows
    experts = golden.block_expert[case.slots.numpy() // problem.pad]
    for place, (slot, expert) in enumerate(zip(case.slots.tolist(), experts.tolist(), strict=True)):
        source, token = golden.pull_indices[slot]
        matrix = weights[expert].double() if problem.weight_layout == "ekn" else weights[expert].double().T
        wanted = tokens[source * problem.tokens + token] @ matrix
        assert torch.allclose(case.reference[place].double(), wanted, rtol=1e-4, atol=1e-4)


def test_rows_without_a_token_are_not_a_number(case_and_weights):
    case, _ = case_and_weights
    real = torch.zeros(case.rows + GUARD_ROWS, dtype=torch.bool)
    real[case.slots] = True
    assert torch.isnan(case.activations[~real]).all()
    assert torch.isfinite(case.activations[real]).all()
    assert case.offsets[-1] == case.rows


def test_walks_cover_every_expert_once(case_and_weights):
    case, _ = case_and_weights
    for walk in case.walks.values():
        assert sorted(walk[:, 0].tolist()) == list(range(case.problem.local_experts))
        assert int(walk[:, 2].sum()) == case.real_rows
    counts = {name: walk[:, 2].tolist() for name, walk in case.walks.items()}
    assert counts["longest"] == sorted(counts["longest"], reverse=True) == counts["shortest"][::-1]


def test_a_right_output_passes_and_its_error_is_that_of_rounding(case_and_weights):
    case, _ = case_and_weights
    verdict = check_output(case, right_output(case))
    assert verdict.passed and 0 < verdict.worst_error < verdict.tolerance == gemm_tolerance(72)


def test_padding_may_hold_anything_but_rows_behind_the_last_expert_may_not(case_and_weights):
    case, _ = case_and_weights
    out = right_output(case)
    padding = [row for row in range(case.rows) if row not in set(case.slots.tolist())]
    out[padding] = 7
    assert check_output(case, out).passed
    out[case.rows + 2, 1] = 0
    verdict = check_output(case, out)
    assert not verdict.passed and f"Row {case.rows + 2} " in verdict.sentence


@pytest.mark.parametrize("value", [math.nan, 100.0])
def test_a_wrong_row_is_named_with_its_token(case_and_weights, value):
    case, _ = case_and_weights
    out = right_output(case)
    slot = int(case.slots[5])
    out[slot, 3] = value
    verdict = check_output(case, out)
    source, token = divmod(int(case.slot_token[slot]), case.problem.tokens)
    assert not verdict.passed
    assert f"row {slot} (token {token} of rank {source})" in verdict.sentence


def test_seeds_ranks_and_purposes_draw_different_numbers():
    problem = small()
    same = draw_tokens(problem, 1, CPU)
    assert torch.equal(same, draw_tokens(problem, 1, CPU))
    assert not torch.equal(same, draw_tokens(problem, 2, CPU))
    assert not torch.equal(draw_weights(problem, 0, CPU), draw_weights(problem, 1, CPU))


def test_a_rank_without_rows_has_an_empty_case_that_passes():
    problem = small(experts=4, top_k=1, tokens=3)
    weights = draw_weights(problem, 1, CPU)
    ids = np.zeros((2, 3, 1), np.int32)
    case = make_case(problem, weights, 1, "uniform", 0, ids)
    assert (case.rows, case.real_rows) == (0, 0)
    assert check_output(case, right_output(case)).passed
