"""The loaded combine on the CPU backend: a whole expert layer over two ranks against plain torch, one schedule for both
GEMMs, and sentences on every rank when one of them is wrong.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import tktune
from tktune.core.errors import ProblemError, RanksDisagree, RoutingError
from tktune.families.gemm_combine.inputs import combine_tolerance

ROUTING: dict[str, Any] = {"experts": 4, "top_k": 2, "tokens": 32, "pad": 32}
FIRST = {**ROUTING, "hidden": 96, "cols": 128}
SECOND = {**ROUTING, "hidden": 128, "cols": 192}


@pytest.fixture(autouse=True)
def _own_places(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    shared = tmp_path_factory.getbasetemp() / "combine_operator"
    shared.mkdir(exist_ok=True)
    monkeypatch.setenv("TKTUNE_DB", f"sqlite:///{shared}/none.db")
    monkeypatch.setenv("TKTUNE_CACHE_DIR", str(shared / "cache"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    tktune.lookup.cache_clear()


def ids_of(problem: Any, seed: int, kind: str = "") -> torch.Tensor:
    scores = torch.rand(problem.tokens, problem.experts, generator=torch.Generator().manual_seed(seed))
    if kind == "first rank":  # all rows of all tokens are held by rank 0
        scores[:, problem.local_experts :] = -1
    if kind == "one each":
        return torch.stack([torch.arange(problem.tokens) % 2, torch.arange(problem.tokens) % 2 + 2], 1)
    return scores.topk(problem.top_k, dim=1).indices


def topk_weights_of(problem: Any, seed: int) -> torch.Tensor:
    weights = torch.rand(problem.tokens, problem.top_k, generator=torch.Generator().manual_seed(seed))
    weights[seed % problem.tokens] = 0  # a token that gets nothing
    return weights


def bf16(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).mul(scale).to(torch.bfloat16)


def on_two_ranks(scenario: Any, tmp_path: Path, *words: Any) -> None:
    mp.spawn(_rank, args=(scenario, str(tmp_path / "rendezvous"), words), nprocs=2)


def _rank(rank: int, scenario: Any, rendezvous: str, words: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    scenario(rank, *words)
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def expected(rows: torch.Tensor, weights: Any, ids: torch.Tensor, topk_weights: torch.Tensor) -> Any:
    """Sums and the norms of their magnitudes; `rows[t, x]` is what expert `ids[t, x]` is given, `weights(e)` (K, N)."""
    total = torch.zeros(len(ids), weights(0).shape[1])
    size = torch.zeros_like(total)
    for token in range(len(ids)):
        for x, expert in enumerate(ids[token].tolist()):
            term = topk_weights[token, x] * (rows[token, x].float() @ weights(expert).float())
            total[token] += term
            size[token] += term.abs()
    return total, size.norm(dim=1)


def near(found: torch.Tensor, total: torch.Tensor, size: torch.Tensor, hidden: int) -> bool:
    return bool(((found.float() - total).norm(dim=1) <= combine_tolerance(hidden) * size + 1e-30).all())


@pytest.mark.parametrize("layout", ["ekn", "enk"])
def test_a_rank_alone_sums_its_tokens(layout: str) -> None:
    op = tktune.load("gemm_combine", **SECOND, weight_layout=layout, device="cpu", build=True)
    ids, topk_weights = ids_of(op.problem, 1), topk_weights_of(op.problem, 1)
    plan = op.plan(ids, topk_weights)
    rows = bf16(32, 2, 128, seed=2)
    packed = torch.full((plan.schedule.rows, 128), float("nan"), dtype=torch.bfloat16)
    packed[plan.schedule.slots[0].long()] = rows
    weights = bf16(4, 128, 192, seed=3)
    given = weights if layout == "ekn" else weights.transpose(1, 2).contiguous()
    y = op(packed, given, plan)
    assert near(y, *expected(rows, lambda e: weights[e], ids, topk_weights), 128)
    assert torch.equal(op(packed, given, plan), y) and (y[1] == 0).all()
    assert torch.equal(plan.topk_weights[0], topk_weights)
    op.close()


def _layer(rank: int, kind: str) -> None:
    group = dist.group.WORLD
    first = tktune.load("dispatch_gemm", **FIRST, group=group, device="cpu", build=True)
    second = tktune.load("gemm_combine", **SECOND, group=group, device="cpu", build=True)
    w1 = [bf16(2, 96, 128, seed=10 + r, scale=0.1) for r in range(2)]
    w2 = [bf16(2, 128, 192, seed=20 + r, scale=0.1) for r in range(2)]
    kept = None
    for seed in range(3):
        own = 7 * seed + rank
        ids, topk_weights = ids_of(first.problem, own, kind), topk_weights_of(first.problem, own)
        x = bf16(32, 96, seed=100 + own)
        schedule = first.plan(ids)
        shared = second.plan(None, topk_weights, schedule=schedule)
        alone = second.plan(ids, topk_weights.double())
        assert torch.equal(shared.schedule.slots, alone.schedule.slots)
        inner = first(x, w1[rank], schedule)
        y = second(inner, w2[rank], shared, out=kept)
        kept = torch.full_like(y, float("nan"))
        assert torch.equal(second(inner, w2[rank], alone), y)
        wanted = torch.stack([x[t] @ w1[e // 2][e % 2] for t in range(32) for e in ids[t]]).view(32, 2, 128)
        reference = expected(wanted, lambda e: w2[e // 2][e % 2], ids, topk_weights)
        total, size = reference
        assert (
            (y.float() - total).norm(dim=1) <= 2e-2 * size + 1e-30
        ).all()  # inner rows differ by a rounding
        again = second.plan(None, topk_weights, alone)
        assert again.schedule is alone.schedule and torch.equal(second(inner, w2[rank], again), y)
    second.close()
    first.close()


@pytest.mark.parametrize("kind", ["", "first rank", "one each"])
def test_two_ranks_run_a_layer_with_one_schedule(tmp_path: Path, kind: str) -> None:
    """Tokens whose experts are anywhere; all on one rank, which leaves the other without a row; one on each."""
    on_two_ranks(_layer, tmp_path, kind)


def _mistakes(rank: int) -> None:
    group = dist.group.WORLD
    op = tktune.load("gemm_combine", **SECOND, group=group, device="cpu", build=True)
    other = tktune.load("dispatch_gemm", **{**FIRST, "experts": 8}, group=group, device="cpu", build=True)
    ids, topk_weights = ids_of(op.problem, rank), topk_weights_of(op.problem, rank)
    with pytest.raises(RoutingError if rank else RanksDisagree, match="outside"):
        op.plan(ids + 3 * rank, topk_weights)
    with pytest.raises(RoutingError if rank else RanksDisagree, match="weights is"):
        op.plan(ids, topk_weights[: 32 - rank])
    with pytest.raises(ProblemError, match="operator's problem has"):
        op.plan(None, topk_weights, schedule=other.plan(ids))
    with pytest.raises(ProblemError, match="neither was"):
        op.plan(None, topk_weights)
    plan = op.plan(ids, topk_weights)
    rows = torch.zeros(plan.schedule.rows, 128, dtype=torch.bfloat16)
    weights = torch.zeros(2, 128, 192, dtype=torch.bfloat16)
    with pytest.raises(ProblemError, match="activations is"):
        op(rows[:-1], weights, plan)
    with pytest.raises(ProblemError, match="weights is"):
        op(rows, weights.float(), plan)
    with pytest.raises(ProblemError, match="not contiguous"):
        op(rows, weights, plan, out=torch.zeros(192, 32, dtype=torch.bfloat16).T)
    assert (op(rows, weights, plan) == 0).all()
    op.close()
    other.close()


def test_mistakes_are_told_on_every_rank_and_harm_nothing(tmp_path: Path) -> None:
    on_two_ranks(_mistakes, tmp_path)


def test_a_capacity_is_for_gpus() -> None:
    with pytest.raises(tktune.core.errors.WordsError, match="takes no capacity"):
        tktune.load("gemm_combine", **SECOND, device="cpu", build=True, capacity=64)
