"""The host mirror of `combine_globals` (csrc/comm/combine_config.cuh): the one place in Python that knows its layout. A
test compiles the header and compares every offset.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from tktune.families.cuda.gemm_globals import GLOBALS_BYTES, GemmGlobals
from tktune.families.formulas import round_up

PLAN, QUEUE, ROLES, LANDED_STRIDE, ROWS = 640, 744, 760, 792, 800
PLAN_WORDS, QUEUE_WORDS = 2, 36

_POINTERS = struct.Struct("<15Q")
_NUMBERS = struct.Struct("<10i")
_VIEW = struct.Struct("<Qii")  # gl<bf16> without tiles
assert GLOBALS_BYTES == PLAN and PLAN + _POINTERS.size == ROLES and ROLES + _NUMBERS.size == ROWS


@dataclass(frozen=True)
class CombineGlobals:
    """Everything one launch reads and writes; plain numbers that are not counts are device addresses.

    `rows[r]`, `staging[r]`, `watermarks[r]`, `landed[r]`: in rank r's symmetric memory. `capacity`: rows of `rows[r]`.
    """

    gemm: GemmGlobals
    plan: int
    block_expert: int
    experts: int
    jobs: int
    pull_tokens: int
    slots: int
    owners: int
    topk_weights: int
    push_expected: int
    recv_from: int
    final_contrib: int
    y: int
    finished: int
    queue: int
    sequence: int
    roles: int
    num_comp_blocks: int
    num_reduce_blocks: int
    form: int
    groups: int
    top_k: int
    tokens: int
    warp_slots: int
    landed_stride: int
    piece_vectors: int
    rows: tuple[int, ...]
    staging: tuple[int, ...]
    watermarks: tuple[int, ...]
    landed: tuple[int, ...]
    capacity: int

    def packed(self) -> bytes:
        """The `globals_bytes(world)` that the kernel takes by value."""
        world, cols = len(self.rows), self.gemm.cols
        pointers = _POINTERS.pack(
            *(
                self.plan,
                self.block_expert,
                self.experts,
                self.jobs,
                self.pull_tokens,
                self.slots,
                self.owners,
            ),
            *(self.topk_weights, self.push_expected, self.recv_from, self.final_contrib, self.y),
            *(self.finished, self.queue, self.sequence),
        )
        numbers = _NUMBERS.pack(
            *(self.roles, self.num_comp_blocks, self.num_reduce_blocks, self.form, self.groups, self.top_k),
            *(self.tokens, self.warp_slots, self.landed_stride, self.piece_vectors),
        )
        views = b"".join(_VIEW.pack(at, self.capacity, cols) for at in self.rows)
        views += b"".join(_VIEW.pack(at, world * self.tokens, cols) for at in self.staging)
        words = struct.pack(f"<{2 * world}Q", *self.watermarks, *self.landed)
        packed = self.gemm.packed() + pointers + numbers + views + words
        return packed.ljust(globals_bytes(world), b"\0")


def globals_bytes(world: int) -> int:
    return round_up(ROWS + world * (2 * _VIEW.size + 16), 64)
