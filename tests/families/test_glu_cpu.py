"""SwiGLU on the CPU backend: both forms against fp32 and against numpy's own of the plain [gate | up], in tiles of every
kind; through a gang; and a gate that sees weights in the wrong order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cpu_world import Builder, Rank, builder, ids_of_counts, spec, tile

from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.policy import Policy
from tktune.core.problem import Problem
from tktune.families import abi, glu
from tktune.families.base import family
from tktune.families.bf16 import from_float, swiglu_tolerance, to_float
from tktune.families.cpu_inputs import POISON, check_output, expert_matrix, expert_parts, gather_rows
from tktune.gang.gang import Gang

__all__ = ["builder"]

TILES = {
    "small": tile(16, 32, 32, 2, 1),
    "odd": tile(32, 96, 64, 3, 2),
    "wide": tile(32, 192, 32, 2, 4),
}
COUNTS = [1, 0, 40, 7, 33]
DEVICE = DeviceClass("cpu", "test", 4, 1 << 20, 1 << 22, "shm")


def problem_of(counts: list[int], layout: str) -> Problem:
    return Problem(
        "dispatch_gemm", 128, 192, len(counts), 1, sum(counts), pad=32, weight_layout=layout, finish="swiglu"
    )


def run(builder: Builder, part: Config, form: str, rank: Rank) -> None:
    """The launches of one form, all blocks computing, rows in place."""
    problem = rank.problem
    wanted = spec("dispatch_gemm", part, layout=problem.weight_layout)
    wanted.defines["TKT_GLU"] = str(glu.CODES[form])
    kernel = builder.kernel(wanted)
    assert kernel.facts.build_part() == {**part, "GLU": form}
    rows = len(rank.out)
    rank.out = np.full((rows, problem.out_cols), POISON, np.uint16)
    packed = np.full((rows, problem.cols), POISON, np.uint16)
    rank.place()
    blocks = {"num_comp_blocks": 3, "num_comm_blocks": 0, "out": rank.out.ctypes.data}
    words: dict[str, Any] = {**blocks, "packed": packed.ctypes.data}
    roles = [abi.COMPUTE] + ([abi.FINISH] if form == "separate" else [])
    for role in roles:
        done = rank.launch(kernel, rank.machine(3), roles=role, **words)
        assert done.end == abi.DONE
        rank.assert_seeded()
    if form == "fused":
        assert (packed == POISON).all()


def by_numpy(rank: Rank) -> Any:
    """silu(gate) · up of the plain [gate | up], in double precision, from weights unpacked by hand."""
    problem, case = rank.problem, rank.case
    rows = to_float(gather_rows(problem, case.tables, case.seed)).astype(np.float64)
    half = problem.out_cols
    columns = np.arange(half)
    gates = columns // 8 * 16 + columns % 8
    expected = np.empty((len(case.real), half))
    for expert, part in expert_parts(case.tables):
        matrix = expert_matrix(problem, rank.weights, expert).astype(np.float64)
        gate, up = rows[part] @ matrix[:, gates], rows[part] @ matrix[:, gates + 8]
        expected[part] = gate / (1 + np.exp(-gate)) * up
    return expected


@pytest.mark.parametrize("layout", ["ekn", "enk"])
@pytest.mark.parametrize("name", TILES)
def test_a_fused_output_is_within_one_rounding_of_double_precision(
    builder: Builder, name: str, layout: str
) -> None:
    rank = Rank(problem_of(COUNTS, layout), ids_of_counts(COUNTS))
    run(builder, TILES[name], "fused", rank)
    verdict = check_output(
        rank.problem, rank.case, rank.out, rank.gathered, swiglu_tolerance(rank.problem.hidden, False)
    )
    assert verdict.passed, verdict.sentence
    expected = by_numpy(rank)
    found = to_float(rank.out[rank.case.real]).astype(np.float64)
    assert (np.abs(found - expected) <= 2.0**-8 * np.abs(expected) + 1e-6).all()
    # Nearly always the very bits: both round one value, and the values differ by units of the last place of fp32.
    assert (rank.out[rank.case.real] == from_float(expected)).mean() > 0.999


@pytest.mark.parametrize("layout", ["ekn", "enk"])
def test_a_separate_output_rounds_gate_and_up_first(builder: Builder, layout: str) -> None:
    rank = Rank(problem_of(COUNTS, layout), ids_of_counts(COUNTS))
    run(builder, TILES["odd"], "separate", rank)
    allowed = {form: swiglu_tolerance(rank.problem.hidden, form == "separate") for form in glu.CODES}
    verdict = check_output(rank.problem, rank.case, rank.out, rank.gathered, allowed["separate"])
    assert verdict.passed, verdict.sentence
    rows = to_float(gather_rows(rank.problem, rank.case.tables, rank.case.seed))
    for expert, part in expert_parts(rank.case.tables):
        sums = to_float(from_float(rows[part] @ expert_matrix(rank.problem, rank.weights, expert)))
        gate, up = (one.astype(np.float64) for one in glu.gate_and_up(sums))
        expected = gate / (1 + np.exp(-gate)) * up
        found = to_float(rank.out[rank.case.real[part]]).astype(np.float64)
        assert (np.abs(found - expected) <= 2.0**-8 * np.abs(expected) + 1e-6).all()


def test_weights_that_were_not_packed_do_not_pass(builder: Builder) -> None:
    problem = problem_of(COUNTS, "ekn")
    rank = Rank(problem, ids_of_counts(COUNTS))
    gates = np.arange(problem.out_cols) // 8 * 16 + np.arange(problem.out_cols) % 8
    plain = np.concatenate([rank.weights[..., gates], rank.weights[..., gates + 8]], axis=-1)
    rank.weights = np.ascontiguousarray(plain)
    rank.globals.weights = rank.weights.ctypes.data
    run(builder, TILES["small"], "fused", rank)
    verdict = check_output(problem, rank.case, rank.out, rank.gathered, swiglu_tolerance(128, True))
    assert not verdict.passed and "rows differ" in verdict.sentence


def test_a_separate_artifact_without_its_buffer_is_refused(builder: Builder) -> None:
    rank = Rank(problem_of(COUNTS, "ekn"), ids_of_counts(COUNTS))
    wanted = spec("dispatch_gemm", TILES["odd"])
    wanted.defines["TKT_GLU"] = "2"
    done = rank.launch(
        builder.kernel(wanted), rank.machine(3), roles=abi.COMPUTE, num_comp_blocks=3, packed=0
    )
    assert done.end == abi.BAD_ARGUMENT


# Through a gang, as the search does it.

PAIR = Problem("dispatch_gemm", 128, 192, 4, 2, 48, world=2, pad=32, weight_layout="enk", finish="swiglu")


@pytest.fixture(scope="module")
def gang() -> Iterator[Gang]:
    with Gang(PAIR, DEVICE, Policy(flush_bytes=1 << 20), spin_limit_s=10.0) as made:
        yield made


@pytest.mark.parametrize("form", glu.CODES)
def test_two_ranks_gate_and_time_each_form(builder: Builder, gang: Gang, form: str) -> None:
    bench = family("dispatch_gemm")
    space = bench.space(PAIR, DEVICE)
    config = space.default_config().replace(GLU=form, COL_BLOCK=96, CONSUMER_WARPS=2)
    part = space.build_part(config)
    assert space.broken(config) == []
    (artifact,) = builder.build([bench.build_spec(part, PAIR, DEVICE)])
    loaded = gang.load(artifact.path, artifact.sha256, part)
    assert loaded.ok and loaded.sentence == "", loaded
    for seed, routing in enumerate(("uniform", "empty:0", "hot:0.9@3")):
        outcome = gang.gate(config.replace(order=("token", "slot")[seed % 2]), routing, seed)
        assert outcome.ok, outcome.sentence
        for body in outcome.bodies:
            assert body["tolerance"] == swiglu_tolerance(PAIR.hidden, form == "separate")
            assert 2.0**-12 < body["worst_error"] < body["tolerance"]
    for mode in ("fused", "comp", "comm", "serial", "peer"):
        timed = gang.time(config, mode, 0, 3)
        assert timed.ok and min(timed.worst_us) > 0, (mode, timed.sentence)
    assert gang.report().bodies[0]["imported"] == ["numpy"]


def test_an_artifact_of_the_other_form_is_refused(builder: Builder, gang: Gang) -> None:
    bench = family("dispatch_gemm")
    space = bench.space(PAIR, DEVICE)
    parts = {f: space.build_part(space.default_config().replace(GLU=f)) for f in glu.CODES}
    (fused,) = builder.build([bench.build_spec(parts["fused"], PAIR, DEVICE)])
    outcome = gang.load(fused.path, fused.sha256, parts["separate"])
    assert not outcome.ok and "'GLU': 'separate'" in outcome.sentence
