"""A rank of the dispatch bench on the CPU: its baselines compute what the fused kernel must, and its rounds are fair."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed (the extra `cuda`)")

from dispatch_bench import libraries
from dispatch_bench.libraries import Libraries, eager
from dispatch_bench.rank import BenchRank

from tktune.core.device import device_class
from tktune.core.policy import Policy
from tktune.core.problem import Problem
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


def test_rounds_measure_everything_once_and_no_one_is_always_first(ranks):
    order = []

    def run(name):
        return lambda launches: order.append(name) or [1.0] * launches

    found = ranks[0].interleave({name: run(name) for name in "abcd"}, 4, "here")
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
