"""The dispatch operator of a config that pushes, as far as no GPU is needed: what it lays out in symmetric memory, which tables
its plans have, what its launches are given, and how often ranks meet.
"""

from __future__ import annotations

import struct
import types

import pytest
import torch

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed (the extra `cuda`)")

from tktune.core import push_tables, tables
from tktune.core.device import device_class
from tktune.core.errors import ArtifactError, ProblemError
from tktune.core.problem import Problem
from tktune.core.routing import parse_routing
from tktune.families.base import family
from tktune.families.cuda import dispatch_globals as mirror
from tktune.families.cuda import plan_globals, push_globals
from tktune.families.cuda.gemm_globals import Guard, View
from tktune.families.cuda.symmetric import HEADER_BYTES
from tktune.families.dispatch_gemm import fused_launch, planner_cuda
from tktune.families.dispatch_gemm.push_cuda import Pushes
from tktune.families.dispatch_gemm.tables_cuda import DeviceTables
from tktune.runtime import cuda_dispatch_operator, cuda_ranks_operator
from tktune.runtime.cuda_dispatch_operator import CudaDispatchOperator
from tktune.runtime.cuda_dispatch_plan import CudaDispatchPlan

CPU = torch.device("cpu")
DEVICE = device_class("sm_90a")
PROBLEM = Problem("dispatch_gemm", 64, 64, 8, 3, 24, world=2, pad=64)
RANK, PEER = 1, 1 << 44
PUSHED = ("push_plan", "push_tokens", "push_blocks", "push_expected", "missing", "gate_sources")


class Memory:
    """This rank's symmetric memory in ordinary memory; the peer's lies elsewhere. Remembers what was asked of it."""

    def __init__(self, nbytes):
        self.bytes = torch.zeros(nbytes, dtype=torch.uint8)
        self.spans = []

    def addresses(self, offset=0):
        return PEER + offset, self.bytes.data_ptr() + offset

    def tensor(self, dtype, shape, offset=0):
        size = torch.Size(shape).numel() * dtype.itemsize
        assert offset % 16 == 0 and offset + size <= len(self.bytes)
        self.spans.append((offset, offset + size))
        return self.bytes[offset : offset + size].view(dtype).view(shape)


class Played:
    """Stands for `Launch`: keeps its words, and says when it is called."""

    def __init__(self, log, function, grid, threads, smem_bytes, arguments, kept=()):
        self.log, self.function, self.arguments = log, function, arguments
        log.made.append(self)

    def without_buffers(self, *kept):
        return self

    def __call__(self, stream):
        self.log.called.append(self.function)


def config_of(form, transport="push"):
    space = family("dispatch_gemm").space(PROBLEM, DEVICE)
    config = space.default.replace(ACTIVATIONS=form, TRANSPORT=transport)
    assert space.is_feasible(config)
    return config


@pytest.fixture
def opened(monkeypatch):
    """Makes the operator of a config, and its log of launches."""
    log = types.SimpleNamespace(made=[], called=[])
    for module in (fused_launch, planner_cuda, cuda_ranks_operator):
        monkeypatch.setattr(module, "Launch", lambda *words: Played(log, *words))
    view = lambda maps, m, box: View(bytes(128), m.data_ptr(), *m.shape[-2:])  # noqa: E731
    monkeypatch.setattr(fused_launch, "matrix_view", view)
    for module in (cuda_dispatch_operator, cuda_ranks_operator):
        monkeypatch.setattr(module, "current_stream", lambda index: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: None)
    monkeypatch.setattr(cuda_dispatch_operator, "verified", lambda path, sha256: b"")
    facts = types.SimpleNamespace(cluster=1, threads=384, smem_bytes=205216)

    def module_of(pushes):
        words = {
            "tktune_dispatch_plan_facts": [1, plan_globals.THREADS, plan_globals.GLOBALS_BYTES, 1],
            "tktune_dispatch_plan_pushes": [int(pushes)],
        }
        return types.SimpleNamespace(
            facts=facts, smem_bytes=232448, function="fused", meet="meet", glu_pass="glu", words=lambda n, _: words[n],
            entry=lambda name, nbytes: "plan", expect_world=lambda world, path: None,
        )  # fmt: skip

    def make(form, transport="push", built_for=None):
        config = config_of(form, transport)
        of_push = (built_for or transport) == "push"
        monkeypatch.setattr(cuda_dispatch_operator, "DispatchModule", lambda *_: module_of(of_push))
        one = CudaDispatchOperator.__new__(CudaDispatchOperator)
        one.choice = types.SimpleNamespace(config=config, device=DEVICE, problem=PROBLEM)
        one.problem, one.capacity, one.number = PROBLEM, PROBLEM.capacity_rows, 0
        memory = []

        def share(nbytes):
            memory.append(Memory(nbytes))
            one._seat.memory = memory[0]
            return memory[0]

        one._seat = types.SimpleNamespace(
            device=CPU,
            rank=RANK,
            index=0,
            share=share,
            memory=None,
            attach=lambda sms, s: Guard(s, rank=RANK),
        )
        one._load("none", "", 1.0)
        one._share()
        one._allocate()
        return one, memory[0]

    return make, log


