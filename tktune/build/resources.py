"""How many compilers may run at once, and for how long: cores, free memory, and what compiles took before."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
# What a compile is taken to need before the first one of its template has been measured.
UNMEASURED_PEAK_BYTES = {"shared": 384 * MIB, "cubin": 1024 * MIB}
RESERVE_BYTES = 512 * MIB
TIMEOUT_CAP_S = 600.0
_TIMEOUT_FLOOR_S = 60.0
_TIMEOUT_FACTOR = 20.0


@dataclass(frozen=True)
class Measured:
    """The most that compiles of one template took so far: resident bytes and wall seconds (0: never measured)."""

    peak_bytes: int = 0
    seconds: float = 0.0

    def widened(self, peak_bytes: int, seconds: float) -> Measured:
        return Measured(max(self.peak_bytes, peak_bytes), max(self.seconds, seconds))


def job_count(cores: int, free_bytes: int, peak_bytes: int, reserve_bytes: int = RESERVE_BYTES) -> int:
    """min(cores, (free − reserve) ÷ peak), at least 1."""
    by_memory = max(0, free_bytes - reserve_bytes) // max(1, peak_bytes)
    return max(1, min(cores, by_memory))


def timeout_s(measured: Measured) -> float:
    """20 × the slowest compile seen, between one minute and the cap; the cap when none was seen."""
    if measured.seconds <= 0:
        return TIMEOUT_CAP_S
    return min(TIMEOUT_CAP_S, max(_TIMEOUT_FLOOR_S, _TIMEOUT_FACTOR * measured.seconds))


def usable_cores() -> int:
    """Cores this process may run on, bounded by the control group's quota."""
    cores = len(os.sched_getaffinity(0))
    quota, _, period = _first_line(Path("/sys/fs/cgroup/cpu.max")).partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def free_bytes() -> int:
    """Bytes that may still be taken without swapping, bounded by the control group's limit."""
    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit = _first_line(Path("/sys/fs/cgroup/memory.max"))
    used = _first_line(Path("/sys/fs/cgroup/memory.current"))
    if limit.isdigit() and used.isdigit():
        available = min(available, max(0, int(limit) - int(used)))
    return available


def read_measured(path: Path) -> Measured:
    """What was recorded at `path`; nothing when it is missing or unreadable, for it is only advice."""
    try:
        fields = json.loads(path.read_text())
        return Measured(int(fields["peak_bytes"]), float(fields["seconds"]))
    except (OSError, ValueError, KeyError, TypeError):
        return Measured()


def _first_line(path: Path) -> str:
    try:
        return path.read_text().partition("\n")[0].strip()
    except OSError:
        return ""
