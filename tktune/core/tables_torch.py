"""The vectorised builder of schedule tables, in torch operations only, on any device.

Written from the definitions in `tables.ScheduleTables`, independently of the golden loops. torch is imported when
a table is built, not with this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tktune.core.tables import ScheduleTables, check_topk_shape, refuse_ids

if TYPE_CHECKING:
    from tktune.core.problem import Problem


def build(topk_ids: Any, problem: Problem, rank: int, *, check_ids: bool = True) -> ScheduleTables:
    """Build the tables of `rank` from `topk_ids` (ranks, tokens, top_k; a tensor or array of any int dtype).

    The tables are int32 tensors on the device of `topk_ids`. `check_ids` reads the ids once more to refuse
    those out of range or twice in a token (a synchronisation on a GPU). Raises `RoutingError`.
    """
    import torch

    ids = torch.as_tensor(topk_ids)
    check_topk_shape(tuple(ids.shape), problem, rank)
    ids = ids.long()
    device = ids.device
    ranks, tokens, top_k, pad = problem.expert_ranks, problem.tokens, problem.top_k, problem.pad
    local = problem.local_experts
    if check_ids:
        ordered = ids.sort(dim=-1).values
        bad = (ids < 0).any() | (ids >= problem.experts).any()
        bad = bad | (ordered[..., 1:] == ordered[..., :-1]).any()
        if bool(bad):
            raise refuse_ids(problem)

    # Ring order: start with this rank's own tokens. A stable sort by expert then gives each expert's rows.
    ring = ids.roll(-rank, dims=0).reshape(-1) - rank * local
    here = (ring >= 0) & (ring < local)
    key = torch.where(here, ring, local)
    by_expert = torch.argsort(key, stable=True)
    counts = torch.bincount(key, minlength=local + 1)[:local]
    taken = by_expert[: int(counts.sum())]

    padded = (counts + pad - 1).div(pad, rounding_mode="floor") * pad
    ends = padded.cumsum(0)
    base = ends - padded
    rows = int(ends[-1])
    expert_of = key[taken]
    place = torch.arange(len(taken), device=device) - (counts.cumsum(0) - counts)[expert_of]
    slot_of = base[expert_of] + place

    ring_slots = torch.full((ranks * tokens * top_k,), -1, dtype=torch.long, device=device)
    ring_slots[taken] = slot_of
    slots = ring_slots.reshape(ranks, tokens, top_k).roll(rank, dims=0)

    ring_token = taken.div(top_k, rounding_mode="floor")
    source = (ring_token.div(tokens, rounding_mode="floor") + rank) % ranks
    token = ring_token % tokens
    pull_indices = torch.full((rows, 2), -1, dtype=torch.long, device=device)
    pull_indices[slot_of] = torch.stack([source, token], dim=1)
    slot_token = torch.full((rows,), -1, dtype=torch.long, device=device)
    slot_token[slot_of] = source * tokens + token

    blocks = rows // pad
    block = torch.arange(blocks, device=device)
    block_expert = torch.searchsorted(ends.div(pad, rounding_mode="floor"), block, right=True)
    block_rows = (counts[block_expert] - (block * pad - base[block_expert])).clamp(max=pad)

    # An expert's own rows are its first: count those of each block from the expert's own count.
    own_counts = torch.bincount(key[: tokens * top_k], minlength=local + 1)[:local]
    own_rows = (own_counts[block_expert] - (block * pad - base[block_expert])).clamp(min=0, max=pad)

    flat = slots.reshape(ranks * tokens, top_k)
    largest = flat.amax(dim=1)
    smallest = torch.where(flat >= 0, flat, rows).amin(dim=1)
    wanted = torch.nonzero(largest >= 0).reshape(-1)
    pulled = wanted[smallest[wanted].argsort()]
    pull_source = pulled.div(tokens, rounding_mode="floor")
    pull_token = pulled % tokens

    def table(tensor: Any) -> Any:
        return tensor.to(torch.int32).contiguous()

    return ScheduleTables(
        rank=rank,
        rows=rows,
        num_pad_blocks=blocks,
        counts=table(counts),
        padded=table(padded),
        base=table(base),
        pull_indices=table(pull_indices),
        block_expert=table(block_expert),
        block_rows=table(block_rows),
        slack=table(pad - block_rows),
        own_slack=table(pad - block_rows + own_rows),
        slots=table(slots),
        pull_tokens=table(torch.stack([pull_source, pull_token], dim=1)),
        pull_slots=table(flat[pulled]),
        job_order=table(largest[pulled].argsort()),
        slot_token=table(slot_token),
        push_order=tuple(table(pull_token[pull_source == s]) for s in range(ranks)),
    )
