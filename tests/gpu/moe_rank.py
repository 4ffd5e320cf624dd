"""One rank of the layer's tests on two GPUs (`python moe_rank.py RANK WORLD FOLDER SCENE`): plays a scene and prints what
it found as one line of JSON. The reference is fp32, expert by expert, and knows nothing of tktune.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "moe"))

from gpu_places import few, gpu_of
from layer_ranks import TOLERANCE, WORLD, Inputs, assert_right, routed

from tktune.core.build_spec import BuildSpec
from tktune.core.device import DeviceClass
from tktune.core.problem import Problem
from tktune.families.base import family
from tktune.moe import FusedMoE, operator
from tktune.moe.choosing import LayerChoice, choose
from tktune.moe.parts import COMBINE, DISPATCH, FAMILIES, joined_config

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, TOKENS, PAD = 512, 256, 8, 2, 200, 128
ROUTINGS = ("uniform", "hot", "both")
# Changes of the defaults: every way of bringing rows, making SwiGLU and summing is in one of them.
FORMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"ACTIVATIONS": "indexed"}, {"form": "pull"}),
    ({"GLU": "separate", "order": "slot"}, {"signal_groups": 2, "walk": "columns", "order": "remote"}),
    ({"TRANSPORT": "push"}, {}),
]


def formed(choice: LayerChoice, form: int) -> LayerChoice:
    """The choice with its kernels' configs changed to a form."""
    changes = dict(zip((DISPATCH, COMBINE), FORMS[form], strict=True))
    parts = {}
    for part, own in choice.parts.items():
        space = family(FAMILIES[part]).space(own.problem, own.device)
        config = space.canonical(space.default.replace(**changes[part]))
        assert space.is_feasible(config), space.broken(config)
        parts[part] = dataclasses.replace(own, config=config, provenance="default", artifact_digest=None)
    return LayerChoice(parts[DISPATCH], parts[COMBINE])


def specs(device: DeviceClass) -> list[BuildSpec]:
    """What the scenes load, for whoever builds it beforehand."""
    layer = Problem(
        "moe_layer", HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, TOKENS, WORLD, weight_layout="enk", pad=PAD
    )
    found = []
    for form in range(len(FORMS)):
        choice = formed(choose(layer, any_pad=False, policy="serving", device=device, db=None), form)
        space = family("moe_layer").space(layer, device)
        part = space.build_part(joined_config(choice.dispatch.config, choice.combine.config))
        found.append(family("moe_layer").build_spec(part, layer, device))
    return found


def layer_with(inputs: Inputs, form: int = 0, **words: Any) -> FusedMoE:
    """A layer on all ranks whose kernels run a form."""

    def changed(*arguments: Any, **keywords: Any) -> LayerChoice:
        return formed(choose(*arguments, **keywords), form)

    operator.choose = changed  # type: ignore[assignment]
    given = {"top_k": TOP_K, "tokens": TOKENS, "pad": PAD, "build": True, "fallback": False}
    return FusedMoE.from_weights(
        inputs.w13, inputs.down, experts=inputs.experts, group=dist.group.WORLD, **{**given, **words}
    )


