"""Whether this host's GPUs are idle: nothing runs on them, and no memory is held beyond what was held before."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass

SLACK_MIB = 16


@dataclass(frozen=True)
class Load:
    """One GPU: percent of the last moments in which a kernel ran, MiB of memory in use."""

    busy: int
    memory_mib: int


def loads() -> list[Load]:
    """Of the GPUs that tests may use, as nvidia-smi tells it; empty where it does not answer."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    chosen = ["-i", visible] if visible else []
    query = ["nvidia-smi", *chosen, "--query-gpu=utilization.gpu,memory.used"]
    said = subprocess.run(
        [*query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=20, check=False
    )
    if said.returncode:
        return []
    return [Load(*map(int, line.split(","))) for line in said.stdout.splitlines()]


def wait_idle(before: list[Load], within_s: float = 8.0) -> str:
    """An empty text once all GPUs are as idle as they were; else what is not, after `within_s`."""
    end = time.monotonic() + within_s
    while True:
        now = loads()
        busy = [
            f"GPU {i}: {load.busy} % busy, {load.memory_mib} MiB (before: {was.memory_mib})"
            for i, (load, was) in enumerate(zip(now, before, strict=True))
            if load.busy or load.memory_mib > was.memory_mib + SLACK_MIB
        ]
        if not busy:
            return ""
        if time.monotonic() > end:
            return "; ".join(busy)
        time.sleep(0.2)
