"""grouped_gemm on a rank of the CPU backend: the rows one rank owns are packed by the host before any launch."""

from __future__ import annotations

from tktune.core.config import Config
from tktune.core.errors import ConstraintRefused
from tktune.families import abi
from tktune.families.cpu_inputs import POISON, Case, gather_rows
from tktune.families.cpu_workbench import GemmWorkbench


class CpuWorkbench(GemmWorkbench):
    family = "grouped_gemm"

    def rank_of_tables(self) -> int:
        return self.problem.ep_rank or 0

    def fuse(self, config: Config) -> dict[str, int]:
        return {
            "num_comp_blocks": self.seat.device.sm_count,
            "num_comm_blocks": 0,
            "order": 0,
            "raster": abi.RASTERS[str(config["order"])],
            "backoff": config.number("backoff"),
            "roles": abi.COMPUTE,
        }

    def place(self, case: Case) -> None:
        self._gathered.fill(POISON)
        self._gathered[case.real] = gather_rows(self.problem, case.tables, case.seed)

    def time(self, config: Config, mode: str, seed: int, iterations: int, sequence: int) -> list[float]:
        """`fused` and `comp` are the same launch. Raises `ConstraintRefused` for comm and serial."""
        if mode in ("comm", "serial"):
            raise ConstraintRefused(
                "no_communication",
                f"grouped_gemm communicates nothing, so there is no {mode} to time.",
                "Use fused, comp or peer.",
            )
        return super().time(config, mode, seed, iterations, sequence)
