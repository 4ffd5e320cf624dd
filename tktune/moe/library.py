"""A layer as `torch.ops.tktune.moe_layer`, for torch.compile: one operation, which goes by number, since compiled code may
only hold tensors and numbers. It writes `out` and the operator's workspace and returns nothing.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Protocol

import torch

from tktune.core.errors import ProblemError


class Runs(Protocol):
    def run(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        out: torch.Tensor,
    ) -> torch.Tensor: ...


_LAYERS: weakref.WeakValueDictionary[int, Runs] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def enter(layer: Runs) -> int:
    """The number under which compiled code calls `layer`; it is not kept alive."""
    number = next(_numbers)
    _LAYERS[number] = layer
    return number


def leave(number: int) -> None:
    _LAYERS.pop(number, None)


_LIBRARY = torch.library.Library("tktune", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "moe_layer(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w13, Tensor w2, Tensor(a!) out, "
    "Tensor(b!) workspace, int number) -> ()"
)


def run_by_number(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    out: torch.Tensor,
    workspace: torch.Tensor,
    number: int,
) -> None:
    """`workspace` orders the calls of one operator. Raises `ProblemError` when it was closed."""
    layer = _LAYERS.get(number)
    if layer is None:
        raise ProblemError(f"Layer {number} was closed.", "Keep it open as long as compiled code calls it.")
    layer.run(x, topk_ids, topk_weights, w13, w2, out)


def _fake(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    out: torch.Tensor,
    workspace: torch.Tensor,
    number: int,
) -> None:
    """`out` and `workspace` are written, nothing is returned: there is no shape to infer."""


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("moe_layer", run_by_number, _key)  # type: ignore[no-untyped-call]
torch.library.register_fake("tktune::moe_layer", _fake, lib=_LIBRARY)
