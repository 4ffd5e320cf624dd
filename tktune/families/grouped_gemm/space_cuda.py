"""The grouped GEMM on GPUs: build parameters of the wgmma main loops (mma.sync: `space_mma`), the rules that the kernel
template asserts (`csrc/gemm/config.cuh`), defines and the cost of its tiles.

Other families whose compute role is this GEMM take these and add their own.
"""

from __future__ import annotations

from tktune.core.build_spec import BuildSpec
from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.paths import csrc_root
from tktune.core.problem import Problem
from tktune.core.space import Constraint, Parameter
from tktune.families import glu
from tktune.families.formulas import (
    WEIGHT_LAYOUT_CODES,
    ceil_div,
    divides,
    launch_register_cap,
    round_up,
    tile_rows,
    waves,
    within_bytes,
)
from tktune.families.grouped_gemm import space_mma, wgmma_time
from tktune.families.grouped_gemm.space_mma import DEFAULT_MMA_SYNC, MMA_SYNC

MAIN_LOOPS = {"mma_sync": 0, "wgmma": 1, "wgmma_pingpong": 2}
DRAWS = {"stride": 0, "dispenser": 1}
# setmaxnreg of a wgmma block by consumer warps: (producer warpgroup, consumer warpgroups).
WGMMA_REGISTERS = {4: (40, 232), 8: (40, 232), 12: (56, 152)}
LOOP_REGISTERS = 32  # R2: addresses and loop state of a wgmma consumer thread, beside its accumulators
PRODUCER_WARPS = 4  # of a wgmma block
OUT_SLOT_BYTES = 64 * 128  # of whole panels
TASK_SLOTS, TASK_BYTES = 2, 16
PIECE_ROWS = 64  # tiles of 128 rows and more move in pieces
MMA_OUT_SLOTS = 2  # TKT_OUT_SLOTS where it is not given; mma.sync has its semaphores, and no slots
MOST_GROUP_ROWS = 128  # of one warpgroup: two strips of 64 rows

_WGMMA = (
    Parameter(
        "MAIN_LOOP", ("wgmma", "wgmma_pingpong"), "build", "warpgroups share a tile, or take tiles in turn"
    ),
    Parameter("ROW_BLOCK", (64, 128, 192, 256), "build", "rows of an output tile, at most"),
    Parameter("COL_BLOCK", (64, 128, 192, 256), "build", "columns of an output tile"),
    Parameter("RED_BLOCK", (64,), "build", "depth of one pipeline stage along hidden"),
    Parameter("STAGES", (3, 4, 5, 6, 7), "build", "stages between the producer and its consumers"),
    Parameter("CONSUMER_WARPS", (4, 8, 12), "build", "warps that multiply, four to a warpgroup"),
    Parameter("CLUSTER", (1, 2), "build", "blocks that share one operand by in-cluster multicast"),
    Parameter(
        "OUT_SLOTS", (1, 2, 3), "build", "8 KB output slots of a warpgroup; of all when they take turns"
    ),
    Parameter("MMA_DEPTH", (0, 1), "build", "batches of tensor work queued behind the running one"),
    Parameter("DRAW", ("stride", "dispenser"), "build", "how a block gets its next task"),
)
RASTER_ROWS = Parameter(
    "raster_rows", (0, 1, 2), "launch", "row tiles of an expert that advance before the column; 0: all"
)
WALK = Parameter("walk", ("longest", "shortest"), "launch", "experts with most rows first, or last")
TURN_BACK = Parameter("turn_back", (0, 1), "launch", "1: strides run forth and back, so that waves even out")
LAUNCH_PARAMETERS = (RASTER_ROWS, WALK, TURN_BACK)
DEFAULT_WGMMA = Config(
    MAIN_LOOP="wgmma",
    ROW_BLOCK=128,
    COL_BLOCK=256,
    RED_BLOCK=64,
    STAGES=4,
    CONSUMER_WARPS=8,
    CLUSTER=1,
    OUT_SLOTS=2,
    MMA_DEPTH=1,
    DRAW="stride",
)
# Rough rates for ranking only: dense bf16 FLOP/s of one SM with mma.sync, bytes/s one SM gathers, of the link.
SM_FLOPS = 5.6e12
SM_GATHERED = 52e9
LINK_BYTES = {"nvlink": 330e9, "pcie": 45e9}


def uses_wgmma(device: DeviceClass) -> bool:
    """sm_90a has wgmma; sm_120a, and sm_90 when it rehearses that class, run mma.sync."""
    return device.arch == "sm_90a"


