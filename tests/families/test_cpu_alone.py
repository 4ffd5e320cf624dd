"""The CPU workbench on one rank in this process: modes, fresh inputs, kept cases, and what it does after a failure."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import numpy as np
import pytest
from cpu_world import Builder, builder, spec, tile

from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.errors import ArtifactError, ConstraintRefused, LaunchFailed, WordsError
from tktune.core.policy import Policy
from tktune.core.problem import Problem
from tktune.families.base import MODES, RankSeat
from tktune.families.control_page import ControlPage
from tktune.families.cpu_workbench import GemmWorkbench
from tktune.families.dispatch_gemm.launch import CpuWorkbench as DispatchWorkbench
from tktune.families.grouped_gemm.launch import CpuWorkbench as GroupedWorkbench
from tktune.families.parallel_tensor import ParallelTensor

__all__ = ["builder"]

PART = tile(32, 64, 64, 2, 1)
SHAPE = {"hidden": 128, "cols": 128, "experts": 4, "top_k": 2, "tokens": 50, "pad": 32}
DISPATCH = Config({**PART, "num_comm_sms": 1, "order": "slot", "backoff": 16})
GROUPED = Config({**PART, "order": "cols", "backoff": 16})


@contextlib.contextmanager
def bench_of(
    builder: Builder, kind: type[GemmWorkbench], spin_limit_s: float = 20.0
) -> Iterator[tuple[GemmWorkbench, ControlPage]]:
    control, fds = ControlPage.create(1), ParallelTensor.create_fds(1)
    policy = Policy(flush_bytes=1 << 20, warmup=2)
    device = DeviceClass("cpu", "x86-64", 2, 1 << 20, 1 << 25, "shm")
    problem = Problem(kind.family, **SHAPE)
    bench = kind(RankSeat(problem, device, policy, 0, 1, fds, control.fd, spin_limit_s))
    artifact = builder.build([spec(kind.family, PART)])[0]
    bench.load(artifact.path, artifact.sha256, PART)
    try:
        yield bench, control
    finally:
        bench.close()
        control.close()
        for fd in fds:
            os.close(fd)


def test_every_mode_of_dispatch_is_timed_and_the_output_stays_right(builder: Builder) -> None:
    with bench_of(builder, DispatchWorkbench) as (bench, _):
        assert bench.gate(DISPATCH, "uniform", 0, 1).passed
        for index, mode in enumerate(MODES):
            us = bench.time(DISPATCH, mode, 1, 4, 1000 * (index + 1))
            assert len(us) == 4
            assert min(us) > 0
        assert bench.gate(DISPATCH, "hot:0.9@1", 2, 9000).passed


def test_a_grouped_gemm_finds_its_rows_in_place_and_has_nothing_to_communicate(builder: Builder) -> None:
    with bench_of(builder, GroupedWorkbench) as (bench, _):
        assert bench.gate(GROUPED, "empty:0", 0, 1).passed
        for index, mode in enumerate(("fused", "comp", "peer")):
            assert min(bench.time(GROUPED, mode, 0, 3, 1000 * (index + 1))) > 0
        for mode in ("comm", "serial"):
            with pytest.raises(ConstraintRefused, match="communicates nothing"):
                bench.time(GROUPED, mode, 0, 3, 9000)


def test_inputs_differ_by_seed_and_a_case_is_kept(builder: Builder) -> None:
    with bench_of(builder, DispatchWorkbench) as (bench, _):
        bench.gate(DISPATCH, "uniform", 0, 1)
        first, case = bench._x.copy(), bench._case("uniform", 0)
        bench.gate(DISPATCH, "uniform", 1, 10)
        assert not np.array_equal(bench._x, first)
        bench.gate(DISPATCH, "uniform", 0, 20)
        assert np.array_equal(bench._x, first)
        assert bench._case("uniform", 0) is case


def test_old_cases_go_when_they_take_too_much(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tktune.families.cpu_workbench.KEPT_CASES_BYTES", 1)
    with bench_of(builder, DispatchWorkbench) as (bench, _):
        for seed in range(3):
            assert bench.gate(DISPATCH, "uniform", seed, 1 + 10 * seed).passed
        assert list(bench._cases) == [("uniform", 2)]


def test_a_gate_fails_on_a_kernel_that_computes_something_else(builder: Builder) -> None:
    """The weights change under the kernel after the reference was made, as if it read the wrong ones."""
    with bench_of(builder, DispatchWorkbench) as (bench, _):
        assert bench.gate(DISPATCH, "uniform", 0, 1).passed
        weights = bench._need_weights()
        weights[[0, 1]] = weights[[1, 0]]
        verdict = bench.gate(DISPATCH, "uniform", 0, 10)
        assert not verdict.passed
        assert verdict.worst_error > 0.5
        assert "rows differ" in verdict.sentence


def test_a_deadlock_raises_its_code_and_the_workbench_serves_on(builder: Builder) -> None:
    with bench_of(builder, DispatchWorkbench, spin_limit_s=0.1) as (bench, control):
        with pytest.raises(LaunchFailed) as caught:
            bench.gate(DISPATCH.replace(num_comm_sms=0), "uniform", 0, 1)
        assert caught.value.code == "spin_limit"
        report = control.report(0)
        assert report is not None
        assert report.word == "arrivals"
        control.clear()
        assert bench.gate(DISPATCH, "uniform", 0, 10).passed


def test_an_aborted_gang_raises_aborted(builder: Builder) -> None:
    with bench_of(builder, DispatchWorkbench) as (bench, control):
        control.abort()
        with pytest.raises(LaunchFailed) as caught:
            bench.time(DISPATCH, "fused", 0, 3, 1)
        assert caught.value.code == "aborted"


def test_words_and_order_of_commands_are_checked(builder: Builder) -> None:
    with bench_of(builder, DispatchWorkbench) as (bench, _):
        with pytest.raises(WordsError, match="no mode 'sideways'"):
            bench.time(DISPATCH, "sideways", 0, 3, 1)
        artifact = builder.build([spec("grouped_gemm", PART)])[0]
        with pytest.raises(ArtifactError, match="was asked for"):
            bench.load(artifact.path, artifact.sha256, PART)
        with pytest.raises(ArtifactError, match="No artifact is loaded"):
            bench.gate(DISPATCH, "uniform", 0, 1)
