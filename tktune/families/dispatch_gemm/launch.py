"""dispatch_gemm on a rank of the CPU backend: the launch itself pulls the rows from the peers' symmetric buffers."""

from __future__ import annotations

from tktune.core.config import Config
from tktune.families import abi
from tktune.families.cpu_inputs import Case
from tktune.families.cpu_workbench import GemmWorkbench


class CpuWorkbench(GemmWorkbench):
    family = "dispatch_gemm"
    brings_rows = True

    def rank_of_tables(self) -> int:
        return self.seat.rank

    def fuse(self, config: Config) -> dict[str, int]:
        communicating = config.number("num_comm_sms")
        return {
            "num_comp_blocks": self.seat.device.sm_count - communicating,
            "num_comm_blocks": communicating,
            "order": abi.ORDERS[str(config["order"])],
            "raster": abi.RASTERS["rows"],
            "backoff": config.number("backoff"),
            "roles": abi.FUSED,
        }

    def place(self, case: Case) -> None:
        """One communication launch on all seats brings the rows."""
        seats = self.seat.device.sm_count
        everywhere = {"num_comp_blocks": 0, "num_comm_blocks": seats, "roles": abi.COMMUNICATE}
        self._launch({"order": 0, "raster": 0, "backoff": 16, **everywhere}, 0)
