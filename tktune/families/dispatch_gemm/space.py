"""The pure half of the family `dispatch_gemm`: token rows are pulled from their source ranks, or pushed by them, while the
grouped GEMM of those that arrived already runs.

The compute half's parameters and rules are the grouped GEMM's. Nothing here imports torch, numpy or a compiler.
"""

from __future__ import annotations

import dataclasses

from tktune.core.build_spec import BuildSpec
from tktune.core.config import Config, Value
from tktune.core.device import DeviceClass
from tktune.core.problem import Problem
from tktune.core.roles import RoleModel
from tktune.core.space import Constraint, Parameter, Space
from tktune.families import glu
from tktune.families.base import RankSeat, Workbench
from tktune.families.dispatch_gemm import beside, gated_time, transport
from tktune.families.formulas import (
    SPIN_LIMIT_S,
    deadlock_constraints,
    rank_rows,
    split_values,
    wanted_tokens,
)
from tktune.families.grouped_gemm import space_cpu, space_cuda
from tktune.families.link_model import LinkFacts

CPU_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
CUDA_SPLITS = {
    True: (4, 8, 12, 16, 24, 32),
    False: (2, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48),
}
ORDER = Parameter(
    "order", ("token", "slot"), "launch", "fetch each token once and scatter it, or fetch slot by slot"
)
CUDA_ORDER = Parameter(
    "order",
    ("token", "slot", "mixed"),
    "launch",
    "fetch each token once and scatter it, or fetch slot by slot; mixed: slots for the first wave of tiles, then tokens; by "
    "index or pushed: blocks that compute bring the first rows too",
)
ACTIVATIONS = Parameter(
    "ACTIVATIONS",
    ("gathered", "indexed"),
    "build",
    "rows are stored to each slot that wants them, or once and loaded by index; own rows then stay where they are",
)
ACTIVATIONS_CODES = {"gathered": 0, "indexed": 1}
RASTER_ROWS = Parameter("raster_rows", (0, 1), "launch", space_cuda.RASTER_ROWS.meaning)
# The gate stands in the producer and needs registers there; consumers of up to eight warps give them.
GATED_REGISTERS = {4: (56, 232), 8: (56, 224), 12: (56, 152)}
MOST_INDEXED_ROWS = 1 << 16  # a loader keeps two rows in a register
# Recommended on wgmma devices: of 312 configs that were measured on four shapes, this one is 2.3 % slower than the best of each
# on average (`hand_sweep` in bench/results/gpu_dispatch_gemm_2026-11-30.json). A finish leaves fewer registers to accumulators.
TILE: dict[str, Value] = {
    "ROW_BLOCK": 256,
    "COL_BLOCK": 192,
    "STAGES": 3,
    "MMA_DEPTH": 0,
    "DRAW": "dispenser",
}
FINISHED_TILE: dict[str, Value] = {"ROW_BLOCK": 256, "COL_BLOCK": 128, "STAGES": 3, "DRAW": "dispenser"}
SLOT_RESERVE_BYTES = 2048  # semaphores and counters beside the row slots of a communication block


def _split(values: tuple[int, ...], what: str) -> Parameter:
    return Parameter(
        "num_comm_sms", values, "launch", f"{what} of a rank that communicate; the others compute"
    )


