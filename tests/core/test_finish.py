"""The finish of a problem: what it asks of the shape, who has one, and that problems without one are what they were."""

from __future__ import annotations

import hashlib
import json

import pytest

from tktune.core.errors import ProblemError
from tktune.core.problem import Problem
from tktune.store.keys import problem_from, shape_digest

PLAIN = Problem("dispatch_gemm", 256, 192, 8, 2, 64, world=2)
GLU = PLAIN.replace(finish="swiglu")


def test_a_problem_without_a_finish_has_the_key_and_digest_it_always_had():
    key = {"family": "dispatch_gemm", "hidden": 256, "cols": 192, "experts": 8, "top_k": 2, "tokens": 64}
    key |= {"world": 2, "dtype": "bf16", "weight_layout": "ekn", "routing": "uniform", "pad": 128}
    assert PLAIN.key == key
    spelt = json.dumps(key, sort_keys=True, separators=(",", ":"))
    assert PLAIN.digest == hashlib.sha256(spelt.encode()).hexdigest()
    assert PLAIN.replace(finish="none").digest == PLAIN.digest
    assert (PLAIN.out_cols, str(PLAIN).count("swiglu")) == (192, 0)


def test_a_finish_is_another_problem_and_goes_through_its_key():
    assert GLU.key == {**PLAIN.key, "finish": "swiglu"}
    assert GLU.digest != PLAIN.digest and shape_digest(GLU) != shape_digest(PLAIN)
    assert problem_from(json.dumps(GLU.key)) == GLU
    assert problem_from(json.dumps(PLAIN.key)) == PLAIN
    assert GLU.out_cols == 96
    assert str(GLU) == f"{PLAIN}, swiglu"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"finish": "gelu"}, "finish = 'gelu' is not known"),
        ({"finish": "swiglu", "cols": 184}, "cols = 184 is not a multiple of 16"),
        ({"finish": "swiglu", "family": "gemm_combine"}, "gemm_combine has no finish"),
        ({"finish": "swiglu", "family": "grouped_gemm", "world": 1}, "grouped_gemm has no finish"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_words(changes, said):
    with pytest.raises(ProblemError, match=said):
        PLAIN.replace(**changes)
