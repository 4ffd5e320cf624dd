"""The operator on one GPU: eager, captured and compiled calls agree, and a call costs the host little."""

from __future__ import annotations

import statistics
import time

import pytest

import tktune
from tktune.core.errors import ProblemError

SHAPE = {"hidden": 1024, "cols": 512, "experts": 16, "top_k": 4, "tokens": 256}


@pytest.fixture(scope="module", params=["enk", "ekn"])
def loaded(request, tmp_path_factory):
    import torch

    folder = tmp_path_factory.mktemp("operator")
    operator = tktune.load(
        "grouped_gemm", **SHAPE, weight_layout=request.param, db=str(folder / "none.db"),
        cache=folder / "cache", build=True,
    )  # fmt: skip
    ids = torch.rand(256, 16, device="cuda").topk(4).indices
    plan = operator.plan(ids)
    tokens = torch.randn(256, 1024, device="cuda").bfloat16()
    x = operator.input
    x.fill_(float("nan"))
    slots = plan.slots[0]
    for choice in range(4):
        x[slots[:, choice].long()] = tokens
    shape = (16, 512, 1024) if request.param == "enk" else (16, 1024, 512)
    weights = torch.randn(shape, device="cuda").mul_(1024**-0.5).bfloat16()
    yield operator, x, weights, plan, tokens, ids
    operator.close()


def test_a_call_is_each_token_times_its_experts_weights(loaded):
    import torch

    operator, x, weights, plan, tokens, ids = loaded
    out = operator(x, weights, plan)
    operator.check()
    assert out.shape == (operator.capacity, 512)
    matrices = weights if weights.shape[1] == 1024 else weights.transpose(1, 2)
    for choice in range(4):
        wanted = torch.bmm(tokens[:, None].float(), matrices[ids[:, choice]].float())[:, 0]
        got = out[plan.slots[0][:, choice].long()].float()
        assert float((got - wanted).norm() / wanted.norm()) < 4e-3


def test_graph_replays_and_compiled_calls_equal_the_eager_call(loaded):
    import torch

    operator, x, weights, plan, _, _ = loaded
    rows = plan.tables.slot_token >= 0
    eager = operator(x, weights, plan)[: plan.rows][rows]
    out = torch.empty(operator.capacity, 512, dtype=torch.bfloat16, device="cuda")
    operator(x, weights, plan, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        operator(x, weights, plan, out)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out[: plan.rows][rows], eager)

    def step(x, weights):
        return operator(x, weights, plan) * 2

    compiled = torch.compile(step, fullgraph=True)
    assert torch.equal(compiled(x, weights)[: plan.rows][rows], eager * 2)


def test_another_thread_and_another_stream_may_call(loaded):
    import threading

    import torch

    operator, x, weights, plan, _, _ = loaded
    wanted = operator(x, weights, plan)
    torch.cuda.synchronize()
    found = []

    def call():
        with torch.cuda.stream(torch.cuda.Stream()):
            found.append(operator(x, weights, plan))
        torch.cuda.synchronize()

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    rows = plan.tables.slot_token >= 0
    assert torch.equal(found[0][: plan.rows][rows], wanted[: plan.rows][rows])


def test_wrong_buffers_are_refused(loaded):
    operator, x, weights, plan, _, _ = loaded
    for bad in ((x.float(), weights), (x, weights[:8]), (x.cpu(), weights), (x[:, ::2], weights)):
        with pytest.raises(ProblemError):
            operator(*bad, plan)


def test_a_call_costs_the_host_little(loaded):
    import torch

    from tktune.families.cuda.driver import current_stream

    operator, x, weights, plan, _, _ = loaded
    out = operator(x, weights, plan)
    launch = next(iter(operator._launches.values())).launch
    stream = current_stream(0)

    def micros(call, repeat=200):
        samples = []
        for _ in range(15):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(repeat):
                call()
            samples.append((time.perf_counter() - begin) / repeat * 1e6)
        return statistics.median(samples)

    few = 40  # below the depth of the launch queue, so that the device never holds the host up
    raw = micros(lambda: launch(stream), few)
    eager = micros(lambda: operator(x, weights, plan, out), few)
    print(f"\nraw launch {raw:.2f} µs, call {eager:.2f} µs", end="")
    assert raw < 12 and eager < 20
