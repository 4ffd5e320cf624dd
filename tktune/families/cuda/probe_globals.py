"""The host mirror of `probe_globals` and `echo_globals` (csrc/comm/probe.cuh): the one place in Python that knows their
layout. A test compiles the header and compares every offset.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from tktune.families.cuda.dispatch_globals import packed_guard
from tktune.families.cuda.gemm_globals import Guard

BULK, PLAIN = 0, 1
THREADS, MOST_UNROLL = 512, 8
RESERVE_BYTES = 2048  # semaphores before the row slots
MOST_PENDING = 8
PIECE_BYTES = 16  # what a thread moves at a time when plain
GLOBALS_BYTES, ECHO_BYTES = 80, 56

_TAIL = struct.Struct("<iiiIIIIiii")


@dataclass(frozen=True)
class ProbeGlobals:
    """One copying launch; `source` and `target` are device addresses.

    Item i is read at row `i & (source_rows - 1)`; store number j goes to row `j * stride & (target_rows - 1)`. Rows are
    powers of two, `stride` is odd. A plain launch has pieces of 16 bytes for rows, and `warp_slots` of them (4 or 8) in
    flight in a thread.
    """

    source: int
    target: int
    guard: Guard
    way: int
    items: int
    source_rows: int
    target_rows: int
    row_bytes: int
    fan: int = 1
    stride: int = 1
    warps: int = 0
    warp_slots: int = 0
    pending: int = 0

    def __post_init__(self) -> None:
        for rows in (self.source_rows, self.target_rows):
            if rows < 1 or rows & (rows - 1):
                raise ValueError(f"{rows} rows are no power of two")
        if self.stride % 2 == 0 or self.row_bytes % PIECE_BYTES:
            raise ValueError(f"a stride of {self.stride} or rows of {self.row_bytes} bytes")
        if self.items * self.fan >= 1 << 31:
            raise ValueError(f"{self.items} rows stored {self.fan} times are too many to count")

    def packed(self) -> bytes:
        """The `GLOBALS_BYTES` that the kernel takes by value."""
        tail = _TAIL.pack(
            *(self.way, self.items, self.fan, self.stride, self.source_rows - 1, self.target_rows - 1),
            *(self.row_bytes, self.warps, self.warp_slots, self.pending),
        )
        return struct.pack("<QQ", self.source, self.target) + packed_guard(self.guard) + tail


def packed_echo(mine: int, theirs: int, sequence: int, guard: Guard, rounds: int, opens: bool) -> bytes:
    """`mine`: address of the word that the partner writes here; `theirs`: of ours there; `sequence`: of the last number."""
    return (
        struct.pack("<QQQ", mine, theirs, sequence) + packed_guard(guard) + struct.pack("<ii", rounds, opens)
    )
