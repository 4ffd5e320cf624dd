"""A trial: gate, race, time, gate again; every end is a status with its samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from gang_cases import faulty_problem

from tktune.core.canonical import canonical_json
from tktune.core.config import Config
from tktune.core.policy import Policy
from tktune.gang.gang import Gang, Outcome
from tktune.gang.noise import noise_floor, relative_difference
from tktune.gang.trial import Sample, TrialPlan, TrialResult, clearly_slower, measure_trial, score_us

PLAN = TrialPlan(("uniform", "empty:0"), seeds=(0,), first_iterations=2, iterations=6)
HEALTHY = Config(FAULT="none", US=200)


@dataclass(frozen=True)
class OnDisk:
    path: Path = Path("/nowhere")
    sha256: str = "sha"


def trial(gang: Gang, config: Config, plan: TrialPlan = PLAN) -> tuple[TrialResult, list[str]]:
    stages: list[str] = []

    def note(stage: str, outcome: Outcome) -> None:
        stages.append(stage)

    return measure_trial(gang, config, config, OnDisk(sha256=config.digest), plan, note), stages


def test_a_good_config_goes_the_whole_way(make_gang: Callable[..., Gang]) -> None:
    result, stages = trial(make_gang(), HEALTHY)
    assert result.status == "ok"
    assert stages == ["loaded", "gated", "gated", "raced", "timed", "rechecked"]
    assert len(result.samples) == 6 * 2
    assert sorted({(one.iteration, one.rank) for one in result.samples}) == [
        (iteration, rank) for iteration in range(6) for rank in range(2)
    ]
    assert result.time_us == 202.5, "the slowest rank of each iteration, then the median"
    assert result.gate_error == 0.0
    assert result.sentence == ""
    assert result.detail["rank_median_us"] == [200.5, 202.5]
    assert [gate["routing"] for gate in result.detail["gates"]] == ["uniform", "empty:0", "uniform"]
    assert result.detail["gates"][2]["seed"] != result.detail["gates"][0]["seed"]
    canonical_json(result.detail)


def test_each_seed_is_timed_and_counts_the_same(make_gang: Callable[..., Gang]) -> None:
    result, stages = trial(make_gang(), HEALTHY, replace(PLAN, seeds=(3, 5)))
    assert stages == ["loaded", "gated", "gated", "raced", "raced", "timed", "timed", "rechecked"]
    assert {one.routing_seed for one in result.samples} == {3, 5}
    assert len(result.samples) == 2 * 6 * 2


def test_a_clearly_slower_config_stops_early_and_keeps_its_samples(make_gang: Callable[..., Gang]) -> None:
    result, stages = trial(make_gang(), HEALTHY, replace(PLAN, race_limit_us=100.0))
    assert result.status == "censored"
    assert stages == ["loaded", "gated", "gated", "raced"]
    assert len(result.samples) == 2 * 2
    assert result.time_us == 202.5
    assert "more than 1.5 × the 100 µs to beat" in result.sentence


def test_a_config_inside_the_margin_earns_its_iterations(make_gang: Callable[..., Gang]) -> None:
    result, _ = trial(make_gang(), HEALTHY, replace(PLAN, race_limit_us=140.0))
    assert result.status == "ok"


def test_the_race_compares_the_best_of_the_first() -> None:
    assert not clearly_slower([1000.0, 149.0], 100.0)
    assert clearly_slower([151.0, 900.0], 100.0)


def test_a_wrong_config_is_never_timed(make_gang: Callable[..., Gang]) -> None:
    gang = make_gang()
    result, stages = trial(gang, Config(FAULT="nan", AT="gate", RANK=1))
    assert (result.status, result.time_us, result.samples, result.gate_error) == ("wrong", None, [], None)
    assert stages == ["loaded", "gated"]
    canonical_json(result.detail)
    result, _ = trial(gang, Config(FAULT="wrong_rows", AT="gate", RANK=0))
    assert result.status == "wrong"
    assert result.gate_error is not None
    assert result.gate_error > 1


def test_a_config_wrong_under_one_routing_only_is_wrong(make_gang: Callable[..., Gang]) -> None:
    config = Config(FAULT="wrong_rows", AT="gate", RANK=0, ROUTING="empty:0")
    result, stages = trial(make_gang(), config)
    assert result.status == "wrong"
    assert "empty:0" in result.sentence
    assert stages == ["loaded", "gated", "gated"]


def test_a_config_that_goes_wrong_once_timed_is_wrong(make_gang: Callable[..., Gang]) -> None:
    result, stages = trial(make_gang(), Config(FAULT="wrong_rows", AT="recheck", RANK=0))
    assert result.status == "wrong"
    assert stages[-1] == "rechecked"
    assert result.sentence.endswith("It passed before it was timed.")
    assert result.time_us is None
    assert result.samples, "they are kept as evidence"


def test_wrong_is_said_only_by_ranks_that_no_fault_has_touched(make_gang: Callable[..., Gang]) -> None:
    gang = make_gang()
    assert trial(gang, Config(FAULT="raise", AT="gate", RANK=1))[0].status == "fault:RuntimeError"
    touched = gang.pids
    result, stages = trial(gang, Config(FAULT="nan", AT="gate", RANK=1))
    assert result.status == "wrong"
    assert stages == ["loaded", "gated"] * 2
    assert gang.pids != touched
    assert gang.renewals == 1


@pytest.mark.parametrize("at", ["load", "gate", "time"])
def test_a_trial_that_crashes_ends_in_a_status_and_the_next_one_works(
    make_gang: Callable[..., Gang], at: str
) -> None:
    gang = make_gang()
    result, _ = trial(gang, Config(FAULT="sigkill", AT=at, RANK=0))
    assert result.status == "crashed"
    assert "killed by SIGKILL" in result.sentence
    assert trial(gang, HEALTHY)[0].status == "ok"


def test_a_trial_has_a_deadline_of_its_own(make_gang: Callable[..., Gang]) -> None:
    result, _ = trial(make_gang(), HEALTHY, replace(PLAN, deadline_s=0.0))
    assert result.status == "timeout:trial"
    assert "used up its 0 s before it was loaded" in result.sentence


def test_a_formula_that_the_artifact_belies_is_told_with_the_result(make_gang: Callable[..., Gang]) -> None:
    result, _ = trial(make_gang(), Config(SMEM=96))
    assert result.status == "ok"
    assert "correct the formula" in result.sentence
    assert result.detail["facts"]["smem_bytes"] == 96


def test_the_plan_of_a_policy_gates_an_empty_and_a_hot_expert() -> None:
    policy = Policy(first_iterations=4, iterations=9, routing_seeds=(1, 2))
    plan = TrialPlan.of(faulty_problem(), policy, race_limit_us=7.0)
    assert plan.gate_routings[0] == "uniform"
    assert any(routing.startswith("empty:") for routing in plan.gate_routings)
    assert any(routing.startswith("hot:") for routing in plan.gate_routings)
    assert (plan.seeds, plan.first_iterations, plan.iterations, plan.race_limit_us) == ((1, 2), 4, 9, 7.0)


def test_the_score_is_a_median_of_maxima_and_a_mean_over_seeds() -> None:
    samples = [
        Sample(0, i, r, us) for i, both in enumerate([(1, 9), (8, 2), (3, 3)]) for r, us in enumerate(both)
    ]
    assert score_us(samples) == 8
    assert score_us([*samples, Sample(1, 0, 0, 10.0)]) == 9


def test_the_noise_floor_of_a_steady_config_is_small(make_gang: Callable[..., Gang]) -> None:
    gang = make_gang()
    gang.load("/nowhere", "sha", HEALTHY)
    noise = noise_floor(gang, HEALTHY, comparisons=3, rounds=2, iterations=2)
    assert noise.relative == 0.0
    assert len(noise.differences) == 3
    assert len(noise.samples) == 3 * 2 * 2 * 2
    assert {half for _, half, _ in noise.samples} == {0, 1}


def test_a_difference_is_relative_to_the_faster() -> None:
    assert relative_difference([100.0, 100.0, 500.0], [110.0, 110.0, 90.0]) == pytest.approx(0.1)
