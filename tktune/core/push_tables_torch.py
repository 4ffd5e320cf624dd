"""The vectorised builder of push tables, in torch operations only, on any device.

Written from the definitions in `push_tables`, independently of the golden loops: no other rank's schedule is built.
torch is imported when a table is built, not with this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tktune.core import combine_tables_torch, tables_torch
from tktune.core.push_tables import PushTables

if TYPE_CHECKING:
    from tktune.core.problem import Problem


def build(topk_ids: Any, problem: Problem, rank: int) -> PushTables:
    """Build the tables of `rank` from `topk_ids` (ranks, tokens, top_k; a tensor or array of any int dtype).

    The tables are int32 tensors on the device of `topk_ids`. Raises `RoutingError`.
    """
    import torch

    ids = torch.as_tensor(topk_ids)
    schedule = tables_torch.build(ids, problem, rank)
    combine = combine_tables_torch.build(ids, problem, rank)
    ranks, tokens, top_k, pad = problem.expert_ranks, problem.tokens, problem.top_k, problem.pad
    device = ids.device

    # Slots of own tokens by destination: (ranks, tokens, top_k), −1 where the expert is elsewhere or here.
    there = torch.arange(ranks, device=device).reshape(-1, 1, 1)
    pushed = (combine.owners.long() == there) & (there != rank)
    slots = torch.where(pushed, combine.owner_slots.long(), -1)
    wanted = pushed.any(2)
    counts = wanted.sum(1)

    # By smallest slot; tokens that are not wanted come last.
    never = torch.iinfo(torch.long).max
    order = torch.where(slots >= 0, slots, never).amin(2).argsort(1)
    beyond = torch.arange(tokens, device=device) >= counts.reshape(-1, 1)
    blocks = slots.gather(1, order.unsqueeze(2).expand(-1, -1, top_k)).div(pad, rounding_mode="floor")

    # Pad blocks of every destination follow from all ranks' counts of its experts.
    of_expert = torch.bincount(ids.reshape(-1).long(), minlength=problem.experts)
    of_rank = (of_expert + pad - 1).div(pad, rounding_mode="floor").reshape(ranks, -1).sum(1)
    of_rank[rank] = 0
    offsets = torch.cat([torch.zeros_like(of_rank[:1]), of_rank.cumsum(0)])
    words = (slots.div(pad, rounding_mode="floor") + offsets[:-1].reshape(-1, 1, 1))[pushed]
    expected = torch.bincount(words, minlength=int(offsets[-1]))

    source = schedule.pull_indices[:, 0].long()
    real = source >= 0
    block = torch.arange(schedule.rows, device=device).div(pad, rounding_mode="floor")
    gate_expected = torch.bincount(
        block[real] * ranks + source[real], minlength=schedule.num_pad_blocks * ranks
    ).reshape(-1, ranks)
    bits = torch.ones_like(of_rank) << torch.arange(ranks, device=device)
    bits[rank] = 0

    def table(tensor: Any) -> Any:
        return tensor.to(torch.int32).contiguous()

    return PushTables(
        rank=rank,
        turns=int(counts.max()),
        counts=table(counts),
        tokens=table(torch.where(beyond, -1, order)),
        blocks=table(torch.where(beyond.unsqueeze(2), -1, blocks)),
        offsets=table(offsets),
        expected=table(expected),
        gate_expected=table(gate_expected),
        gate_sources=table(((gate_expected > 0) * bits).sum(1)),
    )
