"""What the gang tests share: the faulty problem, a toy device, and waiting for conditions instead of sleeping."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tktune.core.device import DeviceClass
from tktune.core.problem import Problem
from tktune.gang.limits import Deadlines

GENEROUS = Deadlines(grace_s=20.0)


def faulty_problem(world: int = 2) -> Problem:
    return Problem("faulty_family:FAMILY", hidden=64, cols=64, experts=12, top_k=2, tokens=8, world=world)


def toy_device(backend: str = "cpu") -> DeviceClass:
    return DeviceClass(backend, "toy", 4, 1 << 20, 1 << 20, "shm")


def eventually(condition: Callable[[], bool], within_s: float = 30.0) -> bool:
    """Whether `condition` becomes true in time; looks often, sleeps little."""
    give_up = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.01)
    return True


def gone(pid: int) -> bool:
    """Whether a process has ended (one that nobody reaped counts as ended)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"
