"""The host mirror of `push_part` (csrc/comm/push_config.cuh), which follows `dispatch_globals` where rows are pushed: the
one place in Python that knows its layout. A test compiles the headers and compares every offset.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from tktune.core.problem import Problem
from tktune.families.cuda import dispatch_globals as mirror
from tktune.families.formulas import round_up

PLAN, TOKENS, BLOCKS, EXPECTED, MISSING, GATE_SOURCES, SEQUENCE, SECTIONS = range(0, 64, 8)
FLAG_BYTES = 8

_HEAD = struct.Struct("<7Q")
_VIEW = struct.Struct("<Qii")  # gl<bf16> without tiles
assert _HEAD.size == SECTIONS


@dataclass(frozen=True)
class PushPart:
    """Device addresses of what a push reads and writes; `core.push_tables` says what stands in the tables.

    `plan`: offsets, then turns. `missing`: as `expected` between launches. `sequence`: of the last meeting.
    `sections[r]`: rank r's buffer of all ranks' tokens, of `section_rows` rows; `flags[r]`: its words, by index (pad
    blocks, ranks), gathered (ranks, tokens). `num_push_blocks`: gathered, communicating blocks that push before they
    scatter.
    """

    plan: int
    tokens: int
    blocks: int
    expected: int
    missing: int
    gate_sources: int
    sequence: int
    sections: tuple[int, ...]
    section_rows: int
    flags: tuple[int, ...]
    num_push_blocks: int = 0

    def behind(self, dispatch: bytes, hidden: int) -> bytes:
        """The `globals_bytes(world)` that the kernel takes by value: `dispatch`, then this."""
        head = _HEAD.pack(
            *(self.plan, self.tokens, self.blocks, self.expected),
            *(self.missing, self.gate_sources, self.sequence),
        )
        views = b"".join(_VIEW.pack(at, self.section_rows, hidden) for at in self.sections)
        flags = struct.pack(f"<{len(self.flags)}Qii", *self.flags, self.num_push_blocks, 0)
        return (dispatch + head + views + flags).ljust(globals_bytes(len(self.flags)), b"\0")


def part_bytes(world: int) -> int:
    return _HEAD.size + world * (_VIEW.size + 8) + 8


def globals_bytes(world: int) -> int:
    return round_up(mirror.globals_bytes(world) + part_bytes(world), 64)


def flag_bytes(problem: Problem) -> tuple[int, int]:
    """Of one rank's flags of pad blocks and of rows, for whatever routing: symmetric memory that was zero once and only
    grows.
    """
    blocks = problem.capacity_rows // problem.pad
    return blocks * problem.world * FLAG_BYTES, problem.world * problem.tokens * FLAG_BYTES
