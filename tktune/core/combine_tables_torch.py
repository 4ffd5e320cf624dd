"""The vectorised builder of combine tables and job orders, in torch operations only, on any device.

Written from the definitions in `combine_tables`, independently of the golden loops: no other rank's schedule is built.
torch is imported when a table is built, not with this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tktune.core.combine_tables import CombineTables, check_job_words
from tktune.core.tables import check_topk_shape

if TYPE_CHECKING:
    from tktune.core.problem import Problem
    from tktune.core.tables import ScheduleTables


def build(topk_ids: Any, problem: Problem, rank: int) -> CombineTables:
    """Build the tables of `rank` from `topk_ids` (ranks, tokens, top_k; a tensor or array of any int dtype).

    The tables are int32 tensors on the device of `topk_ids`. Ids are taken as checked. Raises `RoutingError`.
    """
    import torch

    ids = torch.as_tensor(topk_ids)
    check_topk_shape(tuple(ids.shape), problem, rank)
    ids = ids.long()
    ranks, tokens, top_k, local = (
        problem.expert_ranks,
        problem.tokens,
        problem.top_k,
        problem.local_experts,
    )
    owner = ids.div(local, rounding_mode="floor")
    hits = torch.zeros(ranks, tokens, ranks, dtype=torch.long, device=ids.device)
    hits.scatter_(2, owner, 1)  # (source, token, owner)

    # Rows of each (source, expert). An expert's rows stand by (source − owner) mod ranks, then token: before those
    # of `rank` come the sources between the owner and `rank` on the ring.
    counts = torch.zeros(ranks, problem.experts, dtype=torch.long, device=ids.device)
    counts.scatter_add_(1, ids.reshape(ranks, -1), torch.ones_like(ids).reshape(ranks, -1))
    padded = (counts.sum(0) + problem.pad - 1).div(problem.pad, rounding_mode="floor") * problem.pad
    padded = padded.reshape(ranks, local)
    base = (padded.cumsum(1) - padded).reshape(-1)
    source = torch.arange(ranks, device=ids.device).reshape(-1, 1)
    holder = torch.arange(problem.experts, device=ids.device).div(local, rounding_mode="floor").reshape(1, -1)
    before = (source - holder) % ranks < (rank - holder) % ranks
    start = base + (counts * before).sum(0)

    own = ids[rank].reshape(-1)
    by_expert = own.argsort(stable=True)
    of = own[by_expert]
    first = counts[rank].cumsum(0) - counts[rank]
    slots = torch.empty_like(own)
    slots[by_expert] = start[of] + torch.arange(len(own), device=ids.device) - first[of]

    def table(tensor: Any) -> Any:
        return tensor.to(torch.int32).contiguous()

    return CombineTables(
        rank=rank,
        push_expected=table(hits[:, :, rank].sum(1)),
        final_contrib=table(hits[rank]),
        recv_from=table(hits[rank].sum(0)),
        owners=table(owner[rank]),
        owner_slots=table(slots.reshape(tokens, top_k)),
    )


def from_slots(schedule: ScheduleTables, planes: Any, problem: Problem) -> CombineTables:
    """The same tables from what ranks have told each other: `planes` (ranks, tokens, top_k), the slots that each rank
    gave to the rows of own tokens, -1 where it holds none. Rows that nobody holds are owned by -1.
    """
    import torch

    ranks = problem.expert_ranks
    held = torch.as_tensor(planes) >= 0
    contrib = held.any(2).T
    owner_slots, owners = torch.as_tensor(planes).max(0)
    owners = torch.where(owner_slots < 0, -1, owners)
    sources = torch.as_tensor(schedule.pull_tokens)[:, 0].long()

    def table(tensor: Any) -> Any:
        return tensor.to(torch.int32).contiguous()

    return CombineTables(
        rank=schedule.rank,
        push_expected=table(torch.bincount(sources, minlength=ranks)),
        final_contrib=table(contrib),
        recv_from=table(contrib.sum(0)),
        owners=table(owners),
        owner_slots=table(owner_slots),
    )


def push_jobs(
    schedule: ScheduleTables, problem: Problem, order: str, groups: int = 1, walk: str = "experts"
) -> Any:
    """The jobs of the pre-reduce form, int32 on the schedule's device; see `combine_tables.push_jobs`."""
    check_job_words(order, groups, walk)
    runs = groups if walk == "columns" else 1
    source, token = schedule.pull_tokens.long().unbind(1)
    if order == "token":
        places = _by((source - schedule.rank) % problem.expert_ranks, token)
        return _run_by_run(_spread(places, groups // runs), runs, groups)
    largest = schedule.pull_slots.long().amax(1)
    late = source == schedule.rank if order == "remote" else None
    return _run_by_run(_by_readiness(largest, largest, late, problem.pad, groups // runs), runs, groups)


def pull_jobs(
    combine: CombineTables, problem: Problem, order: str, groups: int = 1, walk: str = "experts"
) -> Any:
    """The jobs of the pull form, int32 on the tables' device; see `combine_tables.pull_jobs`."""
    import torch

    check_job_words(order, groups, walk)
    runs = groups if walk == "columns" else 1
    largest = combine.owner_slots.long().amax(1).clamp(min=0)
    token = torch.arange(len(largest), device=largest.device)
    if order == "token":
        return _run_by_run(_spread(token, groups // runs), runs, groups)
    late = (combine.owners == combine.rank).all(1) if order == "remote" else None
    return _run_by_run(_by_readiness(largest, token, late, problem.pad, groups // runs), runs, groups)


def _run_by_run(jobs: Any, runs: int, groups: int) -> Any:
    """`jobs` of one run of columns (or of all, when `runs` is 1), for one run after the other."""
    import torch

    if runs == 1:
        return jobs
    return torch.cat([jobs * groups + run for run in range(runs)])


def _by(*keys: Any) -> Any:
    """Indices in ascending order of `keys`, the first one weighing most; stable."""
    import torch

    order = torch.arange(len(keys[0]), device=keys[0].device)
    for key in reversed(keys):
        order = order[key[order].argsort(stable=True)]
    return order


def _spread(items: Any, groups: int) -> Any:
    """Each item's groups one after the other."""
    import torch

    group = torch.arange(groups, device=items.device)
    return (items.reshape(-1, 1) * groups + group).reshape(-1).to(torch.int32)


def _by_readiness(largest: Any, tie: Any, late: Any, pad: int, groups: int) -> Any:
    """Jobs by (late, pad block of `largest`, group, `largest`, `tie`)."""
    import torch

    items = torch.arange(len(largest), device=largest.device).repeat_interleave(groups)
    group = torch.arange(groups, device=largest.device).repeat(len(largest))
    keys = [largest[items].div(pad, rounding_mode="floor"), group, largest[items], tie[items]]
    if late is not None:
        keys.insert(0, late.long()[items])
    places = _by(*keys)
    return (items * groups + group)[places].to(torch.int32)
