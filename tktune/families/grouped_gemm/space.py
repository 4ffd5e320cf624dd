"""The pure half of the family `grouped_gemm`: rows grouped by expert times each expert's matrix, on one device.

The rows are those that rank `ep_rank` of `ep_world` owns. Nothing here imports torch, numpy or a compiler.
"""

from __future__ import annotations

from tktune.core.build_spec import BuildSpec
from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.problem import Problem
from tktune.core.roles import Role, RoleModel
from tktune.core.space import Parameter, Space
from tktune.families.base import RankSeat, Workbench
from tktune.families.formulas import SPIN_LIMIT_S, deadlock_constraints
from tktune.families.grouped_gemm import space_cpu, space_cuda

RASTER = Parameter("order", ("rows", "cols"), "launch", "tiles advance along rows or along columns first")


class GroupedGemm:
    """A grouped GEMM alone: the compute half of every fusion, and its yardstick."""

    name = "grouped_gemm"
    purpose = "grouped GEMM of the rows one rank owns"

    def space(self, problem: Problem, device: DeviceClass) -> Space:
        if device.backend == "cpu":
            default = space_cpu.DEFAULT_BUILD.replace(order="rows", backoff=space_cpu.DEFAULT_BACKOFF)
            return Space(
                problem,
                device,
                (*space_cpu.BUILD_PARAMETERS, RASTER, space_cpu.BACKOFF),
                [*space_cpu.build_constraints(), *deadlock_constraints(self.roles, ())],
                default,
                lambda config: _same_raster(config, problem),
                canonical_over=("COL_BLOCK",),
            )
        default = space_cuda.default_build(device).replace(raster_rows=0, walk="longest", turn_back=0)
        return Space(
            problem,
            device,
            (*space_cuda.build_parameters(device), *space_cuda.LAUNCH_PARAMETERS),
            [
                *space_cuda.build_constraints(device),
                *deadlock_constraints(self.roles, ("CLUSTER",) if space_cuda.uses_wgmma(device) else ()),
            ],
            default,
            space_cuda.same_behaviour,
            canonical_over=("DRAW",),
        )

    def roles(self, config: Config, problem: Problem, device: DeviceClass) -> RoleModel:
        unit = space_cuda.cluster(config)
        seats = device.sm_count // unit * unit
        return RoleModel(
            roles=(Role("gemm", seats),), resident_blocks=device.sm_count, spin_limit_s=SPIN_LIMIT_S
        )

    def cost_us(self, config: Config, problem: Problem, device: DeviceClass) -> float:
        if device.backend == "cpu":
            return space_cpu.compute_us(config, problem, device, device.sm_count)
        return space_cuda.compute_us(config, problem, device, device.sm_count)

    def build_spec(self, build_part: Config, problem: Problem, device: DeviceClass) -> BuildSpec:
        if device.backend == "cpu":
            return space_cpu.build_spec(self.name, build_part, problem)
        return space_cuda.build_spec(self.name, build_part, problem, device)

    def workbench(self, seat: RankSeat) -> Workbench:
        bench: Workbench
        if seat.device.backend == "cuda":
            from tktune.families.grouped_gemm.launch_cuda import CudaWorkbench

            bench = CudaWorkbench(seat)
        else:
            from tktune.families.grouped_gemm.launch import CpuWorkbench

            bench = CpuWorkbench(seat)
        return bench


def _same_raster(config: Config, problem: Problem) -> Config:
    """With one column of tiles both rasters are the same walk."""
    if config["order"] == "cols" and problem.cols <= config.number("COL_BLOCK"):
        return config.replace(order="rows")
    return config


FAMILY = GroupedGemm()
