"""What a search came to: facts for whoever verifies its finalists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tktune.core.config import Config


@dataclass(frozen=True)
class Found:
    """What a search came to: times by config (microseconds), the best, and how much was done.

    `margin` is the factor by which a config must be slower than another to be clearly slower here; `noise` is by how much (a
    fraction) single measurements of equal configs differ; `moved` whether the machine's own pace changed meanwhile.
    """

    times_us: Mapping[Config, float]
    best: Config | None
    measured: int
    built: int
    reason: str
    out_of_time: bool
    margin: float
    noise: float = 0.0
    moved: bool = False
