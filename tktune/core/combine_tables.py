"""What one rank owes and is owed when expert rows are combined into tokens, and the orders in which that is done: the
golden builder in plain loops.

The vectorised builder is in `combine_tables_torch`, the invariants both must meet in `combine_tables_check`. Source of
the definitions: pre-reduced combine, readiness order (research/fused_kernels.md §6.5, §1.11).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tktune.core import tables
from tktune.core.errors import WordsError
from tktune.core.table_arrays import TableArrays

if TYPE_CHECKING:
    from tktune.core.problem import Problem
    from tktune.core.tables import ScheduleTables

JOB_ORDERS = ("ready", "remote", "token")
WALKS = ("experts", "columns")


@dataclass(frozen=True)
class CombineTables(TableArrays):
    """Who holds the rows of whose tokens, seen from one rank. int32 arrays, numpy or torch.

    As a holder of rows (pre-reduce): one partial row for each of the schedule's `pull_tokens`.

    - `push_expected` (ranks): how many of them go to each rank.

    As the source of tokens:

    - `final_contrib` (tokens, ranks): 1 where that rank holds a row of the own token, and so owes a partial row.
    - `recv_from` (ranks): partial rows that each rank owes, the column sums of `final_contrib`.
    - `owners` (tokens, top_k): the rank that holds each assignment of own tokens; `owner_slots` (tokens, top_k): its
      slot in that rank's schedule.
    """

    rank: int
    push_expected: Any
    final_contrib: Any
    recv_from: Any
    owners: Any
    owner_slots: Any


def check_job_words(order: str, groups: int, walk: str) -> None:
    """Raise `WordsError` for an order, a number of column groups or a walk that there is not."""
    if walk not in WALKS:
        raise WordsError(f"There is no walk {walk!r}.", f"Use one of {', '.join(WALKS)}.")
    if order not in JOB_ORDERS or groups < 1:
        raise WordsError(
            f"There is no job order {order!r} over {groups} groups.",
            f"Use one of {', '.join(JOB_ORDERS)}, and at least one group.",
        )


def build(topk_ids: Any, problem: Problem, rank: int) -> CombineTables:
    """Build the tables of `rank` from `topk_ids` (ranks, tokens, top_k) in plain loops (numpy int32 arrays).

    Slow on purpose: every rank's schedule is built for the slots. Raises `RoutingError`.
    """
    import numpy

    ranks, tokens, top_k = problem.expert_ranks, problem.tokens, problem.top_k
    schedules = [tables.build(topk_ids, problem, owner) for owner in range(ranks)]
    own = numpy.asarray(topk_ids)[rank].tolist()

    push_expected = [0] * ranks
    for source, _ in schedules[rank].pull_tokens.tolist():
        push_expected[source] += 1

    final_contrib = [[0] * ranks for _ in range(tokens)]
    owners = [[0] * top_k for _ in range(tokens)]
    owner_slots = [[0] * top_k for _ in range(tokens)]
    for token in range(tokens):
        for x, expert in enumerate(own[token]):
            owner = expert // problem.local_experts
            owners[token][x] = owner
            owner_slots[token][x] = int(schedules[owner].slots[rank, token, x])
            final_contrib[token][owner] = 1
    recv_from = [sum(of_token[owner] for of_token in final_contrib) for owner in range(ranks)]

    def table(values: Any, *shape: int) -> Any:
        return numpy.array(values, dtype=numpy.int32).reshape(shape)

    return CombineTables(
        rank=rank,
        push_expected=table(push_expected, ranks),
        final_contrib=table(final_contrib, tokens, ranks),
        recv_from=table(recv_from, ranks),
        owners=table(owners, tokens, top_k),
        owner_slots=table(owner_slots, tokens, top_k),
    )


def push_jobs(
    schedule: ScheduleTables, problem: Problem, order: str, groups: int = 1, walk: str = "experts"
) -> Any:
    """The jobs of the pre-reduce form, (pull tokens × groups,) int32: index into `pull_tokens` × groups + group.

    A job is one of `groups` runs of columns of one partial row. `ready`: by the last pad block that must have landed,
    then group, then largest slot (with one group this is `job_order`); `remote`: the same, but own tokens after those
    of peers; `token`: by source in ring order, then token. Where the GEMM's `walk` takes one run of columns after the
    other (`columns`), so do the jobs. Raises `WordsError`.
    """
    check_job_words(order, groups, walk)
    t = schedule.numpy()
    ranks = problem.expert_ranks
    keys = []
    for job, ((source, token), slots) in enumerate(
        zip(t.pull_tokens.tolist(), t.pull_slots.tolist(), strict=True)
    ):
        largest = max(slots)
        for group in range(groups):
            ready = (largest // problem.pad, group, largest)
            key: tuple[int, ...] = ready
            if order == "remote":
                key = (int(source == t.rank), *ready)
            elif order == "token":
                key = ((source - t.rank) % ranks, token, group)
            if walk == "columns":
                key = (group, *key)
            keys.append((key, job * groups + group))
    return _in_order(keys)


def pull_jobs(
    combine: CombineTables, problem: Problem, order: str, groups: int = 1, walk: str = "experts"
) -> Any:
    """The jobs of the pull form, (tokens × groups,) int32: own token × groups + group.

    As `push_jobs`, where blocks and slots are those of whichever rank holds the row; `remote`: tokens that only this
    rank holds rows of come last. Raises `WordsError`.
    """
    check_job_words(order, groups, walk)
    t = combine.numpy()
    keys = []
    for token, (owners, slots) in enumerate(zip(t.owners.tolist(), t.owner_slots.tolist(), strict=True)):
        largest = max(slots)
        for group in range(groups):
            ready = (largest // problem.pad, group, largest, token)
            key: tuple[int, ...] = ready
            if order == "remote":
                key = (int(all(owner == t.rank for owner in owners)), *ready)
            elif order == "token":
                key = (token, group)
            if walk == "columns":
                key = (group, *key)
            keys.append((key, token * groups + group))
    return _in_order(keys)


def _in_order(keys: list[tuple[tuple[int, ...], int]]) -> Any:
    import numpy

    return numpy.array([job for _, job in sorted(keys)], dtype=numpy.int32)
