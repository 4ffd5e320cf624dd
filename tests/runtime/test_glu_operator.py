"""`tktune.load` with a finish of "swiglu" on the CPU backend: from plain [gate | up] weights to rows that match torch."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import tktune
from tktune.core.errors import ProblemError
from tktune.runtime import operator as runtime
from tktune.runtime.cpu_operator import CpuOperator

SHAPE: dict[str, Any] = {"hidden": 128, "cols": 192, "experts": 4, "top_k": 2, "tokens": 40, "pad": 32}


@pytest.fixture(autouse=True)
def _own_places(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    shared = tmp_path_factory.getbasetemp() / "glu_operator"
    shared.mkdir(exist_ok=True)
    monkeypatch.setenv("TKTUNE_DB", f"sqlite:///{shared}/none.db")
    monkeypatch.setenv("TKTUNE_CACHE_DIR", str(shared / "cache"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    tktune.lookup.cache_clear()


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def loaded(layout: str, form: str, group: Any = None) -> Any:
    """The operator with this form, as a study might have found it."""
    world = 1 if group is None else dist.get_world_size(group)
    words = {**SHAPE, "weight_layout": layout, "finish": "swiglu"}
    choice = tktune.lookup("dispatch_gemm", world=world, device="cpu", **words)
    assert choice.config["GLU"] == "fused"
    choice = dataclasses.replace(choice, config=choice.config.replace(GLU=form))
    artifact = runtime._artifact(choice, Path(os.environ["TKTUNE_CACHE_DIR"]), True)
    return CpuOperator(choice, artifact.path, artifact.sha256, group, 20.0)


def check_rows(op: Any, rank: int, layout: str, rounds: int = 2) -> None:
    """Calls with fresh rows and ids against torch in fp32, all ranks' rows known to each."""
    problem = op.problem
    local, half = problem.local_experts, problem.out_cols
    plain = drawn(local, problem.hidden, problem.cols, seed=7 + rank).mul(problem.hidden**-0.5).bfloat16()
    laid = plain if layout == "ekn" else plain.transpose(1, 2).contiguous()
    weights = tktune.pack_glu(laid, layout)
    for round_ in range(rounds):
        x = [
            drawn(problem.tokens, problem.hidden, seed=100 * round_ + r).bfloat16()
            for r in range(problem.world)
        ]
        ids = [
            drawn(problem.tokens, problem.experts, seed=50 * round_ + r).topk(problem.top_k).indices
            for r in range(problem.world)
        ]
        plan = op.plan(ids[rank])
        out = op(x[rank], weights, plan)
        assert out.shape == (op.capacity, half)
        for source in range(problem.world):
            for token in range(problem.tokens):
                for i in range(problem.top_k):
                    slot = int(plan.slots[source, token, i])
                    if slot < 0:
                        continue
                    matrix = plain[int(ids[source][token, i]) - rank * local].float()
                    sums = x[source][token].float() @ matrix
                    wanted = torch.nn.functional.silu(sums[:half]) * sums[half:]
                    assert (out[slot].float() - wanted).norm() < 8e-3 * wanted.norm()


@pytest.mark.parametrize("layout", ["ekn", "enk"])
@pytest.mark.parametrize("form", ["fused", "separate"])
def test_one_rank_gives_silu_of_gate_times_up(layout: str, form: str) -> None:
    op = loaded(layout, form)
    check_rows(op, 0, layout)
    with pytest.raises(ProblemError, match="out is"):
        plan = op.plan(torch.arange(4).expand(40, 4)[:, :2])
        weights = torch.zeros(op.problem.local_experts, *((128, 192) if layout == "ekn" else (192, 128)))
        op(op.input, weights.bfloat16(), plan, torch.zeros(op.capacity, 192).bfloat16())
    op.close()


def _rank(rank: int, rendezvous: str, form: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    op = loaded("enk", form, dist.group.WORLD)
    check_rows(op, rank, "enk")
    op.close()
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("form", ["fused", "separate"])
def test_two_ranks_give_silu_of_gate_times_up(form: str, tmp_path: Path) -> None:
    mp.spawn(_rank, args=(str(tmp_path / "rendezvous"), form), nprocs=2)


def test_load_takes_the_finish_and_refuses_columns_that_cannot_be_packed() -> None:
    op = tktune.load("dispatch_gemm", **SHAPE, finish="swiglu", device="cpu", build=True)
    check_rows(op, 0, "ekn", rounds=1)
    op.close()
    with pytest.raises(ProblemError, match="not a multiple of 16"):
        tktune.load("dispatch_gemm", **{**SHAPE, "cols": 200}, finish="swiglu", device="cpu", build=True)