class DispatchGemm:
    """Expert dispatch fused with the grouped GEMM that consumes its rows."""

    name = "dispatch_gemm"
    purpose = "bring token rows from all ranks and multiply them as they arrive"

    def __init__(self, link: LinkFacts | None = None) -> None:
        self._link = link

    def with_link(self, link: LinkFacts) -> DispatchGemm:
        """This family with a cost model that uses what the link was measured to do."""
        return DispatchGemm(link)

    def space(self, problem: Problem, device: DeviceClass) -> Space:
        if device.backend == "cpu":
            split = _split(split_values(device.sm_count, CPU_SPLITS), "seats")
            return Space(
                problem,
                device,
                (*space_cpu.BUILD_PARAMETERS, *glu.parameters(problem), split, ORDER, space_cpu.BACKOFF),
                [*space_cpu.build_constraints(), *deadlock_constraints(self.roles, ("num_comm_sms",))],
                space_cpu.DEFAULT_BUILD.replace(
                    num_comm_sms=1, order="token", backoff=space_cpu.DEFAULT_BACKOFF, **glu.default(problem)
                ),
                lambda config: _same_order(config, problem),
                canonical_over=(),
            )
        wgmma = space_cuda.uses_wgmma(device)
        split = _split(split_values(device.sm_count, CUDA_SPLITS[wgmma]), "SMs")
        over = ("num_comm_sms", "CLUSTER") if wgmma else ("num_comm_sms",)
        finish = glu.parameters(problem)
        order = beside.order(CUDA_ORDER) if wgmma else CUDA_ORDER
        forms = (*((ACTIVATIONS,) if wgmma else ()), transport.parameter(problem), *finish)
        default = space_cuda.default_build(device).replace(
            num_comm_sms=16 if wgmma else 8,
            order="token",
            raster_rows=0,
            TRANSPORT="pull",
            **glu.default(problem),
        )
        if wgmma:
            default = default.replace(ACTIVATIONS="gathered")
        measured: dict[str, Value] = {
            **(FINISHED_TILE if finish else TILE),
            "num_comm_sms": 4,
            "order": beside.WORD,
        }
        return Space(
            problem,
            device,
            (*space_cuda.build_parameters(device), *forms, split, order, RASTER_ROWS),
            [
                *space_cuda.build_constraints(device, tuple(p.name for p in finish)),
                Constraint("row_fits_a_slot", "a token row fits shared memory", _row_fits, (), _short_row),
                Constraint("clusters_fill_roles", "clusters fill each role's blocks", _clusters, over),
                *((*INDEXED_RULES, *beside.constraints()) if wgmma else ()),
                *transport.rules(wgmma),
                *deadlock_constraints(
                    self.roles, (*over, "order", "TRANSPORT", *(("ACTIVATIONS",) if wgmma else ()))
                ),
            ],
            default,
            lambda config: _same_order(config, problem),
            canonical_over=(*(("ACTIVATIONS",) if wgmma else ()), "TRANSPORT"),
            recommended=default.replace(**measured) if wgmma else None,
        )

    def roles(self, config: Config, problem: Problem, device: DeviceClass) -> RoleModel:
        """Compute waits for rows to arrive; communication drains one queue, then computes (`transport.roles`)."""
        communicate = config.number("num_comm_sms")
        by = str(config.get("TRANSPORT", "pull"))
        return RoleModel(
            roles=transport.roles(config, device.sm_count - communicate, communicate),
            resident_blocks=device.sm_count,
            spin_limit_s=SPIN_LIMIT_S,
            world=problem.world,
            protocol=(f"hidden={problem.hidden}", f"pad={problem.pad}", f"world={problem.world}", by),
        )

    def cost_us(self, config: Config, problem: Problem, device: DeviceClass) -> float:
        """The longer of communication and of all work shared by all blocks, plus the first rows' arrival.

        Communicating blocks join the compute when their queue is dry (research/fused_kernels.md §2.2).
        """
        communicate = config.number("num_comm_sms")
        row_bytes = 2 * problem.hidden
        fetched = (rank_rows(problem) if config["order"] == "slot" else wanted_tokens(problem)) * row_bytes
        gathered = rank_rows(problem) * row_bytes
        indexed, pushed = transport.is_indexed(config), transport.is_push(config)
        lost = communicate / device.sm_count  # of the compute's speed, while communication lasts
        factor = 1.0
        if device.backend == "cpu":
            comm = 1e6 * (fetched + gathered) / (communicate * space_cpu.CORE_COPIED)
            comp = space_cpu.compute_us(config, problem, device, device.sm_count)
            fill = comm / 16
        else:
            remote = fetched * (problem.world - 1) / problem.world
            if indexed:  # each row once; own ones stay where they are
                gathered = remote
            link = transport.link_bytes(config, device)
            per_sm = space_cuda.SM_GATHERED * (0.7 if config["order"] == "slot" or indexed else 1.0)
            staged = remote if pushed and not indexed else 0.0  # stored once more than where it is wanted
            comm = 1e6 * max(remote / link, (staged + gathered) / (communicate * per_sm))
            comp = space_cuda.compute_us(config, problem, device, device.sm_count)
            if self._link is not None:
                if indexed:
                    measured = transport.indexed_us(config, self._link, remote, row_bytes, communicate)
                elif pushed:
                    fan = max(1.0, gathered / fetched)
                    measured = transport.staged_us(self._link, remote, gathered, row_bytes, fan, communicate)
                else:
                    measured = self._link.dispatch_us(
                        fetched, gathered, row_bytes, communicate, problem.world
                    )
                comm = measured or comm
                lost = self._link.lost_share(communicate) or lost
            if indexed and config["order"] == "mixed":
                comm = max(1e6 * remote / link, comm * (1 - _opened(config, remote / row_bytes, device)))
            fill = 15.0 + comm / 16
            if config["order"] == beside.WORD:
                together = beside.gathered_us(gathered, device)
                lost += beside.LOST_BESIDE
                comm = max(1e6 * remote / link, 1 / (1 / comm + 1 / together))
                fill = 15.0 + comm / 16
            if glu.is_separate(config):
                fill += glu.pass_us(problem, device, rank_rows(problem))
            if space_cuda.main_loop(config) != "mma_sync":
                stored = rank_rows(problem) * row_bytes
                comp, factor = gated_time.compute_us(config, comp, stored), gated_time.order_factor(config)
        return factor * (max(comm, comp + comm * lost) + fill)

    def build_spec(self, build_part: Config, problem: Problem, device: DeviceClass) -> BuildSpec:
        if device.backend == "cpu":
            return space_cpu.build_spec(self.name, build_part, problem)
        spec = space_cuda.build_spec(self.name, build_part, problem, device)
        by = str(build_part.get("TRANSPORT", "pull"))
        more, words = {"TKT_TRANSPORT": str(transport.CODES[by])}, [by] if by == "push" else []
        if space_cuda.main_loop(build_part) != "mma_sync":
            producer, consumer = GATED_REGISTERS[build_part.number("CONSUMER_WARPS")]
            form = str(build_part["ACTIVATIONS"])
            words.insert(0, form)
            more["TKT_PRODUCER_REGISTERS"], more["TKT_CONSUMER_REGISTERS"] = str(producer), str(consumer)
            more["TKT_ACTIVATIONS"] = str(ACTIVATIONS_CODES[form])
        return dataclasses.replace(spec, name="-".join([spec.name, *words]), defines={**spec.defines, **more})

    def workbench(self, seat: RankSeat) -> Workbench:
        bench: Workbench
        if seat.device.backend == "cuda":
            from tktune.families.dispatch_gemm.launch_cuda import CudaDispatchWorkbench

            bench = CudaDispatchWorkbench(seat)
        else:
            from tktune.families.dispatch_gemm.launch import CpuWorkbench

            bench = CpuWorkbench(seat)
        return bench


