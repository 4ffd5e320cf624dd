"""The fusion gives the reference for every main loop, split, order and routing, launch after launch."""

from __future__ import annotations

from typing import Any

import pytest
from dispatch_pair import REHEARSAL, build_all, configured, dispatch_problem, needs_two

from tktune.build.cache import ArtifactCache
from tktune.core.device_cuda import cuda_device_classes
from tktune.core.policy import Policy
from tktune.gang.gang import Gang

pytestmark = [pytest.mark.gpu, needs_two, pytest.mark.timeout(300)]

PROBLEMS: dict[str, dict[str, Any]] = {
    "small": {},
    "ragged": {"hidden": 320, "cols": 328, "experts": 6, "top_k": 3, "tokens": 77, "weight_layout": "ekn"},
    "one_expert": {"experts": 4, "top_k": 1, "tokens": 50},  # a rank may get nothing at all
    "long_rows": {"hidden": 7168, "cols": 256, "experts": 64, "top_k": 8, "tokens": 64},
}
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
ROUTINGS = ("uniform", "empty:0", "hot:0.9@3", "one:3", "zipf:1.2")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return ArtifactCache(tmp_path_factory.mktemp("dispatch"))


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("path", ["wgmma", "indexed", "mma_sync"])
def test_the_output_is_the_reference(cache, name, path):
    problem = dispatch_problem(**PROBLEMS[name])
    device = REHEARSAL if path == "mma_sync" else cuda_device_classes()[0]
    variants = {"wgmma": WGMMA, "indexed": INDEXED, "mma_sync": MMA_SYNC}[path]
    configs = [configured(problem, device, **changes) for changes in variants]
    built = build_all(cache, [(problem, device, config) for config in configs])
    seed = 0
    with Gang(problem, device, Policy()) as gang:
        for config, (artifact, part) in zip(configs, built, strict=True):
            loaded = gang.load(artifact.path, artifact.sha256, part)
            assert loaded.ok and loaded.sentence == "", loaded
            for launch in LAUNCHES:
                for routing in ROUTINGS:
                    seed += 1
                    outcome = gang.gate(config.replace(**launch), routing, seed)
                    assert outcome.ok, f"{dict(config)} {launch} {routing}: {outcome.sentence}"


@pytest.mark.parametrize("form", ["gathered", "indexed"])
def test_a_hundred_rounds_with_fresh_inputs_are_right(cache, form):
    problem, device = dispatch_problem(tokens=333), cuda_device_classes()[0]
    config = configured(problem, device, DRAW="dispenser", ACTIVATIONS=form)
    ((artifact, part),) = build_all(cache, [(problem, device, config)])
    with Gang(problem, device, Policy()) as gang:
        assert gang.load(artifact.path, artifact.sha256, part).ok
        for seed in range(100):
            launch = LAUNCHES[seed % len(LAUNCHES)]
            outcome = gang.gate(config.replace(**launch), ROUTINGS[seed % 3], 1000 + seed)
            assert outcome.ok, f"round {seed}: {outcome.sentence}"


@pytest.mark.parametrize("form", ["gathered", "indexed"])
@pytest.mark.parametrize("launch_mode", ["graph", "direct"])
def test_every_mode_is_timed_and_replays_leave_the_counters_ready(cache, launch_mode, form):
    problem, device = dispatch_problem(), cuda_device_classes()[0]
    config = configured(problem, device, DRAW="dispenser", ACTIVATIONS=form)
    ((artifact, part),) = build_all(cache, [(problem, device, config)])
    with Gang(problem, device, Policy(launch_mode=launch_mode)) as gang:
        assert gang.load(artifact.path, artifact.sha256, part).ok
        for mode in ("fused", "comp", "comm", "serial", "peer"):
            outcome = gang.time(config, mode, 0, 10)
            assert outcome.ok, f"{mode}: {outcome.sentence}"
            assert len(outcome.worst_us) == 10 and 3 < min(outcome.worst_us) < 5000
        replays = gang.time(config, "fused", 0, 10_000 if launch_mode == "graph" else 200)
        assert replays.ok, replays.sentence
        assert gang.gate(config, "uniform", 5).ok