class OnDevice:
    """The same layer in fp32 on this GPU, expert by expert."""

    def __init__(self, inputs: Inputs) -> None:
        self.gate, self.up, self.down = (w.cuda().float() for w in (inputs.gate, inputs.up, inputs.down))

    def error(self, y: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> float:
        """The largest error of a token relative to its terms' magnitudes; infinite where one is not finite."""
        result = torch.zeros(x.shape, device=x.device)
        size = torch.zeros_like(result)
        for expert in range(len(self.gate)):
            token, place = torch.nonzero(ids == expert, as_tuple=True)
            rows = x[token].float()
            opened = rows @ self.gate[expert].T
            term = (opened * torch.sigmoid(opened) * (rows @ self.up[expert].T)) @ self.down[expert].T
            term *= weights[token, place, None]
            result[token] += term
            size[token] += term.abs()
        off = (y.float() - result).norm(dim=1)
        size = size.norm(dim=1)
        worst = torch.where(size > 0, off / size, off * 1e30)
        return float(torch.nan_to_num(worst, nan=float("inf")).max()) if len(worst) else 0.0


def drawn(
    inputs: Inputs, kind: str, count: int, seed: int, rank: int, top_k: int = TOP_K
) -> tuple[torch.Tensor, ...]:
    x = inputs.tokens(count, seed, rank)
    return x.cuda(), *(t.cuda() for t in routed(kind, count, inputs.experts, top_k, 31 * seed + rank))


def forms(rank: int) -> dict[str, Any]:
    """Every form: tokens on one rank, the other, both; none on a rank; one expert a token; weights of zero."""
    inputs = Inputs(HIDDEN, INTERMEDIATE, EXPERTS)
    reference = OnDevice(inputs)
    errors: dict[str, float] = {}
    for form in range(len(FORMS)):
        moe = layer_with(inputs, form)
        for seed, kind in enumerate(("uniform", "hot", "first", "second", "both", "ragged")):
            counts = {"ragged": (0, TOKENS), "hot": (TOKENS, 7)}.get(kind, (TOKENS, TOKENS))
            x, ids, weights = drawn(inputs, kind, counts[rank], seed, rank)
            if kind == "both":
                weights[::2] = 0
            y = moe(x, ids, weights)
            moe.check()
            errors[f"{form} {kind}"] = reference.error(y, x, ids, weights)
            if not form:  # by the other reference too, token by token in float64
                assert_right(y, inputs, x, ids, weights)
        ids = ids.clone()
        ids[::3] = -1
        y = moe(x, ids, weights)
        moe.check()
        errors[f"{form} no expert"] = reference.error(y, x, ids, weights)
        moe.close()
    moe = layer_with(inputs, 0, top_k=1)
    x, ids, weights = drawn(inputs, "uniform", TOKENS, 3, rank, top_k=1)
    y = moe(x, ids, weights)
    moe.check()
    errors["one expert a token"] = assert_right(y, inputs, x, ids, weights)
    moe.close()
    return {"errors": errors}


def rounds(rank: int) -> dict[str, Any]:
    """A hundred rounds of each routing (fewer in turn), a rank now and then late on the device; some of them twice, with the
    same bits."""
    inputs = Inputs(HIDDEN, INTERMEDIATE, EXPERTS)
    reference = OnDevice(inputs)
    worst, different = 0.0, 0
    for form in range(len(FORMS)):
        moe = layer_with(inputs, form)
        late = torch.Generator().manual_seed(10 * form + rank)
        for kind in ROUTINGS:
            for number in range(few(100, 20)):
                x, ids, weights = drawn(inputs, kind, TOKENS, number, rank)
                if torch.rand(1, generator=late) < 0.3:
                    torch.cuda._sleep(int(torch.randint(1000, 1_000_000, (1,), generator=late)))
                y = moe(x, ids, weights)
                worst = max(worst, reference.error(y, x, ids, weights))
                if number % 4 == 0:
                    again = moe(x, ids, weights)
                    different += int(not torch.equal(again.view(torch.int16), y.view(torch.int16)))
        moe.check()
        moe.close()
    return {"worst": worst, "different": different}


def graphs(rank: int) -> dict[str, Any]:
    """A captured call follows its inputs; a compiled one is one operation; both give the bits of a plain call."""
    inputs = Inputs(HIDDEN, INTERMEDIATE, EXPERTS)
    reference = OnDevice(inputs)
    moe = layer_with(inputs)
    x, ids, weights = drawn(inputs, "uniform", TOKENS, 0, rank)
    graph = torch.cuda.CUDAGraph()
    worst, different = 0.0, 0
    with torch.no_grad():
        with torch.cuda.graph(graph):
            replayed = moe(x, ids, weights)
        for number in range(60):
            for mine, given in zip(
                (x, ids, weights), drawn(inputs, ROUTINGS[number % 3], TOKENS, number, rank), strict=True
            ):
                mine.copy_(given)
            graph.replay()
            if number % 3 == 0:
                worst = max(worst, reference.error(replayed, x, ids, weights))
                different += int(not torch.equal(moe(x, ids, weights), replayed))

        def around(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return moe(moe(x * 2, ids, weights), ids, weights) + 1

        compiled = torch.compile(around, backend="aot_eager", fullgraph=True)
        compiled_differs = not torch.equal(compiled(x, ids, weights), around(x, ids, weights))
        in_place = moe.operator.input
        in_place.copy_(x)
        different += int(not torch.equal(moe(in_place, ids, weights), moe(x, ids, weights)))
    moe.check()
    moe.close()
    return {"worst": worst, "different": different, "compiled_differs": compiled_differs}


def serial(rank: int) -> dict[str, Any]:
    """Plain torch on GPUs, over NCCL, captured."""
    from tktune.moe.call import LayerCall
    from tktune.moe.serial import SerialLayer

    nccl = dist.new_group(backend="nccl")
    inputs = Inputs(HIDDEN, INTERMEDIATE, EXPERTS)
    problem = operator.layer_problem(
        HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, TOKENS, nccl, "enk", "uniform", PAD
    )
    layer = SerialLayer(problem, nccl)
    first = slice(rank * EXPERTS // 2, (rank + 1) * EXPERTS // 2)
    w13, w2 = inputs.w13[first].cuda(), inputs.down[first].cuda()
    errors = {}
    for seed, kind in enumerate(("uniform", "first", "second")):
        x, ids, weights = drawn(inputs, kind, TOKENS, seed, rank)
        y = layer.run(LayerCall(x, ids, weights, w13, w2, torch.empty_like(x)))
        errors[kind] = assert_right(y, inputs, x, ids, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        replayed = layer.run(LayerCall(x, ids, weights, w13, w2, torch.empty_like(x)))
    graph.replay()
    torch.cuda.synchronize()
    return {"errors": errors, "different": int(not torch.equal(replayed, y))}


SCENES: dict[str, Callable[[int], dict[str, Any]]] = {
    "forms": forms,
    "rounds": rounds,
    "graphs": graphs,
    "serial": serial,
}


def main() -> None:
    rank, world, folder, scene = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.cuda.set_device(gpu_of(rank))
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    found = SCENES[scene](rank)
    print(json.dumps({**found, "tolerance": TOLERANCE}), flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