def _same_order(config: Config, problem: Problem) -> Config:
    """With one expert a token, fetching by token and by slot are the same walk. Rows by index, and pushed ones, are not
    fetched by slot: `slot` would be `mixed`, compute blocks that bring the first rows too.
    """
    if transport.is_indexed(config) or transport.is_push(config):
        return config.replace(order="mixed") if config["order"] == "slot" else config
    if config["order"] in ("slot", "mixed") and problem.top_k == 1:
        return config.replace(order="token")
    return config


def _opened(config: Config, rows: float, device: DeviceClass) -> float:
    """The share of `rows` that compute blocks bring before they compute, one a warp."""
    warps = space_cuda.threads(config) // 32 * (device.sm_count - config.number("num_comm_sms"))
    return min(1.0, warps / max(1.0, rows))


def _row_fits(config: Config, problem: Problem, device: DeviceClass) -> str | None:
    """M2: at least one row slot of a communication block fits."""
    needed = 2 * problem.hidden + SLOT_RESERVE_BYTES
    if needed <= device.smem_optin_bytes:
        return None
    return f"a row slot needs {needed} bytes, the device gives {device.smem_optin_bytes}"


def _short_row(config: Config, problem: Problem, device: DeviceClass) -> str:
    return f"use hidden ≤ {(device.smem_optin_bytes - SLOT_RESERVE_BYTES) // 2}"


def _clusters(config: Config, problem: Problem, device: DeviceClass) -> str | None:
    """C4: the resident blocks and the communication blocks are whole clusters."""
    size, communicate = space_cuda.cluster(config), config.number("num_comm_sms")
    if device.sm_count % size == 0 and communicate % size == 0:
        return None
    return f"clusters of {size} cannot fill {communicate} communication blocks of {device.sm_count} SMs"


def _indexed_alone(config: Config, problem: Problem, device: DeviceClass) -> str | None:
    if config["ACTIVATIONS"] == "gathered" or space_cuda.cluster(config) == 1:
        return None
    return f"the {space_cuda.cluster(config)} blocks of a cluster cannot share rows that each thread loads"


def _rows_have_numbers(config: Config, problem: Problem, device: DeviceClass) -> str | None:
    rows = problem.world * problem.tokens
    if config["ACTIVATIONS"] == "gathered" or rows <= MOST_INDEXED_ROWS:
        return None
    return f"{rows} rows of all ranks do not have numbers of 16 bits"


def _fewer_tokens(config: Config, problem: Problem, device: DeviceClass) -> str:
    return f"use tokens ≤ {MOST_INDEXED_ROWS // problem.world}"


INDEXED_RULES = (
    Constraint(
        "indexed_rows_are_not_shared",
        "rows loaded by index are not multicast to a cluster",
        _indexed_alone,
        ("ACTIVATIONS", "CLUSTER"),
    ),
    Constraint(
        "indexed_rows_have_numbers",
        "rows loaded by index have 16-bit numbers",
        _rows_have_numbers,
        ("ACTIVATIONS",),
        _fewer_tokens,
    ),
)
FAMILY = DispatchGemm()
