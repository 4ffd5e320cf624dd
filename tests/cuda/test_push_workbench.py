"""Pushes in the workbench of a rank: what a launch is given, what is noticed of what it leaves, and what is refused; with
launches that torch plays on the CPU.
"""

from __future__ import annotations

import dataclasses
import struct
import types

import pytest
import torch

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed (the extra `cuda`)")

from seated_dispatch import play, seat

from tktune.core import push_tables
from tktune.core.device import device_class
from tktune.core.errors import ProblemError
from tktune.core.policy import Policy
from tktune.core.problem import Problem
from tktune.core.roles import Wait, broken_rules
from tktune.core.routing import parse_routing
from tktune.families.base import family
from tktune.families.cuda import dispatch_globals as mirror
from tktune.families.cuda import push_globals
from tktune.families.dispatch_gemm import launch_cuda
from tktune.families.dispatch_gemm.fused_launch import fused_launch
from tktune.families.dispatch_gemm.launch_cuda import CudaDispatchWorkbench
from tktune.families.dispatch_gemm.push_cuda import PushMemory
from tktune.families.dispatch_gemm.tables_cuda import DeviceTables

DEVICE = device_class("sm_90a")
PROBLEM = Problem("dispatch_gemm", 64, 40, 8, 3, 24, world=2, pad=16)
SECTIONS, FLAGS = launch_cuda.HEADER_BYTES, 0x900000
ROW_FLAGS = FLAGS + push_globals.flag_bytes(PROBLEM)[0]
RANK = 1


