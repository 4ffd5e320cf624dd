"""What one rank pushes where, and whose rows its own pad blocks wait for: the golden builder in plain loops.

The vectorised builder is in `push_tables_torch`, the invariants that the tables of all ranks must meet together are in
`push_tables_check`. Source of the definitions: counters and flags of pushed rows (research/fused_kernels.md §6.4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tktune.core import tables
from tktune.core.table_arrays import TableArrays

if TYPE_CHECKING:
    from tktune.core.problem import Problem


@dataclass(frozen=True)
class PushTables(TableArrays):
    """The pushes of one rank. int32 arrays, numpy or torch; B pad blocks here. Nothing is pushed to the rank itself.

    As the source of tokens, for each destination:

    - `counts` (ranks): tokens pushed to it; `turns`: the most of any destination.
    - `tokens` (ranks, tokens): own tokens in the order in which it needs them, −1 beyond its count.
    - `blocks` (ranks, tokens, top_k): pad blocks there that the token's rows belong to, in the order of `tokens` and
      position by position, −1 where the expert is elsewhere.
    - `offsets` (ranks + 1): where the counters of its pad blocks begin; `expected` (offsets[-1]): rows that this rank
      pushes for each of them.

    As the destination of rows:

    - `gate_expected` (B, ranks): rows of each source in each pad block, own ones among them.
    - `gate_sources` (B): bit s is set where rank s pushes a row of the block.
    """

    rank: int
    turns: int
    counts: Any
    tokens: Any
    blocks: Any
    offsets: Any
    expected: Any
    gate_expected: Any
    gate_sources: Any


def build(topk_ids: Any, problem: Problem, rank: int) -> PushTables:
    """Build the tables of `rank` from `topk_ids` (ranks, tokens, top_k) in plain loops (numpy int32 arrays).

    Slow on purpose: every rank's schedule is built for its slots. Raises `RoutingError`.
    """
    import numpy

    ranks, most, top_k, pad = problem.expert_ranks, problem.tokens, problem.top_k, problem.pad
    schedules = [tables.build(topk_ids, problem, destination) for destination in range(ranks)]

    counts, offsets = [0] * ranks, [0]
    tokens = [[-1] * most for _ in range(ranks)]
    blocks = [[[-1] * top_k for _ in range(most)] for _ in range(ranks)]
    expected: list[int] = []
    for destination, schedule in enumerate(schedules):
        rows = [0] * schedule.num_pad_blocks
        if destination == rank:
            rows = []
        else:
            for token in schedule.push_order[rank].tolist():
                place = counts[destination]
                counts[destination] += 1
                tokens[destination][place] = token
                for x, slot in enumerate(schedule.slots[rank][token].tolist()):
                    if slot >= 0:
                        blocks[destination][place][x] = slot // pad
                        rows[slot // pad] += 1
        expected += rows
        offsets.append(len(expected))

    own = schedules[rank]
    gate_expected = [[0] * ranks for _ in range(own.num_pad_blocks)]
    for slot, (source, _) in enumerate(own.pull_indices.tolist()):
        if source >= 0:
            gate_expected[slot // pad][source] += 1
    gate_sources = [
        sum(1 << source for source, rows_of in enumerate(of_block) if rows_of and source != rank)
        for of_block in gate_expected
    ]

    def table(values: Any, *shape: int) -> Any:
        return numpy.array(values, dtype=numpy.int32).reshape(shape)

    return PushTables(
        rank=rank,
        turns=max(counts),
        counts=table(counts, ranks),
        tokens=table(tokens, ranks, most),
        blocks=table(blocks, ranks, most, top_k),
        offsets=table(offsets, ranks + 1),
        expected=table(expected, len(expected)),
        gate_expected=table(gate_expected, own.num_pad_blocks, ranks),
        gate_sources=table(gate_sources, own.num_pad_blocks),
    )
