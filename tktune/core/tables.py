"""Schedule tables of one rank under expert parallelism, and their golden builder in plain loops.

The vectorised builder is in `tables_torch`, written from the same definitions and not from this code; the
invariants both must meet are in `tables_check`. Source of the definitions: grouping, ring order and pull order of
fused dispatch kernels (research/fused_kernels.md §6.2, §6.3, §6.5).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tktune.core.errors import RoutingError
from tktune.core.table_arrays import TableArrays

if TYPE_CHECKING:
    from tktune.core.problem import Problem


@dataclass(frozen=True)
class ScheduleTables(TableArrays):
    """Where every row goes on one rank. int32 arrays, numpy or torch; slots and experts are local to the rank.

    El local experts, P = `rows` padded rows, B = `num_pad_blocks` = P / pad, U tokens wanted by this rank.
    Inside an expert rows stand in ring order: by (source rank − rank) mod ranks, then token.

    - `counts` (El): real rows; `padded` (El): rounded up to pad, 0 stays 0; `base` (El): first slot.
    - `pull_indices` (P, 2): (source rank, token) of each slot, −1 on padding.
    - `block_expert`, `block_rows`, `slack` (B): expert, real rows and padding rows of each pad block; `own_slack` (B):
      padding rows and rows of this rank's own tokens, which a launch that reads those in place waits for no more.
    - `slots` (ranks, tokens, top_k): slot of each assignment here, −1 where the expert is elsewhere.
    - `pull_tokens` (U, 2): (source rank, token) wanted here, by smallest slot (the pull order);
      `pull_slots` (U, top_k): their slots, position by position, −1 where the expert is elsewhere.
    - `job_order` (U): indices into `pull_tokens` by largest slot.
    - `slot_token` (P): source × tokens + token, −1 on padding.
    - `push_order`: for each source rank, its own token ids in the order this rank wants them.
    """

    rank: int
    rows: int
    num_pad_blocks: int
    counts: Any
    padded: Any
    base: Any
    pull_indices: Any
    block_expert: Any
    block_rows: Any
    slack: Any
    own_slack: Any
    slots: Any
    pull_tokens: Any
    pull_slots: Any
    job_order: Any
    slot_token: Any
    push_order: tuple[Any, ...]

    @property
    def digest(self) -> str:
        """SHA-256 over all tables, equal wherever the same tables are built."""
        tables = self.numpy()
        sha = hashlib.sha256(f"{self.rank},{self.rows},{self.num_pad_blocks}".encode())
        for name, array in tables.arrays().items():
            sha.update(f"{name}{array.shape}".encode())
            sha.update(array.astype("<i4").tobytes())
        return sha.hexdigest()


def check_topk_shape(shape: tuple[int, ...], problem: Problem, rank: int) -> None:
    """Raise `RoutingError` when ids of this shape cannot route `problem`, or `rank` is not one of its ranks."""
    wanted = (problem.expert_ranks, problem.tokens, problem.top_k)
    if tuple(shape) != wanted:
        raise RoutingError(
            f"The expert ids have shape {tuple(shape)}, and the problem needs (ranks, tokens, top_k) = {wanted}.",
            "Gather the ids of all ranks, in rank order.",
        )
    if not 0 <= rank < problem.expert_ranks:
        raise RoutingError(
            f"rank = {rank} is not in 0..{problem.expert_ranks - 1}.", "Ranks are counted from 0."
        )


def refuse_ids(problem: Problem) -> RoutingError:
    """The error for ids that are out of range or not distinct."""
    return RoutingError(
        f"The expert ids are not {problem.top_k} distinct numbers in 0..{problem.experts - 1} for each token.",
        "Take them from a top-k over the experts.",
    )


def build(topk_ids: Any, problem: Problem, rank: int) -> ScheduleTables:
    """Build the tables of `rank` from `topk_ids` (ranks, tokens, top_k) in plain loops (numpy int32 arrays).

    Slow on purpose: this is the definition that faster builders are compared with. Raises `RoutingError`.
    """
    import numpy

    ids = numpy.asarray(topk_ids)
    check_topk_shape(ids.shape, problem, rank)
    ranks, tokens, top_k, pad = problem.expert_ranks, problem.tokens, problem.top_k, problem.pad
    local = problem.local_experts
    first = rank * local
    routed: list[list[list[int]]] = ids.tolist()
    for of_rank in routed:
        for picked in of_rank:
            if len(set(picked)) != top_k or min(picked) < 0 or max(picked) >= problem.experts:
                raise refuse_ids(problem)

    counts = [0] * local
    for of_rank in routed:
        for picked in of_rank:
            for expert in picked:
                if first <= expert < first + local:
                    counts[expert - first] += 1

    padded, base, rows = [], [], 0
    block_expert, block_rows = [], []
    for expert, count in enumerate(counts):
        blocks = (count + pad - 1) // pad
        base.append(rows)
        padded.append(blocks * pad)
        rows += blocks * pad
        for block in range(blocks):
            block_expert.append(expert)
            block_rows.append(min(pad, count - block * pad))

    slots = [[[-1] * top_k for _ in range(tokens)] for _ in range(ranks)]
    pull_indices = [[-1, -1] for _ in range(rows)]
    cursor = list(base)
    for step in range(ranks):
        source = (rank + step) % ranks
        for token in range(tokens):
            for x in range(top_k):
                expert = routed[source][token][x] - first
                if 0 <= expert < local:
                    slot = cursor[expert]
                    cursor[expert] += 1
                    slots[source][token][x] = slot
                    pull_indices[slot] = [source, token]

    own_slack = [pad - real for real in block_rows]
    for slot, (source, _) in enumerate(pull_indices):
        own_slack[slot // pad] += source == rank

    wanted = []  # (smallest slot, largest slot, source, token)
    for source in range(ranks):
        for token in range(tokens):
            here = [slot for slot in slots[source][token] if slot >= 0]
            if here:
                wanted.append((min(here), max(here), source, token))
    wanted.sort()
    pull_tokens = [[source, token] for _, _, source, token in wanted]
    pull_slots = [slots[source][token] for source, token in pull_tokens]
    job_order = sorted(range(len(wanted)), key=lambda job: wanted[job][1])
    push_order = [[token for s, token in pull_tokens if s == source] for source in range(ranks)]
    slot_token = [-1 if source < 0 else source * tokens + token for source, token in pull_indices]

    def table(values: Any, *shape: int) -> Any:
        return numpy.array(values, dtype=numpy.int32).reshape(shape)

    blocks, jobs = rows // pad, len(wanted)
    return ScheduleTables(
        rank=rank,
        rows=rows,
        num_pad_blocks=blocks,
        counts=table(counts, local),
        padded=table(padded, local),
        base=table(base, local),
        pull_indices=table(pull_indices, rows, 2),
        block_expert=table(block_expert, blocks),
        block_rows=table(block_rows, blocks),
        slack=table([pad - real for real in block_rows], blocks),
        own_slack=table(own_slack, blocks),
        slots=table(slots, ranks, tokens, top_k),
        pull_tokens=table(pull_tokens, jobs, 2),
        pull_slots=table(pull_slots, jobs, top_k),
        job_order=table(job_order, jobs),
        slot_token=table(slot_token, rows),
        push_order=tuple(table(order, len(order)) for order in push_order),
    )
