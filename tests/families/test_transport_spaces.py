"""Who moves the rows, as a parameter of a dispatch: where both ways are tried and in which forms, that no rule of waits is
broken, and which way the cost model prefers over which link.
"""

from __future__ import annotations

import dataclasses

import pytest

from tktune.core.config import Config
from tktune.core.device import DeviceClass, device_class
from tktune.core.problem import Problem
from tktune.core.rehearsal import rehearsed
from tktune.core.roles import broken_between_ranks, broken_rules
from tktune.families.base import family
from tktune.families.dispatch_gemm.launch_words import head_of, opening_of, wave_of
from tktune.families.dispatch_gemm.space import CUDA_SPLITS
from tktune.families.dispatch_gemm.transport import is_indexed, is_push
from tktune.families.link_model import Curve, LinkFacts, informed

BENCH = family("dispatch_gemm")
PROBLEM = Problem("dispatch_gemm", 2048, 768, 128, 8, 2048, world=2, weight_layout="enk")
SMALL = Problem("dispatch_gemm", 256, 256, 8, 2, 64, world=2, pad=64)
DEVICES = {
    "sm_90a": device_class("sm_90a"),
    "sm_90a over PCIe": dataclasses.replace(device_class("sm_90a"), interconnect="pcie"),
    "sm_120a": device_class("sm_120a"),
    "rehearsed": rehearsed("sm_120a-rehearsed", ()),
}
CPU = DeviceClass("cpu", "test", 4, 1 << 20, 1 << 22, "shm")


def both_ways(config: Config) -> tuple[Config, Config]:
    return config.replace(TRANSPORT="pull"), config.replace(TRANSPORT="push")


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_every_build_is_tried_both_ways(device):
    space = BENCH.space(SMALL, device)
    builds = {space.build_part(config) for config in space.feasible}
    pulls = {build for build in builds if build["TRANSPORT"] == "pull"}
    assert {build.replace(TRANSPORT="push") for build in pulls} == builds - pulls
    assert space.default["TRANSPORT"] == "pull"


def test_the_other_half_of_the_space_is_what_it_was():
    """What a study of pulls alone tries: pinned, and with orders by index left at `token`, as they were before."""
    space = BENCH.space(SMALL, DEVICES["sm_90a"])
    pulls = space.restrict({"TRANSPORT": ["pull"]})
    assert pulls.feasible.members == {config for config in space.feasible if config["TRANSPORT"] == "pull"}
    indexed = {config["order"] for config in pulls.feasible if is_indexed(config)}
    assert indexed == {"token", "mixed"}


def test_one_rank_alone_only_pulls_and_a_cpu_has_no_such_parameter():
    alone = BENCH.space(SMALL.replace(world=1), DEVICES["sm_90a"])
    assert {config["TRANSPORT"] for config in alone.feasible} == {"pull"}
    assert "TRANSPORT" not in BENCH.space(SMALL, CPU).default


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_orders_of_pushes_are_those_that_differ(device):
    """By index compute blocks may open; staged rows are scattered by blocks of their own; nothing is brought by slot."""
    space = BENCH.space(SMALL, device)
    pushes = [config for config in space.feasible if is_push(config)]
    assert {config["order"] for config in pushes if is_indexed(config)} <= {"token", "mixed"}
    assert {config["order"] for config in pushes if not is_indexed(config)} == {"token"}
    staged = next(config for config in pushes if not is_indexed(config))
    for order in ("slot", "mixed"):
        broken = [rule.name for rule, _ in space.broken(staged.replace(order=order))]
        assert broken == ["staged_rows_come_first"]


def test_slots_are_no_order_of_rows_that_have_none():
    space = BENCH.space(SMALL, DEVICES["sm_90a"])
    indexed = space.default.replace(ACTIVATIONS="indexed", order="slot")
    for config in both_ways(indexed):
        opened = space.canonical(config)
        assert opened["order"] == "mixed" and space.canonical(opened) is opened
        assert (head_of(opened, SMALL, 100), opening_of(opened), wave_of(opened)) == (0, 1, 1)
        assert space.is_feasible(opened)
    gathered = space.default.replace(order="slot")
    assert space.canonical(gathered) is gathered and head_of(gathered, SMALL, 100) > 0


def test_a_config_without_the_parameter_pulls():
    space = BENCH.space(SMALL, DEVICES["sm_90a"])
    old = Config({name: value for name, value in space.default.items() if name != "TRANSPORT"})
    assert not is_push(old)
    with_it, without = (
        BENCH.build_spec(space.build_part(c), SMALL, space.device) for c in (space.default, old)
    )
    assert with_it == without and with_it.defines["TKT_TRANSPORT"] == "0"
    assert BENCH.cost_us(old, SMALL, space.device) == BENCH.cost_us(space.default, SMALL, space.device)
    assert BENCH.roles(old, SMALL, space.device) == BENCH.roles(space.default, SMALL, space.device)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_no_push_of_the_space_breaks_a_rule_of_waits(device):
    space = BENCH.space(SMALL, device)
    pushes = [config for config in space.feasible if is_push(config)]
    names = set()
    for config in pushes[::7]:
        model = BENCH.roles(config, SMALL, device)
        assert broken_rules(model) == []
        assert sum(role.blocks for role in model.roles if not role.taken_up) == device.sm_count
        names.add(tuple(role.name for role in model.roles))
        gemm = model.roles[0]
        assert all(wait.supplier in ("push", "scatter") for wait in gemm.waits) and gemm.waits
    staged, indexed = ("gemm", "push", "scatter"), ("gemm", "push")
    assert names == ({staged, indexed} if device.arch == "sm_90a" else {staged})


