"""A layer as `torch.ops.tktune.moe_layer`, for torch.compile: one operation, which goes by number. It writes `out` and the
operator's workspace and returns nothing.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from tktune.moe.call import LayerCall
from tktune.runtime.cuda_library import Numbered, define


class Runs(Protocol):
    def run(self, call: LayerCall) -> torch.Tensor: ...


_LAYERS = Numbered[Runs]()
enter, leave = _LAYERS.enter, _LAYERS.leave


def run_by_number(*words: Any) -> None:
    """The tensors of a `LayerCall`, the workspace, which orders the calls of one operator, and its number. Raises
    `ProblemError` when it was closed."""
    *tensors, _, number = words
    _LAYERS.get(number).run(LayerCall(*tensors))


define(
    "moe_layer(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w13, Tensor w2, Tensor(a!) out, "
    "Tensor(b!) workspace, int number) -> ()",
    run_by_number,
    ("CPU", "CUDA"),
)
