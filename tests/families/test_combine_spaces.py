"""The space of gemm_combine: a feasible set on the CPU, rules by name, roles that can finish, and a cost that ranks."""

from __future__ import annotations

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
from tktune.families.formulas import cpu_smem_bytes, wanted_tokens
from tktune.families.gemm_combine import space_cuda
from tktune.families.gemm_combine.layout import MOST_GROUPS, PAGE, SymmetricLayout
from tktune.families.gemm_combine.parameters import moved_rows
from tktune.search.study import load_study

CPU = DeviceClass("cpu", "x86-64-v3.2c", 4, 1 << 20, 32 << 20, "shm")
BENCH = family("gemm_combine")
ROOT = Path(__file__).resolve().parents[2]


def problem_of(hidden=256, cols=256, experts=8, top_k=2, tokens=256, world=2, pad=64, **more) -> Problem:
    return Problem("gemm_combine", hidden, cols, experts, top_k, tokens, world=world, pad=pad, **more)


def cuda_space(problem, arch):
    return space_cuda.space(problem, device_class(arch), BENCH.roles)


@pytest.mark.parametrize(
    "shape", [(256, 256, 8, 2), (1536, 2048, 128, 8), (2880, 2880, 128, 4), (14336, 4096, 8, 2)]
)
def test_every_shape_is_tunable_and_every_config_can_finish(shape):
    problem = problem_of(*shape, pad=128)
    space = BENCH.space(problem, CPU)
    found = space.feasible
    assert len(found) > 100
    assert found.total - sum(row.removed for row in found.waterfall) == len(found)
    assert space.default_config() in found.members
    for config in found.configs[::997]:
        assert broken_rules(BENCH.roles(config, problem, CPU)) == []
        assert BENCH.cost_us(config, problem, CPU) > 0


def test_the_names_of_parameters():
    space = BENCH.space(problem_of(), CPU)
    assert space.build_names == ("ROW_BLOCK", "COL_BLOCK", "RED_BLOCK", "STAGES", "CONSUMER_WARPS")
    assert space.launch_names == (
        *("num_comm_sms", "num_reduce_sms", "form", "order", "rows_in_flight", "signal_groups", "walk"),
    )


def test_constraints_speak_by_name():
    space = BENCH.space(problem_of(cols=1024, hidden=512, pad=128), CPU)
    default = space.default_config()

    def broken(**changes):
        return [constraint.name for constraint, _ in space.broken(default.replace(**changes))]

    assert broken() == []
    assert broken(COL_BLOCK=256, signal_groups=2) == []
    assert BENCH.space(problem_of(cols=192), CPU).broken(default.replace(signal_groups=2))[0][0].name == (
        "groups_divide_columns"
    )
    narrow = {"ROW_BLOCK": 16, "COL_BLOCK": 32, "RED_BLOCK": 32}  # a pipeline of 14336 bytes
    assert broken(**narrow, rows_in_flight=4) == ["row_slots"]
    assert broken(**narrow, rows_in_flight=4, signal_groups=2) == []
    assert broken(**narrow, rows_in_flight=4, form="pull") == []
    assert broken(num_comm_sms=4) == ["D2"]
    assert broken(num_comm_sms=0) == ["D2"]
    assert broken(num_reduce_sms=3) == ["D4"]
    assert broken(num_reduce_sms=3, form="pull") == []


