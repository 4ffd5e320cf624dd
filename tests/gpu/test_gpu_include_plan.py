"""A policy that includes the plan: it is built by every timed launch, gated with it, and costs what it costs."""

from __future__ import annotations

import statistics

import pytest
from dispatch_pair import build_all, configured, dispatch_problem
from gpu_places import SHARED, few, kept_cache, needs_two

from tktune.core.device_cuda import cuda_device_classes
from tktune.core.policy import Policy
from tktune.gang.gang import Gang

pytestmark = [pytest.mark.gpu, needs_two, pytest.mark.timeout(180)]


@pytest.mark.parametrize("transport", ["pull", "push"])
@pytest.mark.parametrize("launch_mode", ["graph", "direct"])
def test_a_plan_in_the_timed_region_is_right_and_is_paid_for(tmp_path, launch_mode, transport):
    problem, device = dispatch_problem(tokens=512), cuda_device_classes()[0]
    config = configured(problem, device, DRAW="dispenser", TRANSPORT=transport)
    ((artifact, part),) = build_all(kept_cache(tmp_path), [(problem, device, config)])
    medians = {}
    for include in (False, True):
        policy = Policy(launch_mode=launch_mode, include_plan=include)
        with Gang(problem, device, policy) as gang:
            assert gang.load(artifact.path, artifact.sha256, part).ok
            for seed, routing in enumerate(("uniform", "empty:0", "hot:0.9@3", "one:3")):
                outcome = gang.gate(config, routing, seed)
                assert outcome.ok, f"{routing}: {outcome.sentence}"
            for mode in ("fused", "comm", "comp", "serial"):
                outcome = gang.time(config, mode, 0, few(50, 10))
                assert outcome.ok, f"{mode}: {outcome.sentence}"
                medians[mode, include] = statistics.median(outcome.worst_us)
            assert gang.gate(config, "uniform", 9).ok
    print(f"\n{launch_mode}: { ({key: round(us, 1) for key, us in medians.items()}) }", end="")
    paid = medians["fused", True] - medians["fused", False]
    assert SHARED or 2.0 < paid < 100.0
