"""A test-only stand-in for the link probe's ranks: it claims times, and misbehaves where PROBE_FAULT says so.

PROBE_FAULT is "FAULT WAY RANK [once]" (FAULT: sigkill, hang, raise, wrong), or "absent" for a rank that cannot sit down
beside a peer.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from tktune.core.config import Config
from tktune.core.errors import DeviceAbsent, LaunchFailed
from tktune.families.base import GateResult, RankSeat
from tktune.families.control_page import ControlPage
from tktune.families.link_probe import space


class StandIn:
    def __init__(self, seat: RankSeat) -> None:
        self.seat, self.page = seat, ControlPage(seat.control_fd)
        if os.environ.get("PROBE_FAULT") == "absent" and seat.world > 1:
            raise DeviceAbsent("There is no peer access.", "Look at the topology.")

    def load(self, artifact: Path, sha256: str, build_part: Config) -> dict[str, Any]:
        return {}

    def gate(self, config: Config, routing: str, seed: int, sequence: int) -> GateResult:
        wrong = self._fault(config, "wrong")
        return GateResult(not wrong, float(wrong), 0.0, "3 of 4001 rows came wrong." if wrong else "")

    def time(self, config: Config, mode: str, seed: int, iterations: int, sequence: int) -> list[float]:
        if self._fault(config, "sigkill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._fault(config, "raise"):
            raise RuntimeError("asked to raise")
        if self._fault(config, "hang"):
            while not self.page.aborted:
                time.sleep(0.001)
            raise LaunchFailed("told to abort", code="aborted")
        rate = 40e3 * config.number("sms")  # bytes a microsecond
        us = {"echo": 2.5, "launch": 5.0, "gemm": 1e5 / config.number("sms")}.get(str(config["way"]))
        return [space.stored_bytes(config) / rate if us is None else us] * iterations

    def close(self) -> None:
        self.page.close()

    def _fault(self, config: Config, fault: str) -> bool:
        words = os.environ.get("PROBE_FAULT", "").split()
        if words[:3] != [fault, config["way"], str(self.seat.rank)]:
            return False
        if "once" in words:
            flag = Path(os.environ["PROBE_FLAG"])
            if flag.exists():
                return False
            flag.touch()
        return True


class ProbeFamily(space.LinkProbe):
    def workbench(self, seat: RankSeat) -> Any:
        return StandIn(seat)


FAMILY = ProbeFamily()
