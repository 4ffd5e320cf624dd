"""A rank of the dispatch bench on the CPU: its baselines compute what the fused kernel must, and its rounds are fair."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import threading
import types
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed (the extra `cuda`)")

import gpu_dispatch_gemm
from dispatch_bench import libraries, outcome
from dispatch_bench import rank as rank_module
from dispatch_bench.hand_rank import HandSweep
from dispatch_bench.libraries import Libraries
from dispatch_bench.rank import BenchRank
from dispatch_bench.wanted import sweep_of, wanted
from two_gpus import rank as shared_rank
from two_gpus.rank import eager

from tktune.core.device import device_class
from tktune.core.policy import Policy
from tktune.core.problem import Problem
from tktune.families.base import GateResult, RankSeat, family
from tktune.families.control_page import ControlPage
from tktune.families.cuda.gemm_inputs import draw_tokens, draw_weights
from tktune.families.dispatch_gemm.plan_cuda import make_plan

CPU = torch.device("cpu")
FIELDS = {"hidden": 64, "cols": 48, "experts": 8, "top_k": 2, "tokens": 40, "world": 2}


@pytest.fixture(params=["enk", "ekn"])
def checked(request, monkeypatch):
    """Libraries of rank 1 under a routing with an empty expert, with an all-gather that a test may spoil."""
    problem = Problem("dispatch_gemm", **FIELDS, weight_layout=request.param, routing="empty:5")
    weights = draw_weights(problem, 1, CPU)
    plan = make_plan(problem, weights, 1, problem.routing, 0)
    everyone = draw_tokens(problem, 0, CPU)

    def all_gather(out, mine):
        assert mine.equal(everyone[problem.tokens :])
        out.copy_(everyone)

    monkeypatch.setattr(libraries.dist, "all_gather_into_tensor", all_gather)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return Libraries(problem, weights, plan), everyone


def test_every_baseline_computes_the_reference(checked):
    made, _ = checked
    said = made.check()
    assert set(said) == {"serial", "serial, real rows", "torch._grouped_mm", "torch._grouped_mm, real rows"}
    assert set(said.values()) == {""}
    assert len(made.steps["serial"]) == 3 and len(made.steps["all-gather"]) == 1


def test_a_baseline_that_lacks_a_row_is_noticed(checked):
    made, everyone = checked
    wanted = int(made.case.slot_token[made.case.slots[0]])
    everyone[wanted] = 0.0
    made.plan.x.copy_(everyone[made.problem.tokens :])
    said = made.check()
    assert all("rows differ" in one for one in said.values())


def test_eager_work_runs_its_steps_in_order():
    ran = []
    eager([lambda: ran.append(1), lambda: ran.append(2)])(0)
    assert ran == [1, 2]


@pytest.fixture
def ranks():
    """Both ranks of a bench, without a device."""
    page = ControlPage.create(2)
    fds = {name: [os.memfd_create(name) for _ in range(2)] for name in ("talk", "doing")}
    words = {
        "device": dataclasses.asdict(device_class("sm_90a")),
        "control_fd": page.fd,
        "policy": Policy().key,
        "talk_fds": fds["talk"],
        "doing_fds": fds["doing"],
        "seconds": 60.0,
        "iterations": 3,
        "rounds": 4,
    }
    words = json.loads(json.dumps(words))
    yield [BenchRank(words, rank) for rank in range(2)]
    page.close()
    for fd in (*fds["talk"], *fds["doing"]):
        os.close(fd)


def both(ranks, work):
    said = [None, None]

    def run(rank):
        said[rank] = work(ranks[rank])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return said


def test_ranks_agree_on_what_was_fastest_for_the_slowest_of_them(ranks):
    mine = [
        {"split 4": [[1.0]], "split 8": [[2.0]], "split 12": [[3.0]], "split 16": [[9.0]]},
        {"split 4": [[8.0]], "split 8": [[2.5]], "split 12": [[3.5]], "split 16": [[1.0]]},
    ]
    said = both(ranks, lambda rank: rank.fastest(mine[rank.rank], list(mine[0])))
    assert said == [["split 8", "split 12", "split 4"]] * 2


def test_ranks_may_say_more_than_is_exchanged_at_once(ranks):
    mine = [list(range(1000)), ["short"]]
    said = both(ranks, lambda rank: [rank.agreed(mine[rank.rank]), rank.agreed(rank.rank)])
    assert said == [[mine, [0, 1]]] * 2


def test_rounds_measure_everything_once_and_no_one_is_always_first(ranks):
    order = []

    def run(name):
        return lambda launches: order.append(name) or [1.0] * launches

    found = ranks[0].interleave({name: run(name) for name in "abcd"}, "here")
    assert {name: len(rounds) for name, rounds in found.items()} == dict.fromkeys("abcd", 4)
    assert all(len(launches) == 3 for rounds in found.values() for launches in rounds)
    rounds = [order[i : i + 4] for i in range(0, 16, 4)]
    assert all(sorted(one) == list("abcd") for one in rounds)
    assert len({one[0] for one in rounds}) > 1
    said = os.pread(ranks[0]._doing_fd, 200, 0).decode().strip()
    assert said == f"timed {order[-1]} of here"


def test_sequence_numbers_only_grow_and_are_the_same_on_both_ranks(ranks):
    numbers = [[rank.numbers() for _ in range(3)] for rank in ranks]
    assert numbers[0] == numbers[1] == sorted(numbers[0])


class FakeRank:
    """A rank whose launches take as many µs as its config's split, and whose peer takes twice as long for `slow`."""

    def __init__(self, slow, wrong=""):
        self.slow, self.wrong, self.gated = slow, wrong, []

    def doing(self, what):
        pass

    def gate(self, bench, what, routing, seed):
        self.gated.append((what["sha256"], what["config"]["order"], routing, seed))
        return "rows differ" if what["sha256"] == self.wrong else ""

    def own(self, bench, what, mode, config):
        assert mode == "fused" and dict(config) == what["config"]
        return lambda launches: [float(config["num_comm_sms"])] * launches

    def agreed(self, mine):
        return [mine, [us * (2.0 if number in self.slow else 1.0) for number, us in enumerate(mine)]]


