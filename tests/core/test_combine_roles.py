"""Roles that nobody starts in: their blocks count where they started, and their waits are followed all the same."""

from __future__ import annotations

from tktune.core.roles import Role, RoleModel, Wait, broken_rules

GEMM = Role("gemm", 3, resident=False, becomes="combine", drains=True)
COMBINE = Role("combine", 1, (Wait("landed", "gemm"),), becomes="reduce", drains=True)


def rules(*roles: Role, seats: int = 4) -> set[str]:
    return {broken.rule for broken in broken_rules(RoleModel(roles, seats, spin_limit_s=2.0))}


def reduce(blocks: int, supplier: str = "combine", taken_up: bool = True) -> Role:
    return Role("reduce", blocks, (Wait("watermark", supplier, "peer"),), taken_up=taken_up)


def test_blocks_of_a_role_that_is_taken_up_take_no_seats_of_their_own():
    assert rules(GEMM, COMBINE, reduce(4)) == set()
    assert rules(GEMM, COMBINE, reduce(4, taken_up=False)) == {"D1", "D2"}


def test_somebody_must_take_it_up():
    assert rules(GEMM, COMBINE, reduce(0)) == {"D2"}


def test_its_waits_are_part_of_the_graph():
    assert rules(GEMM, COMBINE, reduce(1, "nobody")) == {"D3"}
    waits_back = Role("combine", 1, (Wait("landed", "reduce"),), becomes="reduce", drains=True)
    assert rules(GEMM, waits_back, reduce(1)) == {"D3"}
