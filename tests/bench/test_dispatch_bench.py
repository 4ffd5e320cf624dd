"""The dispatch bench without a GPU: what it takes from a database, what it makes of samples, and how ranks are watched."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))

import gpu_dispatch_gemm
from dispatch_bench import hand, judged, outcome
from dispatch_bench.hand import hand_builds, hand_sweep
from dispatch_bench.wanted import Cost, alone_problem, cost_of, gemm_config, sweep_of, wanted
from two_gpus import supervise

from tktune.core.device import device_class
from tktune.core.policy import serving_policy
from tktune.core.problem import Problem
from tktune.families.base import family
from tktune.search.study import load_study
from tktune.store.results import Store
from tktune.store.rows import VerificationRow

ROOT = Path(__file__).resolve().parents[2]
DEVICE = device_class("sm_90a")
PROBLEM = Problem("dispatch_gemm", 2048, 768, 128, 8, 2048, world=2, weight_layout="enk")
DIGEST = "ab" * 32


@pytest.fixture(scope="module")
def space():
    return family("dispatch_gemm").space(PROBLEM, DEVICE)


@pytest.fixture(scope="module")
def database(tmp_path_factory, space):
    """A run of PROBLEM whose winner has 24 communicating SMs: three of its line were measured, and four of another build."""
    url = f"sqlite:///{tmp_path_factory.mktemp('bench') / 'b.db'}"
    default = space.default
    winner = default.replace(num_comm_sms=24)
    other = next(c for c in space.feasible if c["DRAW"] == "dispenser")
    others = [c for c in space.feasible if space.build_part(c) == space.build_part(other)][:4]
    with Store.open(url) as store:
        toolchain = store.toolchain_id("nvcc", "nvcc 13.0", "cd" * 32, {})
        key = store.key(PROBLEM, DEVICE, serving_policy("cuda", DEVICE.l2_bytes), toolchain)
        for config in (default, winner, default.replace(num_comm_sms=8), *others):
            trial = store.start_trial(key, config, DIGEST, "run")
            store.finish_trial(trial, "censored" if config in others else "ok", time_us=10.0)
        store.record_trial(key, default.replace(num_comm_sms=48), DIGEST, "refused:D1", run_id="run")
        rows = [VerificationRow(winner, DIGEST, "finalist", 10.0, (10.0,), True, "faster")]
        store.add_verification(key, "run", rows)
    return url, winner


def test_the_sweep_is_every_split_of_the_space_at_the_winners_other_values(space):
    winner = space.default_config().replace(num_comm_sms=24, order="slot")
    sweep = sweep_of(space, winner)
    splits = next(p.values for p in space.parameters if p.name == "num_comm_sms")
    assert [config["num_comm_sms"] for config in sweep] == [
        split for split in splits if space.is_feasible(winner.replace(num_comm_sms=split))
    ]
    assert {config.replace(num_comm_sms=24) for config in sweep} == {winner}


def test_a_winner_is_found_with_what_it_cost(database, space):
    url, winner = database
    with Store.open(url, mode="ro") as store:
        found = wanted(store, PROBLEM, DEVICE)
    assert (found.provenance, found.winner, found.default) == ("exact", winner, space.default_config())
    other = next(c for c in space.feasible if c["DRAW"] == "dispenser")
    others = [c for c in space.feasible if space.build_part(c) == space.build_part(other)][:4]
    assert found.cost == Cost(
        measured=7,  # what was refused was never measured
        found_after=2,
        builds=2,
        on_line=3,
        line=len(found.sweep),
        in_sweep=3 + sum(c in found.hand for c in others),
        space=len(space.feasible),
    )
    assert found.hand == hand_sweep(space)


def test_another_routing_takes_the_winner_of_uniform_and_claims_no_cost(database):
    url, winner = database
    with Store.open(url, mode="ro") as store:
        skewed = wanted(store, PROBLEM.replace(routing="zipf:1.2"), DEVICE)
        strange = wanted(store, PROBLEM.replace(hidden=4096), DEVICE)
    assert (skewed.provenance, skewed.winner) == ("uniform", winner)
    assert (strange.provenance, strange.winner, strange.cost) == ("default", strange.default, None)
    assert wanted(None, PROBLEM, DEVICE).provenance == "default"


def test_a_config_measured_twice_counts_once(database, space):
    url, winner = database
    with Store.open(url, mode="ro") as store:
        rows = [row for key in store.keys() for row in store.trials(key)]  # noqa: SIM118
    hand = hand_sweep(space)
    assert cost_of([*rows, *rows], space, winner, hand) == cost_of(rows, space, winner, hand)
    backwards = cost_of(rows[::-1], space, winner, hand)
    assert backwards.found_after == 2  # the order in which they were begun counts, not that of the rows
    never = cost_of([row for row in rows if row.config != winner], space, winner, hand)
    assert never.found_after == never.measured == 6


def test_the_sweep_by_hand_is_every_launch_of_its_builds(space):
    builds, sweep = hand_builds(space), hand_sweep(space)
    for name in ("DRAW", "ACTIVATIONS"):
        assert {build[name] for build in builds} == set(
            next(p.values for p in space.parameters if p.name == name)
        )
    assert {(b["MAIN_LOOP"], b["ROW_BLOCK"], b["COL_BLOCK"]) for b in builds} == {
        ("wgmma", 128, 256),
        ("wgmma", 256, 192),
        ("wgmma_pingpong", 128, 192),
    }
    assert len(builds) >= 12 and all(config["CLUSTER"] == 1 for config in sweep)
    kept = [name for name in space.launch_names if name not in hand.LAUNCHES]
    wanted_ones = {
        c
        for c in space.feasible
        if space.build_part(c) in builds and c.only(kept) == space.default.only(kept)
    }
    assert set(sweep) == wanted_ones and len(sweep) == len(wanted_ones) > 300
    positions = [builds.index(space.build_part(config)) for config in sweep]
    assert positions == sorted(positions)  # ranks number them build by build
    assert hand_sweep(family("dispatch_gemm").space(PROBLEM, device_class("sm_120a"))) == ()


def test_the_gemm_that_it_is_held_against_is_the_stored_winner_or_the_committed_one(tmp_path):
    alone = alone_problem(PROBLEM)
    config, said = gemm_config(None, alone.replace(routing="zipf:1.2"), DEVICE, "serving")
    assert config is not None and config["MAIN_LOOP"] == "wgmma_pingpong"
    assert "gpu_grouped_gemm_2048x768" in said
    assert gemm_config(None, alone.replace(cols=776), DEVICE, "serving") == (None, "")
    stored = family("grouped_gemm").space(alone, DEVICE).default_config().replace(walk="shortest")
    with Store.open(f"sqlite:///{tmp_path / 'g.db'}") as store:
        toolchain = store.toolchain_id("nvcc", "nvcc 13.0", "cd" * 32, {})
        key = store.key(alone, DEVICE, serving_policy("cuda", DEVICE.l2_bytes), toolchain)
        trial = store.start_trial(key, stored, DIGEST, "run")
        store.finish_trial(trial, "ok", time_us=10.0)
        rows = [VerificationRow(stored, DIGEST, "finalist", 10.0, (10.0,), True, "faster")]
        store.add_verification(key, "run", rows)
        for routing in ("uniform", "zipf:1.2"):
            assert gemm_config(store, alone.replace(routing=routing), DEVICE, "serving") == (stored, "")


def test_the_gemm_alone_is_the_problem_that_the_gemm_studies_tune():
    (study,) = (load_study(ROOT / "studies" / "h200" / f"{name}.toml") for name in ["2048x768-t2048"])
    assert alone_problem(PROBLEM) in study.problems


# Samples.


def test_a_launch_counts_by_its_slowest_rank():
    ranks = [{"a": [[1.0, 5.0], [2.0]], "b": [[1.0], [1.0]]}, {"a": [[3.0, 4.0], [1.0]]}]
    assert judged.slowest(ranks) == {"a": [[3.0, 5.0], [2.0]]}


def rounds_of(us, count=6):
    return [[us, us + 0.5, us - 0.5]] * count


def everything(**changes):
    """Rounds of every name: fused 120 µs, communication 40 at the split of 16 and 30 at its best, compute 100."""
    us = {judged.WINNER: 120.0, judged.AGAIN: 120.0, judged.DEFAULT: 150.0, judged.COMP: 100.0}
    us |= {
        "split 8": 160.0,
        "split 16": 120.0,
        "split 24": 125.0,
        "comm 8": 60.0,
        "comm 16": 40.0,
        "comm 24": 30.0,
    }
    us |= {"serial": 240.0, "serial, real rows": 230.0, "torch._grouped_mm": 110.0, "DeepGEMM": 96.0}
    return {name: rounds_of(value) for name, value in {**us, **changes}.items()}


def test_a_result_compares_with_the_best_of_each_kind():
    one = judged.judge(
        16, everything(), {n: everything()[n] for n in ("winner", "winner again", "split 16")}, None
    )
    assert (one.serial, one.alone) == ("serial, real rows", "DeepGEMM")
    said = one.object()
    assert said["serial_over_fused"] == pytest.approx(230 / 120, abs=1e-3)
    assert said["fused_over_alone"] == pytest.approx(120 / 96, abs=1e-3)
    assert (said["comm_at_split_us"], said["comm_least_us"], said["comm_least_split"]) == (40.0, 30.0, 24)
    assert said["overlap_at_split"] == pytest.approx((100 + 40 - 120) / 40)
    assert said["overlap_at_least"] == pytest.approx((100 + 30 - 120) / 30, abs=1e-3)
    assert said["exposed_us"] == pytest.approx(20.0)
    assert said["sweep_us"] == {"8": 160.0, "16": 120.0, "24": 125.0}
    assert json.loads(json.dumps(said)) == said


def last_rounds(winner, best, again=None):
    return {
        judged.WINNER: rounds_of(winner),
        judged.AGAIN: rounds_of(winner if again is None else again),
        "split 24": rounds_of(best),
        "split 8": rounds_of(best + 50),
    }


COST = Cost(measured=60, found_after=20, builds=10, on_line=2, line=9, in_sweep=7, space=100_000)
SWEEP = [f"config {number}" for number in range(100)]


@pytest.mark.parametrize(
    ("winner", "best", "again", "as_fast"),
    [
        (100.0, 100.0, 100.0, True),
        (100.9, 100.0, 100.9, True),  # within 1 %
        (101.5, 100.0, 101.5, False),
        (101.5, 100.0, 103.5, True),  # within the noise of the winner against itself
        (90.0, 100.0, 90.0, True),
    ],
)
def test_the_winner_is_right_within_one_percent_or_the_noise(winner, best, again, as_fast):
    found = judged.claim(16, last_rounds(winner, best, again), COST)
    assert found.as_fast is as_fast
    assert (found.split, found.best) == (16, "split 24")
    assert found.ratio == pytest.approx(winner / best)
    assert f"(split 16) {'is' if as_fast else 'is NOT'} within" in found.sentence


def test_a_config_of_the_sweep_by_hand_may_be_the_best():
    rounds = last_rounds(100.0, 99.0) | {"hand 17": rounds_of(90.0)}
    found = judged.claim(16, rounds, COST, SWEEP)
    assert found.best == "config 17" and found.ratio == pytest.approx(100 / 90) and not found.as_fast
    assert "a sweep of 100 configs and of its own splits, config 17" in found.sentence


def test_the_cost_is_told_against_the_sweep():
    found = judged.claim(16, last_rounds(100.0, 100.0), COST, SWEEP)
    assert "It was config 20 of 60 that the tuner measured, from 10 builds" in found.sentence
    assert "20.0% of that sweep until it was found (at most a quarter)" in found.sentence
    assert "60.0% in all (MORE than a quarter)" in found.sentence
    assert "had measured 7 configs, of its own 9 splits 2, of 100000 feasible configs 0.06%" in found.sentence
    cost = found.object()["cost"]
    assert cost["at_most_a_quarter_of_the_sweep"] == {"until_found": True, "in_all": False}
    assert (cost["measured"], cost["found_after"], found.object()["sweep"]) == (60, 20, 100)
    alone = judged.claim(16, last_rounds(100.0, 100.0), COST)
    assert "until it was found" not in alone.sentence and "at_most" not in str(alone.object()["cost"])
    assert "not known" in judged.claim(16, last_rounds(100.0, 100.0), None).sentence


def test_a_mode_without_sweeps_claims_nothing():
    rounds = {
        name: one for name, one in everything().items() if not name.startswith(("split", "comm 8", "comm 24"))
    }
    one = judged.judge(16, rounds, {}, COST)
    said = one.object()
    assert said["claim"] is None and said["sweep_us"] == {} and said["comm_least_split"] == 16
    assert "120.0 (16)" in judged.table([("A", "uniform", one)])


def test_the_table_has_one_cell_for_each_head():
    one = judged.judge(16, everything(), last_rounds(120.0, 119.5), COST)
    lines = judged.table([("2048 × 768", "uniform", one)]).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert "120.0 (16)" in lines[2] and "1.92 (230 µs)" in lines[2] and "96.0 (DeepGEMM)" in lines[2]
    assert judged.curve(one) == "8:160 16:120 24:125"


@dataclasses.dataclass
class Built:
    path: Path
    sha256: str


# From the ranks' files to the result.


def found_by_a_rank(slower=0.0, modes=("graph", "direct")):
    rounds = {name: [[us + slower for us in one] for one in all_] for name, all_ in everything().items()}
    mode = {"rounds": rounds, "last": last_rounds(120.0 + slower, 119.5 + slower), "wrong_after": ""}
    one = {"number": 0, "real_rows": 5, "padded_rows": 8, "wrong": {}, "modes": dict.fromkeys(modes, mode)}
    one |= {"seconds": {"check": 1.0}, "hand_us": {"hand 0": 130.0 + slower, "hand 1": 125.0}}
    return {"found": [one], "versions": {"torch": "2"}}


def test_results_are_joined_and_unfinished_cases_are_left_out(space):
    config = space.default
    assert config.number("num_comm_sms") == 16
    cases = [
        dataclasses.replace(
            wanted(None, PROBLEM.replace(routing=routing), DEVICE),
            winner=config,
            default=config,
            sweep=sweep_of(space, config),
        )
        for routing in ("uniform", "zipf:1.2")
    ]
    case = cases[0]
    ranks = [found_by_a_rank(), found_by_a_rank(2.0, modes=("graph",))]
    shown, found = outcome.results(cases, ranks)
    assert [(number, mode) for number, mode, _ in found] == [(0, "graph")]
    assert found[0][2].fused_us == pytest.approx(122.0)
    assert shown[0]["winner"] == dict(case.winner) and list(shown[0]["modes"]) == ["graph"]
    assert shown[0]["hand_sweep"] == {str(case.hand[0]): 132.0, str(case.hand[1]): 125.0}
    assert shown[0]["modes"]["graph"]["claim"]["sweep"] == len(case.hand)
    text = outcome.summary(cases, found)
    assert "CUDA graph" in text and "Eager" not in text and "sweep: 8:162 16:122 24:127" in text


def test_a_dead_ranks_missing_file_leaves_nothing(space):
    ranks = [found_by_a_rank(), {"found": [], "versions": {}}]
    assert outcome.results([wanted(None, PROBLEM, DEVICE)], ranks) == ([], [])


def test_cases_are_each_shape_of_the_study_under_each_routing(database):
    url, _ = database
    asked = argparse.Namespace(
        study=gpu_dispatch_gemm.STUDY,
        shapes="2048x768",
        routings=["uniform", "zipf:1.2"],
        db=url,
        config=None,
        hand=True,
    )
    cases = gpu_dispatch_gemm.chosen_cases(asked, DEVICE)
    assert [(case.problem.routing, case.provenance) for case in cases] == [
        ("uniform", "exact"),
        ("zipf:1.2", "uniform"),
    ]
    asked.config = "num_comm_sms=8"
    assert {case.winner["num_comm_sms"] for case in gpu_dispatch_gemm.chosen_cases(asked, DEVICE)} == {8}
    assert [bool(case.hand) for case in cases] == [True, False]  # under the first routing alone
    builds = len(hand_builds(family("dispatch_gemm").space(PROBLEM, DEVICE)))
    bench = gpu_dispatch_gemm.Bench(DEVICE, cases, asked)
    # Winner and default differ in their split alone and are of the sweep; our own grouped GEMM is beside them.
    assert len(bench.specs()) == builds + 1
    made = {key: Built(Path(f"/{number}"), f"{number:064}") for number, key in enumerate(bench.specs())}
    (shape,) = gpu_dispatch_gemm.words_of(bench, made)
    uniform, skewed = shape["cases"]
    assert [config for build in uniform["hand"] for config in build["configs"]] == [
        dict(c) for c in cases[0].hand
    ]
    assert skewed["hand"] == [] and uniform["gemm"]["config"] == dict(cases[0].gemm)


def test_there_may_be_no_database_yet(tmp_path, capsys):
    asked = argparse.Namespace(
        study=gpu_dispatch_gemm.STUDY,
        shapes="",
        routings=["uniform"],
        db=str(tmp_path / "none.db"),
        config=None,
        hand=False,
    )
    cases = gpu_dispatch_gemm.chosen_cases(asked, DEVICE)
    assert [case.provenance for case in cases] == ["default"] * 4
    assert "There is no database" in capsys.readouterr().out
    assert not (tmp_path / "none.db").exists()


# Watching.

WELL = "pass"
DIES = "import sys; print('no rows', file=sys.stderr); sys.exit(3)"
KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
WAITS = "import time; time.sleep(60)"


def watched(codes, deadline_s=20.0, farewell_s=0.5):
    told, begin = [], time.monotonic()
    said = supervise.run_ranks(
        [[sys.executable, "-c", code] for code in codes],
        {name: value for name, value in os.environ.items() if not name.startswith("COV")},
        [],
        supervise.Watch(deadline_s, farewell_s),
        lambda: told.append(True),
        lambda rank: f"timed thing {rank}",
    )
    return said, len(told), time.monotonic() - begin


def test_ranks_that_end_well_say_nothing():
    assert watched([WELL, WELL])[:2] == ([], 0)


def test_a_rank_that_dies_ends_the_others_with_a_sentence():
    said, told, took_s = watched([DIES, WAITS])
    assert said[0] == "Rank 0 left with exit code 3 while it timed thing 0. Its log ends: no rows"
    assert said[1:] == ["Rank 1 was killed: it timed thing 1 and did not stop."]
    assert told == 1 and took_s < 10


def test_a_rank_that_is_killed_is_named_by_its_signal():
    said, _, _ = watched([WELL, KILLED])
    assert said == ["Rank 1 was ended by SIGKILL while it timed thing 1."]


def test_ranks_that_do_not_end_are_told_and_killed():
    said, told, took_s = watched([WAITS, WELL], deadline_s=1.0)
    assert said[0] == "The ranks did not end within 1 s: rank 0 timed thing 0."
    assert told == 1 and took_s < 10