FORMS = pytest.mark.parametrize("form", ["indexed", "gathered"])


@FORMS
def test_sections_plans_and_flags_lie_apart(opened, form):
    make, _ = opened
    operator, memory = make(form)
    section = 2 * PROBLEM.tokens * PROBLEM.hidden
    start = memory.bytes.data_ptr()
    rows, own, blocks, tokens = memory.spans
    assert operator.input.data_ptr() == start + own[0] == start + HEADER_BYTES + section
    assert rows[1] - rows[0] == 2 * section and own == (rows[0] + section, rows[1])
    plans = operator._regions[RANK] - start
    assert rows[1] <= plans and plans + plan_globals.region_bytes(PROBLEM) <= blocks[0]
    assert blocks[1] <= tokens[0] and tokens[1] <= len(memory.bytes)
    assert (blocks[1] - blocks[0], tokens[1] - tokens[0]) == push_globals.flag_bytes(PROBLEM)
    assert operator._token_rows == (PEER + rows[0], start + rows[0] + section)


@FORMS
def test_a_call_reads_the_pushes_of_its_plan_and_meets_before_it(opened, form):
    make, log = opened
    operator, memory = make(form)
    plan = operator.plan(torch.zeros(24, 3, dtype=torch.int32))
    assert log.called == ["plan"]
    at = plan.device_tables.at
    (made,) = [one for one in log.made if one.function == "plan"]
    fields = [field.name for field in plan_globals.fields(plan_globals.PlanAddresses)]
    words = struct.unpack_from(f"<{len(fields)}Q", made.arguments, plan_globals.FIRST_POINTER)
    named = dict(zip(fields, words, strict=True))
    assert [named[name] for name in PUSHED] == [at[name] for name in PUSHED]
    weights = torch.zeros(4, 64, 64, dtype=torch.bfloat16)
    out = torch.zeros(operator.capacity, 64, dtype=torch.bfloat16)
    operator(operator.input, weights, plan, out)
    assert log.called == ["plan", "meet", "fused", "meet"]
    (fused,) = [one for one in log.made if one.function == "fused"]
    assert len(fused.arguments) == push_globals.globals_bytes(2)
    part = fused.arguments[mirror.globals_bytes(2) :]
    assert list(struct.unpack_from("<6Q", part)) == [at[name] for name in PUSHED]
    assert struct.unpack_from("<Q", part, push_globals.SEQUENCE) == (operator._sequence.data_ptr(),)
    start, rows, flags = (
        memory.bytes.data_ptr(),
        memory.spans[0][0],
        memory.spans[2 + (form == "gathered")][0],
    )
    sections = struct.unpack_from("<QiiQii", part, push_globals.SECTIONS)
    assert sections == (PEER + rows, 48, 64, start + rows, 48, 64)
    said = struct.unpack_from("<2Qi", part, push_globals.SECTIONS + 32)
    assert said == (PEER + flags, start + flags, 4)
    (buffer,) = struct.unpack_from("<Q", fused.arguments, mirror.GATHERED)
    assert (buffer == start + rows) == (form == "indexed")
    tokens = struct.unpack_from("<QiiQii", fused.arguments, mirror.TOKENS)
    assert (tokens[0], tokens[3]) == operator._token_rows


