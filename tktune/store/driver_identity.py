"""Who drives a trial: process id, its start time, boot and host, and whether that process still lives."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

Life = Literal["alive", "dead", "elsewhere"]


@dataclass(frozen=True)
class DriverIdentity:
    """A process, told apart from a later one with the same id. `start_ticks` counts clock ticks since boot."""

    pid: int
    start_ticks: int
    boot_id: str
    host: str

    def life(self) -> Life:
        """Whether it lives; "elsewhere" when it ran on another host and cannot be seen from here."""
        if self.host != os.uname().nodename:
            return "elsewhere"
        if self.boot_id != boot_id():
            return "dead"
        return "alive" if start_ticks(self.pid) == self.start_ticks else "dead"


def this_driver() -> DriverIdentity:
    pid = os.getpid()
    return DriverIdentity(pid, start_ticks(pid) or 0, boot_id(), os.uname().nodename)


@cache
def boot_id() -> str:
    """Changes at every boot of the host; empty where the kernel does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when it is gone or only waits to be reaped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # proc(5): "pid (comm) state ppid ..."; comm may hold spaces and parentheses. Field 22 is starttime.
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])
