"""How a measurement is made: launch mode, cache state, iterations, clocks, routing seeds.

A policy is part of every measurement's key, so numbers of different regimes are never compared.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from tktune.core.canonical import digest


@dataclass(frozen=True)
class Policy:
    """How a config is measured.

    `launch_mode`: "direct" (one launch) or "graph" (a CUDA graph replay). `cache_state`: "cold" flushes
    `flush_bytes` before every iteration, "warm" does not. `iterations` is the full count of a racing
    survivor; `first_iterations` the count after which clearly slower configs stop. `routing_seeds` draw the
    timed routings. `clocks` records whether clocks were left alone ("free") or locked by the owner.
    """

    name: str = "serving"
    launch_mode: str = "direct"
    cache_state: str = "cold"
    flush_bytes: int = 0
    warmup: int = 1
    first_iterations: int = 3
    iterations: int = 15
    clocks: str = "free"
    routing_seeds: tuple[int, ...] = (0,)
    include_plan: bool = False

    @property
    def key(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def digest(self) -> str:
        return digest(self.key)


def serving_policy(backend: str, cache_bytes: int) -> Policy:
    """The default policy on a device: cold last-level cache, and a graph launch where the backend has graphs."""
    return Policy(launch_mode="graph" if backend == "cuda" else "direct", flush_bytes=2 * cache_bytes)
