"""gemm_combine when something is wrong: the deadlock rules against the machine in adversarial seating orders, waits
whose words never rise, ranks that do not come, and that the same workbenches serve on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from combine_world import Benches, problem_of
from cpu_world import Builder, builder, spec, tile

from tktune.core.device import DeviceClass
from tktune.core.errors import LaunchFailed
from tktune.core.problem import Problem
from tktune.core.roles import broken_between_ranks, broken_rules
from tktune.families import abi
from tktune.families.base import family
from tktune.families.gemm_combine.abi import FIXED_COUNTERS
from tktune.families.gemm_combine.launch import CpuWorkbench

__all__ = ["builder"]

PART = tile(16, 32, 32, 2, 1)
FORMS = ("prereduce", "pull")
# (order, seed of the shuffled one)
SEATINGS = ((0, 0), (1, 0), (2, 1), (2, 2))
LIMIT_S = 0.1
PUSHED = 32  # csrc/cpu/gemm_combine.hpp


@contextlib.contextmanager
def seated(builder: Builder, folder: Path, problem: Problem, **words: Any) -> Iterator[Benches]:
    benches = Benches(
        problem, builder.build([spec("gemm_combine", PART, problem.world)])[0], PART, folder, **words
    )
    try:
        yield benches
    finally:
        benches.close()


def refused(
    seats: int, compute: int, communicate: int, reducers: int = 1, form: str = "prereduce"
) -> set[str]:
    """The rules that the family's role model breaks with these blocks."""
    device = DeviceClass("cpu", "x86-64", seats, 1 << 20, 1 << 25, "shm")
    benches_config = {
        "num_comm_sms": communicate,
        "num_reduce_sms": reducers,
        "form": form,
        "signal_groups": 1,
    }
    model = family("gemm_combine").roles(_config(benches_config), problem_of(), device)
    blocks = {"gemm": compute, "combine": communicate}
    roles = tuple(dataclasses.replace(r, blocks=blocks.get(r.name, r.blocks)) for r in model.roles)
    return {broken.rule for broken in broken_rules(dataclasses.replace(model, roles=roles))}


def _config(values: dict[str, Any]) -> Any:
    from tktune.core.config import Config

    return Config(values)


def launch(
    benches: Benches, compute: int, communicate: int, seating: tuple[int, int], form: str
) -> list[str]:
    """How one fused launch with these blocks ends on every rank."""
    config, sequence = benches.config(form=form), benches.sequence()

    def one(bench: CpuWorkbench) -> str:
        bench._machine.seating, bench._machine.seating_seed = seating
        bench._arm(config, bench._prepare("uniform", 0))
        bench._y.fill(0x7FE5)
        split = {"num_comp_blocks": compute, "num_comm_blocks": communicate, "raster": 0, "backoff": 16}
        return ended(bench, {**split, "roles": abi.FUSED}, sequence)

    return benches.on_all(one)


def impatient(benches: Benches, limit_s: float = 3 * LIMIT_S) -> None:
    """From here on waits give up soon; what should end must have ended before."""
    for bench in benches.ranks:
        bench._machine.spin_limit_ns = int(limit_s * 1e9)


def patient(benches: Benches) -> None:
    impatient(benches, 20.0)
    benches.control.clear()


def ended(bench: CpuWorkbench, arguments: dict[str, int], sequence: int) -> str:
    try:
        bench._launch(arguments, sequence)
    except LaunchFailed as failed:
        return failed.code
    return "done"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seats", [1, 2, 3])
def test_the_rules_and_the_machine_agree_on_every_split(
    builder: Builder, tmp_path: Path, seats: int, form: str
) -> None:
    """One rank. A split that no rule refuses ends in every seating order; D1 and D2 deadlock in one."""
    with seated(builder, tmp_path, problem_of(world=1, experts=4), seats=seats) as benches:
        for compute, communicate in itertools.product((0, 1, 2, 3), (1, 2, 3)):
            rules = refused(seats, compute, communicate, form=form) - {"D4"}  # seats left for others
            if not rules:
                for seating in SEATINGS:
                    assert launch(benches, compute, communicate, seating, form) == ["done"], (
                        compute,
                        seating,
                    )
                    benches.assert_exact_result("uniform", 0)
            else:
                impatient(benches, LIMIT_S)
                assert launch(benches, compute, communicate, (1, 0), form) == ["spin_limit"], rules
                report = benches.control.report(0)
                assert report is not None and (report.role, report.word) == ("combine", "landed")
                patient(benches)


def test_a_split_that_the_rules_refuse_may_finish_in_a_kind_order(builder: Builder, tmp_path: Path) -> None:
    """Two seats, two summing blocks, one computing: it ends when compute is seated first, and only then."""
    assert "D1" in refused(2, 1, 2)
    with seated(builder, tmp_path, problem_of(world=1, experts=4), seats=2) as benches:
        assert launch(benches, 1, 2, (0, 0), "prereduce") == ["done"]
        impatient(benches)
        assert launch(benches, 1, 2, (1, 0), "prereduce") == ["spin_limit"]