def test_ranks_that_bring_rows_in_different_ways_differ_on_the_wire():
    space = BENCH.space(SMALL, DEVICES["sm_90a"])
    models = [BENCH.roles(config, SMALL, space.device) for config in both_ways(space.default)]
    assert broken_between_ranks(models[:1] * 2) == []
    told = broken_between_ranks(models)
    assert {one.rule for one in told} == {"D5"} and any("pull, push" in one.sentence for one in told)


def test_compute_blocks_that_open_where_rows_are_staged_wait_for_peers_too():
    config = BENCH.space(SMALL, DEVICES["sm_120a"]).default.replace(TRANSPORT="push")
    device = DEVICES["sm_120a"]
    closed, opened = (BENCH.roles(c, SMALL, device) for c in (config, config.replace(opening=1)))
    assert [w.word for w in closed.roles[0].waits] == ["arrivals"]
    assert [(w.word, w.scope) for w in opened.roles[0].waits] == [("flag", "peer"), ("arrivals", "local")]
    assert broken_rules(opened) == []


def test_a_split_that_leaves_nobody_to_compute_is_refused_by_the_rule():
    space = BENCH.space(SMALL, DEVICES["sm_90a"])
    for form in ("gathered", "indexed"):
        config = space.default.replace(TRANSPORT="push", ACTIVATIONS=form, num_comm_sms=132)
        assert [rule.name for rule, _ in space.broken(config)] == ["D2"]


def test_mma_sync_is_offered_more_blocks_than_its_best_split():
    """32 was the best split of the rehearsed class, and the last one offered."""
    assert CUDA_SPLITS[False][-2:] == (40, 48) and sorted(CUDA_SPLITS[False]) == list(CUDA_SPLITS[False])
    for name in ("sm_120a", "rehearsed"):
        space = BENCH.space(SMALL, DEVICES[name])
        assert {config["num_comm_sms"] for config in space.feasible} == set(CUDA_SPLITS[False])


# What the cost model prefers.


def costs(device, form=None, bench=BENCH, **changes):
    config = BENCH.space(PROBLEM, device).default.replace(**changes)
    if form is not None:
        config = config.replace(ACTIVATIONS=form)
    return tuple(bench.cost_us(c, PROBLEM, device) for c in both_ways(config))


@pytest.mark.parametrize("split", CUDA_SPLITS[True])
def test_over_nvlink_gathered_rows_are_rather_pulled_and_by_index_both_are_alike(split):
    pull, push = costs(DEVICES["sm_90a"], "gathered", num_comm_sms=split)
    assert pull < push
    pull, push = costs(DEVICES["sm_90a"], "indexed", num_comm_sms=split)
    assert push == pytest.approx(pull)


@pytest.mark.parametrize("split", [16, 32])
def test_over_pcie_rows_are_rather_pushed(split):
    for device, form in (
        (DEVICES["sm_120a"], None),
        (DEVICES["sm_90a over PCIe"], "gathered"),
        (DEVICES["sm_90a over PCIe"], "indexed"),
    ):
        pull, push = costs(device, form, num_comm_sms=split)
        assert push < pull


def told(pull_gb_s, push_gb_s):
    """A link of which every SM uses 40 GB/s until it is full, one way fuller than the other."""
    sms = (1, 2, 4, 8, 16, 32)

    def curve(way, fan, most, each=40.0):
        return Curve(
            way, fan, 4096, 28, sms, tuple(min(most * fan, each * fan**0.3 * count) for count in sms)
        )

    curves = [curve("push", 1, push_gb_s), curve("pull", 1, pull_gb_s)]
    for fan in (1, 4):
        curves += [curve("scatter", fan, pull_gb_s), curve("scatter_own", fan, 2000.0)]
    return informed(BENCH, LinkFacts(2, 132, tuple(curves), round_trip_us=2.0))


@pytest.mark.parametrize("form", ["gathered", "indexed"])
def test_measured_links_decide_by_what_each_way_reached(form):
    """Where a link carries less of what is asked for than of what is sent, rows are sent."""
    device = DEVICES["sm_90a"]
    pull, push = costs(device, form, told(12.0, 45.0), num_comm_sms=16)
    assert push < pull
    pull, push = costs(device, form, told(330.0, 340.0), num_comm_sms=16)
    assert pull < push if form == "gathered" else push == pytest.approx(pull, rel=0.02)


def test_pushes_take_more_sms_as_far_as_the_link_has_room():
    """A fast link is filled by 8 SMs of 40 GB/s each; a slow one by the first."""
    device = DEVICES["sm_90a"]
    fast, slow = (
        [costs(device, "indexed", told(*rates), num_comm_sms=c)[1] for c in (1, 8, 32)]
        for rates in ((330.0, 340.0), (12.0, 12.0))
    )
    assert fast[0] > fast[1] and slow[0] <= slow[1] <= slow[2]


def test_compute_blocks_that_open_spare_communicating_ones():
    """145 µs at 4 SMs were measured where those alone took 192."""
    device = DEVICES["sm_90a"]
    for config in both_ways(
        BENCH.space(PROBLEM, device).default.replace(ACTIVATIONS="indexed", num_comm_sms=4)
    ):
        opened = config.replace(order="mixed")
        assert BENCH.cost_us(opened, PROBLEM, device) < BENCH.cost_us(config, PROBLEM, device)
