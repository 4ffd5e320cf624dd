"""How long the tiles of the wgmma loops take, for ranking: tensor work of a tile against the operands that it reads. Pure.

Fitted to 6900 times on H200: `dispatch_gemm` on four shapes, and `bench/recordings/h200_grouped_gemm` (bench/NOTES.md, "What the
cost model knows").
"""

from __future__ import annotations

import functools
import math

from tktune.core.problem import Problem
from tktune.families.formulas import rank_rows, waves

# Of one SM: dense bf16 FLOP/s, and bytes/s of operands that it reads while all others do.
SM_FLOPS, SM_LOADED = 7.2e12, 140e9
_ROW_BYTES = 1.86  # a byte of activations costs as much as so many of weights, which more blocks read at once
_SHARPNESS = 5.0  # of the corner between the two
_HEIGHT = 0.9  # how far a tile that lacks rows is faster: by this power of the share that it has
_TAIL = 0.22  # of a tile: how far blocks end apart
_TILE_US, _DRAW_US = 0.35, 0.47  # beside the work: between tiles of one block, and to draw the next
_EVEN = 0.4  # how far tiles taken by stride finish as if they had been drawn


def tiles_us(
    problem: Problem,
    row_block: int,
    col_block: int,
    piece_rows: int,
    blocks: int,
    *,
    drawn: bool,
    pingpong: bool,
) -> float:
    """Estimated microseconds of all tiles of one rank on `blocks` SMs.

    An expert's rows are dealt evenly, in pieces, over as few tiles as hold them. A tile multiplies height × columns × hidden, and
    reads (height + columns) × hidden operands: where it is small, that is what it waits for. Warpgroups that take turns hide what
    lies between two tiles.
    """
    tiles, height = expert_tiles(rank_rows(problem) / problem.local_experts, row_block, piece_rows)
    tasks = problem.local_experts * tiles * math.ceil(problem.cols / col_block)
    rows = height**_HEIGHT * row_block ** (1 - _HEIGHT)
    multiplied = 2 * rows * col_block * problem.hidden / SM_FLOPS
    loaded = 2 * (_ROW_BYTES * height + col_block) * problem.hidden / SM_LOADED
    task_us = 1e6 * float((multiplied**_SHARPNESS + loaded**_SHARPNESS) ** (1 / _SHARPNESS))
    task_us += (0.0 if pingpong else _TILE_US) + (_DRAW_US if drawn else 0.0)
    even = tasks / max(1, blocks) + _TAIL
    return task_us * (even if drawn else _EVEN * even + (1 - _EVEN) * waves(tasks, blocks))


@functools.lru_cache(maxsize=4096)
def expert_tiles(mean_rows: float, row_block: int, piece_rows: int) -> tuple[float, float]:
    """Expected tiles of an expert, and the rows that one of them covers on average.

    Rows of an expert are taken as normal with the mean and variance of even routing (Poisson).

    >>> expert_tiles(128.0, 256, 64)[0]  # hardly ever more than 256 rows
    1.0
    >>> round(expert_tiles(128.0, 128, 64)[0], 1)  # more than 128 once in two
    1.5
    """
    tiles = _ceilings(mean_rows, row_block)
    covered = piece_rows * _ceilings(mean_rows, piece_rows)
    return round(tiles, 6), min(float(row_block), covered / max(tiles, 1e-9))


def _ceilings(mean_rows: float, step: int) -> float:
    """The expectation of ceil(rows ÷ step): the sum over k of the chance that rows are more than k steps."""
    deviation = math.sqrt(2 * max(mean_rows, 1e-9))
    found, at = 0.0, 0
    while True:
        more = 0.5 * math.erfc((at + 0.5 - mean_rows) / deviation)
        if more < 1e-7 and at > mean_rows:
            return found
        found, at = found + more, at + step
