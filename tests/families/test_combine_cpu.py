"""gemm_combine on the CPU backend, all ranks in one process: every buffer bit for bit against sums that know no table,
for every form, order and granularity, every routing that is special, and under delays.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from combine_world import Benches, problem_of, routed
from cpu_world import Builder, builder, spec, tile

from tktune.core.errors import LaunchFailed
from tktune.core.problem import Problem
from tktune.families.base import MODES
from tktune.families.gemm_combine import inputs

__all__ = ["builder"]

PART = tile(32, 64, 64, 2, 1)
FORMS, ORDERS = ("prereduce", "pull"), ("ready", "remote", "token")


@contextlib.contextmanager
def seated(
    builder: Builder,
    folder: Path,
    problem: Problem,
    part: Any = PART,
    flags: tuple[str, ...] = (),
    **words: Any,
) -> Iterator[Benches]:
    layout = problem.weight_layout
    artifact = builder.build([spec("gemm_combine", part, problem.world, layout, flags)])[0]
    benches = Benches(problem, artifact, part, folder, **words)
    try:
        yield benches
    finally:
        benches.close()


def test_every_config_leaves_the_same_bits(builder: Builder, tmp_path: Path) -> None:
    """Form, order, granularity, walk, rows in flight and split decide who does what when, and nothing of the result."""
    first = None
    with seated(builder, tmp_path, problem_of()) as benches:
        runs = ((1, "experts"), (2, "experts"), (2, "columns"))
        for form, order, (groups, walk), rows in itertools.product(FORMS, ORDERS, runs, (1, 4)):
            for split, reducers in ((1, 1), (3, 1), (2, 2)):
                benches.gate(
                    form=form,
                    order=order,
                    signal_groups=groups,
                    walk=walk,
                    rows_in_flight=rows,
                    num_comm_sms=split,
                    num_reduce_sms=reducers,
                )
                first = first or benches.results()
                for one, other in zip(first, benches.results(), strict=True):
                    assert np.array_equal(one, other)


@pytest.mark.parametrize(
    ("part", "changes"),
    [
        (tile(16, 32, 32, 2, 2), {"pad": 16, "cols": 96}),
        (tile(32, 32, 64, 3, 2), {"pad": 64, "hidden": 128, "weight_layout": "enk"}),
        (tile(64, 128, 32, 2, 4), {"pad": 64, "tokens": 33}),
    ],
    ids=["16x32", "32x32 enk", "64x128"],
)
def test_tiles_layouts_and_pads(builder: Builder, tmp_path: Path, part: Any, changes: Any) -> None:
    with seated(builder, tmp_path, problem_of(**changes), part) as benches:
        for form, seed in itertools.product(FORMS, range(2)):
            benches.gate(seed=seed, form=form)


@pytest.mark.parametrize(
    "changes",
    [
        {"top_k": 1},
        {"world": 1, "experts": 4},
        {"world": 3, "experts": 6, "top_k": 5, "tokens": 17},
        {"world": 4, "tokens": 1},
        {"world": 2, "experts": 2, "top_k": 2},
    ],
    ids=["top-1", "one rank", "three ranks", "one token a rank", "all experts"],
)
def test_worlds_and_top_ks(builder: Builder, tmp_path: Path, changes: Any) -> None:
    with seated(builder, tmp_path, problem_of(**changes), seats=3) as benches:
        for form, routing in itertools.product(FORMS, ("uniform", "hot:0.9@1")):
            benches.gate(routing, form=form)


@pytest.mark.parametrize("form", FORMS)
def test_routings_that_leave_ranks_or_experts_without_rows(
    builder: Builder, tmp_path: Path, form: str
) -> None:
    """Experts 0..3 are on rank 0, 4..7 on rank 1."""
    tokens = 50
    here, there, both = [0, 1], [5, 6], [3, 4]
    mixed = [here, there, both, both[::-1]] * tokens
    with seated(builder, tmp_path, problem_of()) as benches:
        for ids in (
            [here] * 2 * tokens,  # rank 1 holds nothing, owes nothing, and owns tokens
            [there] * 2 * tokens,
            [here] * tokens + [there] * tokens,  # nothing crosses
            [there] * tokens + [here] * tokens,  # everything crosses
            [both] * 2 * tokens,  # every token needs both ranks
            mixed[: 2 * tokens],
        ):
            benches.gate(routed(tmp_path, ids), form=form)
        for routing in ("empty:0", "empty:4,5,6", "one:7"):
            benches.gate(routing, form=form)


@pytest.mark.parametrize("form", FORMS)
def test_weights_of_zero_give_zeros_and_still_move(
    builder: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    drawn = inputs.draw_topk_weights

    def some_zero(problem: Problem, seed: int) -> Any:
        weights = drawn(problem, seed)
        weights[:, ::3] = 0.0
        return weights

    monkeypatch.setattr(inputs, "draw_topk_weights", some_zero)
    with seated(builder, tmp_path, problem_of()) as benches:
        benches.gate(form=form)
        for y in benches.results():
            assert not (y[::3] & 0x7FFF).any()
            assert y[1::3].any(axis=1).sum() > 10


def test_weights_with_all_their_bits_stay_within_the_tolerance(
    builder: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def softmax(problem: Problem, seed: int) -> Any:
        scores = np.random.default_rng(seed).normal(size=(problem.world, problem.tokens, problem.top_k))
        raised = np.exp(3 * scores)
        return (raised / raised.sum(-1, keepdims=True)).astype(np.float32)

    monkeypatch.setattr(inputs, "draw_topk_weights", softmax)
    with seated(builder, tmp_path, problem_of(top_k=4, hidden=128)) as benches:
        for seed, form in itertools.product(range(3), FORMS):
            config, sequence = benches.config(form=form), benches.sequence()
            for verdict in benches.on_all(lambda bench: bench.gate(config, "uniform", seed, sequence)):  # noqa: B023
                assert verdict.passed, verdict.sentence
                assert 2.0**-13 < verdict.worst_error < verdict.tolerance / 2


@pytest.mark.parametrize("form", FORMS)
def test_delays_anywhere_change_no_bit(builder: Builder, tmp_path: Path, form: str) -> None:
    """An artifact whose threads are late now and then, on ranks that start late, seated at random."""
    first = None
    part = tile(16, 32, 32, 2, 2)
    with seated(
        builder, tmp_path, problem_of(tokens=40, cols=64), part, ("-DTKT_DELAYS",), seats=3
    ) as benches:
        for round in range(24):
            for bench in benches.ranks:
                bench._machine.seating, bench._machine.seating_seed = 2, round
            benches.gate(
                form=form,
                late_s=0.02,
                order=ORDERS[round % 3],
                signal_groups=1 + round % 2,
                rows_in_flight=(1, 2, 4)[round % 3],
                num_comm_sms=1 + round % 2,
            )
            first = first or benches.results()
            for one, other in zip(first, benches.results(), strict=True):
                assert np.array_equal(one, other)


def test_every_mode_is_timed_and_leaves_the_result_where_it_makes_one(
    builder: Builder, tmp_path: Path
) -> None:
    with seated(builder, tmp_path, problem_of()) as benches:
        for form, mode in itertools.product(FORMS, MODES):
            config, sequence = benches.config(form=form), benches.sequence()
            for bench in benches.ranks:
                bench._y.fill(inputs.POISON)
            for us in benches.on_all(lambda bench: bench.time(config, mode, 3, 4, sequence)):  # noqa: B023
                assert len(us) == 4
                assert min(us) > 0
            made = mode in ("fused", "serial", "comm")  # comm finds the rows of a GEMM before it in place
            for bench in benches.ranks:
                case = bench._prepare("uniform", 3)
                wanted = inputs.exact_result(inputs.exact_partials(benches.problem, case))
                assert np.array_equal(bench.buffers()[2], wanted) == made, (mode, form)
            benches.gate(form=form, seed=4)


def test_the_library_multiplies_the_same_rows(builder: Builder, tmp_path: Path) -> None:
    with seated(builder, tmp_path, problem_of()) as benches:
        bench = benches.ranks[1]
        case = bench._prepare("uniform", 0)
        exact = inputs.exact_rows(benches.problem, case)[case.real]
        rows = 0
        for packed, matrix, out in bench.library_operands(case):
            np.matmul(packed, matrix, out=out)
            assert np.array_equal(inputs.from_float(out), exact[rows : rows + len(out)])
            rows += len(out)
        assert rows == len(case.real)


class TestTheGate:
    """What a wrong kernel would leave is found and named."""

    @pytest.fixture
    def left(self) -> Any:
        problem = problem_of(tokens=20)
        case = inputs.make_case(problem, 0, "uniform", 0)
        partial = inputs.exact_partials(problem, case)
        poison = np.full((40, problem.cols), inputs.POISON, np.uint16)
        rows = np.concatenate([inputs.exact_rows(problem, case), poison])
        y = np.concatenate([inputs.exact_result(partial), poison[:8]])
        return problem, case, y, rows, partial

    def test_a_right_result_passes(self, left: Any) -> None:
        verdict = inputs.check_combined(*left)
        assert verdict.passed and verdict.sentence == ""
        assert 0 < verdict.worst_error < verdict.tolerance / 2

    def test_a_contribution_that_is_missing(self, left: Any) -> None:
        problem, case, y, rows, partial = left
        token = int(np.flatnonzero(case.combine.final_contrib.all(1))[0])
        y[token] = partial[0, token]
        verdict = inputs.check_combined(problem, case, y, rows, partial)
        assert not verdict.passed
        assert verdict.sentence.startswith(f"1 of 20 tokens differ: token {token} by")

    def test_a_nan(self, left: Any) -> None:
        left[2][3, 7] = 0x7FC0
        verdict = inputs.check_combined(*left)
        assert not verdict.passed and "token 3 by nan" in verdict.sentence

    def test_writes_where_nobody_may_write(self, left: Any) -> None:
        problem, case, y, rows, partial = left
        padding = int(np.flatnonzero(case.tables.slot_token < 0)[0])
        unowed = np.argwhere(case.combine.final_contrib.T == 0)[0]
        for buffer, at, said in (
            (y, 20, "beyond the last token"),
            (rows, padding, f"Row {padding} of the expert rows"),
            (rows, len(rows) - 1, "padding"),
            (partial, tuple(unowed), "owed by nobody"),
        ):
            kept = buffer[at].copy()
            buffer[at] = 0
            verdict = inputs.check_combined(problem, case, y, rows, partial)
            assert not verdict.passed
            assert said in verdict.sentence
            buffer[at] = kept
        assert inputs.check_combined(*left).passed


def test_weights_of_another_token_are_wrong(builder: Builder, tmp_path: Path) -> None:
    with seated(builder, tmp_path, problem_of()) as benches:
        benches.gate()
        config, sequence = benches.config(), benches.sequence()
        for bench in benches.ranks:
            weights = bench._prepare("uniform", 0).topk_weights
            weights[:] = weights[:, ::-1]
        for verdict in benches.on_all(lambda bench: bench.gate(config, "uniform", 0, sequence)):
            assert not verdict.passed and "tokens differ" in verdict.sentence


def test_a_launch_that_does_not_fit_the_artifact_is_refused(builder: Builder, tmp_path: Path) -> None:
    """Seven groups of columns, and more row slots than the pipeline holds."""
    with seated(builder, tmp_path, problem_of(cols=640, world=1)) as benches:
        bench = benches.ranks[0]
        for launch in ({"signal_groups": 7}, {"rows_in_flight": 9}, {"num_reduce_sms": 0}):
            with pytest.raises(LaunchFailed) as caught:
                bench.gate(benches.config(**launch), "uniform", 0, benches.sequence())
            assert caught.value.code == "bad_argument"
        benches.gate(rows_in_flight=8)
    with seated(builder, tmp_path, problem_of(cols=64 * 128, world=1, tokens=4)) as benches:
        with pytest.raises(LaunchFailed):
            benches.gate(rows_in_flight=4)
        benches.gate(rows_in_flight=1)
        benches.gate(rows_in_flight=4, form="pull")
