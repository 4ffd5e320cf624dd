"""gemm_combine on GPUs: the GEMM's build parameters with the roles' own, their rules, defines and costs. The kernel is
csrc/kernels/gemm_combine.cu.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tktune.core.build_spec import BuildSpec
from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.problem import Problem
from tktune.core.roles import RoleModel
from tktune.core.space import Constraint, Parameter, Space
from tktune.families.formulas import ceil_div, deadlock_constraints, rank_rows, split_values, wanted_tokens
from tktune.families.gemm_combine.parameters import (
    FORM,
    REDUCERS_MEANING,
    SPLIT_MEANING,
    WALK,
    canonical,
    groups_divide,
    moved_rows,
)
from tktune.families.grouped_gemm import space_cuda

SPLITS = (2, 4, 8, 12, 16)
REDUCERS = {True: (128,), False: (80,)}
WARP_SLOTS = Parameter(
    "rows_in_flight", (4, 8), "launch", "row pieces of a warp on their way; the more there are, the shorter"
)
CUDA_ORDER = Parameter(
    "order",
    ("ready", "remote"),
    "launch",
    "jobs in the order in which their rows land; the same, own tokens last",
)
SIGNAL_GROUPS = Parameter(
    "signal_groups", (1, 2, 4), "launch", "runs of columns in which a pad block is announced and summed"
)
# Tiles of a run follow each other, so that its sums are made while the next run is multiplied; `experts`, where a block's
# runs do, is for comparisons.
CUDA_WALK = Parameter("walk", ("columns",), "launch", WALK.meaning)
# Build parameters that do not change the size of stages and output slots.
_BESIDE_THE_PIPELINE = ("CLUSTER", "MMA_DEPTH", "DRAW", "WARP_M", "PRODUCER_WARPS")
MOST_TOP_K = 32  # a lane holds one of a token's rows
# Beside row pieces: bytes of all warps' semaphores, finished stretches of a warp; bytes that a warp reads at once.
RESERVE_BYTES, SUM_SLOTS, VECTORS_BYTES = 1024, 2, 512
# The epilogue stands in the storer, a producer warp, and needs registers there.
SIGNALLING_REGISTERS = {4: (56, 232), 8: (56, 224), 12: (56, 152)}


def space(
    problem: Problem, device: DeviceClass, roles: Callable[[Config, Problem, DeviceClass], RoleModel]
) -> Space:
    """The space of `problem` on a CUDA device class; `roles` is the family's role model."""
    wgmma = space_cuda.uses_wgmma(device)
    over = ("num_comm_sms", "num_reduce_sms", "form")
    pipeline = tuple(
        p.name for p in space_cuda.build_parameters(device) if p.name not in _BESIDE_THE_PIPELINE
    )
    return Space(
        problem,
        device,
        (
            *space_cuda.build_parameters(device),
            Parameter(
                "num_comm_sms", split_values(device.sm_count, SPLITS), "launch", f"SMs {SPLIT_MEANING}"
            ),
            Parameter(
                "num_reduce_sms",
                split_values(device.sm_count - 1, REDUCERS[wgmma]),
                "launch",
                f"SMs {REDUCERS_MEANING}",
            ),
            FORM,
            CUDA_ORDER,
            WARP_SLOTS,
            SIGNAL_GROUPS,
            CUDA_WALK,
        ),
        [
            *space_cuda.build_constraints(device),
            Constraint(
                "top_k_fits_a_warp", "a lane holds one of a token's rows", _few_experts, (), _fewer_experts
            ),
            Constraint(
                "groups_divide_columns",
                "runs of announced columns are whole tiles",
                groups_divide,
                ("COL_BLOCK", "signal_groups"),
            ),
            Constraint(
                "row_slots",
                "the row pieces of a block fit over its pipeline memory",
                _pieces_fit,
                (*pipeline, "rows_in_flight"),
            ),
            Constraint(
                "clusters_fill_roles",
                "clusters fill each role's blocks",
                _clusters,
                ("num_comm_sms", "signal_groups", "walk", "COL_BLOCK", "CLUSTER")
                if wgmma
                else ("num_comm_sms", "signal_groups", "walk", "COL_BLOCK"),
            ),
            *deadlock_constraints(roles, over),
        ],
        space_cuda.default_build(device).replace(
            num_comm_sms=8,
            num_reduce_sms=REDUCERS[wgmma][-1],
            form="prereduce",
            order="ready",
            rows_in_flight=4,
            signal_groups=1,
            walk="columns",
        ),
        lambda config: _canonical(config, problem, REDUCERS[wgmma][0]),
        canonical_over=(),
    )


def _canonical(config: Config, problem: Problem, fewest_reducers: int) -> Config:
    """Pulled rows are far away: as many pieces as can be are on their way."""
    if config["form"] == "pull" and config["rows_in_flight"] != WARP_SLOTS.values[-1]:
        config = config.replace(rows_in_flight=WARP_SLOTS.values[-1])
    return canonical(config, problem, fewest_reducers)


def build_spec(family: str, build_part: Config, problem: Problem, device: DeviceClass) -> BuildSpec:
    spec = space_cuda.build_spec(family, build_part, problem, device)
    if space_cuda.main_loop(build_part) == "mma_sync":
        return spec
    producer, consumer = SIGNALLING_REGISTERS[build_part.number("CONSUMER_WARPS")]
    roles = {"TKT_PRODUCER_REGISTERS": str(producer), "TKT_CONSUMER_REGISTERS": str(consumer)}
    return dataclasses.replace(spec, defines={**spec.defines, **roles})


