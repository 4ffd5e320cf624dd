"""The spaces of the families: formulas against known numbers, and a feasible set on every device class."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tktune.core.config import Config
from tktune.core.device import DeviceClass, device_class
from tktune.core.errors import NothingFeasible
from tktune.core.problem import Problem
from tktune.core.roles import broken_rules
from tktune.families.base import family
from tktune.families.formulas import (
    busy_experts,
    cpu_smem_bytes,
    split_values,
    tile_rows,
    wanted_tokens,
)

FAMILIES = ("grouped_gemm", "dispatch_gemm")
CPU = DeviceClass("cpu", "x86-64-v3.2c", 4, 1 << 20, 32 << 20, "shm")
DEVICES = {"cpu": CPU, "sm_90a": device_class("sm_90a"), "sm_120a": device_class("sm_120a")}
SHAPES = [
    (256, 256, 8, 2),
    (2048, 1536, 128, 8),
    (7168, 4096, 256, 8),
    (2880, 5760, 128, 4),
    (4096, 28672, 8, 2),
]


def problem_of(
    name, hidden=256, cols=256, experts=8, top_k=2, tokens=256, world=2, pad=64, **more
) -> Problem:
    ranks = {"ep_world": world} if name == "grouped_gemm" else {"world": world}
    return Problem(name, hidden, cols, experts, top_k, tokens, pad=pad, **ranks, **more)


def space_of(name, device="cpu", **shape):
    return family(name).space(problem_of(name, **shape), DEVICES.get(device, device))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pad", [64, 128])
def test_every_shape_is_tunable_on_every_device_class(name, device, shape, pad):
    space = space_of(name, device, hidden=shape[0], cols=shape[1], experts=shape[2], top_k=shape[3], pad=pad)
    space = space.restrict({launch: [space.default[launch]] for launch in space.launch_names})
    found = space.feasible
    assert len(found) > 100
    assert found.total - sum(row.removed for row in found.waterfall) == len(found)
    default = space.default_config()
    assert default in found.members
    cost = family(name).cost_us
    assert all(cost(config, space.problem, space.device) > 0 for config in found.configs[::97])


ENUMERATION = """
import time
from test_spaces import space_of
def cpu_seconds(name, device):
    space = space_of(name, device, hidden=4096, cols=3072, experts=64, top_k=8, pad=256)
    start = time.process_time()
    assert space.feasible
    return time.process_time() - start
print(min(cpu_seconds({name!r}, {device!r}) for _ in range(3)))
"""


@pytest.mark.alone
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("device", DEVICES)
def test_enumeration_takes_less_than_a_second(name, device):
    """CPU time in a process of its own, where no coverage is traced; the best of three is the code's own."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("COVERAGE")}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", ENUMERATION.format(name=name, device=device)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(done.stdout) < 1.0


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("device", DEVICES)
def test_no_feasible_config_breaks_a_deadlock_rule(name, device):
    space = space_of(name, device)
    for config in space.feasible.configs[::13]:
        assert broken_rules(family(name).roles(config, space.problem, space.device)) == []
        assert space.broken(config) == []


def test_a_split_that_leaves_no_seat_is_refused_by_the_rule():
    space = space_of("dispatch_gemm")
    for split, rule in ((4, "D2"), (0, "D2")):
        config = space.default_config().replace(num_comm_sms=split)
        assert [constraint.name for constraint, _ in space.broken(config)] == [rule]


def test_one_seat_is_too_few_and_says_so():
    one = DeviceClass("cpu", "x86-64-v3.2c", 1, 1 << 20, 32 << 20, "shm")
    with pytest.raises(NothingFeasible, match="D2: the role gemm has no block") as caught:
        _ = space_of("dispatch_gemm", one).feasible
    assert "TKTUNE_CPU_SEATS" in str(caught.value)
    assert space_of("grouped_gemm", one).feasible


def test_the_names_of_cpu_parameters_are_the_ones_of_the_design():
    fused, alone = space_of("dispatch_gemm"), space_of("grouped_gemm")
    build = ("ROW_BLOCK", "COL_BLOCK", "RED_BLOCK", "STAGES", "CONSUMER_WARPS")
    assert fused.build_names == alone.build_names == build
    assert fused.launch_names == ("num_comm_sms", "order", "backoff")
    assert alone.launch_names == ("order", "backoff")


@pytest.mark.parametrize(
    ("shape", "name", "words"),
    [
        ({"pad": 8}, "row_block_divides_pad", "use pad = 16"),
        ({"hidden": 100}, "red_block_divides_hidden", "use hidden = 128"),
        ({"cols": 250}, "col_block_divides_cols", "use cols = 256"),
    ],
)
def test_a_shape_no_config_fits_names_the_constraint_and_the_nearest_shape(shape, name, words):
    with pytest.raises(NothingFeasible, match=f"binds is {name}") as caught:
        _ = space_of("dispatch_gemm", **shape).feasible
    assert words in caught.value.way_out


