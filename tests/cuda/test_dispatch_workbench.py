"""The workbench of the dispatch on a GPU, with a launch that torch plays on the CPU: what is gated, what is noticed,
and which blocks and roles each mode gets.
"""

from __future__ import annotations

import struct
import types
from typing import ClassVar

import pytest
import torch

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed (the extra `cuda`)")

from seated_dispatch import play, seat

from tktune.core.device import device_class
from tktune.core.errors import WordsError
from tktune.core.policy import Policy
from tktune.core.problem import Problem
from tktune.families.base import family
from tktune.families.cuda import dispatch_globals as mirror
from tktune.families.dispatch_gemm import launch_cuda
from tktune.families.dispatch_gemm.launch_cuda import CudaDispatchWorkbench
from tktune.families.dispatch_gemm.launch_words import WAVE
from tktune.families.dispatch_gemm.plan_cuda import make_plan
from tktune.families.dispatch_gemm.rows_cuda import walk_own_first

DEVICE = device_class("sm_90a")


class Played:
    """Stands for `Launch`: keeps its words; a fused one does what the kernel would, `spoil` has its say."""

    made: ClassVar[list[Played]] = []
    everyone: ClassVar[torch.Tensor]
    spoil = None

    def __init__(self, function, grid, threads, smem_bytes, arguments, kept=()):
        self.function, self.grid, self.smem_bytes, self.kept = function, grid, smem_bytes, kept
        if function != "meet":
            (self.buffer,) = struct.unpack_from("<Q", arguments, mirror.GATHERED)
            (self.slack,) = struct.unpack_from("<Q", arguments, mirror.SLACK)
            self.tokens = struct.unpack_from("<QiiQii", arguments, mirror.TOKENS)
            self.roles, self.computing, self.head, self.top_k, self.wave, self.opening = struct.unpack_from(
                "<6i", arguments, mirror.ROLES
            )
        Played.made.append(self)

    def __call__(self, stream):
        if self.function == "meet":
            return
        _, plan, _, space, _ = self.kept
        case = plan.case
        if self.buffer == Played.everyone.data_ptr():
            rows, places = Played.everyone, case.slot_token[case.slots]
        else:
            rows, places = space.gathered, case.slots
        rows[places] = case.activations[case.slots]
        space.out[case.slots] = case.reference.bfloat16()
        if Played.spoil is not None:
            Played.spoil(types.SimpleNamespace(rows=rows, space=space, places=places), case)


class TorchStopwatch:
    def time(self, work, iterations, warmup, before=None):
        for _ in range(warmup + iterations):
            before(0)
            work(0)
        return [1.0] * iterations


@pytest.fixture
def bench(monkeypatch):
    problem = Problem("dispatch_gemm", 64, 40, 8, 3, 24, world=2, pad=16)
    made = CudaDispatchWorkbench.__new__(CudaDispatchWorkbench)
    seat(made, problem, DEVICE, Policy(launch_mode="direct", warmup=1))
    Played.everyone = made._everyone
    made._stopwatch = TorchStopwatch()
    Played.made, Played.spoil = [], None
    play(monkeypatch, Played)
    return made


def config_of(bench, **changes):
    return family("dispatch_gemm").space(bench.problem, DEVICE).default.replace(**changes)


FORMS = pytest.mark.parametrize("form", ["gathered", "indexed"])


@FORMS
@pytest.mark.parametrize("routing", ["uniform", "empty:4", "hot:0.9@7", "one:2"])
def test_a_right_launch_passes_the_gate(bench, routing, form):
    verdict = bench.gate(config_of(bench, ACTIVATIONS=form), routing, 5, 77)
    assert verdict.passed, verdict
    assert int(bench._sequence) == 77
    assert [one.function for one in Played.made] == ["fused", "meet"]


def wrong_row(at, case):
    at.rows[at.places[3]] += 1


def wrong_output(at, case):
    at.space.out[case.slots[5]] *= 2


def no_tail(at, case):
    at.space.arrivals += 1


def beyond(at, case):
    at.rows[case.rows] = 0


def unwanted_row(at, case, section=range(24)):
    wanted = set(at.places.tolist())
    at.rows[next(row for row in section if row not in wanted)] = 0


def own_row(at, case):
    unwanted_row(at, case, range(24, 48))


@pytest.mark.parametrize(
    ("form", "routing", "spoil", "sentence"),
    [
        ("gathered", "uniform", wrong_row, "1 gathered rows differ"),
        ("gathered", "uniform", wrong_output, "1 of "),
        ("gathered", "uniform", no_tail, "left its counters"),
        ("gathered", "uniform", beyond, "behind the last expert"),
        ("indexed", "uniform", wrong_row, "slots differ, first token "),
        ("indexed", "uniform", wrong_output, "1 of "),
        ("indexed", "uniform", no_tail, "left its counters"),
        ("indexed", "empty:4,5,6", own_row, "own rows"),
        ("indexed", "empty:4,5,6", unwanted_row, "no expert here wants"),
    ],
)
def test_what_a_launch_does_wrong_is_noticed_and_named(bench, form, routing, spoil, sentence):
    Played.spoil = spoil
    verdict = bench.gate(config_of(bench, ACTIVATIONS=form), routing, 5, 1)
    assert not verdict.passed
    assert sentence in verdict.sentence, verdict