def cost_us(config: Config, problem: Problem, device: DeviceClass) -> float:
    """The GEMM on its own SMs, then the sums that were not ready while it ran, then the reduce; or the link, where that
    takes longer. A sum of m rows is ready, on average, at m ÷ (m + 1) of the GEMM (research/fused_kernels.md §1.11), or of
    its last walk over the experts.
    """
    seats, communicate = device.sm_count, config.number("num_comm_sms")
    comp = space_cuda.compute_us(config, problem, device, seats - communicate)
    read, written, reduced = moved_rows(config, problem)
    row_bytes = 2 * problem.cols
    pulls = config["form"] == "pull"
    crossing = (rank_rows(problem) if pulls else wanted_tokens(problem)) * (problem.world - 1) / problem.world
    link = (
        1e6
        * crossing
        * row_bytes
        / space_cuda.LINK_BYTES.get(device.interconnect, space_cuda.LINK_BYTES["pcie"])
    )
    work = 1e6 * (read + written) * row_bytes / space_cuda.SM_GATHERED
    rows_of_a_sum = rank_rows(problem) / (problem.tokens if pulls else wanted_tokens(problem))
    late = rows_of_a_sum / (rows_of_a_sum + 1) / passes_of(config)
    hidden = min(work * (1 - late), communicate * comp * (1 - late))
    tail = max((work - hidden) / seats, link * (1 - hidden / work))
    reduce = 1e6 * reduced * row_bytes / (config.number("num_reduce_sms") * space_cuda.SM_GATHERED)
    return comp + tail + reduce + 10.0


def passes_of(config: Config) -> int:
    """How many times the GEMM walks over the experts."""
    return config.number("signal_groups") if config["walk"] == "columns" else 1


def slots_bytes(config: Config) -> int:
    """Shared memory that row pieces may take: stages and output slots of the GEMM, in whole 128 bytes."""
    row, col, red = config.number("ROW_BLOCK"), config.number("COL_BLOCK"), config.number("RED_BLOCK")
    warps = config.number("CONSUMER_WARPS")
    rings = {"mma_sync": 0, "wgmma_pingpong": 1, "wgmma": warps // 4}[space_cuda.main_loop(config)]
    out = rings * config.number("OUT_SLOTS") * space_cuda.OUT_SLOT_BYTES if rings else 0
    return (config.number("STAGES") * (row + col) * red * 2 + out + 16) // 128 * 128


def _few_experts(config: Config, problem: Problem, device: DeviceClass) -> str | None:
    return None if problem.top_k <= MOST_TOP_K else f"top_k {problem.top_k} is more than {MOST_TOP_K} lanes"


def _fewer_experts(config: Config, problem: Problem, device: DeviceClass) -> str:
    return f"use top_k ≤ {MOST_TOP_K}"


def most_piece_vectors(config: Config) -> int:
    """16-byte vectors of a row piece that a lane sums in registers, at most (csrc/comm/combine_config.cuh)."""
    roomy = space_cuda.main_loop(config) != "mma_sync" and space_cuda.threads(config) <= 384
    return 8 if roomy else 4


def _fitting_vectors(config: Config) -> int:
    """The same, as many as leave every warp that multiplies its pieces in flight and its finished stretches; a pull has
    twice the sums.
    """
    pieces = config.number("CONSUMER_WARPS") * (config.number("rows_in_flight") + SUM_SLOTS)
    fit = max(0, slots_bytes(config) - RESERVE_BYTES) // (pieces * VECTORS_BYTES)
    return min(fit, most_piece_vectors(config) // (2 if config["form"] == "pull" else 1))


def piece_vectors(config: Config, problem: Problem) -> int:
    """16-byte vectors of a row piece in each lane: a run of columns falls into as few equal pieces as fit."""
    lane_vectors = ceil_div(ceil_div(2 * problem.cols, config.number("signal_groups")), VECTORS_BYTES)
    return ceil_div(lane_vectors, ceil_div(lane_vectors, _fitting_vectors(config)))


def _pieces_fit(config: Config, problem: Problem, device: DeviceClass) -> str | None:
    """M3: the row pieces of all warps that multiply overlay the stages and output slots."""
    warps, pieces = config.number("CONSUMER_WARPS"), config.number("rows_in_flight") + SUM_SLOTS
    needed = RESERVE_BYTES + warps * pieces * VECTORS_BYTES
    if needed <= slots_bytes(config):
        return None
    return f"row pieces of {warps} warps need {needed} bytes, and the pipeline they overlay has {slots_bytes(config)}"


def _clusters(config: Config, problem: Problem, device: DeviceClass) -> str | None:
    """C4: the resident blocks and the communication blocks are whole clusters, and so are the column tiles of a run."""
    size, communicate = space_cuda.cluster(config), config.number("num_comm_sms")
    tiles = ceil_div(problem.cols, config.number("COL_BLOCK")) // passes_of(config)
    if config["walk"] == "columns" and tiles % size:
        return f"clusters of {size} cannot fill {tiles} column tiles of a run"
    if device.sm_count % size == 0 and communicate % size == 0:
        return None
    return f"clusters of {size} cannot fill {communicate} communication blocks of {device.sm_count} SMs"