def test_cpu_constraints_speak_by_name():
    space = space_of("dispatch_gemm", hidden=512, cols=512, pad=128)
    default = space.default_config()

    def broken(**changes):
        return [constraint.name for constraint, _ in space.broken(default.replace(**changes))]

    assert broken() == []
    assert broken(ROW_BLOCK=128, COL_BLOCK=256, RED_BLOCK=256, STAGES=3) == ["smem"]
    assert broken(ROW_BLOCK=16, COL_BLOCK=32, CONSUMER_WARPS=4) == ["consumers_share_the_tile"]
    assert broken(COL_BLOCK=96) == ["col_block_divides_cols"]
    many = DeviceClass("cpu", "x86-64-v3.2c", 16, 1 << 20, 32 << 20, "shm")
    crowded = space_of("dispatch_gemm", many)
    assert {c["CONSUMER_WARPS"] for c in crowded.feasible} == {1, 2}
    assert {c["num_comm_sms"] for c in crowded.feasible} == {1, 2, 3, 4, 6, 8, 12}


def test_cpu_shared_memory_is_the_ring_and_the_output_tile():
    config = Config(ROW_BLOCK=32, COL_BLOCK=64, RED_BLOCK=128, STAGES=3, CONSUMER_WARPS=2)
    assert cpu_smem_bytes(config) == 3 * (32 * 128 + 128 * 64) * 4 + 32 * 64 * 4


def test_inert_values_are_listed_once():
    assert {c["order"] for c in space_of("dispatch_gemm", top_k=1).feasible} == {"token"}
    assert {c["order"] for c in space_of("dispatch_gemm").feasible} == {"token", "slot"}
    rasters = {(c["order"], c["COL_BLOCK"]) for c in space_of("grouped_gemm").feasible}
    assert ("cols", 256) not in rasters
    assert ("cols", 128) in rasters


def test_a_cpu_artifact_is_described_by_its_build_part_alone():
    problem = problem_of("dispatch_gemm", weight_layout="enk")
    bench = family("dispatch_gemm")
    space = bench.space(problem, CPU)
    part = space.build_part(space.default_config())
    spec = bench.build_spec(part, problem, CPU)
    assert spec.source.name == "dispatch_gemm.cpp"
    assert (spec.kind, spec.arch) == ("shared", "native")
    assert spec.defines == {
        "TKT_WORLD": "2",
        "TKT_ROW_BLOCK": "32",
        "TKT_COL_BLOCK": "64",
        "TKT_RED_BLOCK": "64",
        "TKT_STAGES": "2",
        "TKT_CONSUMER_WARPS": "1",
        "TKT_WEIGHT_LAYOUT": "1",
    }
    assert spec.facts == {"smem_bytes": cpu_smem_bytes(part)}
    assert spec == bench.build_spec(part, problem.replace(tokens=9, routing="one:0", pad=128), CPU)
    assert (
        family("grouped_gemm").build_spec(part, problem_of("grouped_gemm"), CPU).defines["TKT_WORLD"] == "1"
    )


# --- cost ------------------------------------------------------------------------------------------------


def test_expected_rows_follow_from_even_routing():
    problem = problem_of("dispatch_gemm", experts=8, top_k=2, tokens=256, world=2)
    assert busy_experts(problem) == pytest.approx(4)
    assert tile_rows(problem, 1) == pytest.approx(512)
    assert tile_rows(problem, 65) == pytest.approx(512 + 4 * 32)
    assert wanted_tokens(problem) == pytest.approx(512 * 0.75)


@pytest.mark.parametrize("device", DEVICES)
def test_the_cost_model_ranks_what_is_plain(device):
    """More tokens cost more; a split that starves communication costs more than a middling one."""
    bench = family("dispatch_gemm")
    shape = {"hidden": 4096, "cols": 3072, "experts": 64, "top_k": 8, "pad": 128}
    space = space_of("dispatch_gemm", device, tokens=2048, **shape)
    config = space.default_config()

    def cost(config, tokens=2048):
        return bench.cost_us(config, space.problem.replace(tokens=tokens), space.device)

    assert cost(config, 512) < cost(config) < cost(config, 8192)
    if (
        device != "sm_90a"
    ):  # over NVLink rows of the first tiles, fetched first, win more than is fetched twice
        assert cost(config.replace(order="slot")) >= cost(config)
    if device == "sm_90a":
        assert cost(config.replace(num_comm_sms=1)) > cost(config.replace(num_comm_sms=12))


def test_splits_leave_compute_a_block_where_they_can():
    assert split_values(4, (1, 2, 3, 4, 6)) == (1, 2, 3)
    assert split_values(1, (1, 2)) == (1,)