def build_parameters(device: DeviceClass) -> tuple[Parameter, ...]:
    return _WGMMA if uses_wgmma(device) else MMA_SYNC


def default_build(device: DeviceClass) -> Config:
    return DEFAULT_WGMMA if uses_wgmma(device) else DEFAULT_MMA_SYNC


def main_loop(config: Config) -> str:
    return str(config.get("MAIN_LOOP", "mma_sync"))


def cluster(config: Config) -> int:
    return config.number("CLUSTER") if "CLUSTER" in config else 1


def threads(config: Config) -> int:
    producers = config.number("PRODUCER_WARPS") if main_loop(config) == "mma_sync" else PRODUCER_WARPS
    return 32 * (config.number("CONSUMER_WARPS") + producers)


def task_slots(config: Config) -> int:
    """Published tasks that a block holds: a warp that loads between its own steps runs up to STAGES - 1 tasks ahead."""
    fed_by_consumer = config.get("PRODUCER_WARPS", 1) == 0
    return config.number("STAGES") if fed_by_consumer else TASK_SLOTS


def piece_rows(config: Config) -> int:
    """Rows that move together; an expert's pieces are dealt evenly over its tiles."""
    return PIECE_ROWS if config.number("ROW_BLOCK") >= 2 * PIECE_ROWS else config.number("ROW_BLOCK")


def same_behaviour(config: Config) -> Config:
    """A dispenser has no strides that could turn back."""
    if config.get("turn_back") == 1 and config["DRAW"] == "dispenser":
        return config.replace(turn_back=0)
    return config


def out_panel_cols(config: Config) -> int:
    """Columns of a panel in which wgmma's outputs leave: 64, or 32 where a warpgroup's, halved by SwiGLU, do not fill those."""
    if main_loop(config) == "mma_sync" or not glu.is_fused(config):
        return 64
    groups = 1 if main_loop(config) == "wgmma_pingpong" else config.number("CONSUMER_WARPS") // 4
    columns = config.number("COL_BLOCK") // (groups // min(groups, config.number("ROW_BLOCK") // 64))
    return 64 if columns // 2 % 64 == 0 else 32


def smem_bytes(config: Config) -> int:
    """M1: `sizeof(shared_storage)` of the kernel template: stages, output slots, semaphores, task slots."""
    row, col, red = config.number("ROW_BLOCK"), config.number("COL_BLOCK"), config.number("RED_BLOCK")
    stages = config.number("STAGES")
    warpgroups = config.number("CONSUMER_WARPS") // 4 if main_loop(config) != "mma_sync" else 1
    rings = 1 if main_loop(config) == "wgmma_pingpong" else warpgroups
    slots = rings * (config.number("OUT_SLOTS") if "OUT_SLOTS" in config else MMA_OUT_SLOTS)
    out = slots * OUT_SLOT_BYTES * out_panel_cols(config) // 64 if main_loop(config) != "mma_sync" else 0
    semaphores = 8 * (2 * (stages + task_slots(config) + slots + warpgroups) + 1)
    tasks = task_slots(config) * TASK_BYTES
    return round_up(stages * (row + col) * red * 2 + out + 16 + semaphores + tasks, 1024)


def accumulators(config: Config) -> int:
    """R2: fp32 accumulators of one consumer thread."""
    row, col, warps = config.number("ROW_BLOCK"), config.number("COL_BLOCK"), config.number("CONSUMER_WARPS")
    return row * col // (128 if main_loop(config) == "wgmma_pingpong" else 32 * warps)


def fragments(config: Config) -> int:
    """R2: registers of one thread that hold fragments; wgmma reads its operands from shared memory."""
    return space_mma.fragments(config) if main_loop(config) == "mma_sync" else 0


def consumer_registers(config: Config, device: DeviceClass) -> int:
    """Registers that a consumer thread may use."""
    if main_loop(config) != "mma_sync":
        return WGMMA_REGISTERS[config.number("CONSUMER_WARPS")][1]
    return launch_register_cap(threads(config), device.registers_per_sm)


