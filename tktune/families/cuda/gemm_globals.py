"""The host mirror of `gemm_globals`, `expert_rows` and `spin_guard` (csrc/gemm/config.cuh, csrc/tile/spin.cuh): the one
place in Python that knows their layout. A test compiles the headers and compares every offset.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tktune.core.config import Config
from tktune.families.cuda.tensor_map import PANEL_COLS
from tktune.families.grouped_gemm.space_cuda import out_panel_cols

ACTIVATIONS, WEIGHTS, OUTPUTS, WALK, DISPENSER, GUARD = 0, 192, 384, 576, 584, 592
NUM_EXPERTS, REDUCTION, COLS, PAD, RASTER_ROWS, TURN_BACK = 616, 620, 624, 628, 632, 636
GLOBALS_BYTES = 640
VIEW_BYTES = 192  # gl<bf16, one tile>: descriptor, data, rows, cols; padded to 64
GUARD_BYTES = 24
EXPERT_ROWS_BYTES = 16
DISPENSER_WORDS = 2

_VIEW = struct.Struct("<128sQii48x")
_TAIL = struct.Struct("<QQQQIi6i")
assert _VIEW.size == VIEW_BYTES and WALK + _TAIL.size == GLOBALS_BYTES


@dataclass(frozen=True)
class View:
    """A row-major bf16 matrix in device memory with its encoded descriptor."""

    tensor_map: bytes
    pointer: int
    rows: int
    cols: int

    def packed(self) -> bytes:
        return _VIEW.pack(self.tensor_map, self.pointer, self.rows, self.cols)


@dataclass(frozen=True)
class Guard:
    """How long a wait may last and where its report goes; addresses as the device sees them, 0 for none."""

    spin_limit_s: float
    rank: int = 0
    report: int = 0
    abort_word: int = 0

    @property
    def limit_kilo_ns(self) -> int:
        """Units of 1024 ns, at least one."""
        return max(1, min(round(self.spin_limit_s * 1e9 / 1024), 2**32 - 1))


@dataclass(frozen=True)
class GemmGlobals:
    """Everything one launch reads and writes; `walk` and `dispenser` are device addresses.

    `raster_rows`: row tiles of an expert that advance before the column does, 0 for all. `turn_back`: static strides
    run forth and back.
    """

    activations: View
    weights: View
    outputs: View
    walk: int
    dispenser: int
    guard: Guard
    num_experts: int
    reduction: int
    cols: int
    pad: int
    raster_rows: int = 0
    turn_back: int = 0

    def packed(self) -> bytes:
        """The `GLOBALS_BYTES` that the kernel takes by value."""
        guard = self.guard
        tail = _TAIL.pack(
            self.walk,
            self.dispenser,
            guard.report,
            guard.abort_word,
            guard.limit_kilo_ns,
            guard.rank,
            self.num_experts,
            self.reduction,
            self.cols,
            self.pad,
            self.raster_rows,
            self.turn_back,
        )
        return self.activations.packed() + self.weights.packed() + self.outputs.packed() + tail


class Box(NamedTuple):
    """A TMA box: one panel of a tile, in elements. Its rows are swizzled over their own bytes."""

    rows: int
    cols: int = PANEL_COLS


@dataclass(frozen=True)
class Boxes:
    """The TMA boxes of one variant (`geometry::a_box`, `b_box`, `c_piece`)."""

    activations: Box
    weights: Box
    outputs: Box


def boxes_of(build_part: Config, weight_layout: str) -> Boxes:
    """The boxes of a build part."""
    row, depth = build_part.number("ROW_BLOCK"), build_part.number("RED_BLOCK")
    piece = 64 if row >= 128 else row
    cluster = build_part.number("CLUSTER") if "CLUSTER" in build_part else 1
    deep = min(depth, PANEL_COLS)
    weights = Box(build_part.number("COL_BLOCK") // cluster, deep) if weight_layout == "enk" else Box(depth)
    return Boxes(Box(piece, deep), weights, Box(piece, out_panel_cols(build_part)))


WALKS = ("longest", "shortest", "index")


def walk_entries(counts: Sequence[int], base: Sequence[int], walk: str) -> list[tuple[int, int, int, int]]:
    """`expert_rows` of all local experts in the order of `walk` (ties by index): expert, first row, real rows, 0."""
    sign = {"longest": -1, "shortest": 1, "index": 0}[walk]
    order = sorted(range(len(counts)), key=lambda expert: sign * counts[expert])
    return [(expert, base[expert], counts[expert], 0) for expert in order]
