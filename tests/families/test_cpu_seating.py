"""The deadlock rules against the machine: splits they pass finish in every seating order, those they refuse deadlock
in one, and the spin limit catches it.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from cpu_world import Builder, Rank, builder, spec, tile

from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.problem import Problem
from tktune.core.roles import broken_rules
from tktune.core.routing import parse_routing
from tktune.families import abi
from tktune.families.base import family

__all__ = ["builder"]

PROBLEM = Problem("dispatch_gemm", hidden=64, cols=64, experts=4, top_k=2, tokens=40, pad=32)
SEATS = (1, 2, 3)
COMPUTE = (1, 2, 3, 4)
COMMUNICATE = (0, 1, 2, 3)
# (order, seed of the shuffled one)
SEATINGS = ((0, 0), (1, 0), (2, 1), (2, 2))
LIMIT_S = 0.1


def refused(seats: int, compute: int, communicate: int) -> list[str]:
    """The rules that the family's role model breaks with these blocks."""
    device = DeviceClass("cpu", "x86-64", seats, 1 << 20, 1 << 25, "shm")
    config = Config(num_comm_sms=communicate)
    model = family("dispatch_gemm").roles(config, PROBLEM, device)
    blocks = {"gemm": compute, "dispatch": communicate}
    roles = tuple(dataclasses.replace(role, blocks=blocks[role.name]) for role in model.roles)
    return [broken.rule for broken in broken_rules(dataclasses.replace(model, roles=roles))]


@pytest.fixture(scope="module")
def rank() -> Rank:
    made = Rank(PROBLEM, parse_routing("uniform").draw(PROBLEM, 0))
    assert made.case.tables.num_pad_blocks * 2 * 2 >= max(
        COMPUTE
    )  # every compute block has a task to wait for
    return made


@pytest.fixture(scope="module")
def kernel(builder: Builder) -> abi.CpuKernel:
    return builder.kernel(spec("dispatch_gemm", tile(16, 32, 32, 2, 1)))


@pytest.mark.parametrize("seats", SEATS)
def test_the_rules_and_the_machine_agree_on_every_split(
    rank: Rank, kernel: abi.CpuKernel, seats: int
) -> None:
    for compute, communicate, order in itertools.product(COMPUTE, COMMUNICATE, (0, 1)):
        split = {"num_comp_blocks": compute, "num_comm_blocks": communicate, "order": order}
        if not refused(seats, compute, communicate):
            for seating, seed in SEATINGS:
                rank.out.fill(0x7FE5)
                machine = rank.machine(seats, seating, seed)
                assert rank.launch(kernel, machine, roles=abi.FUSED, **split).end == abi.DONE, (
                    split,
                    seating,
                )
                rank.assert_right()
        elif order == 0:
            machine = rank.machine(seats, seating=0, limit_s=LIMIT_S)
            assert rank.launch(kernel, machine, roles=abi.FUSED, **split).end == abi.SPIN_LIMIT, split
            assert rank.report.word == b"arrivals"


def test_a_split_that_the_rules_refuse_may_finish_in_a_kind_order(rank: Rank, kernel: abi.CpuKernel) -> None:
    """That is why a run that ends proves nothing: the same split deadlocks when compute is seated first."""
    assert "D1" in refused(2, 2, 1)
    split = {"num_comp_blocks": 2, "num_comm_blocks": 1, "order": 0, "roles": abi.FUSED}
    assert rank.launch(kernel, rank.machine(2, seating=1), **split).end == abi.DONE
    assert rank.launch(kernel, rank.machine(2, seating=0, limit_s=LIMIT_S), **split).end == abi.SPIN_LIMIT
    assert rank.launch(kernel, rank.machine(3, seating=0), **split).end == abi.DONE
    rank.assert_right()


def test_the_rules_name_what_is_wrong_with_a_split() -> None:
    assert refused(4, 3, 1) == []
    assert refused(2, 1, 3) == []  # communication blocks give their seats back
    assert "D2" in refused(4, 4, 0)
    assert "D1" in refused(4, 4, 1)
