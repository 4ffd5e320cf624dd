"""The order `beside`: which configs may have it, and what its launches are told."""

from __future__ import annotations

import pytest

from tktune.core.device import device_class
from tktune.core.problem import Problem
from tktune.families.base import family
from tktune.families.dispatch_gemm import beside
from tktune.families.dispatch_gemm.launch_words import beside_of, head_of, opening_of, wave_of

TALL = {"ROW_BLOCK": 256, "COL_BLOCK": 192, "STAGES": 3, "MMA_DEPTH": 0, "DRAW": "dispenser"}
PROBLEM = Problem("dispatch_gemm", 4096, 3072, 64, 8, 2048, world=2, weight_layout="enk")


@pytest.fixture(scope="module")
def space():
    return family("dispatch_gemm").space(PROBLEM, device_class("sm_90a"))


def brought_beside(space, **changes):
    return space.default_config().replace(**TALL, order="beside", num_comm_sms=4).replace(**changes)


def test_a_block_with_idle_warps_may_bring_rows_beside(space):
    assert space.is_feasible(brought_beside(space))
    assert space.is_feasible(brought_beside(space, num_comm_sms=beside.MOST_BLOCKS))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ACTIVATIONS": "indexed"}, "loaded by index"),
        ({"CLUSTER": 2, "DRAW": "stride"}, "of a cluster"),
        ({"TRANSPORT": "push"}, "pushed rows"),
        ({"num_comm_sms": 12}, "12 blocks"),
    ],
)
def test_where_it_does_nothing_it_is_refused_with_a_sentence(space, changes, said):
    broken = space.broken(brought_beside(space, **changes))
    assert any(said in sentence for _, sentence in broken), broken


def test_only_warpgroups_have_idle_warps():
    spaces = {
        arch: family("dispatch_gemm").space(PROBLEM, device_class(arch)) for arch in ("sm_90a", "sm_120a")
    }
    offered = {arch: next(p.values for p in s.parameters if p.name == "order") for arch, s in spaces.items()}
    assert beside.WORD in offered["sm_90a"] and beside.WORD not in offered["sm_120a"]


def test_its_launch_opens_with_one_token_a_warp_and_has_slots_behind_the_gemm(space):
    config = brought_beside(space)
    assert (head_of(config, PROBLEM, 128), opening_of(config), wave_of(config)) == (0, 1, 1)
    slots = beside_of(config, PROBLEM, 232448, 205216)
    assert (slots.warps, slots.of_warp, slots.pieces) == (2, 3, 2)
    assert beside_of(config.replace(order="token"), PROBLEM, 232448, 205216).warps == 0
    assert beside_of(config, PROBLEM, 232448, 232000).warps == 0  # blocks of their own bring all rows then


def test_fewer_blocks_are_lost_to_communication(space):
    bench, config = family("dispatch_gemm"), brought_beside(space)
    many = config.replace(order="token", num_comm_sms=24)
    device = device_class("sm_90a")
    assert bench.cost_us(config, PROBLEM, device) < bench.cost_us(many, PROBLEM, device)
