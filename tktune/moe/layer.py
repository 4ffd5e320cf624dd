"""`FusedMoE`: an expert layer over the ranks of one host as a `torch.nn.Module`. What runs it is in `operator` and `serial`."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any, Self

import torch
from torch.compiler import is_compiling
from torch.nn.functional import pad as padded

from tktune.core.errors import ProblemError
from tktune.core.problem import Problem
from tktune.moe.call import LayerCall
from tktune.moe.operator import LayerOperator, layer_problem, load_layer
from tktune.moe.parts import NO_EXPERT
from tktune.moe.weights import check_counts, local_part, plain_shapes, sizes_of
from tktune.runtime.operator import SPIN_LIMIT_S

_BF16 = torch.bfloat16


class FusedMoE(torch.nn.Module):
    """A mixture-of-experts layer under expert parallelism: rank r of `group` holds experts r·E/W … (r+1)·E/W − 1.

    y[t] = Σ_i topk_weights[t, i] · w2[e]( silu(gate[e] x[t]) · up[e] x[t] ) with e = topk_ids[t, i]

    in two launches: token rows are pulled from their ranks while the first grouped GEMM, with SwiGLU in its epilogue,
    runs on those that are there; rows of the second are summed, weighted, on their ranks and brought to the token's rank
    while it runs. Tables are built on the device. Use it for inference: it computes no gradients.

    >>> moe = FusedMoE.from_weights(w13, w2, top_k=8, tokens=2048, group=dist.group.WORLD)      # doctest: +SKIP
    >>> y = moe(x, topk_ids, topk_weights)                                                      # doctest: +SKIP

    The arguments are those of `tktune.load`. `hidden` is the length of a token, `intermediate` that of an expert's row
    between the two GEMMs, `tokens` the most tokens of one rank in a call. The config is the winner of the pair
    (`tktune run` on a study of the family `moe_layer`), else the two kernels' own winners at one pad, else defaults;
    `moe.operator.explain()` says which. Where no artifact can run, plain torch does the same with one warning, or, with
    `fallback=False`, the reason is raised. Layers of one shape share buffers and launches: `like=` another one.

    Making it is collective; so are calls, in the same order on every rank and in one stream. A call allocates nothing but
    what it returns and waits for no host, so it can be captured in a CUDA graph; under torch.compile it is one operation.
    `check` raises what calls found wrong, `close` frees the memory of all ranks.

    `w13` and `w2` are Parameters in the kernels' form. Fill them with `load_weights` or `load_state_dict`: a state dict
    holds plain weights, gate before up, whatever the kernels take.
    """

    w13: torch.nn.Parameter
    w2: torch.nn.Parameter

    def __init__(
        self,
        *,
        hidden: int,
        intermediate: int,
        experts: int,
        top_k: int,
        tokens: int,
        group: Any = None,
        weight_layout: str = "enk",
        routing: str = "uniform",
        pad: int | None = None,
        policy: str = "serving",
        device: str | None = None,
        db: str | PathLike[str] | None = None,
        cache: Path | None = None,
        build: bool = False,
        capacity: int | None = None,
        spin_limit_s: float = SPIN_LIMIT_S,
        fallback: bool = True,
        like: FusedMoE | None = None,
    ) -> None:
        super().__init__()
        layer = layer_problem(
            hidden, intermediate, experts, top_k, tokens, group, weight_layout, routing, pad
        )
        self.operator: LayerOperator
        if like is None:
            self.operator = load_layer(
                layer, group, any_pad=pad is None, policy=policy, device=device, db=db, cache=cache, build=build,
                capacity=capacity, spin_limit_s=spin_limit_s, fallback=fallback,
            )  # fmt: skip
        else:
            self.operator = _shared(like, layer, any_pad=pad is None)
        self.problem = self.operator.problem
        self.top_k, self.tokens, self.hidden = top_k, tokens, hidden
        self._rank = self.operator.rank
        on = self.operator.device
        for name, shape in plain_shapes(layer, layer.local_experts).items():
            empty = torch.zeros(shape, dtype=_BF16, device=on)
            self.register_parameter(name, torch.nn.Parameter(empty, requires_grad=False))

    @classmethod
    def from_weights(
        cls,
        w13: torch.Tensor,
        w2: torch.Tensor,
        *,
        top_k: int,
        tokens: int,
        experts: int | None = None,
        group: Any = None,
        weight_layout: str = "enk",
        **words: Any,
    ) -> Self:
        """A layer with these weights; every other word is the constructor's.

        `w13` (experts, 2 × intermediate, hidden): gate, then up. `w2` (experts, hidden, intermediate). With
        weight_layout "ekn" the last two dimensions change places. They hold this rank's experts; with `experts` given
        they may hold those of all ranks, of which the own ones are taken. Any floating type of two bytes or more, on any
        device. Raises `ProblemError` when shapes contradict each other.
        """
        hidden, intermediate = sizes_of(w13, w2, weight_layout)
        world = 1
        if group is not None:
            import torch.distributed as dist

            world = dist.get_world_size(group)
        everyone = check_counts(w13.shape[0], experts, world)
        made = cls(
            hidden=hidden,
            intermediate=intermediate,
            experts=everyone,
            top_k=top_k,
            tokens=tokens,
            group=group,
            weight_layout=weight_layout,
            **words,
        )
        made.load_weights(w13, w2)
        return made

    @torch.no_grad()
    def load_weights(self, w13: torch.Tensor, w2: torch.Tensor) -> None:
        """Take over plain weights, those of this rank or of all; buffers stay where they are, so graphs stay valid."""
        first, second = (
            local_part(name, tensor, self.problem, self._rank) for name, tensor in (("w13", w13), ("w2", w2))
        )
        self.w13.copy_(self.operator.packed(first.to(self.w13.device, _BF16)))
        self.w2.copy_(second)

    def forward(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(t, hidden) bf16 for this rank's t ≤ `tokens` tokens, none included.

        `x` (t, hidden) bf16; `topk_ids` (t, top_k), any int dtype, distinct global expert ids; `topk_weights` (t, top_k),
        any float dtype, used in fp32. `out` takes the result where it is given. Raises `ProblemError` for other shapes
        and dtypes; wrong ids are left out on GPUs and raise at `check`, and raise at once on the CPU.
        """
        self._expect(x, topk_ids, topk_weights, out)
        mine = x.shape[0]
        missing = self.tokens - mine
        if missing:
            x, topk_ids, topk_weights = self._filled(x, topk_ids, topk_weights, missing)
        weights = topk_weights.float()
        whole = out is not None and not missing
        result = out if whole and out is not None else x.new_empty(self.tokens, self.hidden)
        tensors = (x, topk_ids, weights, self.w13, self.w2, result)
        if is_compiling():
            torch.ops.tktune.moe_layer(*tensors, self.operator.workspace, self.operator.number)
        else:
            self.operator.run(LayerCall(*tensors))
        if whole or (out is None and not missing):
            return result
        return result[:mine] if out is None else out.copy_(result[:mine])

    def check(self) -> None:
        """Wait for what was enqueued. Raises `LaunchFailed` or `RoutingError` for what went wrong in it."""
        self.operator.check()

    def close(self) -> None:
        """Free the memory that ranks share, together with the other ranks; layers made `like` this one end with it."""
        self.operator.close()

    def extra_repr(self) -> str:
        return f"{self.problem}, {'tuned kernels' if self.operator.packs else 'plain torch'}"

    # State dicts hold plain weights.

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.operator.packs:
            destination[f"{prefix}w13"] = self.operator.plain(self.w13.detach())

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, *rest: Any
    ) -> None:
        name = f"{prefix}w13"
        given = state_dict.get(name)
        if given is not None and self.operator.packs and tuple(given.shape) == tuple(self.w13.shape):
            state_dict = {**state_dict, name: self.operator.packed(given.to(self.w13.device, _BF16))}
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *rest)

    # What a call takes.

    def _filled(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, missing: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens that are not there: no experts, weights of zero, rows of zeros."""
        rest = (0, 0, 0, missing)
        return padded(x, rest), padded(topk_ids, rest, value=NO_EXPERT), padded(topk_weights, rest)

    def _expect(
        self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor | None
    ) -> None:
        for name, tensor in (("x", x), ("topk_ids", topk_ids), ("topk_weights", topk_weights), ("out", out)):
            if tensor is None and name == "out":
                continue
            if not isinstance(tensor, torch.Tensor):
                raise ProblemError(
                    f"{name} is a {type(tensor).__name__}, and the layer takes tensors.",
                    f"Pass torch.as_tensor({name}, device={str(self.w13.device)!r}).",
                )
            if tensor.device != self.w13.device:
                raise ProblemError(
                    f"{name} is on {tensor.device}, and the layer on {self.w13.device}.",
                    f"Move it there: {name}.to({str(self.w13.device)!r}).",
                )
        if x.dtype != _BF16 or x.dim() != 2 or x.shape[1] != self.hidden:
            raise ProblemError(
                f"x is {_told(x)}, and the layer takes bfloat16 (tokens ≤ {self.tokens}, {self.hidden}).",
                "Pass the token rows of this rank, as bfloat16.",
            )
        mine = x.shape[0]
        if mine > self.tokens:
            raise ProblemError(
                f"x has {mine} tokens, and the layer was made for {self.tokens} at most.",
                f"Make it with tokens={mine}, or call it in parts.",
            )
        picked = (mine, self.top_k)
        if tuple(topk_ids.shape) != picked or tuple(topk_weights.shape) != picked:
            raise ProblemError(
                f"topk_ids is {tuple(topk_ids.shape)} and topk_weights {tuple(topk_weights.shape)}, and x asks for {picked}.",
                "Pass the experts and weights of these tokens.",
            )
        if (
            topk_ids.dtype.is_floating_point
            or topk_ids.dtype == torch.bool
            or not topk_weights.dtype.is_floating_point
        ):
            raise ProblemError(
                f"topk_ids is {_told(topk_ids)} and topk_weights {_told(topk_weights)}.",
                "Pass ids as whole numbers (int32 or int64) and weights as floating ones.",
            )
        if torch.is_grad_enabled() and (x.requires_grad or topk_weights.requires_grad):
            raise ProblemError(
                "FusedMoE computes no gradients, and its input asks for one.",
                "Call it under torch.no_grad() or torch.inference_mode().",
            )
        if out is not None and (tuple(out.shape) != (mine, self.hidden) or out.dtype != _BF16):
            raise ProblemError(
                f"out is {_told(out)}, and the result is bfloat16 {(mine, self.hidden)}.",
                "Pass such a tensor, or leave out out.",
            )


def _told(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _shared(like: FusedMoE, layer: Problem, any_pad: bool) -> LayerOperator:
    """The operator of another layer of the same shape. Raises `ProblemError` when it is of another."""
    if not isinstance(like, FusedMoE):
        raise ProblemError(
            f"like is a {type(like).__name__}.", "Pass the FusedMoE to share with, or leave like out."
        )
    standing = like.operator.problem
    wanted = layer.replace(pad=standing.pad) if any_pad else layer
    if standing != wanted:
        raise ProblemError(
            f"The layer to share with is {standing}, and this one {wanted}.",
            "Make it on its own: leave like out.",
        )
    return like.operator
