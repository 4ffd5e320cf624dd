"""The dispatch operator as far as it can be judged without a GPU: its plan, its library form, what ranks share beside
their GPUs, and the words it refuses.
"""

from __future__ import annotations

import multiprocessing
import os
import types
from pathlib import Path

import pytest
import torch

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed (the extra `cuda`)")

from tktune.core import tables
from tktune.core.errors import ProblemError, RanksDisagree, TktuneError
from tktune.core.problem import Problem
from tktune.core.routing import parse_routing
from tktune.families.dispatch_gemm.tables_cuda import DeviceTables
from tktune.runtime import cuda_dispatch_library, cuda_exchange
from tktune.runtime.cuda_dispatch_operator import CudaDispatchOperator
from tktune.runtime.cuda_dispatch_plan import CudaDispatchPlan
from tktune.runtime.cuda_ranks_operator import capacity_of

CPU = torch.device("cpu")
PROBLEM = Problem("dispatch_gemm", 32, 16, 8, 3, 20, world=2, pad=16)


def filled(problem, ids, rank, capacity=None):
    """Device tables as the table kernel leaves them; everything it does not write holds junk."""
    made = DeviceTables(problem, problem.capacity_rows if capacity is None else capacity, CPU)
    made.memory.fill_(-99)
    golden = tables.build(ids, problem, rank)
    made.view("words").copy_(torch.tensor([golden.rows, golden.num_pad_blocks, len(golden.pull_tokens)]))
    for name in (
        "counts",
        "base",
        "slots",
        "pull_indices",
        "block_expert",
        "slack",
        "own_slack",
        "pull_tokens",
        "pull_slots",
    ):
        table = torch.as_tensor(getattr(golden, name))
        made.view(name)[: len(table)] = table
    made.view("job_order")[: len(golden.job_order)] = torch.as_tensor(golden.job_order)
    return made, golden


@pytest.mark.parametrize("routing", ["uniform", "empty:0", "empty:4,5,6,7", "one:3", "zipf:1.4"])
def test_tables_read_from_the_device_are_the_golden_ones(routing):
    problem = PROBLEM if routing != "empty:4,5,6,7" else Problem("dispatch_gemm", 32, 16, 8, 2, 20, world=2)
    ids = parse_routing(routing).draw(problem, 3)
    for rank in range(2):
        made, golden = filled(problem, ids, rank)
        assert made.schedule(rank).numpy().digest == golden.digest
        plan = CudaDispatchPlan(made, rank)
        assert plan.tables.numpy().digest == golden.digest
        assert plan.rows == golden.rows
        assert torch.equal(plan.slots, torch.as_tensor(golden.slots))
        assert plan.address == plan.memory.data_ptr()


def test_tables_lie_apart_and_on_sixteen_bytes():
    made = DeviceTables(PROBLEM, 64, CPU)
    start = made.memory.data_ptr()
    for number, name in enumerate(made.at):
        made.view(name).fill_(number)
        assert (made.at[name] - start) % 16 == 0
    for number, name in enumerate(made.at):
        assert (made.view(name) == number).all(), name
        assert made.view(name).data_ptr() == made.at[name] - start + start
    assert made.view("slack").numel() == 64 // PROBLEM.pad


class TorchOperator(CudaDispatchOperator):
    """The operator of one rank alone, whose launch is torch on the CPU."""

    def __init__(self):
        self.problem = Problem("dispatch_gemm", 32, 16, 4, 2, 20, world=1, pad=16)
        self.capacity = self.problem.capacity_rows
        self._out_shape = (self.capacity, 16)
        self._seat = types.SimpleNamespace(device=CPU, rank=0, index=0)
        self._make_out = lambda: torch.empty(self._out_shape, dtype=torch.bfloat16)
        self._input = torch.zeros(20, 32, dtype=torch.bfloat16)
        self.plans = self.calls = 0
        self.number = cuda_dispatch_library.enter(self)

    def enqueue_plan(self, ids, memory):
        self.plans += 1
        memory.copy_(filled(self.problem, ids[None].numpy(), 0)[0].memory)

    def enqueue(self, x, weights, out, memory):
        self.calls += 1
        out.zero_()
        held = DeviceTables(self.problem, self.capacity, CPU, memory)
        rows, blocks, _ = held.used()
        where = held.view("pull_indices")[:rows]
        for block, expert in enumerate(held.view("block_expert")[:blocks].tolist()):
            part = slice(16 * block, 16 * block + 16)
            out[part] = x[where[part, 1].clamp(min=0)] @ weights[expert]


