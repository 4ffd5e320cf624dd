"""Judging and timing through real gangs: gate and time, the abort word, the spin limit, and what comes after."""

from __future__ import annotations

import time

import pytest
import waiting_family
from gpu_variants import build

from tktune.core.config import Config
from tktune.core.policy import Policy, serving_policy
from tktune.core.problem import Problem
from tktune.core.routing import GATE_ROUTINGS
from tktune.families.base import family
from tktune.gang.gang import Gang
from tktune.gang.trial import TrialPlan, measure_trial

SHAPE = {"hidden": 2048, "cols": 768, "experts": 32, "top_k": 8, "tokens": 512, "ep_world": 2}


@pytest.mark.parametrize("launch_mode", ["graph", "direct"])
def test_a_gang_gates_and_times_the_default(cache, device, launch_mode):
    problem = Problem("grouped_gemm", **SHAPE, weight_layout="enk")
    policy = Policy(launch_mode=launch_mode, flush_bytes=2 * device.l2_bytes)
    space = family("grouped_gemm").space(problem, device)
    config = space.default_config()
    artifact = build(cache, problem, device, config)
    with Gang(problem, device, policy) as gang:
        begin = time.monotonic()
        loaded = gang.load(artifact.path, artifact.sha256, space.build_part(config))
        assert loaded.ok and loaded.sentence == "", loaded
        print(f"\n{launch_mode}: a gang is ready after {time.monotonic() - begin:.1f} s", end="")
        for routing in GATE_ROUTINGS(problem):
            outcome = gang.gate(config, routing, 1)
            assert outcome.ok, outcome.sentence
        fused = gang.time(config, "fused", 0, 20)
        peer = gang.time(config, "peer", 0, 20)
        assert fused.ok and peer.ok, (fused.sentence, peer.sentence)
        assert len(fused.worst_us) == 20 and 5 < min(fused.worst_us) < 2000
        assert fused.clocks == {} or fused.clocks["sm_mhz"][0] > 0
        print(f"; fused {sorted(fused.worst_us)[10]:.1f} µs, peer {sorted(peer.worst_us)[10]:.1f} µs", end="")
        assert gang.time(config, "comm", 0, 2).status == "refused:no_communication"


def test_a_trial_ends_ok_and_says_how_long_each_stage_took(cache, device):
    problem = Problem("grouped_gemm", **SHAPE, weight_layout="enk")
    policy = serving_policy(device.backend, device.l2_bytes)
    space = family("grouped_gemm").space(problem, device)
    config = space.default_config()
    part = space.build_part(config)
    artifact = build(cache, problem, device, config)
    with Gang(problem, device, policy) as gang:
        gang.start()
        results = [
            measure_trial(gang, config, part, artifact, TrialPlan.of(problem, policy)) for _ in range(2)
        ]
    for result in results:
        assert result.status == "ok", result.sentence
        assert result.gate_error < 5e-3
        print(f"\n{result.time_us:.1f} µs; {result.detail['seconds']}", end="")


def waiting_problem(world):
    return Problem("waiting_family:FAMILY", hidden=64, cols=64, experts=2, top_k=1, tokens=8, world=world)


def waiting_gang(cache, device, world, spin_limit_s):
    problem = waiting_problem(world)
    (outcome,) = cache.build([waiting_family.FAMILY.build_spec(Config(), problem, device)])
    assert outcome.ok, outcome.error_sentence
    gang = Gang(problem, device, Policy(), spin_limit_s=spin_limit_s, device_indices=[0] * world)
    return gang, outcome.artifact


def test_a_spin_limit_is_told_and_the_next_gang_works(cache, device):
    gang, artifact = waiting_gang(cache, device, 1, 0.5)
    with gang:
        assert gang.load(artifact.path, artifact.sha256, Config()).ok
        assert gang.gate(Config(WANTED=0, LEAVES=-1), "uniform", 0).ok
        outcome = gang.gate(Config(WANTED=3, LEAVES=-1), "uniform", 0)
        assert outcome.status == "fault:spin_limit", outcome
        assert "arrivals[7]" in outcome.sentence and "reach 3 and saw 0" in outcome.sentence
        assert not outcome.gang_lives
        assert gang.load(artifact.path, artifact.sha256, Config()).ok
        assert gang.gate(Config(WANTED=0, LEAVES=-1), "uniform", 0).ok
        assert gang.respawns == 1


def test_the_abort_word_ends_a_wait_long_before_its_limit(cache, device):
    gang, artifact = waiting_gang(cache, device, 2, 20.0)
    with gang:
        assert gang.load(artifact.path, artifact.sha256, Config()).ok
        begin = time.monotonic()
        outcome = gang.gate(Config(WANTED=1, LEAVES=1), "uniform", 0)
        assert outcome.status == "refused:leaves"
        assert time.monotonic() - begin < 10.0


def test_a_kernel_that_was_aborted_leaves_its_context_usable(cache, device):
    import torch

    from tktune.core.errors import LaunchFailed
    from tktune.families.base import RankSeat
    from tktune.families.control_page import ControlPage

    problem = waiting_problem(1)
    (outcome,) = cache.build([waiting_family.FAMILY.build_spec(Config(), problem, device)])
    page = ControlPage.create(1)
    bench = waiting_family.FAMILY.workbench(
        RankSeat(problem, device, Policy(), 0, 1, (), page.fd, spin_limit_s=20.0)
    )
    bench.load(outcome.artifact.path, outcome.artifact.sha256, Config())
    page.abort()
    with pytest.raises(LaunchFailed) as caught:
        bench.gate(Config(WANTED=1, LEAVES=-1), "uniform", 0, 1)
    assert caught.value.code == "aborted"
    page.clear()
    assert bench.gate(Config(WANTED=0, LEAVES=-1), "uniform", 0, 1).passed
    assert int(torch.ones(4, device="cuda").sum()) == 4
    bench.close()
    page.close()