def build_constraints(device: DeviceClass, more: tuple[str, ...] = ()) -> list[Constraint]:
    """The rules of a block; `more` names build parameters of the family that shared memory depends on too."""
    names = (*(p.name for p in build_parameters(device)), *more)
    wgmma = uses_wgmma(device)
    shapes = (
        "ROW_BLOCK",
        "COL_BLOCK",
        "CONSUMER_WARPS",
        *(("MAIN_LOOP",) if wgmma else ("WARP_M", "PRODUCER_WARPS")),
    )
    sizes = tuple(n for n in names if n not in ("DRAW", "MMA_DEPTH", "WARP_M"))
    constraints = [
        Constraint("tma_alignment", "rows are multiples of 16 bytes (TMA)", _tma_alignment, (), _aligned),
        Constraint(
            "pieces_divide_pad",
            "the row pieces that a tile is made of divide pad",
            _pieces,
            ("ROW_BLOCK",),
            _whole_pieces,
        ),
        divides("RED_BLOCK", "hidden"),
        Constraint("tma_box", "a TMA box has at most 256 rows", _tma_box, sizes),
    ]
    if wgmma:
        constraints += [
            Constraint(
                "warpgroups_tile_the_block", "warpgroups share 64 × 64 units evenly", _warpgroups, shapes
            ),
            Constraint(
                "cluster_splits_columns",
                "a cluster fetches halves of 64 columns",
                _cluster_columns,
                ("COL_BLOCK", "CLUSTER"),
            ),
            Constraint(
                "clusters_walk_by_stride",
                "the blocks of a cluster draw one task together",
                _cluster_draw,
                ("CLUSTER", "DRAW"),
            ),
            Constraint(
                "stages_cover_depth",
                "the ring is deeper than the stages that queued batches hold",
                _stages_cover,
                ("STAGES", "MMA_DEPTH"),
            ),
            Constraint(
                "register_pool", "setmaxnreg stays in the block's pool", _register_pool, ("CONSUMER_WARPS",)
            ),
        ]
    else:
        constraints.append(space_mma.tiles_constraint())
    constraints += [
        Constraint("registers", "accumulators and fragments fit a thread's registers", _registers, shapes),
        within_bytes(smem_bytes, sizes, lambda device: device.smem_optin_bytes),
    ]
    return constraints


def build_spec(family: str, build_part: Config, problem: Problem, device: DeviceClass) -> BuildSpec:
    root = csrc_root()
    defines = {"TKT_MAIN_LOOP": str(MAIN_LOOPS[main_loop(build_part)])}
    for p in build_parameters(device):
        if p.name not in ("MAIN_LOOP", "DRAW"):
            defines[f"TKT_{p.name}"] = str(build_part[p.name])
    defines["TKT_DRAW"] = str(DRAWS[str(build_part["DRAW"])])
    defines["TKT_WEIGHT_LAYOUT"] = str(WEIGHT_LAYOUT_CODES[problem.weight_layout])
    if main_loop(build_part) == "mma_sync":
        defines["TKT_WARP_N"] = str(space_mma.warp_n(build_part))
    else:
        producer, consumer = WGMMA_REGISTERS[build_part.number("CONSUMER_WARPS")]
        defines["TKT_PRODUCER_REGISTERS"] = str(producer)
        defines["TKT_CONSUMER_REGISTERS"] = str(consumer)
    defines.update(glu.defines(build_part))
    if family != "grouped_gemm":
        defines["TKT_WORLD"] = str(problem.world)
    values = "-".join(str(build_part[p.name]) for p in build_parameters(device))
    values += f"-{build_part['GLU']}" if "GLU" in build_part else ""
    return BuildSpec(
        name=f"{family}-{device.arch}-w{problem.world}-{problem.weight_layout}-{values}",
        kind="cubin",
        source=root / "kernels" / f"{family}.cu",
        arch=device.arch,
        defines=defines,
        include_dirs=(root,),
        facts={
            "smem_bytes": smem_bytes(build_part),
            "threads": threads(build_part),
            "registers": launch_register_cap(threads(build_part), device.registers_per_sm),
            "static_smem_bytes": 0,
        },
    )


def compute_us(config: Config, problem: Problem, device: DeviceClass, blocks: int) -> float:
    """Estimated microseconds of all tiles on `blocks` SMs of one rank: `wgmma_time`, and for mma.sync
    research/fused_kernels.md §2.2."""
    row, col, drawn = config.number("ROW_BLOCK"), config.number("COL_BLOCK"), config["DRAW"] == "dispenser"
    if main_loop(config) != "mma_sync":
        turns = main_loop(config) == "wgmma_pingpong"
        return wgmma_time.tiles_us(problem, row, col, piece_rows(config), blocks, drawn=drawn, pingpong=turns)
    tasks = tile_rows(problem, piece_rows(config)) / row * ceil_div(problem.cols, col)
    # A deeper ring and a larger tile hide more; a tile below 128 × 256 reads its operands more often.
    reuse = min(1.0, (row * col / (row + col)) / 85.0)
    depth = 1 - 0.5 ** config.number("STAGES")
    rate = SM_FLOPS * depth * (0.4 + 0.6 * reuse) * space_mma.tensor_share(config)
    task_us = 1e6 * 2 * row * col * problem.hidden / rate
    dealt = tasks / max(1, blocks) + 0.5 if drawn else waves(tasks, blocks)
    return dealt * task_us


