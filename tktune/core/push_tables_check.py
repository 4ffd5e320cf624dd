"""The invariants of push tables over all ranks, each by name: what a sender counts is what its receiver waits for
(research/fused_kernels.md §6.4). Recomputed with other means than either builder uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tktune.core.problem import Problem
    from tktune.core.push_tables import PushTables
    from tktune.core.tables import ScheduleTables


def check(pushes: Sequence[PushTables], schedules: Sequence[ScheduleTables], problem: Problem) -> None:
    """Raise AssertionError naming the first invariant that the tables of all ranks, in rank order, break."""
    pushes, schedules = [p.numpy() for p in pushes], [s.numpy() for s in schedules]
    for rank, push in enumerate(pushes):
        _shapes(push, schedules[rank], problem, rank)
        _gate(push, schedules[rank], problem, rank)
        for destination, schedule in enumerate(schedules):
            _pushes(push, schedule, problem, rank, destination)
    for source, push in enumerate(pushes):
        for destination, receiver in enumerate(pushes):
            if source == destination:
                continue
            sent = push.expected[push.offsets[destination] : push.offsets[destination + 1]]
            _need(
                len(sent) == len(receiver.gate_expected)
                and (sent == receiver.gate_expected[:, source]).all(),
                "sender_counts_what_the_receiver_waits_for",
                f"{source} → {destination}",
            )


def _need(holds: Any, invariant: str, detail: str = "") -> None:
    if not bool(holds):
        raise AssertionError(f"{invariant}: {detail}" if detail else invariant)


def _shapes(push: PushTables, schedule: ScheduleTables, problem: Problem, rank: int) -> None:
    ranks, tokens, top_k = problem.expert_ranks, problem.tokens, problem.top_k
    wanted = {
        "counts": (ranks,),
        "tokens": (ranks, tokens),
        "blocks": (ranks, tokens, top_k),
        "offsets": (ranks + 1,),
        "expected": (int(push.offsets[-1]),),
        "gate_expected": (schedule.num_pad_blocks, ranks),
        "gate_sources": (schedule.num_pad_blocks,),
    }
    _need(push.rank == rank, "rank", f"tables of rank {push.rank} stand at {rank}")
    for name, array in push.arrays().items():
        _need(str(array.dtype) == "int32", "dtype_int32", f"{name} is {array.dtype}")
        _need(array.shape == wanted[name], "shapes", f"{name} is {array.shape}, not {wanted[name]}")
    _need(push.turns == push.counts.max(), "turns_are_the_most_pushes")


def _gate(push: PushTables, schedule: ScheduleTables, problem: Problem, rank: int) -> None:
    import numpy

    expected = push.gate_expected
    _need((expected >= 0).all(), "gate_expects_no_less_than_nothing")
    _need((expected.sum(1) == problem.pad - schedule.slack).all(), "gate_rows_and_slack_fill_the_block")
    own = problem.pad - schedule.slack - expected[:, rank]
    _need((own == problem.pad - schedule.own_slack).all(), "own_rows_are_not_waited_for")
    bits = (push.gate_sources[:, None] >> numpy.arange(problem.expert_ranks)) & 1
    awaited = expected > 0
    awaited[:, rank] = False
    _need((bits == awaited).all(), "gate_waits_for_sources_with_rows_only")


def _pushes(
    push: PushTables, schedule: ScheduleTables, problem: Problem, rank: int, destination: int
) -> None:
    import numpy

    where = f"{rank} → {destination}"
    count = int(push.counts[destination])
    begin, end = push.offsets[destination : destination + 2]
    if destination == rank:
        _need(count == 0 and begin == end, "nothing_is_pushed_to_itself")
    else:
        _need(end - begin == schedule.num_pad_blocks, "a_counter_for_each_pad_block", where)
        _need(count == len(schedule.push_order[rank]), "every_wanted_token_is_pushed", where)
    tokens, blocks = push.tokens[destination], push.blocks[destination]
    _need((tokens[count:] == -1).all() and (blocks[count:] == -1).all(), "nothing_beyond_the_count", where)
    if count == 0:
        _need((push.expected[begin:end] == 0).all(), "expected_counts_pushed_rows", where)
        return
    tokens, blocks = tokens[:count], blocks[:count]
    _need(len(numpy.unique(tokens)) == count and (tokens >= 0).all(), "no_token_is_pushed_twice", where)
    slots = schedule.slots[rank][tokens]
    _need((blocks == slots // problem.pad).all(), "blocks_are_those_of_the_slots", where)
    smallest = numpy.where(slots >= 0, slots, schedule.rows).min(1)
    _need((numpy.diff(smallest) > 0).all(), "pushed_in_the_order_of_need", where)
    rows = numpy.bincount(blocks[blocks >= 0], minlength=end - begin)
    _need((push.expected[begin:end] == rows).all(), "expected_counts_pushed_rows", where)
