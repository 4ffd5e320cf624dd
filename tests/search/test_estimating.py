"""The cost model asked by another process: the same numbers in the same order, or none, and nothing left behind."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tktune.core.config import Config
from tktune.core.device import device_class
from tktune.core.problem import Problem
from tktune.families.base import family
from tktune.search.estimating import Estimating, estimates_us
from tktune.search.prior import log_prior

PROBLEM = Problem("dispatch_gemm", hidden=4096, cols=3072, experts=64, top_k=8, tokens=512, world=2)
PINS = {"ROW_BLOCK": (128,), "COL_BLOCK": (128, 256), "STAGES": (3, 4), "RED_BLOCK": (64,)}


@pytest.fixture(scope="module")
def space():
    found = family("dispatch_gemm").space(PROBLEM, device_class("sm_90a")).restrict(PINS)
    assert 100 < len(found.feasible) < 20_000
    return found


def test_another_process_comes_to_the_same_numbers_in_the_order_of_the_feasible_set(space):
    with Estimating(
        "dispatch_gemm", space, [{"form": -1}], PINS
    ) as under_way:  # facts of a form that nobody knows
        found = under_way.result(len(space.feasible))
    here = estimates_us(family("dispatch_gemm"), space, [], space.feasible.configs)
    assert found is not None and found.tobytes() == here.tobytes()
    for config, us in list(zip(space.feasible, here, strict=True))[::97]:
        assert us == family("dispatch_gemm").cost_us(config, PROBLEM, space.device)


def test_a_family_of_the_users_own_is_found_as_in_a_rank(space, tmp_path, monkeypatch):
    source = tmp_path / "a_family_of_mine.py"
    source.write_text(
        "from tktune.families.dispatch_gemm.space import FAMILY as DISPATCH\n"
        "class Mine:\n"
        "    name = 'a_family_of_mine:FAMILY'\n"
        "    def space(self, problem, device):\n"
        "        return DISPATCH.space(problem, device)\n"
        "    def cost_us(self, config, problem, device):\n"
        "        return float(config['num_comm_sms'])\n"
        "FAMILY = Mine()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with Estimating("a_family_of_mine:FAMILY", space, [], PINS) as under_way:
        found = under_way.result(len(space.feasible))
    assert found is not None
    assert found.tolist() == [config["num_comm_sms"] for config in space.feasible]


def test_where_the_process_fails_or_counts_otherwise_there_is_no_answer(space):
    with Estimating("no_module_of_this_name:FAMILY", space, [], PINS) as under_way:
        assert under_way.result(len(space.feasible)) is None
    with Estimating("dispatch_gemm", space, [], PINS) as under_way:
        assert under_way.result(len(space.feasible) + 1) is None


def test_one_that_nobody_waits_for_is_ended(space):
    under_way = Estimating("dispatch_gemm", space, [], PINS)
    pid = under_way._process.pid
    under_way.close()
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_prior_is_the_same_from_an_array_as_from_a_mapping():
    rows = [Config(A=a, B=b) for a in range(1, 6) for b in range(1, 4)]
    us = {row: 10.0 * row.number("A") + row.number("B") for row in rows}
    listed = np.array([us[row] for row in rows])
    assert log_prior(rows, listed).tobytes() == log_prior(rows, us).tobytes()
