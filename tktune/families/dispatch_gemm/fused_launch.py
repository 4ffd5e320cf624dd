"""The fused launch of one config on buffers of fixed size whose plan lives on the device: what a replayed graph may
launch again after the plan has changed.
"""

from __future__ import annotations

import torch

from tktune.core.config import Config
from tktune.core.errors import ProblemError
from tktune.core.problem import Problem
from tktune.families.cuda import dispatch_globals as mirror
from tktune.families.cuda.dispatch_globals import DispatchGlobals
from tktune.families.cuda.gemm_globals import GemmGlobals, Guard, boxes_of
from tktune.families.cuda.launch import Launch
from tktune.families.cuda.tensor_map import TensorMaps
from tktune.families.dispatch_gemm.launch_words import (
    beside_of,
    head_of,
    openers_of,
    opening_of,
    slots_of,
    wave_of,
)
from tktune.families.dispatch_gemm.module_cuda import DispatchModule
from tktune.families.dispatch_gemm.push_cuda import PushMemory
from tktune.families.dispatch_gemm.tables_cuda import DeviceTables
from tktune.families.dispatch_gemm.transport import is_indexed, is_push
from tktune.families.grouped_gemm.launch_cuda import matrix_view


def fused_launch(
    module: DispatchModule,
    config: Config,
    problem: Problem,
    sm_count: int,
    maps: TensorMaps,
    guard: Guard,
    token_rows: tuple[int, ...],
    rows: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    tables: DeviceTables,
    *,
    roles: int = mirror.FUSED,
    computing: int | None = None,
    pushing: PushMemory | None = None,
) -> Launch:
    """`token_rows[r]`: where rank r's rows (tokens, hidden) lie; `out` is what the GEMM writes, (capacity, out_cols), or
    (capacity, cols) where SwiGLU is separate.

    `rows` is what the GEMM reads: gathered (capacity, hidden), or indexed (ranks × tokens, hidden), where this rank's
    own rows lie in their section already. `roles` and `computing` (blocks; None: what the split leaves) run a part of it.
    A config that pushes needs tables of pushes and `pushing`: sections of all ranks' rows and flags, numbered by meetings
    of all ranks, of which one lies between any two launches. Raises `ProblemError` where it has not both.
    """
    if is_push(config) and (pushing is None or not tables.pushes):
        raise ProblemError(
            "This config pushes its rows, and the plan has no tables of pushes, or nobody gave them a place.",
            "Use a config with TRANSPORT=pull.",
        )
    boxes, at, facts = boxes_of(config, problem.weight_layout), tables.at, module.facts
    grid = sm_count // facts.cluster * facts.cluster
    computing = min(sm_count - config.number("num_comm_sms") if computing is None else computing, grid)
    gemm = GemmGlobals(
        activations=matrix_view(maps, rows, boxes.activations),
        weights=matrix_view(maps, weights, boxes.weights),
        outputs=matrix_view(maps, out, boxes.outputs),
        walk=at["walk"],
        dispenser=at["dispenser"],
        guard=guard,
        num_experts=problem.local_experts,
        reduction=problem.hidden,
        cols=problem.cols,
        pad=problem.pad,
        raster_rows=config.number("raster_rows"),
    )
    arguments = DispatchGlobals(
        gemm=gemm,
        gathered=rows.data_ptr(),
        plan=at["words"],
        pull_indices=at["pull_indices"],
        pull_tokens=at["pull_tokens"],
        pull_slots=at["pull_slots"],
        slack=at["own_slack" if is_indexed(config) else "slack"],
        arrivals=at["arrivals"],
        queue=at["queue"],
        roles=roles,
        num_comp_blocks=computing,
        head=head_of(config, problem, computing),
        top_k=problem.top_k,
        wave=wave_of(config),
        opening=opening_of(config),
        slots=slots_of(config, problem, module.smem_bytes, facts.threads // 32),
        tokens=token_rows,
        token_rows=problem.tokens,
        beside=beside_of(config, problem, module.smem_bytes, facts.smem_bytes),
        openers=openers_of(config),
    ).packed()
    if is_push(config):
        assert pushing is not None
        arguments = pushing.behind(arguments, at, config, sm_count - computing)
    kept = (module, rows, weights, out, tables.memory)
    return Launch(module.function, grid, facts.threads, module.smem_bytes, arguments, kept)
