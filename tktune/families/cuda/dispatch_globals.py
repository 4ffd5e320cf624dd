"""The host mirror of `dispatch_globals`, `meeting` and `self_test_globals` (csrc/comm): the one place in Python that
knows their layout. A test compiles the headers and compares every offset.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from tktune.families.cuda.gemm_globals import GLOBALS_BYTES, GemmGlobals, Guard
from tktune.families.formulas import round_up

GATHERED, PLAN, PULL_INDICES, PULL_TOKENS, PULL_SLOTS = 640, 648, 656, 664, 672
SLACK, ARRIVALS, QUEUE, ROLES, PENDING, TOKENS = 680, 688, 696, 704, 736, 776
PLAN_WORDS, QUEUE_WORDS = 3, 3
NEVER_LAST = 1 << 20  # the second word of the GEMM's dispenser between launches
SLOT_RESERVE_BYTES = 2048  # semaphores before the row slots of a communicating block
MOST_SLOTS, MOST_WARP_SLOTS, MOST_PENDING = SLOT_RESERVE_BYTES // 8, 8, 8
BESIDE_RESERVE_BYTES, MOST_BESIDE_WARPS, MOST_PIECES = 256, 2, 16

COMMUNICATE, COMPUTE, GATED = 1, 2, 4
FUSED = COMMUNICATE | COMPUTE | GATED
ALL_ROWS = 2**31 - 1  # a head that no plan exceeds

_DISPATCH = struct.Struct("<8Q18i")
_VIEW = struct.Struct("<Qii")  # gl<bf16> without tiles
assert GLOBALS_BYTES + _DISPATCH.size == TOKENS


@dataclass(frozen=True)
class RowSlots:
    """How warps of a block that bring rows share its memory: `warps` warps with `of_warp` slots each, for rows that move in
    `pieces` (a power of two). When a warp goes on, stores of `pending` pieces may be under way, and `unread` of them
    may still read their slot. None of it where `warps` is 0.
    """

    warps: int
    of_warp: int
    pending: int
    unread: int
    pieces: int = 1

    def smem_bytes(self, row_bytes: int) -> int:
        return SLOT_RESERVE_BYTES + self.warps * self.of_warp * row_bytes // self.pieces

    @classmethod
    def within(cls, smem_bytes: int, row_bytes: int, warps: int) -> RowSlots:
        """As many slots as `smem_bytes` hold; two a warp or more, so that loads run ahead of stores."""
        room = min((smem_bytes - SLOT_RESERVE_BYTES) // row_bytes, MOST_SLOTS)
        if room < 1:
            raise ValueError(f"a row of {row_bytes} bytes does not fit {smem_bytes} bytes of shared memory")
        of_warp = min(max(room // warps, min(2, room)), MOST_WARP_SLOTS)
        return cls(min(warps, room // of_warp), of_warp, of_warp // 2, of_warp // 2)

    @classmethod
    def beside(cls, smem_bytes: int, gemm_bytes: int, row_bytes: int, warps: int) -> RowSlots:
        """What `warps` warps have beside a GEMM that takes `gemm_bytes` of `smem_bytes`: three slots each or more, for rows
        in as few pieces as that allows. None where not even two slots each fit.
        """
        room = smem_bytes - round_up(gemm_bytes, 128) - BESIDE_RESERVE_BYTES
        for least in (3, 2):
            pieces = 1
            while warps and pieces <= MOST_PIECES and row_bytes % (16 * pieces) == 0:
                of_warp = min(room // (row_bytes // pieces * warps), MOST_WARP_SLOTS)
                if of_warp >= least:
                    return cls(warps, of_warp, of_warp, of_warp // 2, pieces)
                pieces *= 2
        return NO_SLOTS


NO_SLOTS = RowSlots(0, 1, 0, 0)


@dataclass(frozen=True)
class DispatchGlobals:
    """Everything one launch reads and writes; plain numbers that are not counts are device addresses.

    `tokens[r]` is where rank r's token rows lie, `token_rows` how many each rank has. `head`: the first rows, which are
    fetched slot by slot; the others are fetched once a token. `wave`: rows or tokens a warp
    draws at once; `opening`: waves that each warp of a compute block brings before its first task. `beside`: the slots
    of the warps of a compute block that bring rows while the others compute. `openers`: warps of a
    compute block that bring rows until its first tile can begin; 0: all of them, for `opening` waves.
    """

    gemm: GemmGlobals
    gathered: int
    plan: int
    pull_indices: int
    pull_tokens: int
    pull_slots: int
    slack: int
    arrivals: int
    queue: int
    roles: int
    num_comp_blocks: int
    head: int
    top_k: int
    wave: int
    opening: int
    slots: RowSlots
    tokens: tuple[int, ...]
    token_rows: int
    beside: RowSlots = NO_SLOTS
    openers: int = 0

    def packed(self) -> bytes:
        """The `globals_bytes(world)` that the kernel takes by value."""
        head = _DISPATCH.pack(
            *(self.gathered, self.plan, self.pull_indices, self.pull_tokens),
            *(self.pull_slots, self.slack, self.arrivals, self.queue),
            *(self.roles, self.num_comp_blocks, self.head, self.top_k, self.wave, self.opening),
            *(self.slots.of_warp, self.slots.warps, self.slots.pending, self.slots.unread, self.slots.pieces),
            *(self.beside.warps, self.beside.of_warp, self.beside.pending, self.beside.unread),
            *(self.beside.pieces, self.openers, 0),
        )
        views = b"".join(_VIEW.pack(at, self.token_rows, self.gemm.reduction) for at in self.tokens)
        return (self.gemm.packed() + head + views).ljust(globals_bytes(len(self.tokens)), b"\0")


def globals_bytes(world: int) -> int:
    return round_up(TOKENS + world * _VIEW.size, 64)


def meeting_bytes(world: int) -> int:
    return 8 * world + 8 + 24


def self_test_bytes(world: int) -> int:
    return 8 * world + 16 + 24 + 8


def packed_meeting(words: tuple[int, ...], sequence: int, guard: Guard) -> bytes:
    """`words[r]`: address of rank r's meeting words; `sequence`: of this rank's own count."""
    return struct.pack(f"<{len(words)}QQ", *words, sequence) + packed_guard(guard)


def packed_self_test(memory: tuple[int, ...], errors: int, first: int, guard: Guard, rounds: int) -> bytes:
    """`memory[r]`: address of rank r's symmetric memory; `errors`: of two int32 words; `first`: the last number used."""
    return (
        struct.pack(f"<{len(memory)}QQQ", *memory, errors, first)
        + packed_guard(guard)
        + struct.pack("<ii", rounds, 0)
    )


def packed_guard(guard: Guard) -> bytes:
    return struct.pack("<QQIi", guard.report, guard.abort_word, guard.limit_kilo_ns, guard.rank)
