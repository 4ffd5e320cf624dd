"""The mma.sync half of the grouped GEMM's CUDA space: parameters of the main loop of sm_120a (and of sm_90 when it
rehearses that class), what its warps' tiles cost in registers, and the rules between them.
"""

from __future__ import annotations

from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.problem import Problem
from tktune.core.space import Constraint, Parameter

MMA_SYNC = (
    Parameter("ROW_BLOCK", (64, 128, 256), "build", "rows of an output tile"),
    Parameter("COL_BLOCK", (64, 128, 192, 256), "build", "columns of an output tile"),
    Parameter("RED_BLOCK", (32, 64, 128), "build", "depth of one pipeline stage along hidden"),
    Parameter("STAGES", (2, 3, 4, 5, 6), "build", "stages between the loads and the consumers"),
    Parameter("CONSUMER_WARPS", (4, 8), "build", "warps that multiply"),
    Parameter(
        "PRODUCER_WARPS", (0, 1), "build", "0: the first consumer warp loads as well, between its steps"
    ),
    Parameter("WARP_M", (16, 32, 64), "build", "rows of one warp's tile; its columns follow"),
    Parameter("DRAW", ("stride", "dispenser"), "build", "how a block gets its next task"),
)
DEFAULT_MMA_SYNC = Config(
    ROW_BLOCK=128,
    COL_BLOCK=128,
    RED_BLOCK=64,
    STAGES=3,
    CONSUMER_WARPS=8,
    PRODUCER_WARPS=1,
    WARP_M=64,
    DRAW="dispenser",
)
SHAPES = ("ROW_BLOCK", "COL_BLOCK", "CONSUMER_WARPS", "WARP_M")
CHUNKS_AHEAD = 4  # 16 × 16 pieces of the weights that a warp fetches early, at most
# R2: addresses and loop state of a thread beside accumulators and fragments, by PRODUCER_WARPS. Whoever loads as well
# also walks the tasks.
LOOP_REGISTERS = {0: 48, 1: 32}
# Clocks of an SM (bench/gemm_probe/pipes.py): of one m16n8k16 product, on each of the four sub-partitions, and of one
# ldmatrix.x4; a clock moves 128 bytes of shared memory.
PRODUCT_CLOCKS, FRAGMENT_CLOCKS, CLOCK_BYTES = 6, 4, 128
# What is left of the tensor cores' time where a warp loads as well, where each has one warp alone, and where steps are
# half as deep (measured: bench/NOTES.md).
FED_SHARE, ALONE_SHARE, SHORT_SHARE = 0.75, 0.7, 0.8


def warp_n(config: Config) -> int:
    """Columns of one warp's tile (0 when the warps cannot tile the block)."""
    area = config.number("ROW_BLOCK") * config.number("COL_BLOCK")
    share = config.number("WARP_M") * config.number("CONSUMER_WARPS")
    return area // share if area % share == 0 else 0


def chunks_ahead(columns: int) -> int:
    """How many of the 16-column chunks of a warp's tile are fetched early: a divisor, so that places repeat."""
    wide = columns // 16
    return wide if wide <= CHUNKS_AHEAD else max(n for n in range(1, CHUNKS_AHEAD + 1) if wide % n == 0)


def fragments(config: Config) -> int:
    """R2: registers of one thread that hold fragments: two slices of 16 of the activations, and a ring of chunks of
    the weights, twice as many as are fetched early."""
    return config.number("WARP_M") // 2 + 4 * 2 * chunks_ahead(max(16, warp_n(config)))


def tensor_share(config: Config) -> float:
    """Rough share of time that the tensor cores can be busy, for ranking: their clocks over those of the busier of
    tensor cores and shared memory, for a slice of 16 of the block's tile."""
    row, col, warps = config.number("ROW_BLOCK"), config.number("COL_BLOCK"), config.number("CONSUMER_WARPS")
    products = row * col // (16 * 8) / 4 * PRODUCT_CLOCKS
    fragments = warps * (config.number("WARP_M") + max(16, warp_n(config))) // 16 * FRAGMENT_CLOCKS
    # A row of 64 bytes takes the clock of a whole line.
    lines = row * (2 if config.number("RED_BLOCK") == 32 else 1) + col
    share = products / max(products, fragments + lines * 16 * 2 / CLOCK_BYTES)
    share *= FED_SHARE if config.number("PRODUCER_WARPS") == 0 else 1.0
    share *= SHORT_SHARE if config.number("RED_BLOCK") == 32 else 1.0
    return share * (ALONE_SHARE if warps == 4 else 1.0)


def tiles_constraint() -> Constraint:
    return Constraint("warps_tile_the_block", "warps tile the block in 16 × 16 units", _warps, SHAPES)


def _warps(config: Config, problem: Problem, device: DeviceClass) -> str | None:
    row, col, height = config.number("ROW_BLOCK"), config.number("COL_BLOCK"), config.number("WARP_M")
    width = warp_n(config)
    fits = row % height == 0 and height <= 64  # a piece of rows; lower blocks are one piece
    if fits and width and width % 16 == 0 and col % width == 0:
        return None
    return f"{config['CONSUMER_WARPS']} warps of {height} rows cannot tile {row} × {col} in 16 × 16 units"