class Memory:
    """Symmetric memory as far as a push looks at it."""

    def __init__(self):
        self.blocks = torch.zeros(PROBLEM.capacity_rows // PROBLEM.pad, 2, dtype=torch.int64)
        self.rows = torch.zeros(2, 24, dtype=torch.int64)

    def addresses(self, offset):
        return 0x10000000 + offset, 0x20000000 + offset

    def tensor(self, dtype, shape, offset):
        found = {FLAGS: self.blocks, ROW_FLAGS: self.rows}[offset]
        assert (dtype, shape) == (torch.int64, tuple(found.shape))
        return found


class Bench(CudaDispatchWorkbench):
    """One whose launches are played: a fused one brings every row, output and flag; `spoil` then has its say."""

    def __init__(self, spoil=None):
        seat(self, PROBLEM, DEVICE, None)
        self._spoil = spoil
        self._memory = Memory()
        self._push = PushMemory(PROBLEM, self._memory, SECTIONS, FLAGS, self._sequence)
        self.made = []

    def launch(self, function, grid, threads, smem_bytes, arguments, kept=()):
        one = types.SimpleNamespace(function=function, arguments=arguments)
        self.made.append(one)

        def play(stream):
            if function == "meet":
                self._sequence += 1
                return
            _, plan, _, space, _ = kept
            case = plan.case
            tokens = case.slot_token[case.slots]
            self._everyone[tokens] = case.activations[case.slots]
            space.gathered[case.slots] = case.activations[case.slots]
            space.out[case.slots] = case.reference.bfloat16()
            sources = plan.pushes.gate_sources
            raised = ((sources.unsqueeze(1) >> torch.arange(2)) & 1).bool()
            self._memory.blocks[: len(sources)][raised] = self._sequence
            self._memory.rows.view(-1)[tokens[tokens // 24 != RANK]] = self._sequence
            if self._spoil is not None:
                self._spoil(self, plan)

        return play


@pytest.fixture
def benched(monkeypatch):
    def made(spoil=None):
        bench = Bench(spoil)
        play(monkeypatch, bench.launch)
        return bench

    return made


def config_of(**changes):
    space = family("dispatch_gemm").space(PROBLEM, DEVICE)
    return space.default.replace(**{"ACTIVATIONS": "indexed", "TRANSPORT": "push", **changes})


@pytest.mark.parametrize("form", ["indexed", "gathered"])
@pytest.mark.parametrize("routing", ["uniform", "empty:4", "hot:0.9@7", "one:2", "one:6"])
def test_a_right_launch_passes_the_gate(benched, routing, form):
    bench = benched()
    for sequence in (77, 90):
        verdict = bench.gate(config_of(ACTIVATIONS=form), routing, 5, sequence)
        assert verdict.passed, verdict


def test_a_launch_is_told_where_to_push_what_and_whom_to_tell(benched):
    bench = benched()
    plan = bench._prepare("uniform", 5)
    bench._launch(config_of(), plan, "fused")
    arguments = bench.made[-1].arguments
    assert len(arguments) == push_globals.globals_bytes(2)
    part = arguments[mirror.globals_bytes(2) :]
    pushes = plan.pushes
    assert struct.unpack_from("<7Q", part) == (
        *(t.data_ptr() for t in (pushes.plan, pushes.tokens, pushes.blocks, pushes.expected, pushes.missing)),
        *(pushes.gate_sources.data_ptr(), bench._sequence.data_ptr()),
    )
    views = struct.unpack_from("<QiiQii", part, push_globals.SECTIONS)
    assert views == (0x10000000 + SECTIONS, 48, 64, 0x20000000 + SECTIONS, 48, 64)
    assert struct.unpack_from("<2Q", part, push_globals.SECTIONS + 32) == (
        0x10000000 + FLAGS,
        0x20000000 + FLAGS,
    )
    golden = push_tables.build(parse_routing("uniform").draw(PROBLEM, 5), PROBLEM, RANK)
    assert pushes.plan.tolist() == [*golden.offsets, golden.turns]
    for name in ("tokens", "blocks", "expected", "gate_sources"):
        assert getattr(pushes, name).tolist() == getattr(golden, name).tolist()


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [({}, 4), ({"push_sms": 2}, 2), ({"push_sms": 99}, 16), ({"num_comm_sms": 1}, 1)],
)
def test_gathered_rows_are_announced_one_by_one_and_some_blocks_push_first(benched, changes, wanted):
    bench = benched()
    plan = bench._prepare("uniform", 5)
    bench._launch(config_of(ACTIVATIONS="gathered", **changes), plan, "fused")
    arguments = bench.made[-1].arguments
    part = arguments[mirror.globals_bytes(2) :]
    flags = struct.unpack_from("<2Qi", part, push_globals.SECTIONS + 32)
    assert flags == (0x10000000 + ROW_FLAGS, 0x20000000 + ROW_FLAGS, wanted)
    (buffer,) = struct.unpack_from("<Q", arguments, mirror.GATHERED)
    assert buffer == bench._space.gathered.data_ptr()


def test_a_pull_takes_no_more_than_before(benched):
    bench = benched()
    bench._launch(config_of().replace(TRANSPORT="pull"), bench._prepare("uniform", 5), "fused")
    assert len(bench.made[-1].arguments) == mirror.globals_bytes(2)


def first_awaited(plan):
    return int(torch.nonzero(plan.pushes.gate_sources)[0])


def late_flag(bench, plan):
    bench._memory.blocks[first_awaited(plan), 0] -= 1


def early_flag(bench, plan):
    bench._memory.blocks[-1, 0] = bench._sequence


def flag_for_nobody(bench, plan):
    bench._memory.blocks[first_awaited(plan), RANK] = bench._sequence


def flag_ahead(bench, plan):
    bench._memory.blocks[-1, 0] = bench._sequence + 5


def counter_left(bench, plan):
    plan.pushes.missing[0] -= 1


def first_peer_token(plan):
    source, token = plan.pull_tokens[plan.pull_tokens[:, 0] != RANK][0].tolist()
    return source, token


def late_row(bench, plan):
    bench._memory.rows[first_peer_token(plan)] -= 1


def own_row(bench, plan):
    bench._memory.rows[RANK, 3] = bench._sequence


def staged_wrong(bench, plan):
    source, token = first_peer_token(plan)
    bench._everyone[source * 24 + token] += 1


def slot_wrong(bench, plan):
    bench._space.gathered[plan.case.slots[0]] += 1


@pytest.mark.parametrize(
    ("form", "spoil", "sentence"),
    [
        ("indexed", late_flag, "1 flags are not what is waited for, first that of block "),
        ("indexed", early_flag, "1 flags are not what is waited for, first that of block "),
        ("indexed", flag_for_nobody, "1 flags are not what is waited for, first that of block "),
        ("indexed", flag_ahead, "A flag is ahead of the launch."),
        ("indexed", counter_left, "left its counters of pushed rows"),
        ("indexed", staged_wrong, "slots differ, first token "),
        ("gathered", late_row, "1 flags are not what is waited for, first that of token "),
        ("gathered", own_row, "1 flags are not what is waited for, first that of token 3 of rank 1"),
        ("gathered", counter_left, "left its counters of pushed rows"),
        ("gathered", staged_wrong, "slots differ, first token "),
        ("gathered", slot_wrong, "1 gathered rows differ"),
    ],
)
def test_what_is_left_wrong_is_noticed_and_named(benched, form, spoil, sentence):
    verdict = benched(spoil).gate(config_of(ACTIVATIONS=form), "uniform", 5, 30)
    assert not verdict.passed
    assert sentence in verdict.sentence, verdict


def test_counters_that_a_stopped_launch_left_are_made_right_before_the_next(benched):
    bench = benched()
    plan = bench._prepare("uniform", 5)
    plan.pushes.missing.sub_(3)
    assert bench.gate(config_of(), "uniform", 5, 30).passed


class OnceStopwatch:
    def time(self, work, iterations, warmup, before=None):
        before(0)
        work(0)
        return [1.0] * iterations


@pytest.mark.parametrize(
    ("form", "roles"), [("indexed", mirror.COMPUTE | mirror.GATED), ("gathered", mirror.COMPUTE)]
)
def test_a_serial_path_computes_when_the_rows_of_peers_are_there(benched, form, roles):
    """By index that is when the peers have pushed them, not when this rank has; gathered rows have been waited for when
    they were scattered, and their counters begin anew.
    """
    bench = benched()
    bench.seat.policy = Policy(launch_mode="direct")
    bench._stopwatch = OnceStopwatch()
    assert bench.time(config_of(ACTIVATIONS=form), "serial", 5, 3, 40) == [1.0] * 3
    launches = [one for one in bench.made if one.function != "meet"]
    found = [struct.unpack_from("<i", one.arguments, mirror.ROLES)[0] for one in launches]
    assert found == [
        mirror.COMMUNICATE,
        mirror.COMMUNICATE,
        roles,
    ]  # the first brings rows before anything is timed


@pytest.mark.parametrize("form", ["indexed", "gathered"])
def test_a_push_breaks_no_rule(form):
    space = family("dispatch_gemm").space(PROBLEM.replace(pad=64), DEVICE)
    assert space.broken(config_of(ACTIVATIONS=form)) == []


def test_blocks_that_push_wait_for_nobody_and_hold_their_seats():
    model = family("dispatch_gemm").roles(config_of(), PROBLEM, DEVICE)
    assert broken_rules(model) == []
    gemm, push = model.roles
    assert [(w.word, w.supplier, w.scope) for w in gemm.waits] == [("flag", "push", "peer")]
    assert (push.name, push.waits, push.resident) == ("push", (), True)
    assert "push" in model.protocol


@pytest.mark.parametrize("changes", [{}, {"push_sms": 16}, {"num_comm_sms": 1}, {"num_comm_sms": 131}])
def test_blocks_that_scatter_wait_for_peers_that_push_and_become_compute(changes):
    model = family("dispatch_gemm").roles(config_of(ACTIVATIONS="gathered", **changes), PROBLEM, DEVICE)
    assert broken_rules(model) == []
    gemm, push, scatter = model.roles
    assert [(w.word, w.supplier, w.scope) for w in gemm.waits] == [("arrivals", "scatter", "local")]
    assert (push.waits, push.becomes) == ((), "scatter")
    assert [(w.word, w.supplier, w.scope) for w in scatter.waits] == [("flag", "push", "peer")]
    started = [role for role in model.roles if not role.taken_up]
    assert sum(role.blocks for role in started) == DEVICE.sm_count
    assert all(role.resident for role in started)


def test_blocks_that_would_scatter_before_they_push_are_a_circle():
    model = family("dispatch_gemm").roles(config_of(ACTIVATIONS="gathered"), PROBLEM, DEVICE)
    gemm, push, scatter = model.roles
    turned = dataclasses.replace(push, waits=(Wait("staged", "scatter"),))
    circle = dataclasses.replace(model, roles=(gemm, turned, scatter))
    assert "D3" in [broken.rule for broken in broken_rules(circle)]


def test_a_push_without_its_tables_or_a_place_for_rows_is_refused():
    pulled = DeviceTables(PROBLEM, 64, torch.device("cpu"))
    pushed = DeviceTables(PROBLEM, 64, torch.device("cpu"), pushes=True)
    for tables, pushing in ((pulled, object()), (pushed, None)):
        with pytest.raises(ProblemError, match="Use a config with TRANSPORT=pull"):
            fused_launch(None, config_of(), *[None] * 8, tables, pushing=pushing)
