"""The loaded operator on the CPU backend: ranks agree, rows match torch, and failures are sentences on every rank."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pair import RankPair

import tktune
from tktune.core.errors import (
    ArtifactError,
    LaunchFailed,
    ProblemError,
    RanksDisagree,
    RoutingError,
    WordsError,
)
from tktune.runtime.agree import unanimous
from tktune.runtime.cpu_operator import CpuOperator

ROOT = Path(__file__).resolve().parents[2]
SHAPE: dict[str, Any] = {"hidden": 128, "cols": 128, "experts": 4, "top_k": 2, "tokens": 32, "pad": 32}


@pytest.fixture(autouse=True)
def _own_places(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    shared = tmp_path_factory.getbasetemp() / "operator"
    shared.mkdir(exist_ok=True)
    monkeypatch.setenv("TKTUNE_DB", f"sqlite:///{shared}/none.db")
    monkeypatch.setenv("TKTUNE_CACHE_DIR", str(shared / "cache"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    tktune.lookup.cache_clear()


def distinct_ids(tokens: int, experts: int, top_k: int, seed: int) -> torch.Tensor:
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed))
    return scores.topk(top_k, dim=1).indices


def bf16(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPair]:
    made = RankPair(tmp_path_factory.mktemp("pair"))
    yield made
    made.close()


def test_two_ranks_of_the_example_match_torch() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "two_ranks.py"), "--rounds", "2", "--tokens", "64", "--hidden", "128", "--pad", "32",
         "--device", "cpu"],
        capture_output=True, text=True, timeout=110, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("largest relative error") == 2


@pytest.mark.parametrize("layout", ["ekn", "enk"])
def test_a_grouped_gemm_matches_torch_and_its_plan_replays_bit_identically(layout: str) -> None:
    op = tktune.load("grouped_gemm", **SHAPE, weight_layout=layout, device="cpu", build=True)
    ids = distinct_ids(SHAPE["tokens"], SHAPE["experts"], SHAPE["top_k"], 0)
    plan = op.plan(ids)
    x = bf16(SHAPE["tokens"], SHAPE["hidden"], seed=1)
    weights = bf16(SHAPE["experts"], SHAPE["hidden"], SHAPE["cols"], seed=2)
    packed = torch.zeros(plan.rows, SHAPE["hidden"], dtype=torch.bfloat16)
    real = plan.tables.slot_token >= 0
    packed[real] = x[plan.tables.slot_token[real].long()]
    given = weights if layout == "ekn" else weights.transpose(1, 2).contiguous()
    first, again = op(packed, given, plan).clone(), op(packed, given, plan)
    for token in range(SHAPE["tokens"]):
        for i in range(SHAPE["top_k"]):
            expected = x[token].float() @ weights[ids[token, i]].float()
            slot = plan.slots[0, token, i]
            assert (first[slot].float() - expected).norm() < 1e-2 * expected.norm()
            assert torch.equal(first[slot], again[slot])
    op.close()


def test_a_missing_artifact_names_the_way_out() -> None:
    with pytest.raises(ArtifactError, match="build=True"):
        tktune.load("grouped_gemm", **{**SHAPE, "experts": 2}, device="cpu")


def test_wrong_tensors_get_a_sentence() -> None:
    op = tktune.load("grouped_gemm", **SHAPE, device="cpu", build=True)
    plan = op.plan(distinct_ids(SHAPE["tokens"], SHAPE["experts"], SHAPE["top_k"], 0))
    rows = torch.zeros(plan.rows, SHAPE["hidden"], dtype=torch.bfloat16)
    weights = torch.zeros(SHAPE["experts"], SHAPE["hidden"], SHAPE["cols"], dtype=torch.bfloat16)
    with pytest.raises(ProblemError, match="weights is"):
        op(rows, weights[:1], plan)
    with pytest.raises(ProblemError, match=r"x is .*float32"):
        op(rows.float(), weights, plan)
    with pytest.raises(ProblemError, match="x is"):
        op(rows[: plan.rows - 1], weights, plan)
    with pytest.raises(ProblemError, match="not contiguous"):
        op(rows, weights, plan, out=torch.zeros(SHAPE["cols"], op.capacity, dtype=torch.bfloat16).T)
    with pytest.raises(RoutingError, match="twice"):
        op.plan(torch.zeros(SHAPE["tokens"], SHAPE["top_k"], dtype=torch.long))
    with pytest.raises(RoutingError, match="outside"):
        op.plan(torch.arange(SHAPE["tokens"] * SHAPE["top_k"]).reshape(SHAPE["tokens"], -1))
    with pytest.raises(RoutingError, match="asks for"):
        op.plan(torch.zeros(3, SHAPE["top_k"], dtype=torch.long))
    op.close()


def _zero_copy(rank: int) -> None:
    op = tktune.load("dispatch_gemm", **SHAPE, group=dist.group.WORLD, device="cpu", build=True)
    ids = distinct_ids(SHAPE["tokens"], SHAPE["experts"], SHAPE["top_k"], rank)
    plan = op.plan(ids)
    weights = bf16(SHAPE["experts"] // 2, SHAPE["hidden"], SHAPE["cols"], seed=9)
    out = torch.empty(op.capacity, SHAPE["cols"], dtype=torch.bfloat16)
    for round_ in range(20):
        x = bf16(SHAPE["tokens"], SHAPE["hidden"], seed=100 * round_ + rank)
        copied = op(x, weights, plan).clone()
        op.input.copy_(x)
        assert op(op.input, weights, plan, out=out) is out
        real = plan.tables.slot_token >= 0
        assert torch.equal(copied[: plan.rows][real], out[: plan.rows][real])
    op.close()


def test_rows_written_to_the_operators_input_need_no_copy(pair: RankPair) -> None:
    pair.run(_zero_copy)


def _one_rank_has_wrong_ids(rank: int) -> None:
    op = tktune.load("dispatch_gemm", **SHAPE, group=dist.group.WORLD, device="cpu", build=True)
    ids = distinct_ids(SHAPE["tokens"], SHAPE["experts"], SHAPE["top_k"], rank)
    with pytest.raises(RoutingError if rank else RanksDisagree, match="outside"):
        op.plan(ids + rank)
    op.close()


def test_wrong_ids_on_one_rank_raise_on_all(pair: RankPair) -> None:
    pair.run(_one_rank_has_wrong_ids)


def _one_rank_has_no_artifact(rank: int, cache: str) -> None:
    tktune.load("dispatch_gemm", **SHAPE, group=dist.group.WORLD, device="cpu", build=True).close()
    place = Path(cache) if rank else None
    with pytest.raises((ArtifactError, RanksDisagree)):
        tktune.load("dispatch_gemm", **SHAPE, group=dist.group.WORLD, device="cpu", cache=place, build=False)


def test_an_artifact_missing_on_one_rank_raises_on_all(pair: RankPair, tmp_path: Path) -> None:
    pair.run(_one_rank_has_no_artifact, str(tmp_path / "empty"))


def _a_peer_does_not_come(rank: int) -> None:
    op = tktune.load(
        "dispatch_gemm", **SHAPE, group=dist.group.WORLD, device="cpu", build=True, spin_limit_s=0.2
    )
    plan = op.plan(distinct_ids(SHAPE["tokens"], SHAPE["experts"], SHAPE["top_k"], rank))
    weights = torch.zeros(SHAPE["experts"] // 2, SHAPE["hidden"], SHAPE["cols"], dtype=torch.bfloat16)
    if rank == 0:
        with pytest.raises(LaunchFailed, match="waited for"):
            op(op.input, weights, plan)
    dist.barrier()
    op.close()


def test_a_peer_that_does_not_come_is_a_sentence_and_no_hang(pair: RankPair) -> None:
    pair.run(_a_peer_does_not_come)


def _fails_on_rank_one(rank: int) -> None:
    if rank:
        raise ValueError("no rows here")


def test_a_scenario_that_fails_fails_its_test(pair: RankPair) -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1: .*no rows here"):
        pair.run(_fails_on_rank_one)
    assert not pair.living


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), 1e12])
def test_a_spin_limit_that_bounds_nothing_is_refused(seconds: float) -> None:
    with pytest.raises(WordsError, match="bounds no wait"):
        tktune.load("grouped_gemm", **SHAPE, device="cpu", build=True, spin_limit_s=seconds)


def _one_passes_a_capacity(rank: int) -> None:
    words = {"capacity": 64} if rank else {}
    with pytest.raises(WordsError if rank else RanksDisagree, match="takes no capacity"):
        tktune.load("dispatch_gemm", **SHAPE, group=dist.group.WORLD, device="cpu", build=True, **words)


def _capacities_differ(rank: int) -> None:
    with pytest.raises(
        RanksDisagree, match=r"capacities \(rank 0: 64, rank 1: 65\)\. Pass the same capacity"
    ):
        unanimous(
            dist.group.WORLD, "capacities", str(64 + rank), way_out="Pass the same capacity on all ranks."
        )


def _one_artifact_is_gone(rank: int, path: str) -> None:
    choice = tktune.lookup("dispatch_gemm", **SHAPE, world=2, device="cpu")
    with pytest.raises(RanksDisagree if rank else ArtifactError, match="cannot be read: No such file"):
        CpuOperator(
            choice, Path(path) if rank else Path(f"{path}.gone"), SHA256_OF_NOTHING, dist.group.WORLD, 1.0
        )


SHA256_OF_NOTHING = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_a_word_that_one_rank_gets_wrong_raises_on_all(pair: RankPair, tmp_path: Path) -> None:
    pair.run(_one_passes_a_capacity)
    pair.run(_capacities_differ)
    (tmp_path / "empty").touch()
    pair.run(_one_artifact_is_gone, str(tmp_path / "empty"))