def test_a_caller_with_meetings_of_its_own_still_gets_one_that_numbers_the_flags(opened):
    make, log = opened
    weights = torch.zeros(4, 64, 64, dtype=torch.bfloat16)
    for transport, called in (("push", ["meet", "fused"]), ("pull", ["fused"])):
        operator, _ = make("indexed", transport)
        plan = operator.plan(torch.zeros(24, 3, dtype=torch.int32))
        log.called.clear()
        out = torch.zeros(operator.capacity, 64, dtype=torch.bfloat16)
        operator.enqueue_between(weights, out, plan.memory)
        assert log.called == called


def test_a_pull_has_no_tables_of_pushes_and_no_flags(opened):
    make, _ = opened
    operator, memory = make("gathered", "pull")
    plan = operator.plan(torch.zeros(24, 3, dtype=torch.int32))
    assert not plan.device_tables.pushes and "push_plan" not in plan.device_tables.at
    assert len(memory.spans) == 2 and operator._pushing is None


def test_plans_of_the_other_way_are_refused(opened):
    make, _ = opened
    ids = torch.zeros(24, 3, dtype=torch.int32)
    pull, push = make("indexed", "pull")[0], make("indexed")[0]
    for one, other in ((pull, push), (push, pull)):
        with pytest.raises(ProblemError, match="another operator"):
            one.plan(ids, other.plan(ids))


def test_an_artifact_that_makes_no_tables_of_pushes_is_refused(opened):
    make, _ = opened
    with pytest.raises(ArtifactError, match=r"TRANSPORT=push"):
        make("indexed", "push", built_for="pull")


# Plans on the device.


@pytest.mark.parametrize("routing", ["uniform", "empty:4,5,6,7", "one:3"])
def test_a_schedule_with_pushes_is_one_for_whoever_reads_the_schedule_alone(routing):
    ids = parse_routing(routing).draw(PROBLEM, 3)
    made = DeviceTables(PROBLEM, PROBLEM.capacity_rows, CPU, pushes=True)
    made.memory.fill_(-99)
    golden = tables.build(ids, PROBLEM, RANK)
    made.view("words").copy_(torch.tensor([golden.rows, golden.num_pad_blocks, len(golden.pull_tokens)]))
    for name in ("counts", "base", "slots", "pull_indices", "block_expert", "slack", "own_slack"):
        made.view(name)[: len(getattr(golden, name))] = torch.as_tensor(getattr(golden, name))
    for name in ("pull_tokens", "pull_slots", "job_order"):
        made.view(name)[: len(getattr(golden, name))] = torch.as_tensor(getattr(golden, name))
    of_combine = PROBLEM.replace(family="gemm_combine", hidden=PROBLEM.cols, cols=PROBLEM.hidden)
    for problem in (PROBLEM, of_combine):  # whose operator reads the dispatch's schedule
        again = DeviceTables(problem, PROBLEM.capacity_rows, CPU, made.memory)
        assert again.pushes and again.at == made.at
        assert CudaDispatchPlan(again, RANK).tables.numpy().digest == golden.digest
    alone = DeviceTables(PROBLEM, PROBLEM.capacity_rows, CPU)
    offsets = {name: at - alone.memory.data_ptr() for name, at in alone.at.items()}
    assert offsets == {name: made.at[name] - made.memory.data_ptr() for name in alone.at}
    assert not DeviceTables(PROBLEM, PROBLEM.capacity_rows, CPU, alone.memory).pushes


@pytest.mark.parametrize("world", [1, 2, 8])
def test_there_is_room_for_the_pushes_of_any_routing(world):
    problem = Problem("dispatch_gemm", 64, 64, 2 * world, 2, 9, world=world, pad=8)
    made = DeviceTables(problem, problem.capacity_rows, CPU, pushes=True)
    for routing in ("uniform", "one:0", "zipf:1.2"):
        ids = parse_routing(routing).draw(problem, 3)
        for rank in range(world):
            golden = push_tables.build(ids, problem, rank)
            host = Pushes.of_ids(ids, problem, rank, CPU)
            views = Pushes.within(made, host)
            for name, table in vars(host).items():
                getattr(views, name).copy_(table)
            assert views.wrong_table(host) == "" and views.left_as_found()
            assert views.plan.tolist() == [*golden.offsets, golden.turns]
            if len(views.gate_sources):
                views.gate_sources[0] += 1
                assert views.wrong_table(host) == "gate_sources"
