"""The deadlock rules: each is broken by name, and models that can finish break none."""

from __future__ import annotations

import pytest

from tktune.core.roles import RULES, Role, RoleModel, Wait, broken_between_ranks, broken_rules

GATE = (Wait("arrivals", "dispatch"),)


def model(*roles: Role, resident=4, **fields) -> RoleModel:
    return RoleModel(tuple(roles), resident, **{"spin_limit_s": 2.0, **fields})


def rules(m: RoleModel) -> set[str]:
    found = broken_rules(m)
    assert all(b.rule in RULES and b.sentence for b in found)
    return {b.rule for b in found}


@pytest.mark.parametrize(
    "good",
    [
        model(Role("gemm", 3, GATE), Role("dispatch", 1, resident=False)),
        # Short-lived communication blocks rotate through the seat that compute leaves.
        model(Role("gemm", 3, GATE), Role("dispatch", 100, resident=False)),
        model(Role("gemm", 2, GATE), Role("dispatch", 2, resident=False, becomes="gemm", drains=True)),
        model(Role("gemm", 3, GATE), Role("dispatch", 2, resident=False, becomes="gemm", drains=True)),
        model(Role("gemm", 4)),
        model(Role("gemm", 9), spin_limit_s=0.0),
        model(
            Role("reduce", 1, (Wait("watermark", "push", "peer"),)),
            Role("push", 1, (Wait("finished_columns", "gemm"),)),
            Role("gemm", 2),
            world=2,
        ),
    ],
)
def test_a_model_that_always_finishes_breaks_no_rule(good):
    assert rules(good) == set()


def test_d1_waiting_blocks_that_take_every_seat():
    assert rules(model(Role("gemm", 4, GATE), Role("dispatch", 1, resident=False))) == {"D1"}


def test_d1_counts_waits_on_peers_and_blocks_that_wait_later():
    peer = (Wait("flag", "dispatch", "peer"),)
    assert "D1" in rules(model(Role("gemm", 4, peer), Role("dispatch", 1, resident=False), world=2))
    # Without a common queue, a block that turns to compute may leave rows to one that never gets a seat.
    later = Role("dispatch", 2, resident=False, becomes="gemm")
    assert rules(model(Role("gemm", 3, GATE), later)) == {"D1"}


def test_d2_a_role_without_a_block():
    assert rules(model(Role("gemm", 0, GATE), Role("dispatch", 4, resident=False))) == {"D2"}
    assert rules(model(Role("gemm", 4, GATE), Role("dispatch", 0, resident=False))) == {"D2"}


def test_d2_resident_roles_that_do_not_all_fit():
    assert "D2" in rules(model(Role("gemm", 2, GATE), Role("dispatch", 3)))


def test_d3_a_circle_and_a_missing_supplier():
    one = Role("push", 1, (Wait("staged", "reduce"),))
    other = Role("reduce", 1, (Wait("watermark", "push", "peer"),))
    assert rules(model(one, other)) == {"D3"}
    assert any("push → reduce → push" in b.sentence for b in broken_rules(model(one, other)))
    assert rules(model(Role("gemm", 1, (Wait("arrivals", "nobody"),)))) == {"D3"}
    assert rules(model(Role("dispatch", 1, becomes="nothing"))) == {"D3"}


def test_d4_an_auxiliary_kernel_that_leaves_fewer_than_two_seats():
    assert rules(model(Role("gemm", 1), auxiliary_grid=3)) == {"D4"}
    assert rules(model(Role("gemm", 1), auxiliary_grid=2)) == set()


def test_d5_ranks_that_differ_on_the_wire():
    def rank(**fields):
        return model(Role("gemm", 3, GATE), Role("dispatch", 1, resident=False), **fields)

    same = [rank(protocol=("pad=64",), world=2)] * 2
    assert broken_between_ranks(same) == []
    assert broken_between_ranks([]) == []
    differ = [rank(protocol=("pad=64",), world=2), rank(protocol=("pad=128",), world=2)]
    assert [b.rule for b in broken_between_ranks(differ)] == ["D5"]
    assert "pad=128, pad=64" in broken_between_ranks(differ)[0].sentence
    assert [b.rule for b in broken_between_ranks([rank(world=2), rank(world=3)])] == ["D5"]
    assert [b.rule for b in broken_between_ranks([rank(), model(Role("gemm", 4))])] == ["D5"]


def test_d6_loading_while_a_role_spins():
    gemm, dispatch = Role("gemm", 3, GATE), Role("dispatch", 1, resident=False)
    assert rules(model(gemm, dispatch, preloaded=False)) == {"D6"}


def test_d7_seats_that_other_work_has_taken():
    gemm, dispatch = Role("gemm", 3, GATE), Role("dispatch", 1, resident=False)
    assert rules(model(gemm, dispatch, queried_blocks=3)) == {"D7"}
    assert rules(model(gemm, dispatch, queried_blocks=5, sm_reserve=2)) == {"D7"}
    assert rules(model(gemm, dispatch, queried_blocks=4)) == set()


def test_d8_waits_without_a_limit():
    gemm, dispatch = Role("gemm", 3, GATE), Role("dispatch", 1, resident=False)
    assert rules(model(gemm, dispatch, spin_limit_s=0.0)) == {"D8"}
