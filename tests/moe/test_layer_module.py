"""FusedMoE with kernels on the CPU backend, two ranks in processes of their own, against the float64 reference."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layer_ranks import Inputs, assert_right, on_two_ranks, routed

import tktune
from tktune.core.errors import ProblemError, RanksDisagree, RoutingError
from tktune.moe import FusedMoE

ROOT = Path(__file__).resolve().parents[2]
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, TOKENS, PAD = 64, 32, 8, 2, 24, 16


@pytest.fixture(autouse=True)
def _own_places(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    shared = tmp_path_factory.getbasetemp() / "layer_module"
    shared.mkdir(exist_ok=True)
    monkeypatch.setenv("TKTUNE_DB", f"sqlite:///{shared}/none.db")
    monkeypatch.setenv("TKTUNE_CACHE_DIR", str(shared / "cache"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    tktune.lookup.cache_clear()


def fused(inputs: Inputs, **words: Any) -> FusedMoE:
    given = {"top_k": TOP_K, "tokens": TOKENS, "pad": PAD, "device": "cpu", "build": True, "fallback": False}
    w13, w2 = inputs.w13, inputs.down
    if words.get("weight_layout") == "ekn":
        w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
    return FusedMoE.from_weights(w13, w2, experts=inputs.experts, **{**given, **words})


def on_group(inputs: Inputs, **words: Any) -> FusedMoE:
    return fused(inputs, group=dist.group.WORLD, **words)


def checked(moe: FusedMoE, inputs: Inputs, kind: str, count: int, seed: int, rank: int) -> torch.Tensor:
    """One call with `count` tokens, compared with the reference."""
    x = inputs.tokens(count, seed, rank)
    ids, weights = routed(kind, count, inputs.experts, moe.top_k, 31 * seed + rank)
    y = moe(x, ids, weights)
    moe.check()
    assert_right(y, inputs, x, ids, weights)
    return y


def _routings(rank: int) -> None:
    inputs = Inputs(HIDDEN, INTERMEDIATE, EXPERTS)
    moe = on_group(inputs)
    assert moe.operator.packs
    for seed, kind in enumerate(("uniform", "hot", "first", "second", "both", "ragged")):
        checked(moe, inputs, kind, TOKENS, seed, rank)
    for seed, counts in enumerate([(0, TOKENS), (TOKENS, 0), (3, 20), (0, 0), (1, 0)]):
        checked(moe, inputs, "uniform", counts[rank], 50 + seed, rank)
    checked(moe, inputs, "second", (0, 5)[rank], 60, rank)  # rank 0 has neither tokens nor rows
    moe.close()


def test_tokens_go_to_one_rank_the_other_or_both_and_ranks_may_have_none(tmp_path: Path) -> None:
    on_two_ranks(_routings, tmp_path)


def _rounds(rank: int) -> None:
    inputs = Inputs(HIDDEN, INTERMEDIATE, EXPERTS)
    moe = on_group(inputs)
    late = torch.Generator().manual_seed(rank)
    for kind in ("uniform", "hot", "both"):
        for number in range(100):
            if torch.rand(1, generator=late) < 0.1:
                time.sleep(float(torch.rand(1, generator=late)) * 0.004)
            count = TOKENS if number % 5 else int(torch.randint(0, TOKENS + 1, (1,), generator=late))
            x = inputs.tokens(count, number, rank)
            ids, weights = routed(kind, count, EXPERTS, TOP_K, 1000 + 2 * number + rank)
            y = moe(x, ids, weights)
            if number % 10 == 0:
                assert_right(y, inputs, x, ids, weights)
                again = moe(x, ids, weights)
                assert torch.equal(again.view(torch.int16), y.view(torch.int16)), "the same bits each time"
            elif count:
                assert torch.isfinite(y).all()
    moe.close()


@pytest.mark.timeout(300)
def test_a_hundred_rounds_of_three_routings_with_random_delays(tmp_path: Path) -> None:
    on_two_ranks(_rounds, tmp_path)


def _one_expert_a_token(rank: int) -> None:
    inputs = Inputs(HIDDEN, INTERMEDIATE, EXPERTS)
    moe = on_group(inputs, top_k=1)
    for seed, kind in enumerate(("uniform", "first", "second")):
        checked(moe, inputs, kind, TOKENS, seed, rank)
    moe.close()


def test_one_expert_a_token(tmp_path: Path) -> None:
    on_two_ranks(_one_expert_a_token, tmp_path)


def _weights_of_zero(rank: int) -> None:
    inputs = Inputs(HIDDEN, INTERMEDIATE, EXPERTS)
    moe = on_group(inputs)
    x = inputs.tokens(TOKENS, 0, rank)
    ids, weights = routed("uniform", TOKENS, EXPERTS, TOP_K, rank)
    weights[: TOKENS // 2] = 0.0
    y = moe(x, ids, weights)
    assert_right(y, inputs, x, ids, weights)
    assert not y[: TOKENS // 2].any()
    assert torch.equal(moe(x, ids, weights.double()), y) and torch.equal(moe(x, ids.int(), weights), y)
    moe.close()


def test_weights_of_zero_and_other_dtypes(tmp_path: Path) -> None:
    on_two_ranks(_weights_of_zero, tmp_path)


def _no_expert(rank: int) -> None:
    inputs = Inputs(HIDDEN, INTERMEDIATE, EXPERTS)
    moe = on_group(inputs)
    x = inputs.tokens(TOKENS, 0, rank)
    ids, weights = routed("uniform", TOKENS, EXPERTS, TOP_K, rank)
    ids[::3] = -1
    ids[1::3, 1] = -1
    assert_right(moe(x, ids, weights), inputs, x, ids, weights)
    wrong = ids.clone()
    if rank:
        wrong[0] = torch.tensor([EXPERTS, 0])
    with pytest.raises(RoutingError if rank else RanksDisagree, match="outside"):
        moe(x, wrong, weights)
    assert_right(moe(x, ids, weights), inputs, x, ids, weights)
    moe.close()


def test_minus_one_is_no_expert_and_other_wrong_ids_raise_on_all_ranks(tmp_path: Path) -> None:
    on_two_ranks(_no_expert, tmp_path)


def _layers_share(rank: int) -> None:
    one, other = Inputs(HIDDEN, INTERMEDIATE, EXPERTS, seed=1), Inputs(HIDDEN, INTERMEDIATE, EXPERTS, seed=2)
    first = on_group(one)
    second = on_group(other, like=first)
    assert second.operator is first.operator
    for seed in range(3):
        checked(first, one, "uniform", TOKENS, seed, rank)
        checked(second, other, "uniform", TOKENS, seed, rank)
    with pytest.raises(ProblemError, match="layer to share with"):
        on_group(Inputs(HIDDEN, INTERMEDIATE, 2 * EXPERTS), like=first)
    first.close()


def test_layers_of_one_shape_share_buffers(tmp_path: Path) -> None:
    on_two_ranks(_layers_share, tmp_path)


def _artifact_on_one_rank(rank: int, empty: str) -> None:
    inputs = Inputs(HIDDEN, INTERMEDIATE, EXPERTS)
    on_group(inputs).close()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        moe = on_group(inputs, build=False, fallback=True, cache=Path(empty) if rank else None)
    assert not moe.operator.packs and any("plain torch" in str(one.message) for one in said)
    checked(moe, inputs, "uniform", TOKENS, 0, rank)
    moe.close()


def test_when_one_rank_has_no_artifact_all_run_plain_torch(tmp_path: Path) -> None:
    on_two_ranks(_artifact_on_one_rank, tmp_path, str(tmp_path / "empty"))


@pytest.mark.parametrize("layout", ["enk", "ekn"])
def test_one_rank_alone_in_both_layouts(layout: str) -> None:
    inputs = Inputs(HIDDEN, INTERMEDIATE, EXPERTS)
    moe = fused(inputs, weight_layout=layout)
    out = torch.full((TOKENS, HIDDEN), 7.0, dtype=torch.bfloat16)
    x = inputs.tokens(TOKENS, 1, 0)
    ids, weights = routed("uniform", TOKENS, EXPERTS, TOP_K, 1)
    assert moe(x, ids, weights, out) is out
    assert_right(out, inputs, x, ids, weights)
    few = torch.empty(5, HIDDEN, dtype=torch.bfloat16)
    assert moe(x[:5], ids[:5], weights[:5], few) is few
    assert torch.equal(few, out[:5])
    moe.close()


def test_a_state_dict_holds_plain_weights_and_fits_layers_of_either_kind() -> None:
    inputs, others = Inputs(HIDDEN, INTERMEDIATE, EXPERTS), Inputs(HIDDEN, INTERMEDIATE, EXPERTS, seed=5)
    moe, copy = fused(inputs), fused(others)
    state = moe.state_dict()
    assert torch.equal(state["w13"], inputs.w13) and torch.equal(state["w2"], inputs.down)
    assert not torch.equal(moe.w13, inputs.w13), "the kernels' form is another"
    address = copy.w13.data_ptr()
    copy.load_state_dict(state)
    assert copy.w13.data_ptr() == address and torch.equal(copy.w13, moe.w13)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = FusedMoE.from_weights(
            others.w13,
            others.down,
            top_k=TOP_K,
            tokens=TOKENS,
            pad=PAD,
            device="cpu",
            cache=Path("/nonexistent"),
        )
    assert not plain.operator.packs
    plain.load_state_dict(state)
    assert torch.equal(plain.w13, inputs.w13)
    for one in (moe, copy, plain):
        one.close()


def test_a_compiled_layer_is_one_operation_and_gives_the_same_bits() -> None:
    inputs = Inputs(HIDDEN, INTERMEDIATE, EXPERTS)
    moe = fused(inputs)
    x = inputs.tokens(TOKENS, 2, 0)
    ids, weights = routed("uniform", TOKENS, EXPERTS, TOP_K, 2)

    def around(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return moe(moe(x * 2, ids, weights), ids, weights) + 1

    expected = around(x, ids, weights)
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs_: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    with torch.no_grad():
        found = torch.compile(around, backend=backend, fullgraph=True)(x, ids, weights)
        functional = torch.compile(around, backend="aot_eager", fullgraph=True)(x, ids, weights)
    assert torch.equal(found, expected) and torch.equal(functional, expected)
    assert sum("moe_layer" in name for name in seen) == 2
    number = moe.operator.number
    moe.close()
    with pytest.raises(ProblemError, match=f"Operator {number} was closed"):
        torch.ops.tktune.moe_layer(
            x, ids, weights, moe.w13, moe.w2, x.clone(), moe.operator.workspace, number
        )


def test_the_example_matches_torch_on_two_ranks() -> None:
    words = [
        "--rounds",
        "2",
        "--tokens",
        "48",
        "--hidden",
        "64",
        "--intermediate",
        "32",
        "--pad",
        "16",
        "--device",
        "cpu",
    ]
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "moe_layer.py"), *words],
        capture_output=True, text=True, timeout=110, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("largest relative error") == 2