def test_an_indexed_launch_reads_all_ranks_tokens_and_seeds_its_counters_with_own_rows(bench):
    plan = bench._prepare("uniform", 0)
    for form, buffer, slack in (
        ("gathered", bench._space.gathered, plan.slack),
        ("indexed", bench._everyone, plan.own_slack),
    ):
        config = config_of(bench, ACTIVATIONS=form, order="slot")
        bench._placed(config, plan)
        launch = bench._launch(config, plan, "fused")
        assert (launch.buffer, launch.slack) == (buffer.data_ptr(), slack.data_ptr())
        assert bench._space.arrivals[: len(slack)].tolist() == slack.tolist()
        section, header = 24 * 64 * 2, launch_cuda.HEADER_BYTES
        assert launch.tokens == (0x1000 + header, 24, 64, 0x2000 + header + section, 24, 64)
    assert (plan.own_slack > plan.slack).any()


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [
        ("fused", [(mirror.FUSED, 116)]),
        ("comm", [(mirror.COMMUNICATE, 116)]),
        ("comp", [(mirror.COMPUTE, 132)]),
        ("serial", [(mirror.COMMUNICATE, 0), (mirror.COMPUTE, 132)]),
    ],
)
def test_each_mode_gets_its_roles_and_blocks(bench, mode, wanted):
    assert bench.time(config_of(bench), mode, 5, 4, 9) == [1.0] * 4
    launches = [one for one in Played.made if one.function != "meet"]
    assert (launches[0].roles, launches[0].computing) == (mirror.COMMUNICATE, 0)  # brings the rows first
    assert [(one.roles, one.computing) for one in launches[1:]] == wanted
    assert {one.grid for one in launches} == {132}
    assert {one.smem_bytes for one in launches} == {232448}


def test_an_unknown_mode_is_refused(bench):
    with pytest.raises(WordsError, match="no mode"):
        bench.time(config_of(bench), "backwards", 5, 4, 9)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"order": "token"}, (0, 0, WAVE)),
        ({"order": "slot"}, (mirror.ALL_ROWS, 1, 1)),
        ({"order": "mixed"}, (116 * 128, 1, 1)),  # one column of tiles: each block begins in rows of its own
        ({"order": "slot", "opening": 0, "wave": 8}, (mirror.ALL_ROWS, 0, 8)),
    ],
)
def test_an_order_is_a_head_of_slots_before_tokens(bench, changes, wanted):
    launch = bench._launch(config_of(bench, **changes), bench._prepare("uniform", 0), "fused")
    assert (launch.head, launch.opening, launch.wave) == wanted


def test_a_plan_says_how_many_rows_blocks_and_tokens_there_are():
    problem = Problem("dispatch_gemm", 64, 40, 8, 3, 24, world=2, pad=16)
    weights = torch.zeros(4, 64, 40, dtype=torch.bfloat16)
    plan = make_plan(problem, weights, 1, "uniform", 2)
    rows, blocks, tokens = plan.words.tolist()
    assert (rows, blocks) == (len(plan.pull_indices), len(plan.slack)) == (plan.case.rows, rows // 16)
    assert tokens == len(plan.pull_tokens) == len(plan.pull_slots)
    real = plan.pull_indices[:, 0] >= 0
    assert torch.equal(torch.nonzero(real).flatten(), plan.case.slots.cpu())
    own = plan.pull_indices[real]
    rows_here = plan.case.activations[real.nonzero().flatten()]
    mine = own[:, 0] == 1
    assert torch.equal(rows_here[mine], plan.x[own[mine, 1].long()])


@pytest.mark.parametrize("experts", [0, 1, 3, 9])
@pytest.mark.parametrize("routing", ["uniform", "hot:0.9@5", "empty:6"])
def test_a_walk_with_own_blocks_first_covers_the_same_rows(routing, experts):
    problem = Problem("dispatch_gemm", 64, 40, 8, 3, 24, world=2, pad=8)
    weights = torch.zeros(4, 64, 40, dtype=torch.bfloat16)
    plan = make_plan(problem, weights, 1, routing, 2)
    walk = walk_own_first(plan, 8, experts).tolist()

    def covered(entries):
        return sorted((e, row) for e, first, rows, _ in entries for row in range(first, first + rows))

    assert covered(walk) == covered(plan.walk.tolist())
    sources = plan.pull_indices[:, 0].tolist()
    for _, first, rows, _ in walk[: min(experts, 4)]:
        assert rows % 8 == 0
        assert all(source == 1 for source in sources[first : first + rows])
    for _, first, _, _ in walk[min(experts, 4) :]:
        assert first % 8 == 0
    if experts >= 4:
        assert all(not all(s == 1 for s in sources[f : f + 8]) for _, f, n, _ in walk[4:] if n >= 8)
