"""Plain torch in a layer's place: right against the reference, chosen by all ranks together, with one warning."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layer_ranks import Inputs, assert_right, on_two_ranks, routed

import tktune
from tktune.core.errors import ArtifactError, ProblemError, RoutingError, WordsError
from tktune.moe import FusedMoE

SHAPE: dict[str, Any] = {"top_k": 2, "tokens": 24, "pad": 32, "device": "cpu"}


@pytest.fixture(autouse=True)
def _own_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TKTUNE_DB", f"sqlite:///{tmp_path}/none.db")
    monkeypatch.setenv("TKTUNE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    tktune.lookup.cache_clear()
    from tktune.moe import operator

    operator._warned.clear()


def quiet(inputs: Inputs, w13: torch.Tensor, w2: torch.Tensor, **words: Any) -> FusedMoE:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FusedMoE.from_weights(w13, w2, **{**SHAPE, **words})


@pytest.mark.parametrize("layout", ["enk", "ekn"])
def test_one_rank_in_plain_torch_matches_the_reference(layout: str) -> None:
    inputs = Inputs(64, 32, 8)
    w13, w2 = inputs.w13, inputs.down
    if layout == "ekn":
        w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
    moe = quiet(inputs, w13, w2, weight_layout=layout)
    for count in (24, 7, 1, 0):
        x = inputs.tokens(count, 1, 0)
        ids, weights = routed("uniform", count, 8, 2, count)
        assert_right(moe(x, ids, weights), inputs, x, ids, weights)


def _both_ranks(rank: int) -> None:
    inputs = Inputs(64, 32, 8)
    moe = quiet(inputs, inputs.w13, inputs.down, experts=8, group=dist.group.WORLD)
    assert not moe.operator.packs
    for number, kind in enumerate(("uniform", "first", "second", "both")):
        count = (24, 0)[rank] if number == 3 else 24
        x = inputs.tokens(count, number, rank)
        ids, weights = routed(kind, count, 8, 2, number + rank)
        assert_right(moe(x, ids, weights), inputs, x, ids, weights)
    moe.close()


def test_two_ranks_in_plain_torch_match_the_reference(tmp_path: Path) -> None:
    on_two_ranks(_both_ranks, tmp_path)


def test_it_is_said_once_and_says_the_way_out() -> None:
    inputs = Inputs(64, 32, 8)
    with pytest.warns(RuntimeWarning, match=r"plain torch.*build=True") as said:
        for _ in range(2):
            FusedMoE.from_weights(inputs.w13, inputs.down, **SHAPE)
    assert len([w for w in said if "plain torch" in str(w.message)]) == 1


def test_without_fallback_the_reason_is_raised() -> None:
    inputs = Inputs(64, 32, 8)
    with pytest.raises(ArtifactError, match="build=True"):
        FusedMoE.from_weights(inputs.w13, inputs.down, **SHAPE, fallback=False)


def test_a_device_that_is_not_there_falls_back() -> None:
    inputs = Inputs(64, 32, 8)
    with pytest.warns(RuntimeWarning, match="plain torch"):
        moe = FusedMoE.from_weights(inputs.w13, inputs.down, **{**SHAPE, "device": "sm_90a"})
    assert "Plain torch" in moe.operator.explain() and "plain torch" in repr(moe)


def test_wrong_weights_get_a_sentence() -> None:
    inputs = Inputs(64, 32, 8)
    w13, w2 = inputs.w13, inputs.down
    for wrong, match in (
        ((w13[:, :, :32], w2), "not the two matrices of one layer"),
        ((w13[0], w2), "need three"),
        ((w13.transpose(1, 2), w2.transpose(1, 2)), "weight_layout='ekn'"),
    ):
        with pytest.raises(ProblemError, match=match):
            quiet(inputs, *wrong)
    moe = quiet(inputs, w13, w2)
    with pytest.raises(ProblemError, match=r"w13 is \(4, 64, 64\)"):
        moe.load_weights(w13[:4], w2)
    with pytest.raises(ProblemError, match="takes bfloat16 weights"):
        moe.load_weights(w13.to(torch.int8), w2)
    for experts in (7, 9, 16):
        with pytest.raises(ProblemError, match="weights hold 8 experts"):
            quiet(inputs, w13, w2, experts=experts)


def test_a_layer_takes_wider_weights_and_rounds_them() -> None:
    inputs = Inputs(64, 32, 8)
    moe = quiet(inputs, inputs.w13.double(), inputs.down.float())
    assert moe.w13.dtype == moe.w2.dtype == torch.bfloat16
    assert torch.equal(moe.w13, inputs.w13)


def test_wrong_calls_get_a_sentence() -> None:
    inputs = Inputs(64, 32, 8)
    moe = quiet(inputs, inputs.w13, inputs.down)
    x = inputs.tokens(24, 0, 0)
    ids, weights = routed("uniform", 24, 8, 2, 0)
    for arguments, match in (
        ((x.float(), ids, weights), "x is"),
        ((x[:, :32], ids, weights), "x is"),
        ((x[:7], ids, weights), "topk_ids is"),
        ((x, ids, weights[:, :1]), "topk_weights"),
        ((x, weights, ids), "ids as whole numbers"),
        ((x, ids.bool(), weights), "ids as whole numbers"),
        ((x, ids, weights, x[:3]), "out is"),
        ((torch.cat([x, x]), ids, weights), "Make it with tokens=48"),
        ((None, ids, weights), "x is a NoneType"),
        ((x, torch.zeros_like(ids), weights), "distinct"),
        ((x[0, 0], ids, weights), "x is"),
        ((x.to("meta"), ids, weights), "x is on meta, and the layer on cpu"),
        ((x, ids, weights, x.to("meta")), "out is on meta"),
    ):
        with pytest.raises((ProblemError, RoutingError), match=match):
            moe(*arguments)
    with pytest.raises(ProblemError, match="no gradients"):
        moe(x.clone().requires_grad_(), ids, weights)
    with torch.no_grad():
        moe(x.clone().requires_grad_(), ids, weights)
    moe.close()
    with pytest.raises(ProblemError, match="layer was closed"):
        moe(x, ids, weights)


def test_a_mistake_in_the_words_raises_where_plain_torch_would_hide_it() -> None:
    inputs = Inputs(64, 32, 8)
    with pytest.raises(WordsError, match="no device class called 'cpuu'"):
        quiet(inputs, inputs.w13, inputs.down, device="cpuu")
    assert not quiet(inputs, inputs.w13, inputs.down, device="sm_90a").operator.packs
    with pytest.raises(ProblemError, match="w13 is a list"):
        quiet(inputs, [1], inputs.down)  # type: ignore[arg-type]
    with pytest.raises(ProblemError, match="w2 is a meta tensor"):
        quiet(inputs, inputs.w13, inputs.down.to("meta"))


@pytest.mark.parametrize("wrong", [-2, 8, 1 << 40])
def test_ids_that_are_no_experts_raise_and_the_next_call_is_right(wrong: int) -> None:
    inputs = Inputs(64, 32, 8)
    moe = quiet(inputs, inputs.w13, inputs.down)
    x = inputs.tokens(24, 0, 0)
    ids, weights = routed("uniform", 24, 8, 2, 0)
    changed = ids.long().clone()
    changed[3, 1] = wrong
    with pytest.raises(RoutingError, match=r"0\.\.7"):
        moe(x, changed, weights)
    assert_right(moe(x, ids, weights), inputs, x, ids, weights)
    moe.check()


def test_plain_torch_is_one_operation_too_for_compiled_code() -> None:
    inputs = Inputs(64, 32, 8)
    moe = quiet(inputs, inputs.w13, inputs.down)
    x = inputs.tokens(24, 0, 0)
    ids, weights = routed("uniform", 24, 8, 2, 0)

    def around(x: torch.Tensor) -> torch.Tensor:
        return moe(x * 2, ids, weights) + 1

    with torch.no_grad():
        assert torch.equal(torch.compile(around, backend="aot_eager", fullgraph=True)(x), around(x))
    moe.close()


def test_impossible_layers_are_refused_and_do_not_fall_back() -> None:
    for words, match in (
        ({"experts": 4, "top_k": 8}, "more than experts"),
        ({"intermediate": 12}, "multiple of 8"),
        ({"tokens": 0}, "not positive"),
    ):
        shape = {"hidden": 64, "intermediate": 32, "experts": 8, "top_k": 2, "tokens": 8, "device": "cpu"}
        with pytest.raises(ProblemError, match=match):
            FusedMoE(**{**shape, **words})