def hand_case():
    launches = [{"num_comm_sms": c, "order": order} for order in ("token", "slot") for c in range(20, 0, -1)]
    builds = [{"artifact": f"/{n}", "sha256": str(n), "part": {}, "configs": launches} for n in range(2)]
    return {"hand": builds, "problem": {"routing": "uniform"}}


def test_the_sweep_by_hand_checks_each_order_of_each_build_and_names_the_fastest_of_the_slowest_rank():
    rank = FakeRank(slow={19, 38}, wrong="1")
    sweep = HandSweep(rank, None, hand_case())
    wrong = sweep.check(0)
    assert rank.gated == [(n, order, "uniform", 0) for n in "01" for order in ("token", "slot")]
    assert set(wrong) == {f"hand {n}" for n in range(40, 80)}
    took, names = sweep.fastest(set(wrong))
    assert len(took) == 40 and took["hand 19"] == took["hand 39"] == 1.0
    # 19 takes 2 µs on the other rank, 38 takes 4.
    assert names[:5] == ["hand 39", "hand 18", "hand 19", "hand 17", "hand 37"] and len(names) == 12
    assert list(sweep.runs(names)) == names


def test_eager_modes_measure_no_sweeps(ranks, monkeypatch):
    case = {"winner": {"config": {"num_comm_sms": 8}}, "default": {"config": {}}, "splits": [4, 8, 12]}
    with_sweeps, without = (list(ranks[0].own_runs(None, case, sweeps)) for sweeps in (True, False))
    assert without == ["winner", "winner again", "default", "comp", "comm 8"]
    assert set(with_sweeps) - set(without) == {"split 4", "split 8", "split 12", "comm 4", "comm 12"}


