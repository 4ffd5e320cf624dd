"""The library form of the CUDA operator, as far as it can be judged without a GPU: it mutates, returns nothing, and
survives tracing and functionalisation.
"""

from __future__ import annotations

import types

import pytest
import torch

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed (the extra `cuda`)")

from cuda_artifacts import problem_of

from tktune.core import tables_torch
from tktune.core.errors import ProblemError
from tktune.runtime import cuda_operator
from tktune.runtime.cuda_operator import CudaOperator, CudaPlan


@pytest.fixture(scope="module")
def on_cpu():
    """The library operator with a CPU kernel that calls the same Python function."""
    library = torch.library.Library("tktune", "IMPL")
    library.impl("grouped_gemm", cuda_operator._launch_by_number, "CPU")
    yield
    library._destroy()


class TorchOperator(CudaOperator):
    """A CudaOperator whose launch is torch on the CPU."""

    def __init__(self, problem):
        self.problem, self.capacity = problem, problem.capacity_rows
        self._out_shape = (self.capacity, problem.cols)
        self._device = torch.device("cpu")
        self._make_out = lambda: torch.empty(self._out_shape, dtype=torch.bfloat16)
        self.calls = 0
        self._launches = {}
        self.number = cuda_operator.OPERATORS.enter(self)

    def enqueue(self, x, weights, out, workspace, address, rows):
        self.calls += 1
        out.zero_()
        for expert, first, count, _ in workspace[4:].view(-1, 4).tolist():
            out[first : first + count] = x[first : first + count] @ weights[expert]
        assert workspace[:2].tolist() == [0, 0]

    def close(self):
        cuda_operator.OPERATORS.leave(self.number)


@pytest.fixture
def called(on_cpu):
    problem = problem_of(hidden=32, cols=16, experts=4, top_k=2, tokens=8, pad=16, ep_world=1)
    operator = TorchOperator(problem)
    ids = torch.rand(1, 8, 4).topk(2).indices
    tables = tables_torch.build(ids, problem, 0)
    walk = torch.stack([torch.arange(4).int(), tables.base, tables.counts, torch.zeros(4).int()], 1)
    workspace = torch.cat([torch.zeros(4, dtype=torch.int32), walk.flatten()])
    plan = CudaPlan(tables, workspace[:0], workspace[:2], workspace, workspace.data_ptr(), tables.rows)
    x = torch.randn(tables.rows, 32).bfloat16()
    weights = torch.randn(4, 32, 16).bfloat16()
    yield operator, x, weights, plan
    operator.close()


def test_a_compiled_call_gives_what_an_eager_one_gives(called):
    operator, x, weights, plan = called
    out = torch.empty(operator.capacity, 16, dtype=torch.bfloat16)
    eager = operator(x, weights, plan, out).clone()

    def step(x, weights):
        return operator(x, weights, plan) * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, weights), eager * 2)
    assert operator.calls == 2
    assert torch.equal(compiled(x + 1, weights), step(x + 1, weights))


def test_a_compiled_call_writes_into_the_callers_buffer(called):
    operator, x, weights, plan = called
    out = torch.full((operator.capacity, 16), 9.0, dtype=torch.bfloat16)
    wanted = operator(x, weights, plan, out).clone()
    out.fill_(9.0)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x, weights, out):
        operator(x, weights, plan, out)
        return out.sum()

    assert torch.equal(step(x, weights, out), wanted.sum())
    assert torch.equal(out, wanted)


def test_the_library_operator_keeps_its_promises(called):
    operator, x, weights, plan = called
    out = torch.empty(operator.capacity, 16, dtype=torch.bfloat16)
    arguments = (x, weights, out, plan.workspace, plan.rows, operator.number)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    told = torch.library.opcheck(torch.ops.tktune.grouped_gemm.default, arguments, test_utils=tests)
    assert set(told.values()) == {"SUCCESS"}


def test_a_closed_operator_says_so(called):
    operator, x, weights, plan = called
    out = torch.empty(operator.capacity, 16, dtype=torch.bfloat16)
    operator.close()
    with pytest.raises(ProblemError, match="was closed"):
        torch.ops.tktune.grouped_gemm(x, weights, out, plan.workspace, plan.rows, operator.number)


def test_buffers_are_checked_when_they_are_first_seen(called):
    operator, _, weights, _ = called
    operator._weights_shape = tuple(weights.shape)
    expect = operator._expect
    expect("weights", weights, operator._weights_shape)
    for bad in (weights.float(), weights[:, :8], weights.transpose(1, 2), weights.expand(4, 32, 16)[::2]):
        with pytest.raises(ProblemError, match="weights is"):
            expect("weights", bad, operator._weights_shape)


def test_other_families_have_no_operator_yet():
    choice = types.SimpleNamespace(problem=types.SimpleNamespace(family="dispatch_gemm"), device="a GPU")
    with pytest.raises(ProblemError, match="no operator of dispatch_gemm"):
        CudaOperator(choice, None, "", None, 1.0)


def test_what_lies_at_a_known_address_is_checked_again():
    x, weights, out = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((8, 32), (4, 32, 16), (8, 16)))
    bound = cuda_operator._Bound(None, x, weights, out, 8)
    assert bound.x() is x and bound.weights() is weights
    assert bound.takes(x[:], weights[:]) and bound.writes(out[:])
    wider = torch.zeros(8, 64, dtype=torch.bfloat16)
    for bad in (x[:4], x.view(torch.int16), wider[:, :32], x.view(32, 8)):
        assert not bound.takes(bad, weights)
        assert not bound.writes(bad)
    for bad in (weights[:2], weights.view(torch.int16), weights.transpose(1, 2)):
        assert not bound.takes(x, bad)


def test_a_tensor_that_is_gone_is_not_mistaken_for_its_successor():
    weights, out = torch.zeros(4, 32, 16).bfloat16(), torch.zeros(8, 16).bfloat16()
    bound = cuda_operator._Bound(None, torch.zeros(8, 32).bfloat16(), weights, out, 8)
    assert bound.x() is None  # nothing is kept alive
    assert not bound.takes(torch.zeros(4, 32).bfloat16(), weights)
