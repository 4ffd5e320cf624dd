"""The invariants of combine tables and job orders, each by name, recomputed with other means than either builder
(research/fused_kernels.md §6.5).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tktune.core.combine_tables import CombineTables
    from tktune.core.problem import Problem
    from tktune.core.tables import ScheduleTables


def check(
    combines: Sequence[CombineTables], schedules: Sequence[ScheduleTables], topk_ids: Any, problem: Problem
) -> None:
    """Raise AssertionError naming the first invariant that the tables of all ranks, in rank order, break."""
    import numpy

    ids = numpy.asarray(topk_ids)
    ranks, tokens, top_k = problem.expert_ranks, problem.tokens, problem.top_k
    combines, schedules = [c.numpy() for c in combines], [s.numpy() for s in schedules]
    shapes = {
        "push_expected": (ranks,),
        "final_contrib": (tokens, ranks),
        "recv_from": (ranks,),
        "owners": (tokens, top_k),
        "owner_slots": (tokens, top_k),
    }
    for rank, c in enumerate(combines):
        _need(c.rank == rank, "rank", f"tables of rank {c.rank} stand at {rank}")
        for name, array in c.arrays().items():
            _need(str(array.dtype) == "int32", "dtype_int32", f"{name} is {array.dtype}")
            _need(array.shape == shapes[name], "shapes", f"{name} is {array.shape}, not {shapes[name]}")
        _need((c.owners == ids[rank] // problem.local_experts).all(), "owner_holds_the_expert")
        hits = numpy.stack([(c.owners == owner).any(1) for owner in range(ranks)], 1)
        _need((c.final_contrib == hits).all(), "contributes_exactly_where_it_holds_a_row")
        _need(c.final_contrib.any(1).all(), "every_token_has_a_contribution")
        _need((c.final_contrib.sum(0) == c.recv_from).all(), "recv_from_sums_contributions")
        _need(c.push_expected.sum() == len(schedules[rank].pull_tokens), "every_job_has_a_destination")
    for rank, c in enumerate(combines):
        for owner in range(ranks):
            here = c.owners == owner
            slots = schedules[owner].slots[rank]
            _need((slots[here] == c.owner_slots[here]).all(), "owner_slots_are_those_of_the_owner")
            pushed = combines[owner].push_expected[rank]
            _need(pushed == c.recv_from[owner], "pushed_is_received", f"{owner} → {rank}")
            _need(pushed == len(schedules[owner].push_order[rank]), "pushes_are_the_wanted_tokens")
    jobs = sum(len(s.pull_tokens) for s in schedules)
    _need(sum(int(c.recv_from.sum()) for c in combines) == jobs, "all_jobs_are_received")
    rows = sum(int(s.counts.sum()) for s in schedules)
    _need(rows == ranks * tokens * top_k, "every_assignment_enters_one_sum")


def check_jobs(
    jobs: Any, readiness: Any, late: Any, groups: int, pad: int, order: str, walk: str = "experts"
) -> None:
    """Raise AssertionError unless `jobs` is every (item, group) once, in an order that `order` and `walk` allow.

    `readiness` (items,): the largest slot of each item; `late` (items,): which items come last under `remote`.
    """
    import numpy

    jobs, readiness, late = (numpy.asarray(array) for array in (jobs, readiness, late))
    _need((numpy.sort(jobs) == numpy.arange(len(readiness) * groups)).all(), "jobs_are_a_permutation")
    item, group = jobs // groups, jobs % groups
    if walk == "columns":
        _need((numpy.diff(group) >= 0).all(), "runs_of_columns_follow_each_other")
        for run in range(groups):
            mine = jobs[group == run] // groups
            check_jobs(mine, readiness, late, 1, pad, order)
        return
    if order == "token":
        return
    block = readiness[item] // pad
    place = block * groups + group
    if order == "remote":
        _need((numpy.diff(late[item].astype(int)) >= 0).all(), "late_jobs_come_last")
        place = place + late[item] * (place.max(initial=0) + 1)
    _need((numpy.diff(place) >= 0).all(), "jobs_ascend_with_what_they_wait_for")


def _need(holds: Any, invariant: str, detail: str = "") -> None:
    if not bool(holds):
        raise AssertionError(f"{invariant}: {detail}" if detail else invariant)
