"""Waits of the CPU backend are bounded: the abort word, the spin limit and its report, and the pool that lives on."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from cpu_world import Builder, Rank, builder, spec, tile

from tktune.core.problem import Problem
from tktune.core.routing import parse_routing
from tktune.families import abi

__all__ = ["builder"]

PART = tile(16, 32, 32, 2, 2)
COMPUTE_WITHOUT_ROWS = {"num_comp_blocks": 2, "num_comm_blocks": 0, "roles": abi.COMPUTE | abi.GATED}
FUSED = {"num_comp_blocks": 1, "num_comm_blocks": 1, "roles": abi.FUSED}


@pytest.fixture
def rank() -> Rank:
    problem = Problem("dispatch_gemm", hidden=64, cols=64, experts=2, top_k=1, tokens=50, pad=32)
    return Rank(problem, parse_routing("uniform").draw(problem, 0))


@pytest.fixture
def kernel(builder: Builder) -> abi.CpuKernel:
    return builder.kernel(spec("dispatch_gemm", PART))


def test_the_abort_word_ends_a_launch_that_waits_and_the_pool_lives_on(
    rank: Rank, kernel: abi.CpuKernel
) -> None:
    machine = rank.machine(2, limit_s=60)
    ends: list[int] = []
    waiting = threading.Thread(
        target=lambda: ends.append(rank.launch(kernel, machine, **COMPUTE_WITHOUT_ROWS).end)
    )
    waiting.start()
    while rank.dispensers[1] < 2:  # both blocks have a task, whose rows nobody brings
        time.sleep(0.001)
    begin = time.monotonic()
    rank.abort_word[0] = 1
    waiting.join()
    assert time.monotonic() - begin < 5
    assert ends == [abi.ABORTED]
    assert not rank.report.set
    rank.assert_seeded()

    assert rank.launch(kernel, machine, **FUSED).end == abi.ABORTED  # as long as the word stands
    rank.abort_word[0] = 0
    assert rank.launch(kernel, machine, **FUSED).end == abi.DONE
    rank.assert_right()


def test_a_wait_out_of_its_limit_reports_who_waited_for_what(rank: Rank, kernel: abi.CpuKernel) -> None:
    result = rank.launch(kernel, rank.machine(2, limit_s=0.1), **COMPUTE_WITHOUT_ROWS)
    assert result.end == abi.SPIN_LIMIT
    assert result.time_ns >= 100_000_000
    report = rank.report
    assert report.set == 1
    assert (report.role, report.word) == (b"gemm", b"arrivals")
    assert report.block in (0, 1)
    assert report.rank == 0
    assert report.expected == rank.problem.pad
    assert report.seen == rank.case.tables.slack[report.index] < report.expected
    rank.assert_seeded()
    assert rank.launch(kernel, rank.machine(2), **FUSED).end == abi.DONE
    rank.assert_right()


def test_a_limit_ends_all_threads_while_others_still_work(rank: Rank, kernel: abi.CpuKernel) -> None:
    """One arrival too many is expected of the last block: the rest of the launch runs to its end."""
    rank.arrivals[-1] -= 1
    result = rank.launch(kernel, rank.machine(2, limit_s=0.1), **FUSED)
    assert result.end == abi.SPIN_LIMIT
    assert rank.report.index == len(rank.arrivals) - 1
    assert rank.report.seen == rank.problem.pad - 1
    assert rank.launch(kernel, rank.machine(2), **FUSED).end == abi.DONE
    rank.assert_right()


def two_ranks() -> tuple[Rank, Rank]:
    """Two ranks of one process that share barrier words, as two processes share them through symmetric memory."""
    problem = Problem("dispatch_gemm", hidden=64, cols=64, experts=2, top_k=1, tokens=20, world=2, pad=32)
    ids = parse_routing("uniform").draw(problem, 0)
    one, two = (Rank(problem, ids, r) for r in range(2))
    for r in range(2):
        two.globals.barrier[r] = one.globals.barrier[r]
    return one, two


def test_a_start_barrier_without_the_peer_runs_out_of_its_limit(builder: Builder) -> None:
    rank, _ = two_ranks()
    kernel = builder.kernel(spec("dispatch_gemm", PART, world=2))
    result = rank.launch(kernel, rank.machine(2, limit_s=0.05), start_sequence=7, **FUSED)
    assert result.end == abi.SPIN_LIMIT
    report = rank.report
    assert (report.role, report.word, report.index) == (b"host", b"barrier", 1)
    assert (report.block, report.expected, report.seen) == (-1, 7, 0)


def test_ranks_meet_at_a_sequence_and_never_before_the_last_one(builder: Builder) -> None:
    one, two = two_ranks()
    kernel = builder.kernel(spec("dispatch_gemm", PART, world=2))
    rounds = 200
    order: list[tuple[int, int]] = []

    def meet(rank: Rank) -> None:
        for sequence in range(1, rounds + 1):
            order.append((sequence, rank.globals.rank))
            assert kernel.barrier(rank.globals, rank.machine(1), sequence) == abi.DONE

    peer = threading.Thread(target=meet, args=(two,))
    peer.start()
    meet(one)
    peer.join()
    assert sorted(order) == [(sequence, r) for sequence in range(1, rounds + 1) for r in range(2)]
    assert [sequence for sequence, _ in order] == sorted(sequence for sequence, _ in order)
    assert [int(words[r]) for words in one.barrier for r in range(2)] == [rounds] * 4


def test_a_late_rank_finds_that_the_others_are_ahead(builder: Builder) -> None:
    one, _ = two_ranks()
    kernel = builder.kernel(spec("dispatch_gemm", PART, world=2))
    one.barrier[0][1] = 9  # the peer is two barriers ahead
    assert kernel.barrier(one.globals, one.machine(1), 7) == abi.DONE


def test_a_closed_kernel_can_be_opened_again(builder: Builder, rank: Rank) -> None:
    path = builder.build([spec("dispatch_gemm", PART)])[0].path
    threads = threading_count()
    for _ in range(3):
        kernel = abi.CpuKernel(path)
        assert rank.launch(kernel, rank.machine(2), **FUSED).end == abi.DONE
        kernel.close()
        kernel.close()
    assert threading_count() <= threads + 6
    rank.assert_right()


def threading_count() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_counters_survive_a_hundred_replays_in_any_seating(rank: Rank, kernel: abi.CpuKernel) -> None:
    for seed in range(100):
        machine = rank.machine(3, seating=2, seating_seed=seed)
        assert rank.launch(kernel, machine, **{**FUSED, "num_comp_blocks": 2, "order": seed % 2}).end == 0
    rank.assert_seeded()
    rank.assert_right()
    assert np.count_nonzero(rank.dispensers) == 0
