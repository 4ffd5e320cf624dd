"""SwiGLU on GPUs: both forms give the reference for every main loop, both layouts, rows gathered and by index, on one rank
alone and on two; every mode is timed; the operator, eager, captured and as a library call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from dispatch_pair import (
    REHEARSAL,
    build_all,
    configured,
    dispatch_problem,
    gated,
    timed_in_every_mode,
)
from gpu_places import kept_cache, needs_two

from tktune.build.cache import ArtifactCache
from tktune.core.device_cuda import cuda_device_classes
from tktune.core.policy import Policy
from tktune.core.problem import Problem
from tktune.families.glu import CODES
from tktune.gang.gang import Gang

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

PROBLEMS: dict[str, dict[str, Any]] = {
    "small": {},
    "ragged": {"hidden": 320, "cols": 336, "experts": 6, "top_k": 3, "tokens": 77, "weight_layout": "ekn"},
    "one_expert": {"experts": 4, "top_k": 1, "tokens": 50},
    "long_rows": {
        "hidden": 7168,
        "cols": 512,
        "experts": 64,
        "top_k": 8,
        "tokens": 64,
        "weight_layout": "ekn",
    },
}
PINGPONG = {"MAIN_LOOP": "wgmma_pingpong", "COL_BLOCK": 192, "STAGES": 5, "OUT_SLOTS": 1, "DRAW": "dispenser"}
TALL = {"ROW_BLOCK": 256, "COL_BLOCK": 192, "STAGES": 3, "MMA_DEPTH": 0, "DRAW": "dispenser"}
THREE = {"ROW_BLOCK": 192, "COL_BLOCK": 192, "OUT_SLOTS": 1, "CONSUMER_WARPS": 12}
WGMMA: list[dict[str, Any]] = [
    {},
    PINGPONG,
    TALL,
    THREE,
    {"CLUSTER": 2, "MMA_DEPTH": 0},
    {"ROW_BLOCK": 64, "COL_BLOCK": 64, "CONSUMER_WARPS": 4},
    {"ROW_BLOCK": 64, "COL_BLOCK": 128, "DRAW": "dispenser"},
]
INDEXED: list[dict[str, Any]] = [{"ACTIVATIONS": "indexed", **words} for words in (*WGMMA[:4], WGMMA[6])]
MMA_SYNC: list[dict[str, Any]] = [
    {},
    {"WARP_M": 32, "DRAW": "stride"},  # warps of 64 columns
    {"COL_BLOCK": 192, "STAGES": 2, "PRODUCER_WARPS": 0},  # of 48: 24 output columns
    {"COL_BLOCK": 64, "WARP_M": 64},  # of 16: 8 output columns
]
VARIANTS = {"wgmma": WGMMA, "indexed": INDEXED, "mma_sync": MMA_SYNC}
WORLDS = [1, pytest.param(2, marks=needs_two)]
LAUNCHES: list[dict[str, Any]] = [
    {"num_comm_sms": 16, "order": "token"},
    {"num_comm_sms": 8, "order": "token", "raster_rows": 1},
]
ROUTINGS = ("uniform", "empty:0", "hot:0.9@3", "one:2")


def glu_problem(world: int, **changes: Any) -> Problem:
    return dispatch_problem(world=world, finish="swiglu", **changes)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> ArtifactCache:
    return kept_cache(tmp_path_factory.mktemp("glu"))


@pytest.fixture(scope="module")
def gangs() -> Iterator[Any]:
    """The gang of a (world, device class), turned to a problem: ranks start once."""
    open_ones: dict[Any, Gang] = {}

    def gang(problem: Problem, device: Any) -> Gang:
        key = (problem.world, device.arch)
        if key not in open_ones:
            open_ones[key] = Gang(problem, device, Policy())
            open_ones[key].start()
        if open_ones[key].problem != problem:
            open_ones[key].turn_to(problem)
        return open_ones[key]

    yield gang
    for one in open_ones.values():
        one.close()


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("path", VARIANTS)
@pytest.mark.parametrize("world", WORLDS)
def test_the_output_is_silu_of_gate_times_up(cache, gangs, world, path, name):
    problem = glu_problem(world, **PROBLEMS[name])
    device = REHEARSAL if path == "mma_sync" else cuda_device_classes()[0]
    wanted = [
        (problem, device, configured(problem, device, GLU=form, **changes))
        for changes in VARIANTS[path]
        for form in (CODES if changes == VARIANTS[path][0] else ["fused"])
    ]
    configs = [config for _, _, config in wanted]
    gated(gangs(problem, device), configs, build_all(cache, wanted), LAUNCHES, ROUTINGS)


@pytest.mark.parametrize("launch_mode", ["graph", "direct"])
@pytest.mark.parametrize("form", CODES)
def test_every_mode_is_timed_and_replays_leave_the_counters_ready(cache, form, launch_mode):
    problem, device = glu_problem(1), cuda_device_classes()[0]
    config = configured(problem, device, GLU=form, DRAW="dispenser")
    ((artifact, part),) = build_all(cache, [(problem, device, config)])
    with Gang(problem, device, Policy(launch_mode=launch_mode)) as gang:
        assert gang.load(artifact.path, artifact.sha256, part).ok
        timed_in_every_mode(gang, config, 2000 if launch_mode == "graph" else 200)


@pytest.fixture(params=list(CODES))
def operator(request, cache):
    """The operator of one rank alone, with this form, as a study might have found it."""
    import tktune
    from tktune.runtime import operator as runtime
    from tktune.runtime.cuda_dispatch_operator import CudaDispatchOperator

    words = {name: value for name, value in glu_problem(1).key.items() if name != "family"}
    choice = tktune.lookup("dispatch_gemm", **words, db="/nowhere/none.db")
    choice = dataclasses.replace(choice, config=choice.config.replace(GLU=request.param))
    artifact = runtime._artifact(choice, cache.root, True)
    made = CudaDispatchOperator(choice, artifact.path, artifact.sha256, None, 30.0)
    yield made
    made.close()


def test_the_operator_gives_half_the_columns_eager_captured_and_as_a_library_call(operator):
    import torch

    import tktune
    from tktune.core.routing import parse_routing

    problem, half = operator.problem, operator.problem.out_cols
    stream = torch.Generator("cuda").manual_seed(1)
    shape = (problem.local_experts, problem.cols, problem.hidden)
    plain = torch.randn(shape, device="cuda", generator=stream).mul_(problem.hidden**-0.5).bfloat16()
    weights = tktune.pack_glu(plain, "enk")
    x = torch.randn(problem.tokens, problem.hidden, device="cuda", generator=stream).bfloat16()
    ids = torch.as_tensor(parse_routing("uniform").draw(problem, 3)[0]).cuda()

    def error(y: Any, plan: Any) -> float:
        wrong = size = 0.0
        slots = plan.slots[0].long()
        for expert in range(problem.experts):
            token, place = (ids == expert).nonzero(as_tuple=True)
            sums = x[token].float() @ plain[expert].float().T
            wanted = torch.nn.functional.silu(sums[:, :half]) * sums[:, half:]
            got = y[slots[token, place]].float()
            wrong, size = wrong + float((got - wanted).square().sum()), size + float(wanted.square().sum())
        return (wrong / size) ** 0.5

    plan = operator.plan(ids)
    y = operator(x, weights, plan)
    operator.check()
    assert y.shape == (operator.capacity, half)
    assert error(y, plan) < 8e-3
    out = torch.full_like(y, float("nan"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        operator(x, weights, plan, out)
    x.neg_()
    graph.replay()
    operator.check()
    assert error(out, plan) < 8e-3
    out.fill_(float("nan"))
    torch.ops.tktune.dispatch_gemm(x, weights, out, plan.memory, operator.number)
    operator.check()
    assert error(out, plan) < 8e-3
