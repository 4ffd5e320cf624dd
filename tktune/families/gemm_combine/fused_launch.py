"""The argument of one launch of gemm_combine on a rank with a GPU: whose buffers, whose tables, what split."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tktune.core.config import Config
from tktune.core.problem import Problem
from tktune.families.cuda.gemm_globals import GemmGlobals, Guard, boxes_of
from tktune.families.cuda.symmetric import SymmetricMemory
from tktune.families.cuda.tensor_map import TensorMaps
from tktune.families.dispatch_gemm.tables_cuda import DeviceTables
from tktune.families.gemm_combine.abi import FORMS
from tktune.families.gemm_combine.globals_cuda import CombineGlobals
from tktune.families.gemm_combine.layout import SymmetricLayout
from tktune.families.gemm_combine.space_cuda import passes_of, piece_vectors
from tktune.families.gemm_combine.tables_cuda import DeviceCombineTables
from tktune.families.grouped_gemm.launch_cuda import matrix_view


@dataclass(frozen=True)
class LaunchTables:
    """Device addresses of the tables that one launch reads.

    `walk` has an entry for each local expert and pass. `slots` and `owners` are those of the config's form.
    """

    plan: int
    block_expert: int
    experts: int
    walk: int
    jobs: int
    pull_tokens: int
    slots: int
    owners: int
    topk_weights: int
    push_expected: int
    recv_from: int
    final_contrib: int


@dataclass(frozen=True)
class RankMemory:
    """Where a rank's launches work: its symmetric memory with all peers' addresses, counters, its count of meetings."""

    layout: SymmetricLayout
    rows: tuple[int, ...]
    staging: tuple[int, ...]
    watermarks: tuple[int, ...]
    landed: tuple[int, ...]
    finished: int
    queue: int
    dispenser: int
    sequence: int


def rank_memory(
    layout: SymmetricLayout,
    memory: SymmetricMemory,
    finished: torch.Tensor,
    queue: torch.Tensor,
    dispenser: torch.Tensor,
    sequence: torch.Tensor,
) -> RankMemory:
    """The addresses of what a rank has allocated; whoever launches keeps it alive."""
    return RankMemory(
        layout,
        memory.addresses(layout.rows),
        memory.addresses(layout.staging),
        memory.addresses(layout.watermarks),
        memory.addresses(layout.landed),
        finished.data_ptr(),
        queue.data_ptr(),
        dispenser.data_ptr(),
        sequence.data_ptr(),
    )


def launch_tables(config: Config, schedule: DeviceTables, tables: DeviceCombineTables) -> LaunchTables:
    """The tables of a plan that was made on the device."""
    pulls = config["form"] == "pull"
    of = tables.at
    return LaunchTables(
        plan=of["plan"],
        block_expert=schedule.at["block_expert"],
        experts=of["experts"],
        walk=of["walk"],
        jobs=of["jobs"],
        pull_tokens=schedule.at["pull_tokens"],
        slots=of["owner_slots"] if pulls else schedule.at["pull_slots"],
        owners=of["owners"],
        topk_weights=of["everyones"],
        push_expected=of["push_expected"],
        recv_from=of["recv_from"],
        final_contrib=of["final_contrib"],
    )


def packed_launch(
    config: Config,
    problem: Problem,
    maps: TensorMaps,
    guard: Guard,
    memory: RankMemory,
    tables: LaunchTables,
    activations: torch.Tensor,
    weights: torch.Tensor,
    outputs: torch.Tensor,
    y: torch.Tensor,
    roles: int,
    computing: int,
) -> bytes:
    """`outputs`: the expert rows that the GEMM may write, a part of the symmetric memory; `y` (tokens or more, cols)."""
    boxes = boxes_of(config, problem.weight_layout)
    form = str(config["form"])
    gemm = GemmGlobals(
        activations=matrix_view(maps, activations, boxes.activations),
        weights=matrix_view(maps, weights, boxes.weights),
        outputs=matrix_view(maps, outputs, boxes.outputs),
        walk=tables.walk,
        dispenser=memory.dispenser,
        guard=guard,
        num_experts=problem.local_experts * passes_of(config),
        reduction=problem.hidden,
        cols=problem.cols,
        pad=problem.pad,
    )
    return CombineGlobals(
        gemm=gemm,
        plan=tables.plan,
        block_expert=tables.block_expert,
        experts=tables.experts,
        jobs=tables.jobs,
        pull_tokens=tables.pull_tokens,
        slots=tables.slots,
        owners=tables.owners,
        topk_weights=tables.topk_weights,
        push_expected=tables.push_expected,
        recv_from=tables.recv_from,
        final_contrib=tables.final_contrib,
        y=y.data_ptr(),
        finished=memory.finished,
        queue=memory.queue,
        sequence=memory.sequence,
        roles=roles,
        num_comp_blocks=computing,
        num_reduce_blocks=config.number("num_reduce_sms"),
        form=FORMS[form],
        groups=config.number("signal_groups"),
        top_k=problem.top_k,
        tokens=problem.tokens,
        warp_slots=config.number("rows_in_flight"),
        landed_stride=memory.layout.landed_stride,
        piece_vectors=piece_vectors(config, problem),
        rows=memory.rows,
        staging=memory.staging,
        watermarks=memory.watermarks,
        landed=memory.landed,
        capacity=memory.layout.num_rows,
    ).packed()
