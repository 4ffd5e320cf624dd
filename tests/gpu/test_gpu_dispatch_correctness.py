"""The fusion gives the reference for every main loop, split, order and routing, launch after launch."""

from __future__ import annotations

from typing import Any

import pytest
from dispatch_pair import (
    PROBLEMS,
    REHEARSAL,
    ROUTINGS,
    build_all,
    configured,
    dispatch_problem,
    gated,
    gated_for_a_hundred_rounds,
    timed_in_every_mode,
)
from gpu_places import kept_cache, needs_two

from tktune.core.device_cuda import cuda_device_classes
from tktune.core.policy import Policy
from tktune.gang.gang import Gang

pytestmark = [pytest.mark.gpu, needs_two, pytest.mark.timeout(300)]

WGMMA: list[dict[str, Any]] = [
    {},
    {"DRAW": "dispenser"},
    {"MAIN_LOOP": "wgmma_pingpong", "COL_BLOCK": 128, "DRAW": "dispenser"},
    {"ROW_BLOCK": 256, "COL_BLOCK": 192, "STAGES": 3, "MMA_DEPTH": 0, "DRAW": "dispenser"},
    {"CLUSTER": 2, "MMA_DEPTH": 0},
]
INDEXED: list[dict[str, Any]] = [
    {"ACTIVATIONS": "indexed", **words}
    for words in (*WGMMA[:4], {"ROW_BLOCK": 192, "COL_BLOCK": 192, "OUT_SLOTS": 1, "CONSUMER_WARPS": 12})
]
MMA_SYNC: list[dict[str, Any]] = [
    {},
    {"WARP_M": 16, "DRAW": "stride"},
    {"COL_BLOCK": 256, "STAGES": 2, "PRODUCER_WARPS": 0},
    {"ROW_BLOCK": 64, "CONSUMER_WARPS": 4, "STAGES": 4},
]
LAUNCHES: list[dict[str, Any]] = [
    {"num_comm_sms": 16, "order": "token"},
    {"num_comm_sms": 16, "order": "mixed"},
    {"num_comm_sms": 2, "order": "slot", "opening": 0},
    {"num_comm_sms": 48, "order": "slot", "raster_rows": 1},
    {"num_comm_sms": 4, "order": "beside"},
    {"num_comm_sms": 4, "order": "beside", "openers": 2},
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return kept_cache(tmp_path_factory.mktemp("dispatch"))


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("path", ["wgmma", "indexed", "mma_sync"])
def test_the_output_is_the_reference(cache, name, path):
    problem = dispatch_problem(**PROBLEMS[name])
    device = REHEARSAL if path == "mma_sync" else cuda_device_classes()[0]
    variants = {"wgmma": WGMMA, "indexed": INDEXED, "mma_sync": MMA_SYNC}[path]
    configs = [configured(problem, device, **changes) for changes in variants]
    built = build_all(cache, [(problem, device, config) for config in configs])
    with Gang(problem, device, Policy()) as gang:
        gated(gang, configs, built, LAUNCHES, ROUTINGS)


@pytest.mark.parametrize("form", ["gathered", "indexed"])
def test_a_hundred_rounds_with_fresh_inputs_are_right(cache, form):
    problem, device = dispatch_problem(tokens=333), cuda_device_classes()[0]
    config = configured(problem, device, DRAW="dispenser", ACTIVATIONS=form)
    ((artifact, part),) = build_all(cache, [(problem, device, config)])
    with Gang(problem, device, Policy()) as gang:
        assert gang.load(artifact.path, artifact.sha256, part).ok
        gated_for_a_hundred_rounds(gang, config, LAUNCHES, ROUTINGS)


@pytest.mark.parametrize("form", ["gathered", "indexed"])
@pytest.mark.parametrize("launch_mode", ["graph", "direct"])
def test_every_mode_is_timed_and_replays_leave_the_counters_ready(cache, launch_mode, form):
    problem, device = dispatch_problem(), cuda_device_classes()[0]
    config = configured(problem, device, DRAW="dispenser", ACTIVATIONS=form)
    ((artifact, part),) = build_all(cache, [(problem, device, config)])
    with Gang(problem, device, Policy(launch_mode=launch_mode)) as gang:
        assert gang.load(artifact.path, artifact.sha256, part).ok
        timed_in_every_mode(gang, config, 10_000 if launch_mode == "graph" else 200)
