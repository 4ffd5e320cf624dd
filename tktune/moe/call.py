"""What one call of a layer takes on one rank, in the order in which every part of the room passes it on."""

from __future__ import annotations

from typing import NamedTuple

import torch


class LayerCall(NamedTuple):
    """`x` (tokens, hidden) bf16; `topk_ids` (tokens, top_k), −1 is no expert; `topk_weights` (tokens, top_k) fp32; `w13` and
    `w2` of this rank's experts, in the form that the layer takes; `out` (tokens, hidden) bf16 is filled."""

    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    out: torch.Tensor