class FakeBench:
    """A workbench whose launches take µs that follow from their config alone; rank 1's take a little longer."""

    def __init__(self, seat, wrong=()):
        self.seat, self.problem, self.wrong, self._weights = seat, seat.problem, wrong, None
        self.modes, self.loaded = [], None

    def _prepare(self, routing, seed):
        return types.SimpleNamespace(case=types.SimpleNamespace(real_rows=7, rows=8))

    def load(self, artifact, sha256, part):
        self.loaded = part

    def gate(self, config, routing, seed, sequence):
        bad = (config.get("DRAW"), config["order"]) in self.wrong
        return GateResult(not bad, 1.0 if bad else 0.0, 0.1, "rows differ" if bad else "")

    def time(self, config, mode, seed, launches, sequence):
        self.modes.append((self.seat.policy.launch_mode, mode))
        tile = 20.0 if config["ROW_BLOCK"] == 256 else 0.0
        us = {"comp": 90.0, "comm": 400.0 / config["num_comm_sms"]}.get(
            mode, 100.0 + tile + abs(config["num_comm_sms"] - 24) + 5.0 * (config["order"] != "token")
        )
        return [us + self.seat.rank] * launches


def test_a_case_is_measured_from_its_checks_to_the_table(tmp_path, ranks, monkeypatch):
    """All of a rank's work but the device: sweeps in the first mode alone, what is wrong left out, files that join."""
    problem = Problem("dispatch_gemm", 2048, 768, 128, 8, 2048, world=2, weight_layout="enk")
    device = device_class("sm_90a")
    space = family("dispatch_gemm").space(problem, device)
    winner = space.default.replace(num_comm_sms=32)
    case = dataclasses.replace(wanted(None, problem, device), winner=winner, sweep=sweep_of(space, winner))
    asked = argparse.Namespace(modes="graph,direct")
    bench = gpu_dispatch_gemm.Bench(device, [case], asked)
    made = {key: types.SimpleNamespace(path=Path("/a"), sha256=key) for key in bench.specs()}
    (shape,) = gpu_dispatch_gemm.words_of(bench, made)
    monkeypatch.setattr(rank_module, "Libraries", lambda *_: types.SimpleNamespace(check=dict))
    monkeypatch.setattr(BenchRank, "parts", lambda *_: "")
    own = {"serial": 200.0, "torch._grouped_mm": 95.0}
    libraries = {name: (lambda launches, us=us: [us] * launches) for name, us in own.items()}
    monkeypatch.setattr(BenchRank, "library_runs", lambda *_: libraries)
    benches = [
        FakeBench(RankSeat(problem, device, Policy(), rank, 2, (), -1, 1.0, rank), {("stride", "slot")})
        for rank in range(2)
    ]
    for rank in ranks:
        rank.words |= {"modes": ["graph", "direct"], "folder": str(tmp_path)}

    def work(rank):
        rank.case(benches[rank.rank], shape["cases"][0])
        monkeypatch.setattr(shared_rank, "versions", dict)
        rank.write()

    both(ranks, work)
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    shown, judged_ones = outcome.results([case], found)
    by_mode = {mode: one for _, mode, one in judged_ones}
    assert list(by_mode) == ["graph", "direct"] and by_mode["direct"].claim is None
    claim = by_mode["graph"].claim
    assert (claim.split, claim.hand, claim.as_fast) == (
        32,
        len(case.hand),
        False,
    ) and claim.ratio == pytest.approx(109 / 101)
    assert by_mode["graph"].fused_us == 109.0  # of the slower rank
    assert by_mode["graph"].sweep[24] == 101.0 and by_mode["direct"].sweep == {}
    assert set(by_mode["direct"].comm) == {32}
    wrong = shown[0]["wrong"][0]
    assert wrong and all(name.startswith("hand ") for name in wrong)
    slots = [c for c in case.hand if (c["DRAW"], c["order"]) == ("stride", "slot")]
    assert len(shown[0]["hand_sweep"]) == len(case.hand) - len(slots)
    assert len(slots) == len(wrong)
    assert min(shown[0]["hand_sweep"].values()) == 101.0
    assert list(shown[0]["seconds"]) == ["prepare", "check", "sweep", "graph", "direct"]
    text = outcome.summary([case], judged_ones)
    assert "109.0 (32)" in text and f"{len(case.hand)} configs" in text and text.count("sweep:") == 1
    graph = [mode for mode, _ in benches[0].modes].index("direct")
    assert {mode for mode, _ in benches[0].modes[graph:]} == {"direct"}