def test_the_way_out_of_narrow_memory_is_a_shape_that_fits():
    wide = problem_of(cols=1 << 16, hidden=32)
    pins = {
        "ROW_BLOCK": [16],
        "COL_BLOCK": [32],
        "RED_BLOCK": [32],
        "form": ["prereduce"],
        "rows_in_flight": [1],
    }
    with pytest.raises(NothingFeasible, match="row_slots: row slots need") as caught:
        _ = BENCH.space(wide, CPU).restrict(pins).feasible
    columns = int(caught.value.way_out.split("use cols ≤ ")[1].split()[0].strip(";."))
    assert len(BENCH.space(wide.replace(cols=columns // 64 * 64), CPU).restrict(pins).feasible)


def test_too_few_seats_say_how_many_are_needed():
    two = DeviceClass("cpu", "x86-64-v3.2c", 2, 1 << 20, 32 << 20, "shm")
    pushing = BENCH.space(problem_of(), two).restrict({"form": ["prereduce"]})
    with pytest.raises(NothingFeasible, match="D4: an auxiliary kernel") as caught:
        _ = pushing.feasible
    assert "TKTUNE_CPU_SEATS to 3 or more (2 here)" in str(caught.value)
    assert {config["form"] for config in BENCH.space(problem_of(), two).feasible} == {"pull"}


def test_inert_values_are_listed_once():
    found = BENCH.space(problem_of(), CPU).feasible
    assert {(c["form"], c["num_reduce_sms"]) for c in found} == {
        ("prereduce", 1),
        ("prereduce", 2),
        ("pull", 1),
    }
    walks = {(c["signal_groups"], c["walk"]) for c in found}
    assert walks == {(1, "experts"), (2, "experts"), (2, "columns")}
    assert {c["order"] for c in BENCH.space(problem_of(world=1), CPU).feasible} == {"ready", "token"}


def test_a_cpu_artifact_is_described_by_its_build_part_alone():
    problem = problem_of(weight_layout="enk")
    space = BENCH.space(problem, CPU)
    part = space.build_part(space.default_config())
    spec = BENCH.build_spec(part, problem, CPU)
    assert spec.source.name == "gemm_combine.cpp" and spec.source.exists()
    assert spec.facts == {"smem_bytes": cpu_smem_bytes(part)}
    assert spec == BENCH.build_spec(part, problem.replace(tokens=9, top_k=1, routing="one:0"), CPU)


def test_gpu_spaces_are_the_familys_own():
    problem = problem_of(1536, 4096, 64, 8, 2048, pad=128)
    found = BENCH.space(problem, device_class("sm_90a"))
    assert found.launch_names == (
        *("num_comm_sms", "num_reduce_sms", "form", "order", "rows_in_flight", "signal_groups", "walk"),
    )
    default = found.default_config()
    assert found.broken(default.replace(signal_groups=4, walk="columns")) == []
    pairs = default.replace(CLUSTER=2, MMA_DEPTH=0, walk="columns")
    assert found.broken(pairs.replace(signal_groups=4)) == []
    (broken, said), *_ = BENCH.space(problem.replace(cols=4608), device_class("sm_90a")).broken(
        pairs.replace(signal_groups=2)
    )
    assert broken.name == "clusters_fill_roles" and "9 column tiles of a run" in said


def test_the_study_that_ships_is_this_family_on_the_cpu():
    study = load_study(ROOT / "studies" / "cpu" / "combine-quickstart.toml")
    assert (study.family, study.device, len(study.problems)) == ("gemm_combine", "cpu", 1)
    assert len(study.space(study.problems[0], CPU).feasible) > 1000


def test_the_pure_half_imports_nothing_heavy():
    code = (
        "import sys; from tktune.families.base import family; from tktune.core.device import device_class\n"
        "from tktune.core.problem import Problem; problem = Problem('gemm_combine', 256, 256, 8, 2, 64, world=2)\n"
        "space = family('gemm_combine').space(problem, device_class('cpu')); space.default_config()\n"
        "import tktune.core.combine_tables, tktune.core.combine_tables_torch, tktune.core.combine_tables_check\n"
        "print(sorted({'torch', 'numpy', 'optuna', 'sqlalchemy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_parts_of_the_symmetric_buffer_do_not_overlap():
    for problem in (
        problem_of(),
        problem_of(world=8, tokens=1, cols=64, hidden=8192),
        problem_of(world=1, pad=8),
    ):
        layout = SymmetricLayout.of(problem)
        row = 2 * problem.cols
        ends = [
            (0, 8 * problem.world),
            (layout.watermarks, 8 * problem.world * MOST_GROUPS),
            (layout.landed, 8 * problem.world * layout.landed_stride),
            (layout.rows, layout.num_rows * row),
            (layout.staging, problem.world * problem.tokens * row),
        ]
        for (start, size), (following, _) in zip(ends, [*ends[1:], (layout.bytes, 0)], strict=True):
            assert start % PAGE == 0 and start + size <= following
        assert layout.landed_stride == (problem.capacity_rows // problem.pad + 1) * MOST_GROUPS


# --- cost ------------------------------------------------------------------------------------------------


def test_rows_moved_follow_from_even_routing():
    problem = problem_of(experts=8, top_k=2, tokens=256, world=2)
    partial = wanted_tokens(problem)
    assert moved_rows(Config(form="prereduce"), problem) == pytest.approx((512, 2 * partial, partial + 256))
    assert moved_rows(Config(form="pull"), problem) == (512, 256, 0)


@pytest.mark.parametrize("arch", ["cpu", "sm_90a", "sm_120a"])
def test_the_cost_model_ranks_what_is_plain(arch):
    """More tokens cost more, and sums in no order of readiness wait for the whole GEMM."""
    device = CPU if arch == "cpu" else device_class(arch)
    problem = problem_of(3072, 4096, 64, 8, 2048, pad=128)
    space = BENCH.space(problem, CPU) if arch == "cpu" else cuda_space(problem, arch)
    config = space.default_config()

    def cost(config, tokens=2048):
        return BENCH.cost_us(config, problem.replace(tokens=tokens), device)

    assert cost(config, 512) < cost(config) < cost(config, 8192)
    assert arch != "cpu" or cost(config.replace(order="token")) > cost(config)
    assert cost(config.replace(form="pull", rows_in_flight=2)) > 0


@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
@pytest.mark.parametrize("shape", [(1536, 4096, 128, 8), (2048, 7168, 256, 8), (2880, 2880, 128, 4)])
def test_gpu_classes_have_a_feasible_set(arch, shape):
    problem = problem_of(*shape, tokens=2048, pad=128)
    space = cuda_space(problem, arch)
    defaults = {name: [space.default[name]] for name in space.launch_names}
    assert space.is_feasible(space.default_config())
    assert len(space.restrict(defaults).feasible) > 50
    for config in space.restrict(defaults).feasible.configs[::17]:
        assert broken_rules(BENCH.roles(config, problem, device_class(arch))) == []


def test_gpu_constraints_speak_by_name():
    space = cuda_space(problem_of(2048, 7168, 256, 8, 2048, pad=128), "sm_90a")
    default = space.default_config()

    def broken(**changes):
        return [constraint.name for constraint, _ in space.broken(default.replace(**changes))]

    assert broken() == []
    assert broken(rows_in_flight=8) == []
    assert broken(STAGES=3, rows_in_flight=8) == []
    assert broken(rows_in_flight=100) == ["row_slots"]  # not even 512 bytes for each of 8 · 102 pieces
    assert broken(rows_in_flight=100, form="pull") == ["row_slots"]
    assert broken(num_reduce_sms=131) == ["D4"]
    assert broken(CLUSTER=2, num_comm_sms=3) == ["clusters_fill_roles"]
    many = cuda_space(problem_of(2048, 7168, 256, 40, 64, pad=128), "sm_90a")
    assert [c.name for c, _ in many.broken(default)] == ["top_k_fits_a_warp"]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
def test_row_pieces_fill_the_memory_and_their_run_of_columns(arch):
    """Whatever the build: all warps' pieces fit, no longer piece of as few would, and the pieces of a run are equal."""
    for cols in (328, 2880, 4096, 7168):
        problem = problem_of(2048, cols, 64, 8, 2048, pad=128)
        space = cuda_space(problem, arch)
        defaults = {name: [space.default[name]] for name in space.launch_names if name != "rows_in_flight"}
        for config in space.restrict(defaults).feasible.configs[::23]:
            taken = space_cuda.piece_vectors(config, problem)
            lane_vectors = -(-cols * 2 // 512)
            pieces = -(-lane_vectors // taken)
            bytes_of = 1024 + config["CONSUMER_WARPS"] * (config["rows_in_flight"] + 2) * 512 * taken
            assert 1 <= taken <= space_cuda.most_piece_vectors(config) <= 8
            assert bytes_of <= space_cuda.slots_bytes(config)
            assert pieces * taken - lane_vectors < pieces
            more = -(-lane_vectors // max(1, pieces - 1))
            if pieces > 1 and more <= space_cuda.most_piece_vectors(config):
                bytes_of = 1024 + config["CONSUMER_WARPS"] * (config["rows_in_flight"] + 2) * 512 * more
                assert bytes_of > space_cuda.slots_bytes(config)
    wide = cuda_space(problem_of(cols=4096), "sm_90a").default_config()
    assert [space_cuda.piece_vectors(wide, problem_of(cols=n)) for n in (2048, 4096, 7168)] == [8, 8, 7]
    pulls = wide.replace(form="pull")
    assert [space_cuda.piece_vectors(pulls, problem_of(cols=n)) for n in (2048, 4096, 7168)] == [4, 4, 4]
