"""The CPU kernels compute what they should: every tile shape, layout and consumer count, every row count, replays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cpu_world import Builder, Rank, builder, ids_of_counts, spec, tile

from tktune.core.config import Config
from tktune.core.problem import Problem
from tktune.core.routing import parse_routing
from tktune.families import abi

__all__ = ["builder"]

PAD = 128
TILES = [
    (tile(16, 32, 32, 2, 1), "ekn"),
    (tile(16, 32, 32, 2, 8), "enk"),  # more consumers than register tiles
    (tile(32, 64, 64, 3, 2), "ekn"),
    (tile(64, 96, 96, 2, 4), "ekn"),
    (tile(64, 96, 48, 3, 3), "enk"),
    (tile(128, 128, 64, 4, 4), "ekn"),
    (tile(128, 256, 128, 2, 2), "enk"),
]


def named(part: Config, layout: str) -> str:
    return f"{layout}-" + "x".join(str(value) for value in part.values())


@pytest.fixture(scope="module", autouse=True)
def built(builder: Builder) -> None:
    builder.build(
        [
            spec(family, part, layout=layout)
            for family in ("grouped_gemm", "dispatch_gemm")
            for part, layout in TILES
        ]
    )


def grouped_problem(part: Config, layout: str, counts: list[int], steps: int = 3, panels: int = 2) -> Problem:
    return Problem(
        "grouped_gemm",
        hidden=part.number("RED_BLOCK") * steps,
        cols=part.number("COL_BLOCK") * panels,
        experts=len(counts),
        top_k=1,
        tokens=sum(counts),
        weight_layout=layout,
        pad=PAD,
    )


@pytest.mark.parametrize(("part", "layout"), TILES, ids=[named(*one) for one in TILES])
def test_every_row_count_of_an_expert_is_right(builder: Builder, part: Config, layout: str) -> None:
    row = part.number("ROW_BLOCK")
    counts = [0, 1, row - 1, row, row + 1, 0, PAD + row + 3, 2 * PAD, 5]  # empty first, middle; hot seventh
    rank = Rank(grouped_problem(part, layout, counts), ids_of_counts(counts))
    rank.place()
    kernel = builder.kernel(spec("grouped_gemm", part, layout=layout))
    for raster, seats in ((0, 2), (1, 3)):
        rank.out.fill(0x7FE5)
        result = rank.launch(
            kernel, rank.machine(seats), num_comp_blocks=seats, raster=raster, roles=abi.COMPUTE
        )
        assert result.end == abi.DONE
        assert result.time_ns > 0
        assert result.cpu_ns > 0
        rank.assert_right()
        rank.assert_seeded()


@pytest.mark.parametrize(("part", "layout"), TILES, ids=[named(*one) for one in TILES])
@pytest.mark.parametrize("order", ["slot", "token"])
def test_rows_that_arrive_during_the_launch_are_right(
    builder: Builder, part: Config, layout: str, order: str
) -> None:
    problem = Problem(
        "dispatch_gemm",
        hidden=part.number("RED_BLOCK") * 2,
        cols=part.number("COL_BLOCK"),
        experts=6,
        top_k=2,
        tokens=150,
        weight_layout=layout,
        pad=PAD,
    )
    kernel = builder.kernel(spec("dispatch_gemm", part, layout=layout))
    for routing in ("uniform", "hot:0.9@3", "empty:0,5"):
        rank = Rank(problem, parse_routing(routing).draw(problem, 0))
        result = rank.launch(
            kernel,
            rank.machine(3),
            num_comp_blocks=2,
            num_comm_blocks=1,
            order=abi.ORDERS[order],
            roles=abi.FUSED,
        )
        assert result.end == abi.DONE
        rank.assert_right()
        rank.assert_seeded()


def test_a_hidden_of_2880_is_right(builder: Builder) -> None:
    part = tile(64, 96, 96, 2, 4)
    counts = [70, 1, 0, 130]
    rank = Rank(grouped_problem(part, "ekn", counts, steps=30, panels=3), ids_of_counts(counts))
    assert rank.problem.hidden == 2880
    rank.place()
    kernel = builder.kernel(spec("grouped_gemm", part))
    assert rank.launch(kernel, rank.machine(2), num_comp_blocks=2, roles=abi.COMPUTE).end == abi.DONE
    rank.assert_right()


@pytest.mark.parametrize("rank_index", [0, 1, 2])
def test_each_of_three_ranks_gets_its_own_rows(builder: Builder, rank_index: int) -> None:
    part = tile(32, 64, 64, 3, 2)
    problem = Problem("dispatch_gemm", hidden=128, cols=192, experts=9, top_k=3, tokens=40, world=3, pad=32)
    rank = Rank(problem, parse_routing("uniform").draw(problem, 5), rank_index, seed=5)
    kernel = builder.kernel(spec("dispatch_gemm", part, world=3))
    for order in (0, 1):
        rank.out.fill(0x7FE5)
        result = rank.launch(
            kernel, rank.machine(4), num_comp_blocks=1, num_comm_blocks=3, order=order, roles=abi.FUSED
        )
        assert result.end == abi.DONE
        rank.assert_right()


def replayed(builder: Builder, **changes: int) -> tuple[Rank, list[Any]]:
    part = tile(32, 64, 64, 3, 2)
    problem = Problem("dispatch_gemm", hidden=192, cols=128, experts=4, top_k=2, tokens=100, pad=64)
    rank = Rank(problem, parse_routing("zipf:1.2").draw(problem, 1))
    kernel = builder.kernel(spec("dispatch_gemm", part))
    outputs = []
    for _ in range(4):
        rank.out.fill(0x7FE5)
        rank.gathered.fill(0x7FE5)
        arguments = {"num_comp_blocks": 2, "num_comm_blocks": 2, "roles": abi.FUSED, **changes}
        assert rank.launch(kernel, rank.machine(4, seating=2), **arguments).end == abi.DONE
        rank.assert_seeded()
        outputs.append(rank.out.copy())
    return rank, outputs


@pytest.mark.parametrize("order", [0, 1])
def test_a_plan_replays_bit_for_bit(builder: Builder, order: int) -> None:
    rank, outputs = replayed(builder, order=order)
    rank.assert_right()
    assert all(np.array_equal(one, outputs[0]) for one in outputs)


def test_communication_alone_brings_the_rows_and_computes_nothing(builder: Builder) -> None:
    rank, outputs = replayed(builder, roles=abi.COMMUNICATE)
    expected = rank.gathered.copy()
    rank.place()
    assert np.array_equal(rank.gathered, expected)
    assert (outputs[0] == 0x7FE5).all()


def test_no_rows_at_all_is_a_launch_that_ends(builder: Builder) -> None:
    part = tile(32, 64, 64, 3, 2)
    problem = Problem("dispatch_gemm", hidden=64, cols=64, experts=2, top_k=1, tokens=3, world=2, pad=32)
    ids = np.zeros((2, 3, 1), np.int32)  # everything goes to rank 0
    rank = Rank(problem, ids, rank=1)
    assert rank.case.tables.rows == 0
    kernel = builder.kernel(spec("dispatch_gemm", part, world=2))
    for order in (0, 1):
        result = rank.launch(
            kernel, rank.machine(4), num_comp_blocks=3, num_comm_blocks=1, order=order, roles=abi.FUSED
        )
        assert result.end == abi.DONE


@pytest.mark.parametrize(
    "wrong",
    [
        {"hidden": 65},
        {"cols": 65},
        {"pad": 48},
        {"world": 2},
        {"weight_layout": 1},
        {"num_comp_blocks": 0, "num_comm_blocks": 0},
        {"rank": 1},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_arguments_that_do_not_fit_the_artifact_are_refused(builder: Builder, wrong: dict[str, int]) -> None:
    part = tile(32, 64, 64, 3, 2)
    problem = Problem("dispatch_gemm", hidden=64, cols=64, experts=2, top_k=1, tokens=3, pad=32)
    rank = Rank(problem, np.zeros((1, 3, 1), np.int32))
    kernel = builder.kernel(spec("dispatch_gemm", part))
    arguments = {"num_comp_blocks": 1, "num_comm_blocks": 1, "roles": abi.FUSED, **wrong}
    assert rank.launch(kernel, rank.machine(2), **arguments).end == abi.BAD_ARGUMENT


def test_an_artifact_states_its_choices(builder: Builder) -> None:
    facts = builder.kernel(spec("grouped_gemm", tile(64, 96, 96, 2, 4))).facts
    assert facts.build_part() == dict(tile(64, 96, 96, 2, 4))
    assert facts.smem_bytes == 2 * (64 * 96 + 96 * 96) * 4 + 64 * 96 * 4
    assert facts.threads_per_block == 5
    assert facts.family == "grouped_gemm"
    assert facts.row_block % facts.strip_rows == 0
    assert facts.col_block % facts.panel_cols == 0


def test_two_artifacts_of_one_process_share_nothing(builder: Builder) -> None:
    """Their machines have different sizes and both keep working in turn."""
    counts = [40, 1, 0, 90]
    for _ in range(2):
        for part, seats in ((tile(32, 64, 64, 3, 2), 1), (tile(64, 96, 96, 2, 4), 4)):
            rank = Rank(grouped_problem(part, "ekn", counts), ids_of_counts(counts))
            rank.place()
            kernel = builder.kernel(spec("grouped_gemm", part))
            assert rank.launch(kernel, rank.machine(seats), num_comp_blocks=seats, roles=abi.COMPUTE).end == 0
            rank.assert_right()