def _tma_alignment(config: Config, problem: Problem, device: DeviceClass) -> str | None:
    for name in ("hidden", "cols"):
        if getattr(problem, name) % 8:
            return f"{name} {getattr(problem, name)} makes rows of {getattr(problem, name) * 2} bytes"
    return None


def _aligned(config: Config, problem: Problem, device: DeviceClass) -> str:
    return "use hidden and cols that 8 divides"


def _tma_box(config: Config, problem: Problem, device: DeviceClass) -> str | None:
    enk = problem.weight_layout == "enk"
    rows = config.number("COL_BLOCK") // cluster(config) if enk else config.number("RED_BLOCK")
    return f"the weight tile's box has {rows} rows" if rows > 256 else None


def _warpgroups(config: Config, problem: Problem, device: DeviceClass) -> str | None:
    row, col, groups = (
        config.number("ROW_BLOCK"),
        config.number("COL_BLOCK"),
        config.number("CONSUMER_WARPS") // 4,
    )
    if main_loop(config) == "wgmma_pingpong":
        if groups < 2:
            return "one warpgroup has no other to take turns with"
        return None if row <= MOST_GROUP_ROWS else f"a warpgroup cannot hold {row} rows"
    group_rows = min(groups, row // 64)
    group_cols = groups // group_rows
    even = group_rows * group_cols == groups and row % (group_rows * 64) == 0 and col % (group_cols * 64) == 0
    if not even:
        return f"{groups} warpgroups cannot share {row} × {col} evenly"
    height = row // group_rows
    return None if height <= MOST_GROUP_ROWS else f"a warpgroup cannot hold {height} rows"


def _cluster_columns(config: Config, problem: Problem, device: DeviceClass) -> str | None:
    if cluster(config) == 1 or problem.weight_layout == "enk" or config.number("COL_BLOCK") % 128 == 0:
        return None
    return f"half of COL_BLOCK {config['COL_BLOCK']} is no multiple of 64"


def _cluster_draw(config: Config, problem: Problem, device: DeviceClass) -> str | None:
    """Each block's producer asks the dispenser for itself, so two blocks of a cluster would draw different tasks."""
    if cluster(config) == 1 or config["DRAW"] == "stride":
        return None
    return "the dispenser gives each block of a cluster another task"


def _pieces(config: Config, problem: Problem, device: DeviceClass) -> str | None:
    piece = piece_rows(config)
    return f"pieces of {piece} rows do not divide pad {problem.pad}" if problem.pad % piece else None


def _whole_pieces(config: Config, problem: Problem, device: DeviceClass) -> str:
    piece = piece_rows(config)
    return f"use pad = {ceil_div(problem.pad, piece) * piece}"


def _stages_cover(config: Config, problem: Problem, device: DeviceClass) -> str | None:
    stages, depth = config.number("STAGES"), config.number("MMA_DEPTH")
    return None if stages >= depth + 2 else f"{stages} stages leave none to fill beside {depth + 1} in use"


def _register_pool(config: Config, problem: Problem, device: DeviceClass) -> str | None:
    """R3: the sum of setmaxnreg over the warpgroups is within what the block got at launch."""
    warps = config.number("CONSUMER_WARPS")
    producer, consumer = WGMMA_REGISTERS[warps]
    block = 32 * (warps + 4)
    pool = block * launch_register_cap(block, device.registers_per_sm)
    asked = 128 * producer + 32 * warps * consumer
    return None if asked <= pool else f"the roles ask for {asked} registers, the block has {pool}"


def _registers(config: Config, problem: Problem, device: DeviceClass) -> str | None:
    """R1 and R2: accumulators and what stands beside them fit the registers of a consumer thread."""
    mma = main_loop(config) == "mma_sync"
    loop = space_mma.LOOP_REGISTERS[config.number("PRODUCER_WARPS")] if mma else LOOP_REGISTERS
    needed = accumulators(config) + fragments(config) + loop
    given = consumer_registers(config, device)
    return None if needed <= given else f"a consumer thread needs about {needed} registers and has {given}"
