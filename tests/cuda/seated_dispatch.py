"""A dispatch workbench of rank 1 of 2 without a GPU: buffers on the CPU, and launches that are whatever a test plays."""

from __future__ import annotations

import types

import torch

from tktune.families.cuda import ranks_workbench
from tktune.families.cuda.gemm_globals import Guard, View
from tktune.families.dispatch_gemm import launch_cuda
from tktune.families.dispatch_gemm.plan_cuda import Workspace

CPU = torch.device("cpu")


class Nothing:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


def seat(bench, problem, device, policy, smem_bytes=205216):
    """Give `bench`, made without its opening, all that a gate or a timing looks at but a stopwatch."""
    bench.seat = types.SimpleNamespace(device=device, rank=1, world=2, policy=policy)
    bench.problem, bench._index = problem, 0
    ekn = problem.weight_layout == "ekn"
    matrix = (problem.hidden, problem.cols) if ekn else (problem.cols, problem.hidden)
    stream = torch.Generator().manual_seed(3)
    bench._weights = torch.randn(problem.local_experts, *matrix, generator=stream).bfloat16() / 8
    bench._space = Workspace(problem, CPU)
    bench._plans, bench._kept_bytes = launch_cuda.OrderedDict(), 1 << 30
    tokens, hidden = problem.tokens, problem.hidden
    bench._everyone = torch.zeros(2 * tokens, hidden, dtype=torch.bfloat16)
    bench._x, bench._section_bytes = bench._everyone[tokens:], tokens * hidden * 2
    bench._maps, bench._patient = None, Guard(9.0, rank=1)
    bench._control = types.SimpleNamespace(guard=Guard(1.0), launching=Nothing)
    bench._memory = types.SimpleNamespace(addresses=lambda offset: (0x1000 + offset, 0x2000 + offset))
    bench._sequence = torch.zeros(1, dtype=torch.int64)
    facts = types.SimpleNamespace(cluster=1, threads=384, smem_bytes=smem_bytes)
    bench._module = types.SimpleNamespace(
        facts=facts, smem_bytes=232448, function="fused", meet="meet", glu_pass="glu"
    )


def play(monkeypatch, launch, *modules):
    """Let `launch` stand for `Launch` in the workbench and `modules`, and let a stream be nothing to wait for."""
    for module in (launch_cuda, ranks_workbench, *modules):
        monkeypatch.setattr(module, "Launch", launch)
    view = lambda maps, m, box: View(bytes(128), m.data_ptr(), *m.shape[-2:])  # noqa: E731
    monkeypatch.setattr(launch_cuda, "matrix_view", view)
    monkeypatch.setattr(launch_cuda, "current_stream", lambda index: 0)
    monkeypatch.setattr(launch_cuda, "synchronize", lambda stream: None)