@pytest.fixture
def called():
    library = torch.library.Library("tktune", "IMPL")
    library.impl("dispatch_gemm", cuda_dispatch_library.launch_by_number, "CPU")
    library.impl("dispatch_plan", cuda_dispatch_library.plan_by_number, "CPU")
    operator = TorchOperator()
    made, _ = filled(operator.problem, parse_routing("uniform").draw(operator.problem, 1), 0)
    plan = CudaDispatchPlan(made, 0)
    yield operator, torch.randn(20, 32).bfloat16(), torch.randn(4, 32, 16).bfloat16(), plan
    cuda_dispatch_library.leave(operator.number)
    library._destroy()


def test_a_compiled_call_gives_what_an_eager_one_gives(called):
    operator, x, weights, plan = called
    eager = operator(x, weights, plan)

    def step(x, weights):
        return operator(x, weights, plan) * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, weights), eager * 2)
    assert operator.calls == 2
    assert torch.equal(compiled(x + 1, weights), step(x + 1, weights))


def test_a_compiled_step_plans_anew_for_its_ids(called):
    operator, x, weights, plan = called

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(ids, x, weights):
        operator.plan(ids, plan)
        return operator(x, weights, plan) * 2

    for seed in range(3):
        ids = torch.rand(20, 4, generator=torch.Generator().manual_seed(seed)).topk(2).indices
        found = step(ids, x, weights)
        operator.plan(ids, plan)
        assert torch.equal(found, operator(x, weights, plan) * 2)
    assert operator.plans == operator.calls == 6


def test_the_library_operator_keeps_its_promises(called):
    operator, x, weights, plan = called
    out = torch.empty(operator.capacity, 16, dtype=torch.bfloat16)
    arguments = (x, weights, out, plan.memory, operator.number)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    told = torch.library.opcheck(torch.ops.tktune.dispatch_gemm.default, arguments, test_utils=tests)
    assert set(told.values()) == {"SUCCESS"}
    ids = torch.rand(20, 4).topk(2).indices
    arguments = (ids, plan.memory, operator.number)
    told = torch.library.opcheck(torch.ops.tktune.dispatch_plan.default, arguments, test_utils=tests[:2])
    assert set(told.values()) == {"SUCCESS"}


def test_a_closed_operator_says_so(called):
    operator, x, weights, plan = called
    cuda_dispatch_library.leave(operator.number)
    with pytest.raises(ProblemError, match="was closed"):
        torch.ops.tktune.dispatch_gemm(x, weights, torch.empty(9), plan.memory, operator.number)
    operator._input = None
    with pytest.raises(ProblemError, match="was closed"):
        _ = operator.input


def test_a_capacity_is_whole_pad_blocks_and_never_more_than_the_worst():
    choice = types.SimpleNamespace(problem=PROBLEM)
    assert capacity_of(choice, None) == capacity_of(choice, 10**9) == PROBLEM.capacity_rows
    assert capacity_of(choice, 17) == 32
    with pytest.raises(ProblemError, match="no row"):
        capacity_of(choice, 0)


# Ranks that share files, each a process of its own.


def share(rank, rendezvous, broken, found):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    if rank == broken:
        real = os.open
        cuda_exchange.os = types.SimpleNamespace(**vars(os))
        cuda_exchange.os.open = lambda name, flags, mode: real("/nowhere/at/all", flags, mode)
    try:
        fds = cuda_exchange.shared_files(dist.group.WORLD)
    except TktuneError as error:
        found.put((rank, type(error).__name__, 0))
        os._exit(0)  # gloo's own end may abort a process whose peer has left in the middle
    os.pwrite(fds[rank], bytes([65 + rank]), 0)
    dist.barrier()
    found.put((rank, os.pread(fds[1 - rank], 1, 0).decode(), os.fstat(fds[0]).st_nlink))
    dist.barrier()
    os._exit(0)


def shared_by_two(tmp_path, broken):
    spawn = multiprocessing.get_context("spawn")
    found = spawn.SimpleQueue()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    ranks = [spawn.Process(target=share, args=(r, str(tmp_path / "meet"), broken, found)) for r in range(2)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(60)
        assert one.exitcode == 0
    return sorted(found.get() for _ in ranks)


def names_left():
    return sorted(Path("/dev/shm").glob("tktune-*"))


def test_ranks_share_files_that_have_no_name(tmp_path):
    before = names_left()
    assert shared_by_two(tmp_path, None) == [(0, "B", 0), (1, "A", 0)]
    assert names_left() == before


def test_a_rank_that_cannot_share_makes_all_of_them_raise(tmp_path):
    before = names_left()
    (first, second) = shared_by_two(tmp_path, 1)
    assert (first[1], second[1]) == (RanksDisagree.__name__, "GangError")
    assert names_left() == before


def test_a_rank_alone_shares_with_nobody():
    (fd,) = cuda_exchange.shared_files(None)
    assert os.pwrite(fd, b"x", 0) == 1
    os.close(fd)
    cuda_exchange.each_on_its_own_gpu(None, 0)
