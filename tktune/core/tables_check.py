"""The invariants of schedule tables, each by name. A builder's mistake or a corrupted table fails one of them.

Everything is recomputed from the expert ids with other means than either builder uses (research/fused_kernels.md
§6.2, §6.3, §6.5).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tktune.core.problem import Problem
    from tktune.core.tables import ScheduleTables


def check(tables: ScheduleTables, topk_ids: Any, problem: Problem, rank: int) -> None:
    """Raise AssertionError naming the first invariant that `tables` breaks for these ids."""
    import numpy

    t = tables.numpy()
    ids = numpy.asarray(topk_ids)
    first = rank * problem.local_experts
    experts = numpy.arange(first, first + problem.local_experts)
    _shapes(t, problem, rank)
    _counts(t, ids, experts, problem)
    _blocks(t, problem)
    _slots(t, ids, first, problem)
    _pull_indices(t, ids, first, rank, problem)
    _own_slack(t, rank, problem)
    _orders(t, problem)


def _need(holds: Any, invariant: str, detail: str = "") -> None:
    if not bool(holds):
        raise AssertionError(f"{invariant}: {detail}" if detail else invariant)


def _shapes(t: ScheduleTables, problem: Problem, rank: int) -> None:
    ranks, tokens, top_k, local = (
        problem.expert_ranks,
        problem.tokens,
        problem.top_k,
        problem.local_experts,
    )
    jobs, blocks = len(t.pull_tokens), t.num_pad_blocks
    wanted: dict[str, tuple[int, ...]] = {
        "counts": (local,),
        "padded": (local,),
        "base": (local,),
        "pull_indices": (t.rows, 2),
        "block_expert": (blocks,),
        "block_rows": (blocks,),
        "slack": (blocks,),
        "own_slack": (blocks,),
        "slots": (ranks, tokens, top_k),
        "pull_tokens": (jobs, 2),
        "pull_slots": (jobs, top_k),
        "job_order": (jobs,),
        "slot_token": (t.rows,),
    }
    for name, array in t.arrays().items():
        _need(str(array.dtype) == "int32", "dtype_int32", f"{name} is {array.dtype}")
        shape = wanted.get(name)
        _need(shape is None or array.shape == shape, "shapes", f"{name} is {array.shape}, not {shape}")
    _need(t.rank == rank, "rank", f"tables of rank {t.rank} checked as rank {rank}")
    _need(len(t.push_order) == ranks, "push_order_sources", f"{len(t.push_order)} of {ranks}")


def _counts(t: ScheduleTables, ids: Any, experts: Any, problem: Problem) -> None:
    import numpy

    pad = problem.pad
    real = (ids.reshape(-1, 1) == experts.reshape(1, -1)).sum(axis=0)
    _need((t.counts == real).all(), "counts_match_routing")
    _need((t.padded % pad == 0).all(), "padded_is_whole_blocks")
    _need((t.padded >= t.counts).all(), "padded_holds_counts")
    _need((t.padded - t.counts < pad).all(), "padded_is_smallest")
    _need((t.base[1:] == numpy.cumsum(t.padded)[:-1]).all() and t.base[0] == 0, "base_is_prefix_of_padded")
    _need(t.rows == t.padded.sum(), "rows_is_sum_of_padded")
    _need(t.num_pad_blocks * pad == t.rows, "blocks_cover_rows")
    _need(t.rows <= problem.capacity_rows, "rows_within_capacity", f"{t.rows} > {problem.capacity_rows}")


def _blocks(t: ScheduleTables, problem: Problem) -> None:
    import numpy

    pad, local = problem.pad, problem.local_experts
    _need((t.slack >= 0).all() and (t.slack < pad).all(), "slack_range", "each slack is in 0..pad-1")
    _need(t.slack.sum() == t.rows - t.counts.sum(), "slack_sum", "slack sums to padded minus real rows")
    _need((t.block_rows + t.slack == pad).all(), "rows_and_slack_fill_the_block")
    per_expert = numpy.bincount(t.block_expert, minlength=local)
    _need((per_expert == t.padded // pad).all(), "blocks_per_expert")
    _need((numpy.diff(t.block_expert) >= 0).all(), "block_expert_ascends")
    for block in numpy.flatnonzero(t.slack):
        expert = t.block_expert[block]
        last = (t.base[expert] + t.padded[expert]) // pad - 1
        _need(block == last, "slack_only_in_last_block", f"block {block} of expert {expert}")


def _slots(t: ScheduleTables, ids: Any, first: int, problem: Problem) -> None:
    import numpy

    pad, local = problem.pad, problem.local_experts
    here = (ids >= first) & (ids < first + local)
    _need(((t.slots >= 0) == here).all(), "slot_exactly_where_local")
    taken, expert = t.slots[here], ids[here] - first
    _need(len(numpy.unique(taken)) == len(taken), "slots_distinct", "two assignments share a slot")
    _need(
        (taken >= t.base[expert]).all() and (taken < (t.base + t.counts)[expert]).all(),
        "slots_in_expert_range",
        "a slot lies outside [base, base + count) of its expert",
    )
    _need((t.block_expert[taken // pad] == expert).all(), "block_expert_of_slot")
    arrivals = numpy.bincount(taken // pad, minlength=t.num_pad_blocks)
    _need((arrivals == pad - t.slack).all(), "arrivals_complete_the_block", "adds per block are pad - slack")


def _pull_indices(t: ScheduleTables, ids: Any, first: int, rank: int, problem: Problem) -> None:
    import numpy

    ranks, tokens = problem.expert_ranks, problem.tokens
    source, token = t.pull_indices[:, 0], t.pull_indices[:, 1]
    real = source >= 0
    _need((real == (token >= 0)).all(), "padding_is_minus_one_in_both")
    _need((source < ranks).all(), "source_is_a_rank")
    _need((token < tokens).all(), "token_is_local_to_its_source", "a token id is not below tokens")
    for expert in range(problem.local_experts):
        start, count, padded = int(t.base[expert]), int(t.counts[expert]), int(t.padded[expert])
        rows = slice(start, start + count)
        _need(real[rows].all(), "real_rows_first", f"expert {expert}")
        _need(not real[start + count : start + padded].any(), "padding_rows_last", f"expert {expert}")
        contains = (ids[source[rows], token[rows]] == first + expert).any(axis=1)
        _need(contains.all(), "row_belongs_to_its_expert", f"expert {expert}")
        ring = ((source[rows] - rank) % ranks).astype(numpy.int64) * tokens + token[rows]
        _need((numpy.diff(ring) > 0).all(), "ring_order", f"expert {expert}: rows leave the ring order")
    flat = numpy.where(real, source.astype(numpy.int64) * tokens + token, -1)
    _need((t.slot_token == flat).all(), "slot_token_is_global")
    where = numpy.argwhere(t.slots >= 0)
    placed = t.pull_indices[t.slots[tuple(where.T)]]
    _need((placed == where[:, :2]).all(), "slots_and_pull_indices_agree")


def _own_slack(t: ScheduleTables, rank: int, problem: Problem) -> None:
    import numpy

    brought = t.slots[numpy.arange(problem.expert_ranks) != rank]
    blocks = brought[brought >= 0] // problem.pad
    arrivals = numpy.bincount(blocks, minlength=t.num_pad_blocks)
    _need((t.own_slack + arrivals == problem.pad).all(), "own_slack_lacks_the_rows_of_other_ranks")


def _orders(t: ScheduleTables, problem: Problem) -> None:
    import numpy

    tokens = problem.tokens
    hit = numpy.argwhere((t.slots >= 0).any(axis=2))
    pulled = t.pull_tokens.astype(numpy.int64) @ numpy.array([tokens, 1])
    _need(
        (numpy.sort(pulled) == hit @ numpy.array([tokens, 1])).all() if len(hit) == len(pulled) else False,
        "pull_tokens_are_the_wanted_ones",
    )
    source, token = t.pull_tokens[:, 0], t.pull_tokens[:, 1]
    _need((t.pull_slots == t.slots[source, token]).all(), "pull_slots_agree_with_slots")
    smallest = numpy.where(t.pull_slots >= 0, t.pull_slots, t.rows).min(axis=1, initial=t.rows)
    largest = t.pull_slots.max(axis=1, initial=-1)
    _need((numpy.diff(smallest) > 0).all(), "pull_order_ascends", "smallest slots along the pull order")
    _need((numpy.sort(t.job_order) == numpy.arange(len(pulled))).all(), "job_order_is_a_permutation")
    _need((numpy.diff(largest[t.job_order]) > 0).all(), "job_order_ascends", "largest slots along the jobs")
    for s, order in enumerate(t.push_order):
        _need(((order >= 0) & (order < tokens)).all(), "push_order_is_local", f"source {s}: ids below tokens")
        _need(
            len(order) == (source == s).sum() and (order == token[source == s]).all(),
            "push_order_is_filtered_pull_order",
            f"source {s}",
        )
