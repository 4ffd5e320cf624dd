"""Problems: what contradicts itself is refused in words, and the key is stable."""

from __future__ import annotations

import pytest

from tktune.core.errors import ProblemError
from tktune.core.problem import Problem

GOOD = {
    "family": "dispatch_gemm",
    "hidden": 64,
    "cols": 64,
    "experts": 8,
    "top_k": 2,
    "tokens": 4,
    "world": 2,
}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokens": 0}, "tokens = 0 is not positive"),
        ({"world": 0}, "world = 0 is not positive"),
        ({"world": 16, "experts": 16}, "not in 1..8"),
        ({"hidden": "64"}, "not a whole number"),
        ({"hidden": True}, "not a whole number"),
        ({"top_k": 9}, "top_k = 9 is more than experts = 8"),
        ({"experts": 9}, "cannot be shared evenly by 2 ranks"),
        ({"experts": 1024}, "gives one rank more than 256"),
        ({"pad": 12}, "not a multiple of 8"),
        ({"dtype": "fp4"}, "dtype = 'fp4' is not known"),
        ({"weight_layout": "nke"}, "weight_layout = 'nke' is not known"),
        ({"ep_world": 2}, "takes no ep_world"),
        ({"family": "grouped_gemm"}, "runs on one device"),
        ({"family": "grouped_gemm", "world": 1, "ep_world": 4, "ep_rank": 4}, "ep_rank = 4 is not in 0..3"),
    ],
)
def test_a_problem_that_contradicts_itself_is_refused_with_a_way_out(changes, says):
    with pytest.raises(ProblemError, match=says) as caught:
        Problem(**{**GOOD, **changes})
    assert caught.value.way_out
    assert caught.value.exit_code == 2


def test_the_digest_follows_every_field_and_the_canonical_routing():
    problem = Problem(**GOOD)
    assert problem.digest == Problem(**GOOD, routing=" uniform").digest
    for change in ({"tokens": 5}, {"pad": 64}, {"routing": "one:0"}, {"weight_layout": "enk"}):
        assert problem.replace(**change).digest != problem.digest
    assert Problem(**problem.key) == problem


def test_a_grouped_gemm_carries_the_rows_of_one_rank():
    problem = Problem("grouped_gemm", 64, 64, 8, 2, 4, ep_world=4, ep_rank=1)
    assert (problem.expert_ranks, problem.local_experts, problem.assignments) == (4, 2, 32)
    assert Problem("grouped_gemm", 64, 64, 8, 2, 4).expert_ranks == 1
    assert "rank 1 of 4" in str(problem)
