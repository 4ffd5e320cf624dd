"""The grouped GEMM on the CPU backend: build parameters, their constraints, defines and the cost of its tiles.

Other families whose compute role is this GEMM take these and add their own.
"""

from __future__ import annotations

from tktune.core.build_spec import BuildSpec
from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.device_cpu import cores_of
from tktune.core.paths import csrc_root
from tktune.core.problem import Problem
from tktune.core.space import Constraint, Parameter
from tktune.families import glu
from tktune.families.formulas import (
    WEIGHT_LAYOUT_CODES,
    ceil_div,
    cpu_smem_bytes,
    divides,
    tile_rows,
    waves,
    within_bytes,
)

# The widest register tile of the micro-kernel (csrc/cpu/tile.hpp): consumers share a block's tiles of this size.
TILE_ROWS, TILE_COLS = 8, 32
MAX_THREADS_PER_RANK = 64

BUILD_PARAMETERS = (
    Parameter("ROW_BLOCK", (16, 32, 64, 128), "build", "rows of an output tile"),
    Parameter("COL_BLOCK", (32, 64, 96, 128, 192, 256), "build", "columns of an output tile"),
    Parameter("RED_BLOCK", (32, 64, 128, 256), "build", "depth of one pipeline stage along hidden"),
    Parameter("STAGES", (2, 3, 4), "build", "stages between the producer and its consumers"),
    Parameter("CONSUMER_WARPS", (1, 2, 4), "build", "threads of a block that multiply"),
)
BACKOFF = Parameter("backoff", (16, 128, 1024), "launch", "pauses before a wait starts to yield")
DEFAULT_BUILD = Config(ROW_BLOCK=32, COL_BLOCK=64, RED_BLOCK=64, STAGES=2, CONSUMER_WARPS=1)
DEFAULT_BACKOFF = 16

# Rough rates of one core, for ranking only: fp32 multiply-adds, bf16 elements packed, bytes copied.
CORE_FLOPS, CORE_PACKED, CORE_COPIED = 2e11, 2.5e9, 4e9
# Microseconds of one hand-over between threads, and of one pause of a thread that waits on a crowded core.
HANDOVER_US, PAUSE_US = 0.5, 0.015


def build_constraints() -> list[Constraint]:
    return [
        divides("ROW_BLOCK", "pad"),
        divides("COL_BLOCK", "cols"),
        divides("RED_BLOCK", "hidden"),
        Constraint(
            "consumers_share_the_tile",
            f"each consumer gets a register tile of {TILE_ROWS} × {TILE_COLS}",
            _consumers_share,
            ("ROW_BLOCK", "COL_BLOCK", "CONSUMER_WARPS"),
        ),
        within_bytes(
            cpu_smem_bytes,
            ("ROW_BLOCK", "COL_BLOCK", "RED_BLOCK", "STAGES"),
            lambda device: device.smem_optin_bytes,
        ),
        Constraint(
            "threads",
            f"a rank's seats hold at most {MAX_THREADS_PER_RANK} threads",
            _threads,
            ("CONSUMER_WARPS",),
            lambda config, problem, device: "set TKTUNE_CPU_SEATS to a smaller number",
        ),
    ]


def build_spec(family: str, build_part: Config, problem: Problem) -> BuildSpec:
    root = csrc_root()
    defines = {"TKT_WORLD": str(problem.world)}
    defines.update({f"TKT_{p.name}": str(build_part[p.name]) for p in BUILD_PARAMETERS})
    defines["TKT_WEIGHT_LAYOUT"] = str(WEIGHT_LAYOUT_CODES[problem.weight_layout])
    defines.update(glu.defines(build_part))
    sizes = "x".join(str(build_part[name]) for name in ("ROW_BLOCK", "COL_BLOCK", "RED_BLOCK"))
    form = f"-{build_part['GLU']}" if "GLU" in build_part else ""
    return BuildSpec(
        name=f"{family}-w{problem.world}-{problem.weight_layout}-{sizes}"
        f"-s{build_part['STAGES']}-c{build_part['CONSUMER_WARPS']}{form}",
        kind="shared",
        source=root / "cpu" / f"{family}.cpp",
        arch="native",
        defines=defines,
        include_dirs=(root,),
        facts={"smem_bytes": cpu_smem_bytes(build_part)},
    )


def compute_us(config: Config, problem: Problem, device: DeviceClass, blocks: int) -> float:
    """Estimated microseconds of all tiles on `blocks` seats of one rank, ranks sharing the cores evenly."""
    row, col = config.number("ROW_BLOCK"), config.number("COL_BLOCK")
    tasks = ceil_div(int(tile_rows(problem, row)), row) * ceil_div(problem.cols, col)
    # Small tiles spend more on their ends and their stages; every tile packs its rows and columns anew.
    reuse = min(1.0, 0.6 + row / 160) * min(1.0, 0.6 + col / 320)
    multiply = 2 * row * col * problem.hidden / (CORE_FLOPS * reuse)
    pack = (row + col) * problem.hidden / CORE_PACKED
    cores = max(1.0, cores_of(device) / problem.world)
    warps = config.number("CONSUMER_WARPS")
    spread = waves(tasks, blocks) * (multiply / min(warps, cores) + pack / cores)
    busy_us = 1e6 * max(tasks * (multiply + pack) / cores, spread / max(1.0, blocks / cores))
    # Every stage changes hands; on crowded cores a waiting thread holds up the one it waits for until it yields.
    if glu.is_separate(config):
        busy_us += 1e6 * tasks * row * col * 3 / (CORE_COPIED * cores)  # bytes of a pass over the outputs
    steps = tasks * ceil_div(problem.hidden, config.number("RED_BLOCK"))
    crowded = problem.world * blocks * (1 + warps) > cores_of(device)
    stalled = config.number("backoff") * PAUSE_US / config.number("STAGES") if crowded else 0.0
    return busy_us + steps * (1 + warps) * (HANDOVER_US + stalled) / cores


def _consumers_share(config: Config, problem: Problem, device: DeviceClass) -> str | None:
    row, col, warps = config.number("ROW_BLOCK"), config.number("COL_BLOCK"), config.number("CONSUMER_WARPS")
    tiles = (row // TILE_ROWS) * (col // TILE_COLS)
    return (
        None
        if warps <= tiles
        else f"{warps} consumers cannot share the {tiles} register tiles of {row} × {col}"
    )


def _threads(config: Config, problem: Problem, device: DeviceClass) -> str | None:
    threads = device.sm_count * (1 + config.number("CONSUMER_WARPS"))
    if threads <= MAX_THREADS_PER_RANK:
        return None
    return f"{device.sm_count} seats would hold {threads} threads, at most {MAX_THREADS_PER_RANK} are allowed"