def test_the_rules_name_what_is_wrong() -> None:
    assert refused(4, 3, 1) == refused(4, 3, 1, 2) == refused(4, 1, 3) == set()
    assert refused(4, 4, 1) == set()  # compute blocks give their seats back
    assert refused(4, 0, 4) == {"D2"}
    assert refused(4, 4, 0) == {"D2"}
    assert refused(4, 3, 1, reducers=0) == {"D2"}
    assert refused(4, 3, 1, reducers=3) == {"D4"}  # fewer than two seats are left for other kernels
    assert refused(4, 3, 1, reducers=3, form="pull") == set()
    assert "D1" in refused(4, 1, 4)


def test_ranks_that_would_not_understand_each_other_are_told_apart() -> None:
    device = DeviceClass("cpu", "x86-64", 4, 1 << 20, 1 << 25, "shm")

    def model(**launch: Any) -> Any:
        values = {"num_comm_sms": 1, "num_reduce_sms": 1, "form": "prereduce", "signal_groups": 1, **launch}
        return family("gemm_combine").roles(_config(values), problem_of(), device)

    assert broken_between_ranks([model(), model(num_comm_sms=2, num_reduce_sms=2)]) == []
    assert [b.rule for b in broken_between_ranks([model(), model(form="pull")])] == ["D5", "D5"]
    assert [b.rule for b in broken_between_ranks([model(), model(signal_groups=2)])] == ["D5"]


def words_of(benches: Benches, rank: int) -> Any:
    return benches.ranks[rank]._armed[1]


@pytest.mark.parametrize(
    ("word", "by", "role", "name"),
    [
        (FIXED_COUNTERS, -1, "combine", "landed"),  # one tile of the first pad block is missing
        (PUSHED + 0, -1, "reduce", "watermark"),  # one row is not counted: the watermark never rises
    ],
    ids=["a tile", "a row"],
)
def test_a_count_that_is_short_ends_in_a_report_and_the_ranks_serve_on(
    builder: Builder, tmp_path: Path, word: int, by: int, role: str, name: str
) -> None:
    """The count of rank 0 is short by one. Whoever waits for it gives up, and says so; then all is well again."""
    with seated(builder, tmp_path, problem_of(), seats=3) as benches:
        benches.gate()
        impatient(benches)
        config, sequence = benches.config(), benches.sequence()

        def one(bench: CpuWorkbench) -> str:
            bench._arm(config, bench._prepare("uniform", 0))
            if bench.seat.rank == 0:
                bench._armed[1][word] += by
            return ended(bench, bench.fuse(config), sequence)

        assert "spin_limit" in benches.on_all(one)
        report = benches.control.report(0)
        assert report is not None
        assert (report.role, report.word) == (role, name)
        assert report.seen < report.expected
        assert "waited for" in report.sentence
        patient(benches)
        benches.gate(seed=1)
        benches.gate(form="pull")


def test_a_peer_that_does_not_push_is_waited_for_by_name(builder: Builder, tmp_path: Path) -> None:
    """Rank 1 computes and sums nothing: rank 0's reduce waits for its watermark, and rank 0's pulls for its rows."""
    with seated(builder, tmp_path, problem_of(), seats=3) as benches:
        for form, role, word in (("prereduce", "reduce", "watermark"), ("pull", "combine", "landed")):
            config, sequence = benches.config(form=form), benches.sequence()
            impatient(benches, 1.0)

            def one(bench: CpuWorkbench, config: Any = config, sequence: int = sequence) -> str:
                bench._arm(config, bench._prepare("uniform", 0))
                idle = {"roles": 0} if bench.seat.rank == 1 else {}
                return ended(bench, {**bench.fuse(config), **idle}, sequence)

            assert benches.on_all(one) == ["spin_limit", "done"]
            report = benches.control.report(0)
            assert report is not None
            assert (report.role, report.word) == (role, word)
            if form == "prereduce":
                assert report.index == 1
            assert report.expected == sequence > report.seen
            patient(benches)
            benches.gate(form=form, seed=2)


def test_the_abort_word_ends_a_launch_whose_rows_never_land(builder: Builder, tmp_path: Path) -> None:
    with seated(builder, tmp_path, problem_of(world=1, experts=4), seats=2, spin_limit_s=60.0) as benches:
        bench, ends = benches.ranks[0], []
        thread = threading.Thread(target=lambda: ends.extend(launch(benches, 0, 1, (0, 0), "prereduce")))
        thread.start()
        while bench._dispensers is None or not words_drawn(bench):
            time.sleep(0.001)
        begin = time.monotonic()
        benches.control.abort()
        thread.join()
        assert time.monotonic() - begin < 5
        assert ends == ["aborted"]
        assert not words_of(benches, 0).any(), "the tail ran all the same"
        benches.control.clear()
        benches.gate()


def words_drawn(bench: CpuWorkbench) -> bool:
    armed = getattr(bench, "_armed", None)
    return armed is not None and bool(armed[1][0] > 0)


def test_a_hundred_replays_in_any_seating_leave_counters_as_they_were(
    builder: Builder, tmp_path: Path
) -> None:
    with seated(builder, tmp_path, problem_of(tokens=24), seats=3) as benches:
        for round in range(100):
            seating, form = (2, round), FORMS[round % 2]
            assert launch(benches, 2, 1 + round % 2, seating, form) == ["done", "done"]
            for rank in range(2):
                assert not words_of(benches, rank).any()
                assert not np.count_nonzero(benches.ranks[rank]._dispensers)
            benches.assert_exact_result("uniform", 0)
